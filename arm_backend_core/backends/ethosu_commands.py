"""Decoder and encoder of Ethos-U command streams.

Command and register numbers: ``runtime/emulator/command_stream.h``.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

DMA_START, DMA_WAIT = 16, 17
#: NPU_OP_CONV, DEPTHWISE, POOL, ELEMENTWISE and RESIZE.
KERNEL_COMMANDS = (2, 3, 5, 6, 7)
#: Numbers of the registers of a DMA: source region, destination region, source address, destination address, length.
DMA_REGISTERS = (304, 305, 0x430, 0x431, 0x432)
#: Numbers of the registers of the input feature map (IFM), the output feature map (OFM) and the second input (IFM2),
#: one row each: base of tile 0, stride x, width of tile 0 minus 1, region, precision, depth minus 1. Further registers
#: have the next higher numbers: bases of tiles 1 to 3 after the base of tile 0; stride y and the stride of bricks after
#: stride x; heights of tiles 0 and 1, each minus 1, after the width of tile 0. IFM2 has no depth register; its row has
#: the depth register of the OFM.
FEATURE_MAP_REGISTERS = (
    (0x400, 0x404, 266, 271, 261, 260),
    (0x410, 0x414, 282, 287, 276, 275),
    (0x480, 0x484, 394, 399, 389, 275),
)
#: Header of streams for Direct Drive (a U85 that Linux drives without a Cortex-M). Other streams start with COP1.
_DIRECT_DRIVE_MAGIC = b"COP2"

#: {product number in the header of a command stream: NPU}
_PRODUCTS = {0: "U55", 1: "U65", 2: "U85"}


def is_u85(stream: bytes) -> bool:
    """Whether a stream is for an Ethos-U85: a Direct Drive stream, or a stream whose header has product number 2.

    Raises:
        ValueError: the header has another product number than those of ``_PRODUCTS``.
    """
    product = 2 if stream.startswith(_DIRECT_DRIVE_MAGIC) else stream[11] >> 4
    if product not in _PRODUCTS:
        raise ValueError(f"a command stream for product {product}: its registers are unknown; known are {_PRODUCTS}")
    return _PRODUCTS[product] == "U85"


def is_chained(precision: int) -> bool:
    """Whether a feature map of U85 is chained, that is, passed to the next operation without memory.

    ``precision`` is the value of its precision register. Other NPUs use these bits for the rounding.
    """
    return precision >> 46 & 3 == 2


def pixel_extent(depth: int, brick: int, precision: int, log_size: int) -> int:
    """Bytes from a pixel's first channel to the end of its last channel (NHWC) or of its last brick (NHCWB16).

    If there are several bricks, the end includes the unused channels of the last brick.

    Args:
        depth: number of channels.
        brick: stride in bytes between bricks of 16 channels (NHCWB16); unused in NHWC.
        precision: value of the precision register, which contains the layout.
        log_size: log2 of the bytes of an element.
    """
    if precision >> 38 & 3 == 1:
        return (depth - 1) // 16 * brick + (min(depth, 16) << log_size)
    return depth << log_size


def _first_command_offset(stream: bytes) -> int:
    """Byte offset of the first command."""
    return 28 + int(struct.unpack_from("<I", stream, 24)[0]) if stream.startswith(_DIRECT_DRIVE_MAGIC) else 32


def decode_commands(stream: bytes) -> Iterator[tuple[int, int, int]]:
    """Decode commands as (word index, number, value).

    The word index counts from the first command. ``number`` has bit 0x400 set if the command has a second word.
    ``value`` is (16-bit parameter << 32) | second word.
    """
    words = struct.iter_unpack("<I", stream[_first_command_offset(stream) :])
    for word_index, (word,) in (numbered := enumerate(words)):
        second = next(numbered)[1] if word & 0x4000 else ()
        yield word_index, word & 0x3FF | (word & 0x4000) >> 4, word >> 16 << 32 | sum(second)


def encode_command(number: int, value: int) -> list[int]:
    """Encode the number and value of a command (see ``decode_commands``) as one or two words."""
    first = number & 0x3FF | (number & 0x400) << 4 | value >> 32 << 16
    return [first, value & 0xFFFFFFFF] if number & 0x400 else [first]


def pack_command_stream(stream: bytes, words: Sequence[int]) -> bytes:
    """Build a stream from the header of ``stream``, with updated sizes, and ``words``."""
    head = bytearray(stream[: _first_command_offset(stream)])
    size = len(head) + 4 * len(words)
    if stream.startswith(_DIRECT_DRIVE_MAGIC):
        struct.pack_into("<I", head, 8, size - 16)
        struct.pack_into("<I", head, 20, size - 24)
    else:
        struct.pack_into("<I", head, 28, 2 | len(words) >> 16 << 8 | (len(words) & 0xFFFF) << 16)
    return bytes(head) + struct.pack(f"<{len(words)}I", *words)


class RegisterWriter:
    """Writes an edited copy of Vela's stream.

    Vela's writes to the deferred registers are withheld (``defer``). The caller writes their new values right before
    the operation that reads them (``set_registers``).

    Attributes:
        pending: {deferred register: value that Vela's stream wrote last}.
        words: the new stream's words.
    """

    def __init__(self, deferred: Iterable[int], words: Iterable[int] = ()) -> None:
        self._deferred, self._state = frozenset(deferred), dict[int, int]()
        self.pending, self.words = dict[int, int](), list(words)

    def defer(self, number: int, value: int) -> bool:
        """Store the value of a deferred register; False if the register is not deferred."""
        if number in self._deferred:
            self.pending[number] = value
        return number in self._deferred

    def set_registers(self, values: Mapping[int, int]) -> None:
        """Write each register of ``values``, {number: value}, unless the new stream has set it to this value."""
        for register, value in values.items():
            if self._state.get(register) != value:
                self.words += encode_command(register, value)
                self._state[register] = value
