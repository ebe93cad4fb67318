"""What Vela leaves out of streams (``docs/contributors/vela.md``): waits before a DMA and tables (U55, U65), and before
kernels.

The two operations before a DMA ("kernels") may still be under way, and Vela mistakes where parts of tensors are. The
smallest NPUs lose tables in each kernel without one, and Vela passes over some of these. Constants are left to it.
A kernel may begin before the last blocks of the one before are written (BLOCKDEP): none does that reads these in
another way than as whole rows of the same tensor, no kernel that reads them with a stride larger than its window
(Vela assumes adjacent windows), no chain, and no RESIZE, which for Vela reads as far as it writes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from arm_backend_core.backends import ethosu_commands as npu
from arm_backend_core.backends.ethosu_commands import DMA, DMA_START, DMA_WAIT, MAPS, encode_command

_ELEMENTWISE, _RESIZE, _KERNEL_WAIT = 6, 7, 18
_KERNEL_WIDTH, _KERNEL_HEIGHT, _STRIDES = 288, 289, 290
_ACTIVATION, _TABLE_0, _BLOCKDEP = 293, 16, 303
_SOURCE, _TARGET, _FROM, _TO, _LENGTH = DMA
_Span = tuple[int, int, int, bool]  # region, first byte, one past the last, whether it is written


def insert_waits(stream: bytes) -> tuple[bytes, list[int]]:
    """``stream`` with what is left out, and before which of Vela's bytes each word of it stands, from the first on."""
    registers, kernels, words, places = defaultdict[int, int](int), list[list[_Span]](), list[int](), list[int]()
    tables, lost = dict[int, list[int]](), set[int]()  # by slot, the DMA that brings it; slots that are written over
    written, changed = tuple[int, ...](), False  # and whether BLOCKDEP is 0 where ``registers`` have another
    small = stream[8] & 15 < 7  # the third word's lowest bits: log2 of the MACs
    new = npu.is_u85(stream)  # it has none of the other mistakes, as far as known

    def put(*added: int) -> None:
        places.extend([4 * (len(words) - len(places))] * len(added))
        words.extend(added)

    for _, number, value in npu.decode_commands(stream):
        if number >= 256:
            registers[number] = value
            changed = changed and number != _BLOCKDEP
        elif number == _KERNEL_WAIT:
            del kernels[: -(value >> 32) or None]
        elif number in npu.KERNELS:
            slot = (registers[_ACTIVATION] >> 32 & 31) - _TABLE_0
            if slot in lost:
                put(_KERNEL_WAIT, *tables[slot], DMA_START, DMA_WAIT, *_dma_words(registers))
                lost.remove(slot)
            elif small and slot < 0 and not new:
                lost.update(tables)
            maps = MAPS[: 3 if number == _ELEMENTWISE else 2]
            kernels = [*kernels[-1:], list(_kernel_spans(registers, maps))]
            apart = new and any(npu.is_chained(registers[precision]) for *_, precision, _ in maps)
            # Vela 5.2 has chains begin early too, by what each of their operations reads; 5.1 has none do that.
            late = number == _RESIZE or apart
            if len(kernels) > 1 and not late:
                has_gaps = number != _ELEMENTWISE and _stride_exceeds_kernel(registers)
                late = _needs_kernel_wait(registers, kernels, written, has_gaps=has_gaps)
            if changed != (late and registers[_BLOCKDEP] > 0):
                changed = not changed
                put(*encode_command(_BLOCKDEP, 0 if changed else registers[_BLOCKDEP]))
            written = _feature_map_layout(registers, MAPS[1])
        elif number == DMA_START and not new:
            pairs = ((a, b) for a in _dma_spans(registers) for kernel in kernels for b in kernel)
            if any(_overlaps(a, b) and (a[3] or b[3]) for a, b in pairs):
                put(_KERNEL_WAIT)
                kernels.clear()
            if registers[_TARGET] >> 40 & 1:
                slot = registers[_TO] >> 8 & 7
                tables[slot] = _dma_words(registers)
                lost.discard(slot)
        words += encode_command(number, value)
    return npu.pack_stream(stream, words), places


def _feature_map_layout(registers: dict[int, int], places: tuple[int, ...]) -> tuple[int, ...]:
    """First byte, from row to row, and what else whole rows have in common: strides, sizes, format, type, order."""
    base, x, tile, _, precision, depth = places
    form = registers[precision]
    size, turned = (form >> 33 & 3, form >> 41 & 31) if base == MAPS[1][0] else (form >> 34 & 3, 0)
    sizes = registers[tile] >> 32, registers[depth] >> 32, form >> 38 & 3, size, turned
    return (*(registers[key] for key in (base, x + 1, x, x + 2)), *sizes)


def _stride_exceeds_kernel(registers: dict[int, int]) -> bool:
    """Whether windows have gaps between them, in columns or rows. Registers hold stride and kernel size minus one."""
    strides = registers[_STRIDES] >> 32
    x, y = ((strides >> low & 1) + 2 * (strides >> high & 1) for low, high in ((0, 6), (1, 9)))
    return x > registers[_KERNEL_WIDTH] >> 32 or y > registers[_KERNEL_HEIGHT] >> 32


def _needs_kernel_wait(
    registers: dict[int, int], kernels: list[list[_Span]], written: tuple[int, ...], *, has_gaps: bool
) -> bool:
    """Whether a kernel reads what the one before has written, and not whole rows of it, or with gaps between windows.

    Two operands next to each other may be of one tensor: Vela looks at one of them.
    """
    (target,) = (span for span in kernels[0] if span[3])
    sources = [span for span in kernels[1] if not span[3]]
    beside = len(sources) > 1 and _overlaps(sources[0], sources[1], apart=1)
    for places, source in zip(MAPS[::2], sources, strict=False):
        first, row, *others = _feature_map_layout(registers, places)
        rows = [row, *others] == [*written[1:]] and not (first - written[0]) % (row or 1)
        if _overlaps(source, target) and (beside or has_gaps or not rows):
            return True
    return False


def _overlaps(a: _Span, b: _Span, apart: int = 0) -> bool:
    return a[0] == b[0] and a[1] < b[2] + apart and b[1] < a[2] + apart


def _dma_words(registers: dict[int, int]) -> list[int]:
    """Commands that set what a DMA of one row reads."""
    return [word for key in DMA for word in encode_command(key, registers[key])]


def _dma_spans(registers: dict[int, int]) -> Iterator[_Span]:
    """Of several rows (U65), all from the first byte on."""
    length = 1 << 40 if registers[_TARGET] >> 41 & 3 else registers[_LENGTH]
    for region, address in ((_SOURCE, _FROM), (_TARGET, _TO)):
        if not registers[region] >> 40 & 1:  # not the memory of tables
            yield registers[region] >> 32 & 7, registers[address], registers[address] + length, region == _TARGET


def _kernel_spans(registers: dict[int, int], maps: Sequence[tuple[int, ...]]) -> Iterator[_Span]:
    """From a feature map's first byte, or where its rolling buffer begins, to the end of its first tile."""
    for base, stride, tile, region, precision, depth in maps:
        start, x, y, brick, form = (registers[key] for key in (base, stride, stride + 1, stride + 2, precision))
        columns, rows, channels = (registers[key] >> 32 for key in (tile, tile + 1, depth))  # each less one
        last = npu.pixel_bytes(channels + 1, brick, form, form >> (33 if base == MAPS[1][0] else 34) & 3)
        low = 0 if max(x, y) >> 39 else registers[base + 2] or start  # rows that run backwards: all there is
        yield registers[region] >> 32 & 7, low, start + rows * y + columns * x + last, base == MAPS[1][0]
