"""TRANSPOSE on Ethos-U55 and U65 as a sequence of swaps.

A swap views a tensor as three dimensions [A, B, C] and exchanges two of them. Vela decomposes any TRANSPOSE into
such swaps, and refuses it if one of them exceeds the range of the hardware's registers. Another decomposition often
stays within the range.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod

from arm_backend_core.dtype import DType
from arm_backend_core.permutation import Layout, identity, merge_axes

Swap = tuple[tuple[int, int, int], tuple[int, int]]
"""A shape of three dimensions, and the two dimensions that are swapped, for example ((8, 4, 2), (0, 1))."""
#: {swapped dimensions: the same swap as the ``perms`` of a TRANSPOSE}.
SWAP_PERMUTATIONS = {(0, 1): (1, 0, 2), (1, 2): (0, 2, 1), (0, 2): (2, 1, 0)}

MAX_EXTENT = 1 << 16  # 16-bit registers hold the extent minus 1


@lru_cache(maxsize=4096)
def plan_swaps(shape: Layout, perms: Layout, dtype: DType, source: Layout) -> tuple[tuple[Layout, Layout], ...] | None:
    """Decompose a TRANSPOSE into TRANSPOSEs (shape, perms) of one swap each.

    A TRANSPOSE that is one supported swap, or moves only dimensions of size 1, is not decomposed. If a RESHAPE computes
    the operand, Vela may move this RESHAPE behind the first swap, which changes the dimensions of the swap
    (``is_supported_by_vela``). If Vela does not support the changed swap, one of its dimensions is split in two.

    Args:
        shape: shape of the TRANSPOSE's operand.
        perms: permutation of the TRANSPOSE.
        dtype: element type of the operand.
        source: if a RESHAPE computes the operand, the shape that this RESHAPE reads; otherwise ``shape``.

    Returns:
        (shape, perms) of each TRANSPOSE, in order. It is ((shape, perms),) if the TRANSPOSE is not decomposed. None if
        no decomposition stays within the hardware's limits.
    """
    axes_above_one = [axis for axis, size in enumerate(shape) if size != 1]
    squeezed = (
        tuple(shape[axis] for axis in axes_above_one),
        tuple(axes_above_one.index(axis) for axis in perms if axis in axes_above_one),
    )
    is_single_swap = len(list(vela_swaps(shape, perms, dtype))) == 1 and is_supported_by_vela(
        shape, perms, dtype, source
    )
    if is_single_swap or squeezed[1] == identity(len(axes_above_one)):
        return ((shape, perms),)
    for sizes, order in (merge_axes(shape, perms), squeezed):
        path = [(view, SWAP_PERMUTATIONS[axes]) for view, axes in _find_cheapest_swaps(sizes, order, dtype) or ()]
        if path and is_supported_by_vela(*path[0], dtype, source):
            return tuple(path)
        if path and (first := _split_one_dimension(*path[0], dtype)):
            return (first, *path[1:])
    return None


def is_supported_by_vela(shape: Layout, perms: Layout, dtype: DType, source: Layout) -> bool:
    """Whether Vela compiles a TRANSPOSE of a RESHAPE of ``source`` within the limits of the hardware.

    If the RESHAPE only adds or removes dimensions of size 1, Vela moves it behind the TRANSPOSE. The TRANSPOSE then has
    the dimensions of ``source``.
    """
    axes_above_one, source_axes = ([axis for axis, size in enumerate(sizes) if size != 1] for sizes in (shape, source))
    if source != shape and [shape[axis] for axis in axes_above_one] == [source[axis] for axis in source_axes]:
        order = [axes_above_one.index(axis) for axis in perms if axis in axes_above_one]
        places = {axis: source_axes[i] for axis, i in zip(source_axes, order, strict=True)}
        shape, perms = source, tuple(places.get(axis, axis) for axis in range(len(source)))
    return are_supported_swaps(vela_swaps(shape, perms, dtype), dtype)


def _split_one_dimension(view: Layout, perms: Layout, dtype: DType) -> tuple[Layout, Layout] | None:
    """Split one dimension of a TRANSPOSE in two, so that Vela's swaps are within the limits.

    Returns:
        (shape, perms) of the cheapest such TRANSPOSE; None if there is none.
    """
    candidates: list[tuple[int, Layout, Layout]] = []
    for axis, part in ((axis, n) for axis, size in enumerate(view) for n in range(2, size) if size % n == 0):
        shape: Layout = (*view[:axis], part, view[axis] // part, *view[axis + 1 :])
        order = tuple(dim for i in perms for dim in ((i, i + 1) if i == axis else (i + (i > axis),)))
        path = list(vela_swaps(shape, order, dtype))
        if are_supported_swaps(path, dtype):
            candidates.append((_estimate_cycles(path), shape, order))
    return min(candidates)[1:] if candidates else None


def _estimate_cycles(path: Iterable[Swap]) -> int:
    """Cost model: each swap takes one cycle per element and 500 cycles per operation.

    A swap of [A, B, C] takes A operations for the dimensions (1, 2), B operations for (0, 2), and one for (0, 1).
    """
    return sum(prod(sizes) + 500 * {(0, 1): 1, (1, 2): sizes[0], (0, 2): sizes[1]}[axes] for sizes, axes in path)


def are_supported_swaps(path: Iterable[Swap], dtype: DType) -> bool:
    """Whether the hardware can execute these swaps."""
    max_depth = 1 << 14 if dtype is DType.INT32 else MAX_EXTENT
    return all(max(sizes) <= MAX_EXTENT and (axes != (0, 1) or sizes[2] <= max_depth) for sizes, axes in path)


def _find_cheapest_swaps(sizes: Sequence[int], order: tuple[int, ...], dtype: DType) -> list[Swap] | None:
    """The cheapest sequence of swaps that leads to ``order`` (Dijkstra's algorithm); None if there is none."""
    paths: list[tuple[int, tuple[int, ...], list[Swap]]] = [(0, identity(len(sizes)), [])]
    visited: set[tuple[int, ...]] = set()
    while paths:
        cost, state, path = heapq.heappop(paths)
        if state == order:
            return path
        if state in visited:
            continue
        visited.add(state)
        for i, j in combinations(range(len(sizes) + 1), 2):
            parts = [state[:i], state[i:j], state[j:]]
            before, between, behind = (prod(sizes[dim] for dim in part) for part in parts)
            for axes, places in list(SWAP_PERMUTATIONS.items())[: 2 if dtype is DType.INT32 else 3]:
                swap: Swap = ((before, between, behind), axes)
                if are_supported_swaps([swap], dtype):
                    after = tuple(dim for place in places for dim in parts[place])
                    heapq.heappush(paths, (cost + _estimate_cycles([swap]), after, [*path, swap]))
    return None


def vela_swaps(shape: Sequence[int], perms: Sequence[int], dtype: DType) -> Iterator[Swap]:
    """The swaps that Vela decomposes a TRANSPOSE into."""
    added_dims = max(0, 4 - len(shape))
    sizes = [1] * added_dims + list(shape)
    order = [*range(added_dims), *(added_dims + list(perms).index(axis) for axis in range(len(shape)))]
    for axis in range(len(order)):
        position = order.index(axis)
        if position != axis:
            for swap in _swap_dimensions(sizes, axis, position):
                (h, w, c), axes = swap
                int32_swaps = (((h, w, c), (1, 2)), ((h, c, w), (0, 1)), ((c, h, w), (1, 2)))
                yield from int32_swaps if dtype is DType.INT32 and axes == (0, 2) else (swap,)
            order[axis], order[position] = order[position], order[axis]


def _swap_dimensions(sizes: list[int], a: int, b: int) -> Iterator[Swap]:
    """Yield the swaps that exchange dimensions ``a`` < ``b`` of ``sizes``; update ``sizes``."""
    last = len(sizes) - 1

    def view(start: int, end: int) -> tuple[int, int, int]:
        return prod(sizes[:start]), prod(sizes[start:end]), prod(sizes[end:])

    if a > last - 3 and prod(sizes[:-3]) == 1:
        yield view(last - 1, last), (a - last + 2, b - last + 2)
    elif (a, b) == (0, 1):
        yield view(1, 2), (0, 1)
    elif (a, b) == (last - 1, last):
        yield view(a, b), (1, 2)
    elif a > 0:
        yield view(a, a + 1), (0, 1)
        sizes.insert(0, sizes.pop(a))
        yield from _swap_dimensions(sizes, 0, b)
        yield view(1, a + 1), (0, 1)
        sizes.insert(a, sizes.pop(0))
        return
    elif b < last:
        yield view(b, b + 1), (1, 2)
        sizes.append(sizes.pop(b))
        yield from _swap_dimensions(sizes, 0, last)
        yield view(b, last), (1, 2)
        sizes.insert(b, sizes.pop())
        return
    else:
        yield view(1, last), (0, 2)
    sizes[a], sizes[b] = sizes[b], sizes[a]
