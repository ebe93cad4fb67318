"""Command streams of Ethos-U as Vela writes them. Numbers: ``runtime/ethosu_emulator/command_stream.h``."""

import struct
from collections.abc import Iterator, Sequence

DMA_START, DMA_WAIT = 16, 17
KERNELS = (2, 3, 5, 6, 7)
#: Registers of a DMA: regions and addresses of source and target, length.
DMA = (304, 305, 0x430, 0x431, 0x432)
#: Of IFM, OFM and IFM2: the first of bases, of strides and of the first tile's sizes, region, precision, depth.
MAPS = ((0x400, 0x404, 266, 271, 261, 260), (0x410, 0x414, 282, 287, 276, 275), (0x480, 0x484, 394, 399, 389, 275))
_DIRECT_DRIVE_MAGIC = b"COP2"  #: a stream for Direct Drive; others are COP1


def is_u85(stream: bytes) -> bool:
    """Whether a stream is for an Ethos-U85, by the third word's highest bits."""
    return stream.startswith(_DIRECT_DRIVE_MAGIC) or stream[11] >> 4 == 2


def is_chained(precision: int) -> bool:
    """Whether the precision of U85 says that a map is no memory; of the others the bits are the rounding's."""
    return precision >> 46 & 3 == 2


def pixel_bytes(depth: int, brick: int, precision: int, log_size: int) -> int:
    """From a pixel's first channel to one past its last: in bricks of 16 (NHCWB16), ``brick`` bytes apart, or a row."""
    if precision >> 38 & 3 == 1:
        return (depth - 1) // 16 * brick + (min(depth, 16) << log_size)
    return depth << log_size


def _first_command_offset(stream: bytes) -> int:
    """Where the first command is."""
    return 28 + int(struct.unpack_from("<I", stream, 24)[0]) if stream.startswith(_DIRECT_DRIVE_MAGIC) else 32


def decode_commands(stream: bytes) -> Iterator[tuple[int, int, int]]:
    """Place in words, number with 0x400 where a second word follows, the parameter's bits before that word's."""
    words = struct.iter_unpack("<I", stream[_first_command_offset(stream) :])
    for at, (word,) in (counted := enumerate(words)):
        second = next(counted)[1] if word & 0x4000 else ()
        yield at, word & 0x3FF | (word & 0x4000) >> 4, word >> 16 << 32 | sum(second)


def encode_command(number: int, value: int) -> list[int]:
    """The words of a command of ``decode_commands``."""
    first = number & 0x3FF | (number & 0x400) << 4 | value >> 32 << 16
    return [first, value & 0xFFFFFFFF] if number & 0x400 else [first]


def pack_stream(stream: bytes, words: Sequence[int]) -> bytes:
    """``words`` behind the header of ``stream``, which tells their number."""
    head = bytearray(stream[: _first_command_offset(stream)])
    size = len(head) + 4 * len(words)
    if stream.startswith(_DIRECT_DRIVE_MAGIC):
        struct.pack_into("<I", head, 8, size - 16)
        struct.pack_into("<I", head, 20, size - 24)
    else:
        struct.pack_into("<I", head, 28, 2 | len(words) >> 16 << 8 | (len(words) & 0xFFFF) << 16)
    return bytes(head) + struct.pack(f"<{len(words)}I", *words)
