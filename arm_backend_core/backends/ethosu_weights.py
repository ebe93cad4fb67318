"""Weight caching in SRAM (U55, U65): weights that several layers read are copied once from flash to SRAM.

In Vela's programs every layer reads its weights from flash. Only adjacent layers share a copy in SRAM. The matrix
products of an unrolled recurrent layer are not adjacent: each time step has arithmetic between them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from arm_backend_core.backends.ethosu_commands import (
    DMA_REGISTERS,
    DMA_START,
    DMA_WAIT,
    decode_commands,
    encode_command,
    pack_stream,
)
from arm_backend_core.workers.vela import Configuration

#: NPU_OP_CONV and NPU_OP_DEPTHWISE.
_CONVOLUTIONS = (2, 3)
#: Registers of the region of weights and of scales.
_REGION_REGISTERS = (296, 297)
#: Registers of the base of weights, then of scales, of up to two cores. The length register of each follows its base.
_BASE_REGISTERS = (0x420, 0x490, 0x422, 0x492)
_DEFAULT_COPY_BYTES = 256 << 10  # SRAM budget of copies if the configuration has no limit
#: Usage of a weight copy in Vela's tensor table.
WEIGHT_COPY_USAGE = "Kept"
#: (first byte, one past the last byte) in the weight region.
_Span = tuple[int, int]


def cache_weights_in_sram(vela_result: dict[str, Any], configuration: Configuration) -> None:
    """Edit Vela's result: append a weight copy to the scratch if it saves more cycles than it has bytes.

    Does nothing with ``--optimise=Size``. The estimate of the first layer that reads the weights does not change: it
    covers the copy from flash. In the estimates of other layers, SRAM accesses replace flash accesses.
    """
    stream, memories, weight_region = (
        vela_result["command_stream"],
        vela_result["memories"],
        vela_result["weight_region"],
    )
    is_supported = stream[:4] == b"COP1" and stream[11] >> 4 < 2 and not configuration.arena_on_second_port
    if not is_supported or configuration.const_memory not in memories or "optimize=Size" in configuration.options:
        return
    (size, region), layers = (
        vela_result["scratch"],
        {int(row[0]) // 4: row for row in vela_result["tables"]["queue"][1]},
    )
    reads, readers = dict(_weight_reads(stream, weight_region)), defaultdict[_Span, dict[str, None]](dict)
    for word_index, span in reads.items():
        readers[span][layers[word_index][-1]] = None
    is_limited = configuration.arena_cache_size < configuration.address_space
    budget = configuration.arena_cache_size - memories["Sram"]["peak"] if is_limited else _DEFAULT_COPY_BYTES
    copies, end, words = dict[_Span, int](), -(-size // 16) * 16, list[int]()
    for span, users in readers.items():
        length = span[1] - span[0]
        if end - size + length <= budget and _update_tables_if_profitable(
            vela_result, configuration.const_memory, [*users][1:], length
        ):
            for number, value in zip(
                DMA_REGISTERS, (weight_region << 32, region << 32, span[0], end, length), strict=True
            ):
                words += encode_command(number, value)
            words.append(DMA_START)
            copies[span], end = end, end + length
            _add_tensor_row(vela_result, next(iter(users)), copies[span], length)
    if copies:
        copy_of = {word_index: (span[0], copies[span]) for word_index, span in reads.items() if span in copies}
        for word_index, new_position in _append_commands(stream, copy_of, region, words).items():
            if word_index in layers:
                layers[word_index][0] = str(4 * new_position)
        vela_result["command_stream"], vela_result["scratch"] = pack_stream(stream, words), (end, region)
        memories["Sram"]["peak"] += end - size


def _add_tensor_row(vela_result: dict[str, Any], layer: str, address: int, length: int) -> None:
    """Add a weight copy to Vela's tensor table, live in SRAM from the first to the last time step."""
    (header, rows), (columns, layers) = vela_result["tables"]["tensors"], vela_result["tables"]["perf"]
    name = next(row[columns.index("name")] for row in layers if row[0] == layer)
    last = max(int(row[header.index("end_time")]) for row in rows)
    values = {"name": name, "memory": "Sram", "usage": WEIGHT_COPY_USAGE, "start_time": 0, "end_time": last}
    values |= {"start_address": address, "size": length}
    rows.append([str(values.get(column, "")) for column in header])


def _update_tables_if_profitable(vela_result: dict[str, Any], flash: str, layers: list[str], length: int) -> bool:
    """Move the reads of ``layers`` to SRAM in the tables if that saves more than ``length`` cycles; return whether."""
    header, rows = vela_result["tables"]["perf"]
    uses = [vela_result["memories"][name] for name in (flash, "Sram")]
    flash_cycles, sram_cycles = (round(length * use["cycles"] / max(use["read"] + use["written"], 1)) for use in uses)
    columns = [header.index(name) for name in (f"{flash}_ac", "Sram_ac", "op_cycles", "npu_cycles")]
    changed, saved = list[tuple[list[str], tuple[int, ...]]](), 0
    for row in rows:
        if row[0] in layers:
            flash_access, sram_access, total, npu = (int(row[column]) for column in columns)
            flash_access, sram_access = max(flash_access - flash_cycles, 0), sram_access + sram_cycles
            changed.append((row, (flash_access, sram_access, max(flash_access, sram_access, npu))))
            saved += total - max(flash_access, sram_access, npu)
    if saved > length:
        vela_result["report"]["totalCycles"] -= saved
        for row, numbers in changed:
            for column, number in zip(columns, numbers, strict=False):
                row[column] = str(number)
    return saved > length


def _append_commands(
    stream: bytes, copy_of: Mapping[int, tuple[int, int]], region: int, words: list[int]
) -> dict[int, int]:
    """Append the stream's commands to ``words``; weight and scale registers are set right before each convolution.

    Args:
        stream: Vela's stream.
        copy_of: {word index of a convolution: (address of its weights, address of their copy)}.
        region: the region of the copies.
        words: the new stream's words.

    Returns:
        {word index in Vela's stream: word index in the new stream}.
    """
    registers, emitted, new_positions = dict[int, int](), dict[int, int](), dict[int, int]()
    waits = [DMA_WAIT]  # one wait before the first convolution that reads a copy covers all copies
    for word_index, number, value in decode_commands(stream):
        if number in (*_REGION_REGISTERS, *_BASE_REGISTERS):
            registers[number] = value
            continue
        if number in _CONVOLUTIONS:
            start, copy = copy_of.get(word_index, (0, 0))
            for register, value_in_vela in registers.items():
                new = (
                    value_in_vela - start + copy
                    if register in _BASE_REGISTERS
                    else region << 32
                    if word_index in copy_of
                    else value_in_vela
                )
                if emitted.get(register) != new:
                    words += encode_command(register, new)
                    emitted[register] = new
            words += [waits.pop()] if word_index in copy_of and waits else []
        new_positions[word_index] = len(words)
        words += encode_command(number, value)
    return new_positions


def _weight_reads(stream: bytes, region: int) -> Iterator[tuple[int, _Span]]:
    """Yield the word index of each convolution whose weights and scales lie in ``region``, and their byte range."""
    registers = defaultdict[int, int](int)
    for position, number, value in decode_commands(stream):
        registers[number] = value
        if number in _CONVOLUTIONS and all(registers[space] == region << 32 for space in _REGION_REGISTERS):
            spans = [
                (registers[base], registers[base] + registers[base + 1])
                for base in _BASE_REGISTERS
                if registers[base + 1]
            ]
            yield position, (min(spans)[0], max(stop for _, stop in spans))
