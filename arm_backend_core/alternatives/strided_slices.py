"""Strided slices that are concatenated again (patch merging, focus layers) become one TRANSPOSE.

Otherwise, Vela emits a copy for each SLICE.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.alternatives.transpose_split import TRANSPOSE_SEQUENCE
from arm_backend_core.permutation import Layout
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.element_order import source_indices
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back
from arm_backend_core.tosa.passes.transpose_lowering import lower_transpose

_SLICE_KINDS = ("RESHAPE", "SLICE", "TRANSPOSE")
#: Maximum number of elements of the source tensor. The position of each element is traced.
_MAX_ELEMENTS = 1 << 22


def transpose_slices(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a CONCAT of strided SLICEs of one value by a TRANSPOSE, if they contain each element exactly once.

    For example, CONCAT(x[0::2], x[1::2]) is the TRANSPOSE of [N / 2, 2] to [2, N / 2]. Vela copies every SLICE before a
    CONCAT. The copy of a strided element takes 8 cycles. The focus layer of YOLOv5 (3x96x96 to 12x48x48, int8) and two
    3x3 convolutions take 634 k cycles on U55-128, and 290 k with a TRANSPOSE before the first convolution.
    """
    match = _match_transpose(op)
    if match is None:
        return None
    b, (x, shape, perms) = rewriter.builder, match
    return b.reshape(emit_lowered_transpose(b.reshape(x, shape), perms, rewriter), op.output.shape)


def emit_lowered_transpose(x: Value, perms: Layout, rewriter: Rewriter) -> Value:
    """Emit a TRANSPOSE in the form that is fastest on the target.

    On U55 and U65, this is a sequence of swaps (``transpose_swaps``). On U85, it is a convolution or, if no convolution
    fits, a sequence of TRANSPOSEs.
    """
    b = rewriter.builder
    result = b.transpose(x, perms)
    transpose = result.producer
    if transpose is None or transpose.kind != "TRANSPOSE":
        return result
    lowered = lower_transpose(transpose, rewriter)
    if lowered is None and b.target.hardware.transposes_by_convolution:
        lowered = TRANSPOSE_SEQUENCE.rule(transpose, rewriter)
    return result if lowered is None else lowered


def _match_transpose(op: Op) -> tuple[Value, Layout, Layout] | None:
    """Match a CONCAT that is equal to a TRANSPOSE; return the source, the shape before the TRANSPOSE, and ``perms``."""
    if op.output.size > _MAX_ELEMENTS:
        return None
    sources = [_trace_source(value, op.output.size) for value in op.inputs]
    x = sources[0][0]
    if any(y is not x for y, _ in sources) or x.size != op.output.size or not any(steps for _, steps in sources):
        return None
    parts = [
        source_indices(x, steps).reshape(value.shape) for value, (_, steps) in zip(op.inputs, sources, strict=True)
    ]
    runs = _find_strides(np.concatenate(parts, op.attrs["axis"]).ravel())
    if runs is None:
        return None
    order = sorted(range(len(runs)), key=lambda i: -runs[i][1])
    if [runs[i][1] for i in order] != [int(np.prod([runs[j][0] for j in order[i + 1 :]])) for i in range(len(order))]:
        return None
    return x, tuple(runs[i][0] for i in order), tuple(order.index(i) for i in range(len(runs)))


def _trace_source(value: Value, size: int) -> tuple[Value, list[Op]]:
    """Trace ``value`` back to a source with ``size`` elements; return the source and the operators after it."""
    return trace_back(value, lambda step: step.kind in (_SLICE_KINDS if step.output.size < size else ("RESHAPE",)))


def _find_strides(order: Array) -> list[tuple[int, int]] | None:
    """Decompose the indices ``order`` into dimensions, as (size, stride), outermost first; None if this is impossible.

    For example, [0, 2, 4, 1, 3, 5] gives [(2, 1), (3, 2)].
    """
    runs: list[tuple[int, int]] = []
    while len(order) > 1:
        step = int(order[1] - order[0])
        others = np.flatnonzero(np.diff(order) != step)
        size = int(others[0]) + 1 if len(others) else len(order)
        if step < 1 or len(order) % size:
            return None
        rows = order.reshape(-1, size)
        if not np.array_equal(rows, rows[:, :1] + np.arange(size) * step):
            return None
        runs.insert(0, (size, step))
        order = rows[:, 0]
    return runs


def _match_region(op: Op, rewriter: Rewriter) -> Region | None:
    if _match_transpose(op) is None:
        return None
    return Region(collect_neighbors(op, rewriter, _SLICE_KINDS, ("CONV2D", "RESCALE", *_SLICE_KINDS)), ((op,),))


STRIDED_SLICES = Alternative("strided slices as one TRANSPOSE", ("CONCAT",), transpose_slices, _match_region)
