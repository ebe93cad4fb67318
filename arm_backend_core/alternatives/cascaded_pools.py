"""Windows of maxima as cascades of smaller ones: an SPP block's of 5, 9 and 13 on U55-128, 892,188 cycles, 98,244."""

from __future__ import annotations

from collections.abc import Iterator

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Elements of the longest window of a cascade. Vela charges an element of result 4 at least, and one for each element
#: of the window, so longer ones save an operation and no multiplications; with 5, pools of 5, 9 and 13 share theirs.
_LONGEST = 5


def cascade(op: Op, rewriter: Rewriter) -> Value | None:
    """MAX_POOL2D that moves by 1: windows of at most five rows, then of columns, and again until it is as large.

    The maximum over an interval is that of the maxima over intervals that cover it: a window of k and one of m behind
    it see k + m - 1 elements. Padding in front is shared out, each part shorter than its window. So no window sees
    padding alone, and what is cut off of a window at the border lies in the padding of both forms.
    """
    if max(op.attrs["stride"]) > 1:
        return None
    top, bottom, left, right = op.attrs["pad"]
    sides = zip(op.attrs["kernel"], (top, left), (bottom, right), strict=True)
    rows, columns = (list(_windows(*side)) for side in sides)
    value = op.inputs[0]
    for i in range(max(len(rows), len(columns))):
        for axis, windows in enumerate((rows, columns)):
            if i < len(windows):
                size, *pad = windows[i]
                kernel = (1, size) if axis else (size, 1)
                padding = (0, 0, *pad) if axis else (*pad, 0, 0)
                value = rewriter.build.max_pool2d(value, kernel, (1, 1), padding)
    return None if value.producer is None or value.producer.attrs["kernel"] == op.attrs["kernel"] else value


def _windows(size: int, before: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Sizes of windows one behind the other with their padding before and after."""
    while size > 1:
        part = min(size, _LONGEST)
        reach = part - 1
        # Symmetric padding stays so: pools of several sizes then begin alike.
        pads = [min(pad, reach, max(reach // 2, pad - (size - part))) for pad in (before, after)]
        yield part, pads[0], pads[1]
        size, before, after = size - reach, before - pads[0], after - pads[1]


def _siblings(op: Op, rewriter: Rewriter) -> Region:
    """Pools of one tensor share the beginnings of their cascades."""
    readers = [reader for reader in rewriter.users(op.inputs[0]) or [op] if reader.kind == op.kind]
    return Region(readers, (readers,))


CASCADE = Alternative("max pools as cascades of small ones", ("MAX_POOL2D",), cascade, _siblings)
