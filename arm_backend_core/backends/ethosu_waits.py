"""What Vela leaves out of streams (``docs/vela.md``): waits before a DMA and tables (U55, U65), and before a RESIZE.

The two operations before a DMA ("kernels") may still be under way, and Vela mistakes where parts of tensors are. The
smallest NPUs lose tables in each kernel without one, and Vela passes over some of these. Constants are left to it.
"""

from collections import defaultdict
from collections.abc import Iterator

from arm_backend_core.backends.ethosu_commands import DMA, DMA_START, DMA_WAIT, commands, encoded, packed

_ELEMENTWISE, _KERNEL_WAIT, _KERNELS, _U85 = 6, 18, (2, 3, 5, 6), 2
_ACTIVATION, _TABLE_0, _BLOCKDEP, _RESIZE = 293, 16, 303, 7
#: Of IFM, OFM and IFM2: the first of bases, of strides and of the first tile's sizes, region, precision, depth.
_MAPS = ((0x400, 0x404, 266, 271, 261, 260), (0x410, 0x414, 282, 287, 276, 275), (0x480, 0x484, 394, 399, 389, 275))
_SOURCE, _TARGET, _FROM, _TO, _LENGTH = DMA
_Span = tuple[int, int, int, bool]  # region, first byte, one past the last, whether it is written


def with_waits(stream: bytes) -> tuple[bytes, list[int]]:
    """``stream`` with what is left out, and before which of Vela's bytes each word of it stands, from the first on."""
    registers, kernels, words, places = defaultdict[int, int](int), list[list[_Span]](), list[int](), list[int]()
    tables, lost = dict[int, list[int]](), set[int]()  # by slot, the DMA that brings it; slots that are written over
    product, small = stream[11] >> 4, stream[8] & 15 < 7  # the third word's highest bits; the lowest: log2 of the MACs
    if stream.startswith(b"COP2") or product == _U85:
        return _with_resizes_apart(stream), places  # it has none of the other mistakes, as far as known

    def put(*new: int) -> None:
        places.extend([4 * (len(words) - len(places))] * len(new))
        words.extend(new)

    for _, number, value in commands(stream):
        if number >= 256:
            registers[number] = value
        elif number == _KERNEL_WAIT:
            del kernels[: -(value >> 32) or None]
        elif number in _KERNELS:
            slot = (registers[_ACTIVATION] >> 32 & 31) - _TABLE_0
            if slot in lost:
                put(_KERNEL_WAIT, *tables[slot], DMA_START, DMA_WAIT, *_dma_words(registers))
                lost.remove(slot)
            elif small and slot < 0:
                lost.update(tables)
            kernels = [*kernels[-1:], list(_kernel(registers, number))]
        elif number == DMA_START:
            pairs = ((a, b) for a in _dma(registers) for kernel in kernels for b in kernel)
            if any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[3] or b[3]) for a, b in pairs):
                put(_KERNEL_WAIT)
                kernels.clear()
            if registers[_TARGET] >> 40 & 1:
                slot = registers[_TO] >> 8 & 7
                tables[slot] = _dma_words(registers)
                lost.discard(slot)
        words += encoded(number, value)
    return packed(stream, words), places


def _with_resizes_apart(stream: bytes) -> bytes:
    """Let no RESIZE of U85 begin before the operation before has ended: Vela takes it to read as far as it writes."""
    words, blockdep = list[int](), 0
    for _, number, value in commands(stream):
        if number == _BLOCKDEP:
            blockdep = len(words)
        elif number == _RESIZE:
            words[blockdep] = _BLOCKDEP  # 0, for all that follow this command
        words += encoded(number, value)
    return packed(stream, words)


def _dma_words(registers: dict[int, int]) -> list[int]:
    """Commands that set what a DMA of one row reads."""
    return [word for key in DMA for word in encoded(key, registers[key])]


def _dma(registers: dict[int, int]) -> Iterator[_Span]:
    """Of several rows (U65), all from the first byte on."""
    length = 1 << 40 if registers[_TARGET] >> 41 & 3 else registers[_LENGTH]
    for region, address in ((_SOURCE, _FROM), (_TARGET, _TO)):
        if not registers[region] >> 40 & 1:  # not the memory of tables
            yield registers[region] >> 32 & 7, registers[address], registers[address] + length, region == _TARGET


def _kernel(registers: dict[int, int], code: int) -> Iterator[_Span]:
    """From a feature map's first byte, or where its rolling buffer begins, to the end of its first tile."""
    for base, stride, tile, region, precision, depth in _MAPS[: 3 if code == _ELEMENTWISE else 2]:
        start, x, y, brick, form = (registers[key] for key in (base, stride, stride + 1, stride + 2, precision))
        columns, rows, channels = (registers[key] >> 32 for key in (tile, tile + 1, depth))  # each less one
        bricks, size = form >> 38 & 3 == 1, form >> (33 if base == _MAPS[1][0] else 34) & 3
        last = (channels // 16 * brick + (min(channels, 15) + 1 << size)) if bricks else channels + 1 << size
        low = 0 if max(x, y) >> 39 else registers[base + 2] or start  # rows that run backwards: all there is
        yield registers[region] >> 32 & 7, low, start + rows * y + columns * x + last, base == _MAPS[1][0]
