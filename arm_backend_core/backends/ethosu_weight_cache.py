"""Weight caching in SRAM (U55, U65): weights that several layers read are copied once from flash to SRAM.

In Vela's programs, only adjacent layers share a copy of weights in SRAM. The matrix products of an unrolled recurrent
layer are not adjacent, because each time step has arithmetic between them. Each of them reads the weights from flash.
"Flash" is the memory of the constants, ``VelaConfiguration.const_memory``. On U65, some configurations have them in
DRAM.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arm_backend_core.backends.ethosu_accesses import (
    CONVOLUTION_COMMANDS,
    WEIGHT_BASE_REGISTERS,
    WEIGHT_REGION_REGISTERS,
)
from arm_backend_core.backends.ethosu_commands import (
    DMA_REGISTERS,
    DMA_START,
    DMA_WAIT,
    RegisterWriter,
    decode_commands,
    encode_command,
    pack_command_stream,
)
from arm_backend_core.backends.vela_tables import WEIGHT_COPY_USAGE
from arm_backend_core.workers.vela import VelaConfiguration

_DEFAULT_COPY_BYTES = 256 << 10  # SRAM budget of copies if the configuration does not limit the SRAM
#: Bytes [start, end) of the weight region.
_ByteRange = tuple[int, int]


@dataclass
class WeightCopies:
    """Copies of weights, and the DMAs that write them. Commands are identified by their word index in Vela's stream.

    Attributes:
        region: the region of the copies.
        relocations: ``{5: [(0, 64, 1000)]}``: the convolution at word index 5 reads a copy of the bytes [0, 64) of the
            weights, at an address that is 1000 higher.
        waits: commands before which the NPU waits for all earlier DMAs.
        dmas: {command: DMAs that start right after it}. A DMA is a list of (register, value).
    """

    region: int
    relocations: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    waits: set[int] = field(default_factory=set)
    dmas: dict[int, list[list[tuple[int, int]]]] = field(default_factory=dict)


def can_copy_weights(vela_result: dict[str, Any], configuration: VelaConfiguration) -> bool:
    """Whether the program is for U55 or U65 with Arm's core driver (COP1), and SRAM holds the arena but no weights."""
    stream = vela_result["command_stream"]
    is_supported = stream[:4] == b"COP1" and stream[11] >> 4 < 2 and not configuration.arena_on_second_port
    return is_supported and configuration.const_memory in vela_result["memories"]


def cache_weights_in_sram(vela_result: dict[str, Any], configuration: VelaConfiguration) -> None:
    """Edit Vela's result: append copies of weights to the scratch.

    A copy must save more cycles than it has bytes. Copies must also fit the SRAM that the arena leaves free, or
    ``_DEFAULT_COPY_BYTES`` if the SRAM has no limit. With ``--optimise=Size``, nothing is copied. The first layer
    that reads the weights keeps its estimate: its flash reads now stand for the DMA that copies the weights. In the
    estimates of the other layers, SRAM accesses replace flash accesses.
    """
    stream, memories, weight_region = (
        vela_result["command_stream"],
        vela_result["memories"],
        vela_result["weight_region"],
    )
    if not can_copy_weights(vela_result, configuration) or "optimize=Size" in configuration.options:
        return
    (size, region), layers = (
        vela_result["scratch"],
        {int(row[0]) // 4: row for row in vela_result["tables"]["queue"][1]},
    )
    reads, readers = dict(_weight_reads(stream, weight_region)), defaultdict[_ByteRange, dict[str, None]](dict)
    for word_index, span in reads.items():
        readers[span][layers[word_index][-1]] = None
    is_limited = configuration.arena_cache_size < configuration.address_space
    budget = configuration.arena_cache_size - memories["Sram"]["peak"] if is_limited else _DEFAULT_COPY_BYTES
    copies, end, words = dict[_ByteRange, int](), -(-size // 16) * 16, list[int]()
    for span, users in readers.items():
        length = span[1] - span[0]
        if end - size + length <= budget and _update_tables_if_profitable(
            vela_result, configuration.const_memory, [*users][1:], length
        ):
            for number, value in dma_register_values((weight_region, span[0]), (region, end), length):
                words += encode_command(number, value)
            words.append(DMA_START)
            copies[span], end = end, end + length
            header, rows = vela_result["tables"]["tensors"]
            last_tick = max(int(row[header.index("end_time")]) for row in rows)
            add_tensor_row(vela_result, next(iter(users)), copies[span], length, (0, last_tick))
    if copies:
        relocations = {
            word_index: [(*span, copies[span] - span[0])] for word_index, span in reads.items() if span in copies
        }
        # One wait before the first convolution that reads a copy covers all copies.
        changes = WeightCopies(region, relocations, {min(relocations)})
        vela_result["command_stream"], positions = redirect_weight_reads(stream, changes, words)
        for word_index, row in layers.items():
            row[0] = str(4 * positions[word_index])
        vela_result["scratch"] = end, region
        memories["Sram"]["peak"] += end - size


def add_tensor_row(vela_result: dict[str, Any], layer: str, address: int, length: int, live: tuple[int, int]) -> None:
    """Add a weight copy to Vela's tensor table. ``layer``: id of the reader; ``live``: first and last tick in SRAM."""
    (header, rows), (columns, layers) = vela_result["tables"]["tensors"], vela_result["tables"]["perf"]
    name = next(row[columns.index("name")] for row in layers if row[0] == layer)
    values = {"name": name, "memory": "Sram", "usage": WEIGHT_COPY_USAGE, "start_time": live[0], "end_time": live[1]}
    values |= {"start_address": address, "size": length}
    rows.append([str(values.get(column, "")) for column in header])


def _update_tables_if_profitable(
    vela_result: dict[str, Any], const_memory: str, layers: list[str], length: int
) -> bool:
    """Move the weight reads of ``layers`` from flash to SRAM in Vela's tables, if that saves over ``length`` cycles.

    Returns:
        Whether the tables were changed.
    """
    header, rows = vela_result["tables"]["perf"]
    uses = [vela_result["memories"][name] for name in (const_memory, "Sram")]
    const_cycles, sram_cycles = (round(length * use["cycles"] / max(use["read"] + use["written"], 1)) for use in uses)
    columns = [header.index(name) for name in (f"{const_memory}_ac", "Sram_ac", "op_cycles", "npu_cycles")]
    changed, saved = list[tuple[list[str], tuple[int, ...]]](), 0
    for row in rows:
        if row[0] in layers:
            const_access, sram_access, total, npu = (int(row[column]) for column in columns)
            const_access, sram_access = max(const_access - const_cycles, 0), sram_access + sram_cycles
            changed.append((row, (const_access, sram_access, max(const_access, sram_access, npu))))
            saved += total - max(const_access, sram_access, npu)
    if saved > length:
        vela_result["report"]["totalCycles"] -= saved
        for row, numbers in changed:
            for column, number in zip(columns, numbers, strict=False):
                row[column] = str(number)
    return saved > length


def dma_register_values(source: tuple[int, int], target: tuple[int, int], length: int) -> list[tuple[int, int]]:
    """The registers of a DMA as (register number, value). ``source`` and ``target`` are (region, address)."""
    return list(zip(DMA_REGISTERS, (source[0] << 32, target[0] << 32, source[1], target[1], length), strict=True))


def redirect_weight_reads(
    stream: bytes, copies: WeightCopies, words: Iterable[int] = ()
) -> tuple[bytes, dict[int, int]]:
    """Redirect convolutions to copies of weights. Weight and scale registers are set right before each convolution.

    If ``copies`` has DMAs, the registers of DMAs are set right before each DMA.

    Args:
        stream: Vela's stream.
        copies: the copies, and their DMAs.
        words: words to insert before the stream's commands.

    Returns:
        The new stream, and {word index in Vela's stream: word index in the new stream}.
    """
    weight_registers = (*WEIGHT_REGION_REGISTERS, *WEIGHT_BASE_REGISTERS)
    writer = RegisterWriter((*weight_registers, *(DMA_REGISTERS if copies.dmas else ())), words)
    positions = dict[int, int]()
    for word_index, number, value in decode_commands(stream):
        if writer.defer(number, value):
            continue
        if number in CONVOLUTION_COMMANDS:
            weights = {key: pending for key, pending in writer.pending.items() if key in weight_registers}
            if word_index in copies.relocations:
                weights = _redirect(weights, copies.relocations[word_index], copies.region)
            writer.set_registers(weights)
        elif number == DMA_START:
            writer.set_registers({key: pending for key, pending in writer.pending.items() if key in DMA_REGISTERS})
        writer.words += [DMA_WAIT] if word_index in copies.waits else []
        positions[word_index] = len(writer.words)
        writer.words += encode_command(number, value)
        for dma in copies.dmas.get(word_index, ()):
            writer.set_registers(dict(dma))
            writer.words.append(DMA_START)
    return pack_command_stream(stream, writer.words), positions


def _redirect(registers: Mapping[int, int], ranges: Sequence[tuple[int, int, int]], region: int) -> dict[int, int]:
    """Change the weight registers of a convolution to address the copies in ``region``.

    Addresses outside of ``ranges`` do not change, because they belong to unused registers.
    """
    return {
        register: value + next((offset for start, end, offset in ranges if start <= value < end), 0)
        if register in WEIGHT_BASE_REGISTERS
        else region << 32
        for register, value in registers.items()
    }


def _weight_reads(stream: bytes, region: int) -> Iterator[tuple[int, _ByteRange]]:
    """Yield the word index of each convolution whose weights and scales lie in ``region``, and their byte range."""
    registers = defaultdict[int, int](int)
    for position, number, value in decode_commands(stream):
        registers[number] = value
        if number in CONVOLUTION_COMMANDS and all(
            registers[space] == region << 32 for space in WEIGHT_REGION_REGISTERS
        ):
            spans = [
                (registers[base], registers[base] + registers[base + 1])
                for base in WEIGHT_BASE_REGISTERS
                if registers[base + 1]
            ]
            yield position, (min(spans)[0], max(stop for _, stop in spans))
