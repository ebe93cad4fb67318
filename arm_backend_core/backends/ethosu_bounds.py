"""Bounds check of command streams: no kernel writes its result outside of the tensors that Vela has allocated.

Vela has produced programs with such writes (``docs/contributors/vela.md``). Writes of DMAs are not checked.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from arm_backend_core.backends.ethosu_commands import (
    FEATURE_MAP_REGISTERS,
    KERNEL_COMMANDS,
    decode_commands,
    is_chained,
    is_u85,
    pixel_extent,
)
from arm_backend_core.backends.vela_estimates import OperationEstimate

#: Numbers of the registers that hold the OFM's width, height and depth, each minus one.
_WIDTH, _HEIGHT, _DEPTH = 273, 274, 275
#: Output transposes of U85: {transpose bits of the precision register: permutation p}. Stored axis i is computed axis
#: ``p[i]``; the axes are height, width and depth.
_OUTPUT_TRANSPOSES = {1: (1, 0, 2), 2: (0, 2, 1), 3: (1, 2, 0), 6: (2, 0, 1), 7: (2, 1, 0)}


def find_out_of_bounds_write(
    stream: bytes, allocations: Sequence[tuple[int, int, int]], layers: Sequence[OperationEstimate]
) -> str | None:
    """Describe the first kernel that writes outside of all allocations; None if there is none.

    Kernels of U85 with a chained result (``is_chained``) are skipped, because they do not write the result to memory.

    Args:
        stream: the command stream.
        allocations: (region, address, bytes) of each tensor.
        layers: Vela's estimates, from which the description takes the name of the written tensor.
    """
    registers, for_u85 = defaultdict[int, int](int), is_u85(stream)
    starts, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # by region
    for region, address, size in sorted(allocations):
        starts[region].append(address)
        ends[region].append(max([address + size, *ends[region][-1:]]))  # maximum so far
    for word_index, number, value in decode_commands(stream):
        if number >= 256:
            registers[number] = value
        elif number in KERNEL_COMMANDS and not (for_u85 and is_chained(registers[FEATURE_MAP_REGISTERS[1][4]])):
            region = registers[FEATURE_MAP_REGISTERS[1][3]] >> 32 & 7
            for start, end in _written_ranges(registers):
                count = bisect_right(starts[region], start)  # tensors that begin at or before ``start``
                if not count or ends[region][count - 1] < end:
                    names = [layer.tensor for layer in layers if 4 * word_index in layer.commands]
                    return f"{' and '.join(names) or 'a result'} is written to bytes {start} to {end - 1} of its memory"
    return None


def _written_ranges(registers: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Byte range [start, end) of each non-empty tile of the OFM."""
    base, strides, tile, _, precision, _ = FEATURE_MAP_REGISTERS[1]
    precision_bits = registers[precision]
    sizes = [(registers[key] >> 32) + 1 for key in (_HEIGHT, _WIDTH, _DEPTH)]
    height, width, depth = (sizes[i] for i in _OUTPUT_TRANSPOSES.get(precision_bits >> 43 & 7, (0, 1, 2)))
    x, y, brick = (registers[strides + i] - (registers[strides + i] >> 39 << 40) for i in range(3))
    last_pixel = pixel_extent(depth, brick, precision_bits, precision_bits >> 33 & 3)
    left_columns, left_rows, right_rows = ((registers[tile + i] >> 32) + 1 for i in range(3))
    for right, lower in product((0, 1), repeat=2):
        first, upper_rows = registers[base + right + 2 * lower], right_rows if right else left_rows
        rows, columns = (
            height - upper_rows if lower else min(height, upper_rows),
            width - left_columns if right else min(width, left_columns),
        )
        if rows > 0 and columns > 0:
            extents = (rows - 1) * y, (columns - 1) * x
            yield (
                first + sum(min(extent, 0) for extent in extents),
                first + sum(max(extent, 0) for extent in extents) + last_pixel,
            )
