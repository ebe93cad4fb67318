"""Vela workarounds for operators that get a wrong shape when Vela fuses, splits or removes operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arm_backend_core.dtype import DType
from arm_backend_core.targets.transpose_swaps import MAX_EXTENT
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant, copy_operands_where, emit_copy
from arm_backend_core.tosa.vela_workarounds.fused_rescales import is_pure_reshape
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround


def _strip_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` without leading dimensions of size 1."""
    return tuple(shape[next((i for i, size in enumerate(shape) if size > 1), len(shape)) :])


def _is_batched_activation(op: Op, rewriter: Rewriter) -> bool:
    """Match a TABLE or CLAMP of several batch items that Vela fuses into its producer.

    A tensor holds several batch items if it has more than three dimensions after its leading dimensions of size 1.

    Bug ``batched_activation``: Vela splits the activation by batch items, and gives the shape of one item to the result
    of the producer, but not to its input. After elementwise operators and SLICEs, the result is correct.
    """
    x, before = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    if before is None or before.kind in (*ELEMENTWISE, "SLICE"):
        return False
    return len(_strip_leading_ones(x.shape)) > 3 and rewriter.has_one_use(x)


def _flatten_activation(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the TABLE or CLAMP in rank 3, so that Vela does not split it by batch items."""
    b, x = rewriter.builder, op.inputs[0]
    flat = (prod(x.shape[:-2]), *x.shape[-2:])
    return b.reshape(b.emit(op.kind, (b.reshape(x, flat),), op.output.dtype, **op.attrs), x.shape)


def _is_slice_of_other_rank(op: Op, rewriter: Rewriter, *, includes_batch_of_one: bool = False) -> bool:
    """Match a SLICE and a RESHAPE of it that adds or removes leading dimensions of size 1, in rank 5 or 6.

    Bug ``slice_rank_mismatch``: Vela splits the reader of the RESHAPE by batch items. It reads each item with the
    strides of the shape before the RESHAPE, but at an offset that it computes in the rank after the RESHAPE.
    The program reads one item repeatedly, or beyond the end of the tensor. The bug occurs only if the rank before or
    after the RESHAPE is 5 or 6: Vela pads lower ranks to 4, so that they do not differ.

    Args:
        op: the RESHAPE.
        rewriter: the rewriter of the graph.
        includes_batch_of_one: also match a SLICE of one batch item if the rank grows (bug ``slice_rank_growth``).
    """
    x, source = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    added_dimensions = max(4, op.output.rank) - max(4, x.rank)
    is_affected = (
        len(_strip_leading_ones(x.shape)) > 3 or (includes_batch_of_one and added_dimensions > 0)
    ) and _strip_leading_ones(x.shape) == _strip_leading_ones(op.output.shape)
    if source is None or source.kind != "SLICE" or not added_dimensions or not is_affected:
        return False
    return any(reader.kind != "TRANSPOSE" for reader in rewriter.users(op.output) or [op])


def _copy_slice(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the RESHAPE of a copy of the SLICE. Vela reads the copy in one rank only."""
    return rewriter.builder.reshape(emit_copy(op.inputs[0], rewriter.builder), op.output.shape)


def _cancels_vela_transpose(op: Op, rewriter: Rewriter, *, is_result: bool) -> bool:
    """Match a TRANSPOSE of the last two dimensions that cancels with the one that Vela adds to a MATMUL or REDUCE_SUM.

    Vela removes both TRANSPOSEs. Bug ``cancelled_transpose``: the producer of a RESHAPE before them gets the shape
    after the RESHAPE. Bug ``cancelled_result``: if the TRANSPOSE reads an output of the program, this output is lost.

    Args:
        op: the TRANSPOSE.
        rewriter: the rewriter of the graph.
        is_result: if True, match only if the program returns the operand of the TRANSPOSE, or the same elements in
            another shape. If False, match only if it does not.
    """
    x, perms = op.inputs[0], list(op.attrs["perms"])
    reshape, last_axis = producer(x, "RESHAPE"), x.rank - 1
    source = reshape.inputs[0] if reshape else x
    is_returned = _is_returned(skip_through(source, "RESHAPE"), rewriter)
    if is_returned != is_result or perms != [*range(last_axis - 1), last_axis, last_axis - 1]:
        return False
    if skip_through(source, "RESCALE").producer is None and not is_returned:
        return False
    is_single_batch = x.shape[0] == 1 if x.rank == 4 else is_returned and source.shape == (1, *x.shape)
    cancelling_kinds = [kind for kind, cancels in (("MATMUL", is_single_batch), ("REDUCE_SUM", x.rank == 3)) if cancels]
    keeps_shape = _strip_leading_ones(source.shape) == _strip_leading_ones(x.shape) and not is_returned
    return not keeps_shape and any(rewriter.feeds(op.output, kind) for kind in cancelling_kinds)


def _is_returned(value: Value, rewriter: Rewriter) -> bool:
    """Whether ``value`` or a RESHAPE of it is an output of the program.

    An IDENTITY counts as an output: ``make_outputs_distinct`` inserts one to return an input, a constant or a value
    that is already an output.
    """
    readers = rewriter.users(value)
    if readers is None:
        return True
    views = (reader for reader in readers if reader.kind in ("IDENTITY", "RESHAPE"))
    return any(view.kind == "IDENTITY" or _is_returned(view.output, rewriter) for view in views)


def _transpose_copy(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the TRANSPOSE of a copy, which Vela does not remove."""
    return rewriter.builder.transpose(emit_copy(op.inputs[0], rewriter.builder), op.attrs["perms"])


def _match_high_rank_reverse(op: Op, rewriter: Rewriter) -> tuple[int, int, int] | None:
    """Match a REVERSE of rank 5 or 6, or of rank 4 if a dimension after the first has size 1.

    Bug ``reverse_overflow``: if a TRANSPOSE precedes or follows the REVERSE, and a RESHAPE is between the two, the
    program writes beyond the end of the result.

    Returns:
        an equivalent shape of rank 3, of which the REVERSE reverses the middle axis. None if Vela compiles the operator
        correctly, or if a dimension would exceed 65,536.
    """
    shape, axis = op.output.shape, op.attrs["axis"]
    flat = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
    is_supported = len(shape) < 4 or (len(shape) == 4 and 1 not in shape[1:]) or max(flat) > MAX_EXTENT
    return None if is_supported else flat


def _reverse_in_rank_three(op: Op, flat: tuple[int, int, int], rewriter: Rewriter) -> Value:
    """Emit the REVERSE in rank 3, between two RESHAPEs."""
    b = rewriter.builder
    return b.reshape(b.reverse(b.reshape(op.inputs[0], flat), 1), op.output.shape)


def _rewrite_minimum_as_maximum(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit min(x) as ~max(~x), where ~x = -1 - x.

    Bug ``reduce_min``: Vela lowers REDUCE_MIN in the same way, to SUB, max pooling and SUB. The second SUB gets the
    shape of a following RESHAPE, so that it broadcasts the first row of the pooling to all rows. Vela gives separate
    TOSA operators their correct shapes.
    """
    b = rewriter.builder
    maximum = b.reduce("REDUCE_MAX", _emit_complement(op.inputs[0], b), op.attrs["axis"])
    return _emit_complement(maximum, b)


def _emit_complement(x: Value, b: Builder) -> Value:
    """Emit ~x = -1 - x, computed in int32 and converted to the type of ``x`` by a RESCALE with scale 1."""
    minus_one = b.rescale(broadcast_constant(x, -1, x.dtype, b), DType.INT32, 1.0)
    return b.rescale(b.sub(minus_one, b.rescale(x, DType.INT32, 1.0)), x.dtype, 1.0)


def _broadcasts_single_element(op: Op, rewriter: Rewriter) -> bool:
    """Match arithmetic of rank 5 or 6 that broadcasts a first operand of one element.

    Bug ``scalar_broadcast_high_rank``: Vela drops dimensions of the other operand only, compares shapes of different
    rank, and reads more than one element. A constant of 16 bits or fewer is not affected, because the NPU command
    contains its value.
    """
    shape, first = op.output.shape, op.inputs[0]
    is_single = first.size == 1 and (first.data is None or first.dtype is DType.INT32)
    is_high_rank = len(shape) > 4 and prod(shape) > 1
    return is_high_rank and is_single and all(value.size == 1 or value.shape == shape for value in op.inputs)


def _flatten_to_rank_four(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the operator on operands of rank 4.

    A copy replaces an operand that is a SLICE, because Vela would read it in the rank of the SLICE.
    """
    b, shape = rewriter.builder, op.output.shape
    flat = (prod(shape[:-3]), *shape[-3:])
    operands = [emit_copy(x, b) if producer(skip_through(x, "RESHAPE", "RESCALE"), "SLICE") else x for x in op.inputs]
    inputs = [b.reshape(x, flat if x.shape == shape else (1, 1, 1, 1)) for x in operands]
    return b.reshape(b.emit(op.kind, inputs, op.output.dtype, **op.attrs), shape)


def _is_read_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether another operator reads ``value`` in another shape, through a view (``is_pure_reshape``).

    Bug ``reshaped_select``: Vela uses the other shape for a SELECT. For example, it broadcasts [1, 80, 1] with [80] to
    6,400 elements. After the rewrite, the SELECT reads a copy, which no operator reads in another shape. The result is
    also True if the tensor before the RESHAPEs is a program output.
    """
    source, producers = trace_back(value, lambda op: op.kind == "RESHAPE")
    views = [value, *(view.inputs[0] for view in producers)]
    readers = {reader for view in views for reader in rewriter.users(view) or () if is_pure_reshape(reader)}
    return rewriter.users(source) is None or not readers <= {*producers}


def _broadcasts_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether arithmetic broadcasts a first operand whose shape Vela gets wrong.

    Bug ``reshaped_broadcast``: for a RESHAPE of a SLICE of rank 5 or 6, Vela uses the rank of the SLICE. If both
    operands are broadcast, and another operator reads the first one in another shape, Vela uses this other shape, as in
    ``reshaped_select``. After the rewrite, the operator reads a copy, which no operator reads in another shape.
    """
    if value is not op.inputs[0] or value.shape == op.output.shape:
        return False
    if (part := skip_through(value, "RESHAPE", "RESCALE")).rank > 4 and producer(part, "SLICE"):
        return True
    if op.inputs[1].shape == op.output.shape:
        return False
    while not _is_read_reshaped(op, value, rewriter):
        if (scaled := producer(value, "RESCALE")) is None:
            return False
        value = scaled.inputs[0]
    return True


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("reduce_min", ("REDUCE_MIN",), lambda op, rewriter: True, _rewrite_minimum_as_maximum),
    Workaround(
        "scalar_broadcast_high_rank", tuple(ELEMENTWISE - UNARY), _broadcasts_single_element, _flatten_to_rank_four
    ),
    copy_operands_where("reshaped_select", ("SELECT",), _is_read_reshaped),
    copy_operands_where("reshaped_broadcast", tuple(ELEMENTWISE - UNARY), _broadcasts_reshaped),
    Workaround("slice_rank_mismatch", ("RESHAPE",), _is_slice_of_other_rank, _copy_slice),
    Workaround("cancelled_result", ("TRANSPOSE",), partial(_cancels_vela_transpose, is_result=True), _transpose_copy),
    Workaround(
        "cancelled_transpose",
        ("TRANSPOSE",),
        partial(_cancels_vela_transpose, is_result=False),
        _transpose_copy,
        releases=((5, 1),),
    ),
    Workaround("reverse_overflow", ("REVERSE",), _match_high_rank_reverse, _reverse_in_rank_three),
    Workaround(
        "slice_rank_growth", ("RESHAPE",), partial(_is_slice_of_other_rank, includes_batch_of_one=True), _copy_slice
    ),
    Workaround("batched_activation", ("TABLE", "CLAMP"), _is_batched_activation, _flatten_activation, True, ((5, 1),)),
)
