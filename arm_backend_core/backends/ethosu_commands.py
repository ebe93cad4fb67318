"""Command streams of Ethos-U as Vela writes them (COP1). Numbers: ``runtime/ethosu_emulator/command_stream.h``."""

import struct
from collections.abc import Iterator, Sequence

COMMANDS_AT, DMA_START, DMA_WAIT = 32, 16, 17
#: Registers of a DMA: regions and addresses of source and target, length.
DMA = (304, 305, 0x430, 0x431, 0x432)


def commands(stream: bytes) -> Iterator[tuple[int, int, int]]:
    """Place in words, number with 0x400 where a second word follows, the parameter's bits before that word's."""
    words = struct.iter_unpack("<I", stream[COMMANDS_AT:])
    for at, (word,) in (counted := enumerate(words)):
        second = next(counted)[1] if word & 0x4000 else ()
        yield at, word & 0x3FF | (word & 0x4000) >> 4, word >> 16 << 32 | sum(second)


def encoded(number: int, value: int) -> list[int]:
    """The words of a command of ``commands``."""
    first = number & 0x3FF | (number & 0x400) << 4 | value >> 32 << 16
    return [first, value & 0xFFFFFFFF] if number & 0x400 else [first]


def packed(stream: bytes, words: Sequence[int]) -> bytes:
    """``words`` behind the header of ``stream``."""
    length = 2 | len(words) >> 16 << 8 | (len(words) & 0xFFFF) << 16
    return stream[: COMMANDS_AT - 4] + struct.pack(f"<{1 + len(words)}I", length, *words)
