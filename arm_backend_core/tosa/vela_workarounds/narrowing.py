"""Vela workarounds for conversions to a narrower type: CASTs that saturate, and RESCALEs that lose their clipping."""

from __future__ import annotations

from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.operators.elementwise import rescale_input_range
from arm_backend_core.tosa.passes.peephole_fusion import has_unit_scale_and_no_zero_points, log2_scale, rescale_factors
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import (
    broadcast_constant,
    copy_operands_where,
    copy_result,
    emit_scaled_by_almost_one,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: Data movement that Vela may fuse with its producer or consumer. ``Operator.is_data_movement`` is a larger set: it
#: also includes REVERSE, GATHER and SELECT.
DATA_MOVEMENT = ("CONCAT", "IDENTITY", "PAD", "RESHAPE", "SLICE", "TILE", "TRANSPOSE")


def _loses_clipping(op: Op, rewriter: Rewriter, *, scaled: bool = False) -> bool:
    """Match a RESCALE with scale 1 that may clip to a narrower type, followed by one to an equally wide or wider type.

    Bug ``unclipped``: Vela removes both RESCALEs, and with them the clipping of the first. Data movement may be between
    the two.

    Args:
        op: the first RESCALE.
        rewriter: the rewriter of the graph.
        scaled: if True, the second RESCALE may have any scale (bug ``unclipped_scaled``).
    """
    source, dtype = op.inputs[0], op.output.dtype
    if log2_scale(op) != 0 or dtype.bytes >= source.dtype.bytes or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return False
    return not (has_unit_scale_and_no_zero_points(op) and _fits_type(source, dtype)) and _is_widened_again(
        op.output, rewriter, scaled=scaled
    )


def _preserve_clipping(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the RESCALE with a scale of almost 1, which Vela does not remove.

    The multiplier of an int48 RESCALE has too few bits for this scale. In this case, a copy of the result separates the
    two RESCALEs.
    """
    if op.inputs[0].dtype is DType.INT48:
        return copy_result(op, match, rewriter)
    return emit_scaled_by_almost_one(op, match, rewriter)


def _is_widened_again(value: Value, rewriter: Rewriter, *, scaled: bool) -> bool:
    """Whether Vela may merge the producer of ``value`` with a RESCALE of ``value`` to an equally wide or wider type.

    Data movement may be between the two. Vela always merges a RESCALE with scale 1. It merges a RESCALE with another
    scale on U85, and on U55 and U65 only if the RESCALE is the only reader.

    Args:
        value: the result of a RESCALE.
        rewriter: the rewriter of the graph.
        scaled: also search for RESCALEs with other scales than 1.
    """
    may_merge = scaled and (rewriter.has_one_use(value) or rewriter.builder.target.hardware.fuses_shared_rescale)
    for op in rewriter.users(value) or ():
        if op.kind == "RESCALE" and (log2_scale(op) == 0 or may_merge) and op.output.dtype.bytes >= value.dtype.bytes:
            return True
        if op.kind in DATA_MOVEMENT and _is_widened_again(op.output, rewriter, scaled=scaled):
            return True
    return False


def _loses_multiplier_bits(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE of int48 with scale 1, followed by a RESCALE whose multiplier has more than 15 significant bits.

    Bug ``truncated_multiplier``: Vela merges both into one RESCALE of int48, whose multiplier has 15 bits. The low bits
    of the second multiplier are lost. A copy of the first result prevents this.
    """
    if op.inputs[0].dtype is not DType.INT48 or log2_scale(op) != 0:
        return False
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and log2_scale(reader) != 0:
            return bool(np.any(np.asarray(reader.attrs["multiplier"]) & 0xFFFF))
        if reader.kind not in ("RESCALE", "RESHAPE"):
            return False
        result = reader.output
    return False


def _loses_clipping_at_zero_point(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE with scale 1 and only an output zero point, after a RESCALE to the same width that may clip.

    Bug ``unclipped_zero_point``: Vela merges both into one RESCALE, which clips only at the end. RESHAPEs, and RESCALEs
    with scale 1 to int32, may be between the two. The first RESCALE does not widen its operand.
    """
    x, _ = trace_back(
        op.inputs[0],
        lambda step: (
            step.kind == "RESHAPE" or (has_unit_scale_and_no_zero_points(step) and step.output.dtype is DType.INT32)
        ),
    )
    before = producer(x, "RESCALE")
    if before is None or op.attrs["input_zp"] or not op.attrs["output_zp"] or log2_scale(op) != 0:
        return False
    return before.inputs[0].dtype.bytes >= before.output.dtype.bytes == op.output.dtype.bytes and may_clip(before)


def may_clip(op: Op) -> bool:
    """Whether a RESCALE may clip.

    A RESCALE to a narrower type is assumed to clip, unless it has scale 1 and no zero points, and the values of the
    operand fit the result type.
    """
    source, (low, high) = op.inputs[0], op.output.dtype.range
    if source.dtype.bytes > op.output.dtype.bytes:
        return not (has_unit_scale_and_no_zero_points(op) and _fits_type(source, op.output.dtype))
    scale = float(rescale_factors(op).max())
    ends = rescale_input_range(op)
    results = [round((end - op.attrs["input_zp"]) * scale + op.attrs["output_zp"]) for end in ends]
    return min(results) < low or max(results) > high


def _match_narrowing_cast(op: Op, rewriter: Rewriter) -> int | None:
    """Match a CAST of int32 or int16 to a narrower type, if values of the operand may not fit this type.

    Bug ``narrowing_cast``: U55 and U65 always clip to the output range, so that the CAST saturates. In TOSA, the CAST
    keeps the low bits.

    Returns:
        the shift for ``_wrap_cast``: 24 for int8, 16 for int16; None without a match.
    """
    x, bits = op.inputs[0], {DType.INT8: 24, DType.INT16: 16}.get(op.output.dtype)
    is_wider = x.dtype in (DType.INT16, DType.INT32)
    return bits if is_wider and bits is not None and not _fits_type(x, op.output.dtype) else None


def _match_chained_cast(op: Op, rewriter: Rewriter) -> int | None:
    """Match a CAST as ``_match_narrowing_cast`` does, if all its readers are CASTs, or all of one elementwise kind.

    Bug ``chained_cast``: U85 executes a chain of elementwise operations without storing the results between them. If
    Vela puts the CAST and its reader into one chain, the CAST saturates as on U55. RESHAPEs may be between the two.
    CLAMP is excluded, because Vela fuses it with the CAST.
    """
    result = op.output
    while (users := rewriter.users(result)) and len(users) == 1 and users[0].kind == "RESHAPE":
        result = users[0].output
    readers = {user.kind for user in users or ()}
    is_chained = len(readers) == 1 and readers <= {*ELEMENTWISE, "CAST"} - {"CLAMP"}
    return _match_narrowing_cast(op, rewriter) if is_chained else None


def _wrap_cast(op: Op, bits: int, rewriter: Rewriter) -> Value:
    """Emit a CAST that keeps the low bits: an int32 left shift and an arithmetic right shift sign-extend them first.

    The operand of the CAST then fits the output type, so that saturation has no effect.
    """
    b = rewriter.builder
    x = b.cast(op.inputs[0], DType.INT32)
    shift = broadcast_constant(x, bits, DType.INT32, b)
    # U55 and U65 have only the rounding right shift. The dropped bits are 0, so that nothing is rounded.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, shift), shift, round=True), op.output.dtype)


def _fits_type(value: Value, dtype: DType) -> bool:
    low, high = _value_bounds(value)
    type_min, type_max = dtype.range
    return bool(type_min <= low and high <= type_max)


def _value_bounds(value: Value, depth: int = 8) -> tuple[float, float]:
    """(minimum, maximum) of a value by interval arithmetic on the operators that typically precede a CAST.

    Args:
        value: the tensor to analyse.
        depth: maximum number of consecutive operators to analyse. The operands of the earliest one are assumed to have
            the whole range of their type.
    """
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    type_min, type_max = value.dtype.range
    if op is not None and depth and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = (_value_bounds(x, depth - 1) for x in op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    if op is not None and depth and op.kind in ("MUL", "ARITHMETIC_RIGHT_SHIFT") and op.inputs[1].size == 1:
        return _bounds_of_mul_or_shift(op, _value_bounds(op.inputs[0], depth - 1))
    if op is not None and depth and (op.kind in ("CAST", "RESHAPE") or has_unit_scale_and_no_zero_points(op)):
        low, high = _value_bounds(op.inputs[0], depth - 1)
        if type_min <= low and high <= type_max:
            return low, high
    return type_min, type_max


def _bounds_of_mul_or_shift(op: Op, operand: tuple[float, float]) -> tuple[float, float]:
    """Bounds of x * 1 and x << n >> n, which the workarounds emit; the range of the type for any other operator."""
    type_min, type_max = op.output.dtype.range
    if op.kind == "MUL":
        is_identity = op.inputs[1].data is not None and op.inputs[1].data.flat[0] == 1 and not op.attrs["shift"]
        return operand if is_identity else (type_min, type_max)
    left_shift, shift = producer(op.inputs[0], "LOGICAL_LEFT_SHIFT"), op.inputs[1].data
    if (
        left_shift is None
        or shift is None
        or left_shift.inputs[1].data is None
        or left_shift.inputs[1].data.flat[0] != shift.flat[0]
    ):
        return type_min, type_max
    return int(type_min) >> int(shift.flat[0]), int(type_max) >> int(shift.flat[0])


def _is_clamped_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a CAST to a narrower type computes the operand of a CLAMP.

    Bug ``clamped_cast``: Vela marks the CAST as not clipping and fuses the CLAMP into it, so that the CLAMP is lost. A
    copy of the CAST prevents the fusion.
    """
    cast = producer(skip_through(value, "RESHAPE"), "CAST")
    return cast is not None and cast.inputs[0].dtype.range[1] > cast.output.dtype.range[1]


def _is_rescaled_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a RESCALE reads a CAST, and the RESCALE's result has fewer bits than the CAST's operand.

    Bug ``rescaled_cast``: Vela fuses both into one operation without clipping. Data movement may be between the two. A
    copy of the CAST prevents the fusion.
    """
    cast = producer(skip_through(value, *DATA_MOVEMENT), "CAST")
    return cast is not None and op.output.dtype.bytes < cast.inputs[0].dtype.bytes


def _is_shifted_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a CAST to a narrower type reads a RESCALE with scale 1 and an input zero point.

    Bug ``shifted_cast``: Vela fuses both into one operation that clips, but the CAST must keep the low bits. Data
    movement may be between the two. A copy of the RESCALE prevents the fusion.
    """
    rescale = producer(skip_through(value, *DATA_MOVEMENT), "RESCALE")
    narrows = op.output.dtype.bytes < value.dtype.bytes
    return narrows and rescale is not None and bool(rescale.attrs["input_zp"]) and log2_scale(rescale) == 0


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    # ``catalog`` tries these before the workarounds for other RESCALEs and for TABLEs.
    Workaround("unclipped", ("RESCALE",), _loses_clipping, _preserve_clipping),
    Workaround("unclipped_scaled", ("RESCALE",), partial(_loses_clipping, scaled=True), _preserve_clipping),
    Workaround(
        "unclipped_zero_point", ("RESCALE",), _loses_clipping_at_zero_point, _preserve_clipping, releases=((5, 2),)
    ),
    Workaround("truncated_multiplier", ("RESCALE",), _loses_multiplier_bits, copy_result),
    Workaround("narrowing_cast", ("CAST",), _match_narrowing_cast, _wrap_cast),
    Workaround("chained_cast", ("CAST",), _match_chained_cast, _wrap_cast),
    copy_operands_where("clamped_cast", ("CLAMP",), _is_clamped_cast),
    copy_operands_where("rescaled_cast", ("RESCALE",), _is_rescaled_cast),
    copy_operands_where("shifted_cast", ("CAST",), _is_shifted_cast),
)
