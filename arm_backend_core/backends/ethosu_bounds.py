"""A postcondition of streams: no kernel writes beyond the tensors that Vela has placed (``docs/contributors/vela.md``:
it has).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from arm_backend_core.backends.ethosu_commands import KERNELS, MAPS, decode_commands, is_chained, is_u85, pixel_bytes
from arm_backend_core.backends.payload import Layer

_WIDTH, _HEIGHT, _DEPTH = 273, 274, 275
#: By what a precision says of the order: the stored height, width and depth among the kernel's (U85).
_ORDERS = {1: (1, 0, 2), 2: (0, 2, 1), 3: (1, 2, 0), 6: (2, 0, 1), 7: (2, 1, 0)}


def find_out_of_bounds_write(
    stream: bytes, places: Sequence[tuple[int, int, int]], layers: Sequence[Layer]
) -> str | None:
    """What the first kernel does that writes beyond all ``places``: region, first byte and bytes of each tensor."""
    registers, new = defaultdict[int, int](int), is_u85(stream)
    firsts, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # by region, in order
    for region, first, size in sorted(places):
        firsts[region].append(first)
        ends[region].append(max([first + size, *ends[region][-1:]]))
    for at, number, value in decode_commands(stream):
        if number >= 256:
            registers[number] = value
        elif number in KERNELS and not (new and is_chained(registers[MAPS[1][4]])):
            region = registers[MAPS[1][3]] >> 32 & 7
            for start, end in _written_ranges(registers):
                count = bisect_right(firsts[region], start)  # of tensors that begin where it begins, or before
                if not count or ends[region][count - 1] < end:
                    names = [layer.tensor for layer in layers if 4 * at in layer.commands]
                    return f"{' and '.join(names) or 'a result'} is written to bytes {start} to {end - 1} of its memory"
    return None


def _written_ranges(registers: dict[int, int]) -> Iterator[tuple[int, int]]:
    """First byte, and one past the last, of each tile of OFM that has elements."""
    base, strides, tile, _, precision, _ = MAPS[1]
    form = registers[precision]
    sizes = [(registers[key] >> 32) + 1 for key in (_HEIGHT, _WIDTH, _DEPTH)]
    height, width, depth = (sizes[i] for i in _ORDERS.get(form >> 43 & 7, (0, 1, 2)))
    x, y, brick = (registers[strides + i] - (registers[strides + i] >> 39 << 40) for i in range(3))
    last = pixel_bytes(depth, brick, form, form >> 33 & 3)
    across, left_rows, right_rows = ((registers[tile + i] >> 32) + 1 for i in range(3))
    for right, below in product((0, 1), repeat=2):
        first, high = registers[base + right + 2 * below], right_rows if right else left_rows
        rows, columns = height - high if below else min(height, high), width - across if right else min(width, across)
        if rows > 0 and columns > 0:
            ways = (rows - 1) * y, (columns - 1) * x
            yield first + sum(min(way, 0) for way in ways), first + sum(max(way, 0) for way in ways) + last
