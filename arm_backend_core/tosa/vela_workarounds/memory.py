"""Vela workarounds for tensors whose offset, size or lifetime in memory Vela gets wrong. A copy avoids each bug."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.element_order import restores_order
from arm_backend_core.tosa.passes.peephole_fusion import has_unit_scale
from arm_backend_core.tosa.passes.peephole_movement import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.convolutions import CONVOLUTIONS
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")
#: Operators that Vela may split into several operations.
_SPLITTABLE = (
    *CONVOLUTIONS,
    *_REDUCTIONS,
    "ARGMAX",
    "AVG_POOL2D",
    "MATMUL",
    "MAX_POOL2D",
    "REDUCE_SUM",
    "TRANSPOSE_CONV2D",
)


def _loses_slice_offset(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether ``value``, an operand of an operator that Vela splits, is a SLICE along an axis of the split.

    Bug ``lost_slice_offset``: Vela fuses the SLICE into the operator, which then reads the SLICE's input at an offset.
    When Vela splits the operator, it overwrites this offset. ``docs/contributors/vela.md`` lists the operators and
    axes. A copy of the SLICE needs no offset.
    """
    axes: Sequence[int] = rewriter.builder.target.hardware.axes_lost_on_split(op)
    if axes and op.kind == "MATMUL" and _is_slice_behind_cancelling_transposes(value):
        return True

    def can_skip(before: Op) -> bool:
        keeps_shape = equal_without_ones(before.output.shape, before.inputs[0].shape)
        return keeps_shape and (before.kind == "RESHAPE" or has_unit_scale(before))

    value, views = trace_back(value, can_skip)
    if any(view.kind == "RESHAPE" for view in views) and (axes or "axis" in op.attrs):
        axes = range(-6, 0)  # Vela applies the axis of the reshaped operand to the shape of the SLICE
    slice_op = producer(value, "SLICE")
    if slice_op is None:
        return False
    unsliced = slice_op.inputs[0].shape
    return any(-axis <= value.rank and unsliced[axis] != value.shape[axis] for axis in axes)


def _is_slice_behind_cancelling_transposes(value: Value) -> bool:
    """Whether the TRANSPOSEs between a SLICE and ``value`` cancel, so that Vela removes all of them."""
    sliced, views = trace_back(value, lambda op: op.kind in ("RESHAPE", "TRANSPOSE") or has_unit_scale(op))
    moves = [view for view in views if view.kind != "RESCALE"]
    has_transpose = any(move.kind == "TRANSPOSE" for move in moves)
    return has_transpose and producer(sliced, "SLICE") is not None and restores_order(sliced, moves)


def _reduces_column(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Match a reduction along n of a RESHAPE [.., n] of x, if x or another RESHAPE of x is a column [.., n, 1].

    Bug ``column_reduction_overflow``: Vela reduces [.., n, 1] in NHCWB16 bricks of 16 channels, but allocates memory
    for [.., n]. The n elements are written over 16 * n bytes, beyond the allocated memory. A copy of [.., n] shares no
    memory with the column.
    """
    reshape = producer(value, "RESHAPE")
    if reshape is None or op.attrs["axis"] != value.rank - 1 or value.shape[-1] == 1:
        return False
    source = reshape.inputs[0]
    views = [reader.output for reader in rewriter.users(source) or () if reader.kind == "RESHAPE"]
    return any(x.shape[-1:] == (1,) for x in (source, *views))


def _loses_concat_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether an operator that Vela splits writes directly into the result of a CONCAT or PAD.

    Bug ``lost_concat_offset``: if the CONCAT or PAD is the only reader of an operand, the operand's producer writes
    into the larger tensor at an offset. When Vela splits the producer, it loses this offset. A CONCAT or PAD of a copy
    avoids the bug. On U85, Vela also splits a padded AVG_POOL2D with a stride over 3 or a kernel over 8.
    """
    op = skip_through(value, "RESCALE", "RESHAPE").producer
    has_reshape = producer(skip_through(value, "RESCALE"), "RESHAPE") is not None
    if op is None or not rewriter.has_one_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not has_reshape
    loses_offset = bool(rewriter.builder.target.hardware.axes_lost_on_split(op))
    if op.kind == "AVG_POOL2D":
        return loses_offset and (max(op.attrs["stride"]) > 3 or max(op.attrs["kernel"]) > 8)
    # In Vela, the result of a MATMUL has rank 4, with a leading 1. The offset is lost only if a RESHAPE follows.
    return loses_offset and (has_reshape if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not has_reshape)


def _loses_upsampling_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a TRANSPOSE_CONV2D writes into the result of a CONCAT or PAD, directly or through RESCALE and RESHAPE.

    Bug ``lost_upsampling_offset``: Vela splits a TRANSPOSE_CONV2D into one convolution for each phase of its stride,
    and loses the offset as in ``lost_concat_offset``.
    """
    op = producer(skip_through(value, "RESCALE", "RESHAPE"), "TRANSPOSE_CONV2D")
    return op is not None and rewriter.has_one_use(value)


def _indices_may_be_overwritten(op: Op, rewriter: Rewriter) -> bool:
    """Whether other operations may run between a GATHER or SCATTER and the reader of its result.

    Bug ``overwritten_indices``: Vela records one byte for each index instead of four. Other operations may therefore
    overwrite the indices while the DMA still reads them. Constant indices are not affected.
    """
    return op.inputs[1].data is None and not _is_read_by_next_operation(op.output, rewriter)


def _copy_after_gather(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit a copy of the result directly after the GATHER or SCATTER, because the copy waits for the DMA."""
    gathered = rewriter.builder.emit(op.kind, op.inputs, op.output.dtype, **op.attrs)
    return emit_copy(gathered, rewriter.builder)


def _is_read_by_next_operation(value: Value, rewriter: Rewriter) -> bool:
    """Whether ``value`` has one reader, which runs next. RESHAPEs and RESCALEs may be between the two.

    Vela schedules the producers of a reader's last operand first. If an operator computes an operand before ``value``,
    this operator therefore runs between the two, and the result is False.
    """
    readers = rewriter.users(value) or []
    if len(readers) != 1 or readers[0].kind in ("RESHAPE", "RESCALE"):
        return len(readers) == 1 and _is_read_by_next_operation(readers[0].output, rewriter)
    return all(x.producer is None for x in readers[0].inputs[: readers[0].inputs.index(value)])


LOST_SLICE_OFFSET_WORKAROUND = copy_operands_where(
    "lost_slice_offset", (*_SPLITTABLE, *(ELEMENTWISE - UNARY)), _loses_slice_offset
)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    copy_operands_where("column_reduction_overflow", (*_REDUCTIONS, "ARGMAX"), _reduces_column),
    copy_operands_where("lost_concat_offset", ("CONCAT", "PAD"), _loses_concat_offset),
    copy_operands_where("lost_upsampling_offset", ("CONCAT", "PAD"), _loses_upsampling_offset, releases=((5, 2),)),
    Workaround("overwritten_indices", ("GATHER", "SCATTER"), _indices_may_be_overwritten, _copy_after_gather),
)
