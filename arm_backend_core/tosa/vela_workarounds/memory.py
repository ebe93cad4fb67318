"""Vela workarounds for tensors whose offset, size or lifetime in memory Vela gets wrong. A copy avoids each."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.element_order import restores_order
from arm_backend_core.tosa.passes.fuse import is_rescale_by_one
from arm_backend_core.tosa.passes.merge import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.convolutions import CONVOLUTIONS
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")
#: Operators that Vela may execute as several operations.
_SPLIT = (
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
    """Whether a split operator reads a SLICE (``sliced``: all NPUs, 5.1 and 5.2).

    Vela lets the operator read a part of the SLICE's input. When it splits the operator, it overwrites the offset of
    that part (``docs/contributors/vela.md`` lists the operators and axes). Reading a copy needs no offset.
    """
    axes: Sequence[int] = rewriter.build.target.hardware.axes_lost_on_split(op)
    if axes and op.kind == "MATMUL" and _is_slice_behind_cancelling_transposes(value):
        return True

    def is_passed(before: Op) -> bool:
        keeps_shape = equal_without_ones(before.output.shape, before.inputs[0].shape)
        return keeps_shape and (before.kind == "RESHAPE" or is_rescale_by_one(before))

    value, views = trace_back(value, is_passed)
    if any(view.kind == "RESHAPE" for view in views) and (axes or "axis" in op.attrs):
        axes = range(-6, 0)  # Vela counts the axis in the SLICE's rank
    part = producer(value, "SLICE")
    if part is None:
        return False
    whole = part.inputs[0].shape
    return any(-axis <= value.rank and whole[axis] != value.shape[axis] for axis in axes)


def _is_slice_behind_cancelling_transposes(value: Value) -> bool:
    """Whether the TRANSPOSEs between a SLICE and ``value`` undo each other, so that Vela removes all of them."""
    part, views = trace_back(value, lambda op: op.kind in ("RESHAPE", "TRANSPOSE") or is_rescale_by_one(op))
    moves = [view for view in views if view.kind != "RESCALE"]
    has_transpose = any(move.kind == "TRANSPOSE" for move in moves)
    return has_transpose and producer(part, "SLICE") is not None and restores_order(part, moves)


def _reduces_column(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a reduction along the last axis reads a RESHAPE of a column, [.., n, 1] (``column``: all NPUs, 5.1 and
    5.2).

    Also if another operator reads the same tensor as a column. Vela reduces [.., n, 1] in bricks of 16 channels but
    allocates [.., n]: it writes n elements over 16 n bytes. Reading a copy separates the two tensors.
    """
    column = producer(value, "RESHAPE")
    if column is None or op.attrs["axis"] != value.rank - 1 or value.shape[-1] == 1:
        return False
    whole = column.inputs[0]
    others = [reader.output for reader in rewriter.users(whole) or () if reader.kind == "RESHAPE"]
    return any(x.shape[-1:] == (1,) for x in (whole, *others))


def _loses_concat_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a split operator writes directly into the result of CONCAT or PAD (``joined``: all NPUs, 5.1 and 5.2).

    Vela lets the only producer of an operand write to its place in the larger tensor. When it splits the operator, it
    loses the offset of that place. CONCAT and PAD of a copy avoid that.
    """
    op = skip_through(value, "RESCALE", "RESHAPE").producer
    has_reshape = producer(skip_through(value, "RESCALE"), "RESHAPE") is not None
    if op is None or not rewriter.has_one_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not has_reshape
    loses_offset = bool(rewriter.build.target.hardware.axes_lost_on_split(op))
    # Vela gives a MATMUL a result of four dimensions, the first of size 1: only a RESHAPE makes it lose the offset.
    return loses_offset and (has_reshape if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not has_reshape)


def _loses_upsampling_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """The same bug for TRANSPOSE_CONV2D, also past RESCALE and RESHAPE (``joined_upsampling``: U55 and U65, 5.2).

    Vela splits a TRANSPOSE_CONV2D by the rows and columns between those of its operand.
    """
    op = producer(skip_through(value, "RESCALE", "RESHAPE"), "TRANSPOSE_CONV2D")
    return op is not None and rewriter.has_one_use(value)


def _indices_may_be_overwritten(op: Op, rewriter: Rewriter) -> bool:
    """Whether other operations run between a GATHER or SCATTER and the reader of its result (``gathered``: U85, 5.1 and
    5.2).

    Only for computed or input indices. Vela records one byte for each index, which has four. Operations that follow may
    therefore overwrite the indices while the DMA still reads them.
    """
    return op.inputs[1].data is None and not _is_read_by_next_operation(op.output, rewriter)


def _wait_for_gather(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """Emit a copy of the result directly after the GATHER: the copy waits for the DMA."""
    gathered = rewriter.build.emit(op.kind, op.inputs, op.output.dtype, **op.attrs)
    return emit_copy(gathered, rewriter.build)


def _is_read_by_next_operation(value: Value, rewriter: Rewriter) -> bool:
    """Whether the only reader runs directly after the producer: Vela computes an operation's last operand first."""
    readers = rewriter.users(value) or []
    if len(readers) != 1 or readers[0].kind in ("RESHAPE", "RESCALE"):
        return len(readers) == 1 and _is_read_by_next_operation(readers[0].output, rewriter)
    operands = readers[0].inputs
    return all(x.producer is None for x in operands[: operands.index(value)])


SLICED = copy_operands_where("sliced", (*_SPLIT, *(ELEMENTWISE - UNARY)), _loses_slice_offset)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    copy_operands_where("column", (*_REDUCTIONS, "ARGMAX"), _reduces_column),
    copy_operands_where("joined", ("CONCAT", "PAD"), _loses_concat_offset),
    copy_operands_where("joined_upsampling", ("CONCAT", "PAD"), _loses_upsampling_offset, releases=((5, 2),)),
    Workaround("gathered", ("GATHER", "SCATTER"), _indices_may_be_overwritten, _wait_for_gather),
)
