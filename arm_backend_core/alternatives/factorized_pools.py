"""Factorized max pooling: replace a max pooling with a large window by a chain of poolings with small windows.

An SPP block (spatial pyramid pooling) with windows of 5, 9 and 13 on U55-128: 98,244 instead of 892,188 cycles.
"""

from __future__ import annotations

from collections.abc import Iterator

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Maximum number of rows or columns in the window of a stage. Vela estimates one cycle per window element for each
#: output element, but at least 4 cycles. Larger windows would need fewer stages, but about as many cycles. With 5,
#: poolings of 5, 9 and 13 share their first stages.
_MAX_WINDOW = 5


def factorize_pool(op: Op, rewriter: Rewriter) -> Value | None:
    """Factorize a MAX_POOL2D with stride 1 into stages, alternately of at most five rows and of at most five columns.

    Bit-exact: the maximum over an interval is the maximum of the maxima over intervals that cover it. A window of k
    elements followed by a window of m elements covers k + m - 1 elements. The padding is distributed over the stages.
    In each stage it is shorter than the window, so that no window contains only padding.
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
                value = rewriter.builder.max_pool2d(value, kernel, (1, 1), padding)
    return None if value.producer is None or value.producer.attrs["kernel"] == op.attrs["kernel"] else value


def _split_window(size: int, before: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Split a window along one axis; yield size, padding before and padding after of each stage."""
    while size > 1:
        stage = min(size, _MAX_WINDOW)
        shrinkage = stage - 1  # number of elements by which a stage without padding shortens the axis
        # Half of the shrinkage on each side keeps symmetric padding symmetric, so that poolings of several sizes share
        # their first stages. All later stages together shorten the axis by ``size - stage``; this stage must take the
        # padding that exceeds this number.
        stage_pads = [min(pad, shrinkage, max(shrinkage // 2, pad - (size - stage))) for pad in (before, after)]
        yield stage, stage_pads[0], stage_pads[1]
        size, before, after = size - shrinkage, before - stage_pads[0], after - stage_pads[1]


def _match_siblings(op: Op, rewriter: Rewriter) -> Region:
    """Match all poolings of one tensor, because their chains share first stages."""
    readers = [reader for reader in rewriter.users(op.inputs[0]) or [op] if reader.kind == op.kind]
    return Region(readers, (readers,))


FACTORIZED_POOLS = Alternative("factorized max pools", ("MAX_POOL2D",), factorize_pool, _match_siblings)
