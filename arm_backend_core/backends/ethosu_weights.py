"""Weights that several layers read are brought to SRAM once (U55, U65): Vela has each of them read the flash anew.

It shares a copy between neighbours alone, and the steps of a recurrent layer have arithmetic between their products.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from arm_backend_core.backends.ethosu_commands import (
    DMA,
    DMA_START,
    DMA_WAIT,
    decode_commands,
    encode_command,
    pack_stream,
)
from arm_backend_core.workers.vela import Configuration

_CONVOLUTIONS, _REGIONS = (2, 3), (296, 297)  # regions of weights and of scales
_BASES = (0x420, 0x490, 0x422, 0x492)  # of weights, then of scales, of up to two cores; lengths are in the next ones
_DEFAULT_COPY_BYTES = 256 << 10  # bytes of SRAM that copies take where nobody says how many there are
#: What a copy of weights is for, in Vela's table of tensors.
WEIGHT_COPY_USAGE = "Kept"
_Span = tuple[int, int]


def cache_weights_in_sram(answer: dict[str, Any], configuration: Configuration) -> None:
    """Change Vela's answer: copies lie behind the scratch, where one saves more cycles than it takes bytes.

    Not with ``--optimise=Size``. The first layer keeps Vela's estimate; the others get what it would be without flash.
    """
    stream, memories, constants = answer["command_stream"], answer["memories"], answer["weight_region"]
    mapped = stream[:4] == b"COP1" and stream[11] >> 4 < 2 and not configuration.arena_on_second_port
    if not mapped or configuration.const_memory not in memories or "optimize=Size" in configuration.options:
        return
    (size, region), layers = answer["scratch"], {int(row[0]) // 4: row for row in answer["tables"]["queue"][1]}
    reads, readers = dict(_weight_reads(stream, constants)), defaultdict[_Span, dict[str, None]](dict)
    for at, span in reads.items():
        readers[span][layers[at][-1]] = None
    limited = configuration.arena_cache_size < configuration.address_space
    room = configuration.arena_cache_size - memories["Sram"]["peak"] if limited else _DEFAULT_COPY_BYTES
    copies, end, words = dict[_Span, int](), -(-size // 16) * 16, list[int]()
    for span, who in readers.items():
        length = span[1] - span[0]
        if end - size + length <= room and _apply_savings(answer, configuration.const_memory, [*who][1:], length):
            for number, value in zip(DMA, (constants << 32, region << 32, span[0], end, length), strict=True):
                words += encode_command(number, value)
            words.append(DMA_START)
            copies[span], end = end, end + length
            _add_tensor_row(answer, next(iter(who)), copies[span], length)
    if copies:
        copied = {at: (span[0], copies[span]) for at, span in reads.items() if span in copies}
        for at, place in _append_commands(stream, copied, region, words).items():
            if at in layers:
                layers[at][0] = str(4 * place)
        answer["command_stream"], answer["scratch"] = pack_stream(stream, words), (end, region)
        memories["Sram"]["peak"] += end - size


def _add_tensor_row(answer: dict[str, Any], layer: str, address: int, length: int) -> None:
    """Tell that a copy for a layer, and later ones, is in SRAM all the time."""
    (header, rows), (columns, layers) = answer["tables"]["tensors"], answer["tables"]["perf"]
    name = next(row[columns.index("name")] for row in layers if row[0] == layer)
    last = max(int(row[header.index("end_time")]) for row in rows)
    told = {"name": name, "memory": "Sram", "usage": WEIGHT_COPY_USAGE, "start_time": 0, "end_time": last}
    told |= {"start_address": address, "size": length}
    rows.append([str(told.get(column, "")) for column in header])


def _apply_savings(answer: dict[str, Any], flash: str, layers: list[str], length: int) -> bool:
    """Whether ``layers`` save so many cycles where ``length`` bytes are in SRAM; then the tables have it so."""
    header, rows = answer["tables"]["perf"]
    uses = [answer["memories"][name] for name in (flash, "Sram")]
    of_flash, of_sram = (round(length * use["cycles"] / max(use["read"] + use["written"], 1)) for use in uses)
    columns = [header.index(name) for name in (f"{flash}_ac", "Sram_ac", "op_cycles", "npu_cycles")]
    changed, saved = list[tuple[list[str], tuple[int, ...]]](), 0
    for row in rows:
        if row[0] in layers:
            slow, fast, total, npu = (int(row[column]) for column in columns)
            slow, fast = max(slow - of_flash, 0), fast + of_sram
            changed.append((row, (slow, fast, max(slow, fast, npu))))
            saved += total - max(slow, fast, npu)
    if saved > length:
        answer["report"]["totalCycles"] -= saved
        for row, numbers in changed:
            for column, number in zip(columns, numbers, strict=False):
                row[column] = str(number)
    return saved > length


def _append_commands(stream: bytes, copied: Mapping[int, _Span], region: int, words: list[int]) -> dict[int, int]:
    """Append the commands to ``words``; where each is now. Registers of constants are set where convolutions need them.

    Args:
        copied: of convolutions: where what they read lies, and where its copy is.
    """
    registers, written, moved, waits = dict[int, int](), dict[int, int](), dict[int, int](), [DMA_WAIT]
    for at, number, value in decode_commands(stream):
        if number in (*_REGIONS, *_BASES):
            registers[number] = value
            continue
        if number in _CONVOLUTIONS:
            start, copy = copied.get(at, (0, 0))
            for register, held in registers.items():
                new = held - start + copy if register in _BASES else region << 32 if at in copied else held
                if written.get(register) != new:
                    words += encode_command(register, new)
                    written[register] = new
            words += [waits.pop()] if at in copied and waits else []
        moved[at] = len(words)
        words += encode_command(number, value)
    return moved


def _weight_reads(stream: bytes, region: int) -> Iterator[tuple[int, _Span]]:
    """Places of convolutions whose weights and scales lie in ``region``, and from where to where these are."""
    registers = defaultdict[int, int](int)
    for at, number, value in decode_commands(stream):
        registers[number] = value
        if number in _CONVOLUTIONS and all(registers[space] == region << 32 for space in _REGIONS):
            spans = [(registers[base], registers[base] + registers[base + 1]) for base in _BASES if registers[base + 1]]
            yield at, (min(spans)[0], max(stop for _, stop in spans))
