"""Cascaded max pools: a large window becomes several small ones.

An SPP block with windows of 5, 9 and 13 on U55-128: 98,244 instead of 892,188 cycles.
"""

from __future__ import annotations

from collections.abc import Iterator

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Maximum window of a cascade. Vela charges at least 4 cycles for an element of the result and one for each element of
#: the window, so longer windows only save an operation. With 5, pools of 5, 9 and 13 share their first stages.
_MAX_WINDOW = 5


def cascade_pool(op: Op, rewriter: Rewriter) -> Value | None:
    """Split a MAX_POOL2D with stride 1 into alternating windows of at most five rows and of at most five columns.

    Bit-equal: the maximum over an interval is the maximum of the maxima over intervals that cover it. A window of k
    followed by one of m covers k + m - 1 elements. The padding is distributed over the stages, each part shorter than
    its window. So no window contains only padding, and a window that crosses the border covers padding in both forms.
    """
    if max(op.attrs["stride"]) > 1:
        return None
    top, bottom, left, right = op.attrs["pad"]
    sides = zip(op.attrs["kernel"], (top, left), (bottom, right), strict=True)
    rows, columns = (list(_split_window(*side)) for side in sides)
    value = op.inputs[0]
    for i in range(max(len(rows), len(columns))):
        for axis, windows in enumerate((rows, columns)):
            if i < len(windows):
                size, *pad = windows[i]
                kernel = (1, size) if axis else (size, 1)
                padding = (0, 0, *pad) if axis else (*pad, 0, 0)
                value = rewriter.build.max_pool2d(value, kernel, (1, 1), padding)
    return None if value.producer is None or value.producer.attrs["kernel"] == op.attrs["kernel"] else value


def _split_window(size: int, before: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Split a window into stages; yield size, padding before and padding after of each."""
    while size > 1:
        part = min(size, _MAX_WINDOW)
        reach = part - 1
        # Symmetric padding stays symmetric, so that pools of several sizes share their first stages.
        pads = [min(pad, reach, max(reach // 2, pad - (size - part))) for pad in (before, after)]
        yield part, pads[0], pads[1]
        size, before, after = size - reach, before - pads[0], after - pads[1]


def _match_siblings(op: Op, rewriter: Rewriter) -> Region:
    """Match all pools of one tensor, which share the first stages of their cascades."""
    readers = [reader for reader in rewriter.users(op.inputs[0]) or [op] if reader.kind == op.kind]
    return Region(readers, (readers,))


CASCADE = Alternative("cascaded max pools", ("MAX_POOL2D",), cascade_pool, _match_siblings)
