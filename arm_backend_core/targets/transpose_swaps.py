"""TRANSPOSE on Ethos-U55 and U65, which two dimensions of three change places in at a time.

Vela 5.1 makes such exchanges of any other TRANSPOSE, and refuses it where one of these has more along a dimension than
hardware has registers for. Others often do the same within the limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod

from arm_backend_core.dtype import DType
from arm_backend_core.permutation import Layout, identity, merge_axes

Exchange = tuple[tuple[int, int, int], tuple[int, int]]
"""A shape of three dimensions, and the two that change places."""
ORDERS = {(0, 1): (1, 0, 2), (1, 2): (0, 2, 1), (0, 2): (2, 1, 0)}

LONGEST = 1 << 16  # extents along one axis are 16-bit registers


@lru_cache(maxsize=4096)
def steps(shape: Layout, perms: Layout, dtype: DType, source: Layout) -> tuple[tuple[Layout, Layout], ...] | None:
    """Shapes and orders of TRANSPOSEs of one exchange each that give this one; itself if it is of one or none.

    ``source`` is the shape that the operand has before a RESHAPE, its own without one.
    """
    real = [axis for axis, size in enumerate(shape) if size != 1]
    plain = tuple(shape[axis] for axis in real), tuple(real.index(axis) for axis in perms if axis in real)
    alone = len(list(exchanges(shape, perms, dtype))) == 1 and is_supported_by_vela(shape, perms, dtype, source)
    if alone or plain[1] == identity(len(real)):
        return ((shape, perms),)
    for sizes, order in (merge_axes(shape, perms), plain):
        path = [(view, ORDERS[axes]) for view, axes in _shortest(sizes, order, dtype) or ()]
        if path and is_supported_by_vela(*path[0], dtype, source):
            return tuple(path)
        if path and (first := _divided(*path[0], dtype)):
            return (first, *path[1:])
    return None


def is_supported_by_vela(shape: Layout, perms: Layout, dtype: DType, source: Layout) -> bool:
    """Whether Vela does a TRANSPOSE within the limits of hardware, the operand being a RESHAPE of ``source``.

    Where this only drops or adds dimensions of size 1, Vela moves it behind the TRANSPOSE, in which these then stay.
    """
    real, held = ([axis for axis, size in enumerate(sizes) if size != 1] for sizes in (shape, source))
    if source != shape and [shape[axis] for axis in real] == [source[axis] for axis in held]:
        order = [real.index(axis) for axis in perms if axis in real]
        places = {axis: held[i] for axis, i in zip(held, order, strict=True)}
        shape, perms = source, tuple(places.get(axis, axis) for axis in range(len(source)))
    return fits(exchanges(shape, perms, dtype), dtype)


def _divided(view: Layout, perms: Layout, dtype: DType) -> tuple[Layout, Layout] | None:
    """The same TRANSPOSE with one dimension as two, if there is one that Vela does within the limits."""
    ways: list[tuple[int, Layout, Layout]] = []
    for axis, part in ((axis, n) for axis, size in enumerate(view) for n in range(2, size) if size % n == 0):
        shape: Layout = (*view[:axis], part, view[axis] // part, *view[axis + 1 :])
        order = tuple(dim for i in perms for dim in ((i, i + 1) if i == axis else (i + (i > axis),)))
        path = list(exchanges(shape, order, dtype))
        if fits(path, dtype):
            ways.append((_cycles(path), shape, order))
    return min(ways)[1:] if ways else None


def _cycles(path: Iterable[Exchange]) -> int:
    """Every element once for each exchange, and 500 for an operation: one, or one for each row or column."""
    return sum(prod(sizes) + 500 * {(0, 1): 1, (1, 2): sizes[0], (0, 2): sizes[1]}[axes] for sizes, axes in path)


def fits(path: Iterable[Exchange], dtype: DType) -> bool:
    """Whether hardware can do these exchanges."""
    deepest = 1 << 14 if dtype is DType.INT32 else LONGEST
    return all(max(sizes) <= LONGEST and (axes != (0, 1) or sizes[2] <= deepest) for sizes, axes in path)


def _shortest(sizes: Sequence[int], order: tuple[int, ...], dtype: DType) -> list[Exchange] | None:
    """Exchanges of neighbours taken together that lead to ``order``, in the least time."""
    paths: list[tuple[int, tuple[int, ...], list[Exchange]]] = [(0, identity(len(sizes)), [])]
    done: set[tuple[int, ...]] = set()
    while paths:
        cost, state, path = heapq.heappop(paths)
        if state == order:
            return path
        if state in done:
            continue
        done.add(state)
        for i, j in combinations(range(len(sizes) + 1), 2):
            parts = [state[:i], state[i:j], state[j:]]
            before, between, behind = (prod(sizes[dim] for dim in part) for part in parts)
            for axes, places in list(ORDERS.items())[: 2 if dtype is DType.INT32 else 3]:
                exchange: Exchange = ((before, between, behind), axes)
                if fits([exchange], dtype):
                    after = tuple(dim for place in places for dim in parts[place])
                    heapq.heappush(paths, (cost + _cycles([exchange]), after, [*path, exchange]))
    return None


def exchanges(shape: Sequence[int], perms: Sequence[int], dtype: DType) -> Iterator[Exchange]:
    """What Vela makes of a TRANSPOSE."""
    front = max(0, 4 - len(shape))
    sizes = [1] * front + list(shape)
    order = [*range(front), *(front + list(perms).index(axis) for axis in range(len(shape)))]
    for axis in range(len(order)):
        at = order.index(axis)
        if at != axis:
            for exchange in _exchange(sizes, axis, at):
                (h, w, c), axes = exchange
                halves = (((h, w, c), (1, 2)), ((h, c, w), (0, 1)), ((c, h, w), (1, 2)))
                yield from halves if dtype is DType.INT32 and axes == (0, 2) else (exchange,)
            order[axis], order[at] = order[at], order[axis]


def _exchange(sizes: list[int], a: int, b: int) -> Iterator[Exchange]:
    """Exchanges after which dimensions ``a`` < ``b`` of ``sizes`` have changed places."""
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
        yield from _exchange(sizes, 0, b)
        yield view(1, a + 1), (0, 1)
        sizes.insert(a, sizes.pop(0))
        return
    elif b < last:
        yield view(b, b + 1), (1, 2)
        sizes.append(sizes.pop(b))
        yield from _exchange(sizes, 0, last)
        yield view(b, last), (1, 2)
        sizes.insert(b, sizes.pop())
        return
    else:
        yield view(1, last), (0, 2)
    sizes[a], sizes[b] = sizes[b], sizes[a]
