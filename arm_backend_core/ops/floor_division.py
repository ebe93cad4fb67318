"""Division with an integer quotient: floor_divide, remainder, fmod, and div with a rounding mode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops import intervals
from arm_backend_core.ops.binary_arithmetic import div
from arm_backend_core.ops.common_scale import to_common_rank, to_common_scale
from arm_backend_core.ops.fixed_point.rounding import FixedPointQuotient, divide_by_constant
from arm_backend_core.ops.fixed_point_value import RESCALE_SAFE_LIMIT, FixedPoint
from arm_backend_core.ops.float_expression import FloatExpr
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import Record, Rule, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
_DISCONTINUOUS: dict[str, Any] = {"is_univariate": True, "is_discontinuous": True, "compute_fp32": True}
_QUOTIENT_INTERVAL = intervals.elementwise(intervals.divide)
#: Below this quotient, the remainder is exact: the rounded quotient has an error of at most one, whatever the rounding
#: error of the reciprocal.
_EXACT_REMAINDER_LIMIT = 2.0**21
#: Inverse of the quotient limit 2**40. For larger quotients, the remainder exceeds the divisor even after a second
#: division.
_INVERSE_QUOTIENT_LIMIT = 2.0**-40


def _floor_divide_with_remainder(
    cx: Context, x: Operand | float, y: Operand | float, *, round_quotient_to_float32: bool = False
) -> tuple[Value, Value]:
    """Return floor(x / y) and the remainder, which has the sign of y.

    The reciprocal has an error of a few ULP, so floor(x * (1 / y)) may be wrong. Instead, x * (1 / y) is rounded to the
    nearest integer, which is floor(x / y) or floor(x / y) + 1. If the remainder and y differ in sign, this integer is
    floor(x / y) + 1, and 1 is subtracted. INTDIV rounds towards zero and needs the same correction.

    Args:
        cx: the context.
        x: the dividend.
        y: the divisor.
        round_quotient_to_float32: if True, x / y is rounded to float32 before the floor, as in PyTorch's ``div`` with
            rounding_mode="trunc". The remainder is 0 if the rounded quotient is an integer. If False, the exact
            quotient is floored. Has no effect on integers.
    """
    b, dividend, divisor = cx.b, cx.to_value(x, cx.dtype), cx.to_value(y, cx.dtype)
    if cx.dtype.is_float:
        left, right = FloatExpr(b, dividend), FloatExpr(b, divisor)
        nearest = (left / right + 0.5).unary("FLOOR")
        nearest_rem = _exact_remainder(left, right, nearest)
        if round_quotient_to_float32:
            nearest_rem = (nearest + nearest_rem / right).equal(nearest).where(0.0, nearest_rem)
        else:  # PyTorch computes (x - remainder) / y, which is NaN for infinite x
            nearest = right.equal(0.0).where(nearest, nearest + left * 0.0)
        quotient, rem = nearest.value, nearest_rem.value
    else:
        constant = divisor.data if "INTDIV" in cx.target.hardware.unsupported else None
        if constant is not None and np.abs(constant).min() > 1:
            # x * round(2**31 / y) / 2**31 is off by at most 1/2: rounded, it is the quotient or one more.
            inverse = b.const(np.rint((1 << 31) / constant.astype(np.float64)), cx.dtype)
            quotient = b.mul(dividend, inverse, shift=31)
        else:
            quotient = b.binary("INTDIV", dividend, divisor)
        rem = b.sub(dividend, b.mul(quotient, divisor))
    correction = _has_opposite_sign(cx, rem, divisor)
    quotient = b.sub(quotient, correction)
    if cx.dtype.is_float:  # 0 times an infinite divisor would be NaN
        return quotient, FloatExpr(b, correction).greater(0.5).where(
            FloatExpr(b, b.add(rem, divisor)), FloatExpr(b, rem)
        ).value
    return quotient, b.add(rem, b.mul(correction, divisor))


def _exact_remainder(x: FloatExpr, y: FloatExpr, quotient: FloatExpr) -> FloatExpr:
    """x - quotient * y with a single rounding, by the exact rounding error of the product (Dekker 1971)."""
    product = quotient * y
    (high, low), (y_high, y_low) = _veltkamp_split(quotient), _veltkamp_split(y)
    error = high * y_high - product + high * y_low + low * y_high + low * y_low
    return quotient.equal(0.0).where(x, x - product - error)  # also for an infinite y


def _veltkamp_split(x: FloatExpr) -> tuple[FloatExpr, FloatExpr]:
    """Veltkamp splitting of x into the sum of two floats with 12-bit mantissas."""
    scaled = x * (2.0**12 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _has_opposite_sign(cx: Context, x: Value, y: Value) -> Value:
    """Return 1 where x is nonzero and differs in sign from y, else 0. The FP profile compares in FP32."""
    b, compare_dtype = cx.b, DType.INT32 if cx.target.has_int_profile and not cx.dtype.is_float else DType.FP32
    zero, x, y = b.const(0, compare_dtype), b.cast(x, compare_dtype), b.cast(y, compare_dtype)
    signs_differ = b.binary("LOGICAL_XOR", b.compare("GREATER", zero, x), b.compare("GREATER", zero, y))
    nonzero = b.unary("LOGICAL_NOT", b.compare("EQUAL", x, zero))
    return b.cast(b.cast(b.binary("LOGICAL_AND", signs_differ, nonzero), compare_dtype), cx.dtype)


@op(aten.floor_divide.default, aten.floor_divide.Scalar, interval=_QUOTIENT_INTERVAL, **_DISCONTINUOUS)
def floor_divide(cx: Context, x: Operand | float, y: Operand | float) -> Value:
    """floor(x / y): the largest integer that is at most x / y."""
    return _restore_zero_sign(cx, x, y, _floor_divide_with_remainder(cx, x, y)[0])


def _restore_zero_sign(cx: Context, x: Operand | float, y: Operand | float, quotient: Value) -> Value:
    """Set the sign of each floating-point zero in ``quotient`` to the sign of x / y."""
    if not cx.dtype.is_float:
        return quotient
    b, quotient_expr = cx.b, FloatExpr(cx.b, quotient)
    signed_zero = FloatExpr(b, cx.to_value(x, cx.dtype)) / FloatExpr(b, cx.to_value(y, cx.dtype)) * 0.0
    return quotient_expr.equal(0.0).where(signed_zero, quotient_expr).value


@op(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    interval=intervals.elementwise(lambda x, y: intervals.hull((0, 0), y)),
    **_DISCONTINUOUS,
)
def remainder(cx: Context, x: Operand | float, y: Operand | float) -> Value:
    """x - y * floor(x / y), with the sign of y; exact for quotients below 2**21.

    A larger quotient has an error of several units. The remainder is then divided by y again, which reduces the error
    to at most 2**-46 of x. The result is 0 for quotients above 2**40, and for nonzero divisors below 2**-120, whose
    reciprocal could overflow. It is NaN for y = 0.
    """
    rem = _floor_divide_with_remainder(cx, x, y)[1]
    if not cx.dtype.is_float:
        return rem
    second_rem, divisor = (
        FloatExpr(cx.b, _floor_divide_with_remainder(cx, Operand(rem), y)[1]),
        FloatExpr(cx.b, cx.to_value(y, cx.dtype)),
    )
    dividend = FloatExpr(cx.b, cx.to_value(x, cx.dtype))
    # No second division for small quotients: -1e-9 % 1 rounds to 1, and 1 % 1 would be 0.
    result = abs(dividend).greater(abs(divisor) * _EXACT_REMAINDER_LIMIT).where(second_rem, FloatExpr(cx.b, rem))
    zero_or_nan = divisor.equal(0.0).where(math.nan, dividend * 0.0)
    result = result.equal(0.0).where(zero_or_nan, result)  # a zero result has the sign of the dividend
    bounded = (abs(dividend) * _INVERSE_QUOTIENT_LIMIT).greater(abs(divisor)).where(zero_or_nan, result)
    return abs(divisor).less(2.0**-120).where(zero_or_nan, bounded).value


@op(
    aten.fmod.Tensor,
    aten.fmod.Scalar,
    interval=intervals.elementwise(lambda x, y: intervals.hull((0, 0), x)),
    **_DISCONTINUOUS,
)
def fmod(cx: Context, x: Operand | float, y: Operand | float) -> Value:
    """x - y * trunc(x / y), with the sign of x. For floats, it is the remainder of |x| / |y| with the sign of x."""
    b, dividend, divisor = cx.b, cx.to_value(x, cx.dtype), cx.to_value(y, cx.dtype)
    if not cx.dtype.is_float:
        rem = remainder.lower(cx, x, y)
        return b.sub(rem, b.mul(_has_opposite_sign(cx, rem, dividend), divisor))
    signed = FloatExpr(b, dividend)
    positive = FloatExpr(b, remainder.lower(cx, *(Operand(b.unary("ABS", value)) for value in (dividend, divisor))))
    rem = signed.less(0.0).where(-positive, positive)
    return rem.equal(0.0).where(signed * 0.0, rem).value


@op(aten.div.Tensor_mode, aten.div.Scalar_mode, interval=_QUOTIENT_INTERVAL, **_DISCONTINUOUS)
def div_mode(cx: Context, x: Operand | float, y: Operand | float, *, rounding_mode: str | None = None) -> Value:
    """x / y, floored, truncated or unrounded. Truncation is the floor, plus 1 where remainder and x differ in sign."""
    if rounding_mode is None:
        return cast(Value, div.lower(cx, x, y))
    if rounding_mode == "floor":
        return cast(Value, floor_divide.lower(cx, x, y))
    quotient, rem = _floor_divide_with_remainder(cx, x, y, round_quotient_to_float32=True)
    return _restore_zero_sign(cx, x, y, cx.b.add(quotient, _has_opposite_sign(cx, rem, cx.to_value(x, cx.dtype))))


def _integer_rule(record: Record, *, returns_remainder: bool = False) -> Rule:
    """Build the integer rule of ``record``: floor_divide, div_mode, remainder or fmod."""

    def rule(cx: Context, x: Operand | float, y: Operand | float, **mode: str | None) -> Value:
        """Apply ``record`` to INT32 operands whose quotient is x / y.

        If y is a nonzero scalar constant and x is computed, ``divide_by_constant`` is used. Otherwise, x is rescaled to
        the scale of y. Both operands are multiplied by the largest power of two, at most 2**22, at which both stay
        within ``RESCALE_SAFE_LIMIT``. x / 0 saturates. x % 0, which is NaN in floating point, is computed as the
        remainder of x by one quantization step of y. If |x| is always smaller than this step, the remainder is computed
        at the scale of x (``_remainder_of_small_dividend``); x % 0 is then x.
        """
        if mode.get("rounding_mode", "floor") is None:
            assert div.lower_integer is not None
            return cast(Value, div.lower_integer(cx, x, y))
        constant = _scalar_value(y)
        if constant and isinstance(x, Operand) and not x.is_constant:
            # For y < 0, divide_by_constant rounds -x / y and negates the quotient: floor(x / y) = -ceil(-x / y).
            floor_method = FixedPointQuotient.ceil if constant < 0 else FixedPointQuotient.floor
            method = (
                FixedPointQuotient.trunc if record is fmod or mode.get("rounding_mode") == "trunc" else floor_method
            )
            return divide_by_constant(cx, x, constant, method, return_remainder=returns_remainder)
        dividend, scaled_divisor = cx.to_fixed_point(x), cx.to_fixed_point(y)
        divisor = scaled_divisor.to_int32().with_scale(1.0)
        ratio = min(dividend.scale / scaled_divisor.scale, (RESCALE_SAFE_LIMIT - 1) / dividend.peak)
        if returns_remainder and dividend.peak * ratio < 1:
            is_dividend = record is fmod or (dividend.low >= 0 and scaled_divisor.low >= 0)
            result = (
                dividend.requantize(cx.q) if is_dividend else _remainder_of_small_dividend(cx, dividend, scaled_divisor)
            )
            return cx.b.expand(result, cx.shape)
        bits = min(int(math.log2((RESCALE_SAFE_LIMIT - 1) / max(dividend.peak * ratio, divisor.peak))), 22)
        left = dividend.rescale(DType.INT32, ratio * 2.0**bits).with_scale(1.0)
        is_zero = (abs(divisor).maximum(1) - abs(divisor)).assume_range(0, 1)
        right = (divisor + is_zero).refine_scale(1 << bits)
        int32_context = replace(cx, result_q=None, compute_dtype=DType.INT32)
        value = record.lower(int32_context, Operand(left.value), Operand(right.value), **mode)
        if returns_remainder:
            return FixedPoint(cx.b, value, -right.peak, right.peak, scaled_divisor.scale * 2.0**-bits).requantize(cx.q)
        saturation = is_zero.mul(1 << 29).with_scale(1.0) * dividend.sign().with_scale(1.0)
        return (FixedPoint(cx.b, value, -left.peak - 1, left.peak) + saturation).requantize(cx.q)

    return rule


def _remainder_of_small_dividend(cx: Context, x: FixedPoint, y: FixedPoint) -> Value:
    """The remainder if |x| is smaller than a quantization step of y: x, or x + y if x and y differ in sign.

    At the scale of y, x would lose its low bits.
    """
    x, y = to_common_rank(x.to_int32(), y.to_int32())
    is_opposite = _has_opposite_sign(replace(cx, result_q=None, compute_dtype=DType.INT32), x.value, y.value)
    added = replace(y, value=cx.b.mul(y.value, is_opposite), low=min(y.low, 0), high=max(y.high, 0))
    left, right = to_common_scale(x, added, cx.q)
    return (left + right).requantize(cx.q)


def _scalar_value(y: Operand | float) -> float | None:
    """Return the divisor as a Python number if it is a number or a one-element constant, else None."""
    if not isinstance(y, Operand):
        return float(y)
    return float(y.float_values.item()) if y.is_constant and y.value.size == 1 else None


for _record in (floor_divide, div_mode):
    _record.integer_rule(_integer_rule(_record))
for _record in (remainder, fmod):
    _record.integer_rule(_integer_rule(_record, returns_remainder=True))
