"""Concatenation along a short last dimension: CONCAT along the first dimension, then a TRANSPOSE.

Examples: ``torch.stack`` of real and imaginary parts, of the coordinates of boxes, of interleaved rotary embeddings.
"""

from __future__ import annotations

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.alternatives.strided_slices import emit_lowered_transpose
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Maximum length of the result's last dimension. With a longer one, the memory accesses of CONCAT are fast.
_MAX_LENGTH = 16
#: Minimum number of elements. A smaller CONCAT is cheap.
_MIN_ELEMENTS = 512


def transpose_concat(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a CONCAT of k values [N, c] to [N, k * c] by a CONCAT to [k, N, c] and a TRANSPOSE to [N, k, c].

    CONCAT takes 8 cycles for each of the k * N copied rows. On U85, ``emit_lowered_transpose`` emits a TRANSPOSE of few
    long rows as a convolution, which takes 1/4 cycle for each element. Two values [8192, 1] (int8) on U85-256: 131,274
    cycles by CONCAT, and 22,016 by CONCAT and TRANSPOSE.
    """
    if not _has_short_last_axis(op):
        return None
    b, (*_, length) = rewriter.builder, op.inputs[0].shape
    rows = prod(op.output.shape[:-1])
    parts = b.concat([b.reshape(x, (1, rows * length)) for x in op.inputs], 0)  # long rows: copies are fast
    parts = b.reshape(parts, (len(op.inputs), rows, length))
    return b.reshape(emit_lowered_transpose(parts, (1, 0, 2), rewriter), op.output.shape)


def _has_short_last_axis(op: Op) -> bool:
    """Whether ``op`` concatenates parts of one shape along a short last dimension."""
    shape = op.output.shape
    is_last = op.attrs["axis"] == len(shape) - 1 and shape[-1] <= _MAX_LENGTH
    return is_last and op.output.size >= _MIN_ELEMENTS and len({x.shape for x in op.inputs}) == 1


def _match_concat(op: Op, rewriter: Rewriter) -> Region | None:
    """Match the CONCAT with its producers: Vela may let them write directly into the result of the CONCAT."""
    if not _has_short_last_axis(op):
        return None
    movement = collect_neighbors(op, rewriter, ("RESHAPE", "SLICE"), ("RESHAPE",))
    producers = [x.producer for member in movement[:1] for x in member.inputs if x.producer is not None]
    return Region(dict.fromkeys([*movement, *producers]), ((op,),))


SHORT_AXIS_CONCAT = Alternative(
    "concatenations along a short last dimension", ("CONCAT",), transpose_concat, _match_concat
)
