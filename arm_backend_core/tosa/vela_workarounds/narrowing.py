"""Vela workarounds for conversions to fewer bits: a CAST that saturates, or a RESCALE that loses its clipping."""

from __future__ import annotations

from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.fuse import is_identity_rescale, power_of_two, rescale_factors
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant, copy_operands_where, copy_result
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: Operators that move elements and change no value. Vela may fuse them with their producer or consumer.
DATA_MOVEMENT = ("CONCAT", "IDENTITY", "PAD", "RESHAPE", "SLICE", "TILE", "TRANSPOSE")


def _is_unclipped(op: Op, rewriter: Rewriter, *, scaled: bool = False) -> bool:
    """RESCALE by 1 to fewer bits, then a RESCALE by 1 to as many bits or more (``unclipped``: all NPUs, 5.1 and 5.2).

    Vela removes both, also past data movement, and with them the clipping of the first. Only where values may not fit.

    Args:
        scaled: the second RESCALE is by any number (``unclipped_scaled``).
    """
    source, dtype = op.inputs[0], op.output.dtype
    if power_of_two(op) != 0 or dtype.bytes >= source.dtype.bytes or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return False
    return not (is_identity_rescale(op) and _fits(source, dtype)) and _is_widened_again(
        op.output, rewriter, scaled=scaled
    )


def _preserve_clipping(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Scale by 1 + 2**-30 in place of 1: Vela keeps this RESCALE, and no result changes.

    round(x * (1 + 2**-30)) = x for abs(x) < 2**29, and larger values are clipped. A RESCALE of int48 has a multiplier
    of 15 bits, too few for this scale: there a copy of its result keeps the two RESCALEs apart.
    """
    if op.inputs[0].dtype is DType.INT48:
        return copy_result(op, match, rewriter)
    attrs = {**op.attrs, "multiplier": np.array([(1 << 30) + 1], np.int32), "shift": np.array([30], np.int8)}
    return rewriter.build.emit("RESCALE", op.inputs, op.output.dtype, **attrs)


def _is_widened_again(value: Value, rewriter: Rewriter, *, scaled: bool) -> bool:
    """Whether a RESCALE to as many bits or more reads ``value``, also past data movement, and may merge with its
    producer.

    By 1 always. By another scale (``scaled``) on U85, and on U55 and U65 only if it is the single reader.
    """
    may_merge = scaled and (rewriter.has_one_use(value) or rewriter.build.target.hardware.fuses_shared_rescale)
    for op in rewriter.users(value) or ():
        if op.kind == "RESCALE" and (power_of_two(op) == 0 or may_merge) and op.output.dtype.bytes >= value.dtype.bytes:
            return True
        if op.kind in DATA_MOVEMENT and _is_widened_again(op.output, rewriter, scaled=scaled):
            return True
    return False


def _is_long_scale(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE of int48 by 1, followed by a RESCALE whose multiplier has more than 15 bits (``long_scale``: U85, 5.1 and
    5.2).

    Vela merges them into one RESCALE of int48, whose multiplier has 15 bits: the low bits are lost. A copy of the first
    result prevents that.
    """
    if op.inputs[0].dtype is not DType.INT48 or power_of_two(op) != 0:
        return False
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and power_of_two(reader) != 0:
            return bool(np.any(np.asarray(reader.attrs["multiplier"]) & 0xFFFF))
        if reader.kind not in ("RESCALE", "RESHAPE"):
            return False
        result = reader.output
    return False


def _is_unclipped_move(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE by 1 to another zero point, after a RESCALE to as many bits that may clip (``unclipped_move``: all NPUs,
    5.2).

    Vela merges them, also past a RESCALE by 1 to int32, into one RESCALE that clips only at the end.
    """
    x, _ = trace_back(
        op.inputs[0],
        lambda step: step.kind == "RESHAPE" or (is_identity_rescale(step) and step.output.dtype is DType.INT32),
    )
    before = producer(x, "RESCALE")
    if before is None or op.attrs["input_zp"] or not op.attrs["output_zp"] or power_of_two(op) != 0:
        return False
    return before.inputs[0].dtype.bytes >= before.output.dtype.bytes == op.output.dtype.bytes and _may_clip(before)


def _may_clip(op: Op) -> bool:
    """Whether a RESCALE to as many or fewer bits may clip.

    To fewer bits the answer is False only for RESCALEs by 1 whose operand fits; other scales are not analysed.
    """
    source, (low, high) = op.inputs[0], op.output.dtype.range
    if source.dtype.bytes > op.output.dtype.bytes:
        return not (is_identity_rescale(op) and _fits(source, op.output.dtype))
    scale = float(rescale_factors(op).max())
    ends = [round((end - op.attrs["input_zp"]) * scale + op.attrs["output_zp"]) for end in source.dtype.range]
    return min(ends) < low or max(ends) > high


def _match_narrowing_cast(op: Op, rewriter: Rewriter) -> int | None:
    """CAST of int32 or int16 to fewer bits whose operand may not fit (``narrowing_cast``: U55, U65, 5.1 and 5.2).

    These NPUs always clip to the output range, so that the CAST saturates. TOSA keeps the low bits.

    Returns:
        the number of high bits that the CAST drops from 32.
    """
    x, bits = op.inputs[0], {DType.INT8: 24, DType.INT16: 16}.get(op.output.dtype)
    is_wider = x.dtype in (DType.INT16, DType.INT32)
    return bits if is_wider and bits is not None and not _fits(x, op.output.dtype) else None


def _match_chained_cast(op: Op, rewriter: Rewriter) -> int | None:
    """The same CAST where a single elementwise operator or CAST reads it, also past RESHAPE (``chained_cast``: U85, 5.1
    and 5.2).

    In one chain with its reader, the CAST saturates as on U55. CLAMP is excluded: Vela fuses it with the CAST.
    """
    result = op.output
    while (users := rewriter.users(result)) and len(users) == 1 and users[0].kind == "RESHAPE":
        result = users[0].output
    readers = {user.kind for user in users or ()}
    is_chained = len(readers) == 1 and readers <= {*ELEMENTWISE, "CAST"} - {"CLAMP"}
    return _match_narrowing_cast(op, rewriter) if is_chained else None


def _wrap_cast(op: Op, bits: int, rewriter: Rewriter) -> Value:
    """CAST of the low bits: shift them up to the top of int32 and down again with their sign.

    The CAST's operand then fits the output type, so that saturation changes nothing.
    """
    b = rewriter.build
    x = b.cast(op.inputs[0], DType.INT32)
    shift = broadcast_constant(x, bits, DType.INT32, b)
    # The hardware has only the rounding right shift. It rounds nothing here: the bits that it shifts out are 0.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, shift), shift, round=True), op.output.dtype)


def _fits(value: Value, dtype: DType) -> bool:
    low, high = _value_bounds(value)
    least, most = dtype.range
    return bool(least <= low and high <= most)


def _value_bounds(value: Value, depth: int = 8) -> tuple[float, float]:
    """Bounds of a value, derived through operators that typically precede a CAST in programs of narrow integers.

    Args:
        depth: the number of operators to look through; beyond, the bounds are those of the element type.
    """
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    least, most = value.dtype.range
    if op is not None and depth and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = (_value_bounds(x, depth - 1) for x in op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    if op is not None and depth and op.kind in ("MUL", "ARITHMETIC_RIGHT_SHIFT") and op.inputs[1].size == 1:
        return _bounds_of_mul_or_shift(op, _value_bounds(op.inputs[0], depth - 1))
    if op is not None and depth and (op.kind in ("CAST", "RESHAPE") or is_identity_rescale(op)):
        low, high = _value_bounds(op.inputs[0], depth - 1)
        if least <= low and high <= most:
            return low, high
    return least, most


def _bounds_of_mul_or_shift(op: Op, operand: tuple[float, float]) -> tuple[float, float]:
    """Bounds of x * 1 and x << n >> n, which the workarounds emit; for other operands those of the element type."""
    least, most = op.output.dtype.range
    if op.kind == "MUL":
        is_identity = op.inputs[1].data is not None and op.inputs[1].data.flat[0] == 1 and not op.attrs["shift"]
        return operand if is_identity else (least, most)
    left_shift, shift = producer(op.inputs[0], "LOGICAL_LEFT_SHIFT"), op.inputs[1].data
    if (
        left_shift is None
        or shift is None
        or left_shift.inputs[1].data is None
        or left_shift.inputs[1].data.flat[0] != shift.flat[0]
    ):
        return least, most
    return int(least) >> int(shift.flat[0]), int(most) >> int(shift.flat[0])


def _is_clamped_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CLAMP of a CAST to fewer bits (``clamped_cast``: U55, U65, 5.1 and 5.2).

    Vela marks the CAST as not clipping and fuses the CLAMP into it: the CLAMP is lost. A copy keeps them apart.
    """
    cast = producer(skip_through(value, "RESHAPE"), "CAST")
    return cast is not None and cast.inputs[0].dtype.range[1] > cast.output.dtype.range[1]


def _is_rescaled_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """RESCALE of a CAST, to fewer bits than the CAST's operand has (``rescaled_cast``: U85, 5.1 and 5.2).

    Vela fuses both, also past data movement, into one operation without clipping. A copy of the CAST prevents that.
    """
    cast = producer(skip_through(value, *DATA_MOVEMENT), "CAST")
    return cast is not None and op.output.dtype.bytes < cast.inputs[0].dtype.bytes


def _is_shifted_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CAST to fewer bits of a RESCALE by 1 with an input zero point (``shifted_cast``: U85, 5.1 and 5.2).

    Vela fuses both, also past data movement, into one operation that clips. TOSA keeps the low bits of a CAST. A copy
    of the RESCALE prevents the fusion.
    """
    rescale = producer(skip_through(value, *DATA_MOVEMENT), "RESCALE")
    narrows = op.output.dtype.bytes < value.dtype.bytes
    return narrows and rescale is not None and bool(rescale.attrs["input_zp"]) and power_of_two(rescale) == 0


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    # Before the workarounds that copy scales and tables:
    Workaround("unclipped", ("RESCALE",), _is_unclipped, _preserve_clipping),
    Workaround("unclipped_scaled", ("RESCALE",), partial(_is_unclipped, scaled=True), _preserve_clipping),
    Workaround("unclipped_move", ("RESCALE",), _is_unclipped_move, _preserve_clipping, releases=((5, 2),)),
    Workaround("long_scale", ("RESCALE",), _is_long_scale, copy_result),
    Workaround("narrowing_cast", ("CAST",), _match_narrowing_cast, _wrap_cast),
    Workaround("chained_cast", ("CAST",), _match_chained_cast, _wrap_cast),
    copy_operands_where("clamped_cast", ("CLAMP",), _is_clamped_cast),
    copy_operands_where("rescaled_cast", ("RESCALE",), _is_rescaled_cast),
    copy_operands_where("shifted_cast", ("CAST",), _is_shifted_cast),
)
