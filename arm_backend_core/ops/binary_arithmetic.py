"""Binary arithmetic with broadcasting: tensor and tensor, or tensor and number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops import fixed_point, intervals
from arm_backend_core.ops.channel_gain import scale_channels
from arm_backend_core.ops.common_scale import to_common_int16, to_common_rank, to_common_scale
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.ops.float_expression import FloatExpr
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.quantized_division import divide
from arm_backend_core.ops.registry import op
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
#: A divisor of smaller magnitude may have an infinite reciprocal. The reciprocal of this number is far from overflow.
_MIN_SAFE_DIVISOR = 2.0**-64
_ARITHMETIC_ATTRIBUTES: dict[str, Any] = {"is_univariate": True, "absorbs_activation": True}


def _cast_operands(cx: Context, *operands: Operand | float) -> list[Value]:
    """Cast unquantized operands to the result's element type."""
    return [cx.to_value(x, cx.dtype) for x in operands]


def _add_quantized(cx: Context, x: Operand | float, y: Operand | float, factor: float) -> Value:
    """x + factor * y on quantized operands."""
    if factor == 0:
        raise Unsupported("alpha=0 multiplies its second operand by 0; remove the operator")
    addend = y.float_values if isinstance(y, Operand) and y.is_constant else np.ones(1)
    # Adding only zeros, for example a mask, changes nothing.
    if isinstance(x, Operand) and cx.q.is_equivalent(x.q) and x.value.shape == cx.shape and not addend.any():
        return x.value
    right = cx.to_fixed_point(y)
    pair = cx.to_fixed_point(x), right.with_scale(right.scale * abs(factor))
    left, right = to_common_int16(*pair, cx.q) or to_common_scale(*pair, cx.q)
    return (left + right if factor > 0 else left - right).requantize(cx.q)


def _lower_arithmetic(
    cx: Context,
    rule: Callable[[Value, Value], Value],
    x: Operand | float,
    y: Operand | float,
    *,
    is_single_operator: bool,
) -> Value:
    """Lower arithmetic on unquantized operands: cast to one element type, apply ``rule``, cast to the result's type.

    Args:
        rule: emits the TOSA operators.
        is_single_operator: whether ``rule`` emits a single operator. A single operator rounds once, so it computes a
            float result in the result's type. Otherwise, narrower types are computed in FP32 or INT32.
    """

    def evaluate(inner: Context, x: Operand | float, y: Operand | float) -> Value:
        return rule(*_cast_operands(inner, x, y))

    return (
        evaluate(cx, x, y) if is_single_operator and cx.dtype.is_float else cx.compute_in_fp32_or_int32(evaluate, x, y)
    )


def _add_unquantized(cx: Context, x: Operand | float, y: Operand | float, factor: float) -> Value:
    def total(left: Value, right: Value) -> Value:
        if abs(factor) != 1:
            right = cx.b.mul(right, cx.b.const(np.full((), abs(factor)), right.dtype))
        return cx.b.add(left, right) if factor > 0 else cx.b.sub(left, right)

    return _lower_arithmetic(cx, total, x, y, is_single_operator=abs(factor) == 1)


@op(aten.add.Tensor, aten.add.Scalar, interval=intervals.elementwise(intervals.add), **_ARITHMETIC_ATTRIBUTES)
def add(cx: Context, x: Operand | float, y: Operand | float, alpha: float = 1) -> Value:
    """x + alpha * y."""
    return _add_unquantized(cx, x, y, alpha)


add.integer_rule(lambda cx, x, y, alpha=1: _add_quantized(cx, x, y, alpha))


@op(aten.sub.Tensor, aten.sub.Scalar, interval=intervals.elementwise(intervals.subtract), **_ARITHMETIC_ATTRIBUTES)
def sub(cx: Context, x: Operand | float, y: Operand | float, alpha: float = 1) -> Value:
    """x - alpha * y."""
    return _add_unquantized(cx, x, y, -alpha)


sub.integer_rule(lambda cx, x, y, alpha=1: _add_quantized(cx, x, y, -alpha))


@op(
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    interval=intervals.elementwise(lambda x, y, alpha=(1, 1): intervals.subtract(y, x, alpha)),
    **_ARITHMETIC_ATTRIBUTES,
)
def rsub(cx: Context, x: Operand | float, y: Operand | float, alpha: float = 1) -> Value:
    """y - alpha * x."""
    return _add_unquantized(cx, y, x, -alpha)


rsub.integer_rule(lambda cx, x, y, alpha=1: _add_quantized(cx, y, x, -alpha))


def _positive_factor(x: Any, y: Any) -> float | None:
    """The constant factor of a multiplication if it is a positive Python number, else None."""
    return float(y) if isinstance(y, (int, float)) and not isinstance(y, bool) and y > 0 else None


def _reciprocal_factor(x: Any, y: Any) -> float | None:
    factor = _positive_factor(x, y)
    return None if factor is None else 1 / factor


@op(
    aten.mul.Tensor,
    aten.mul.Scalar,
    scale_factor=_positive_factor,
    interval=intervals.multiplication,
    **_ARITHMETIC_ATTRIBUTES,
)
def mul(cx: Context, x: Operand | float, y: Operand | float) -> Value:
    """x * y; logical AND for booleans."""
    if cx.dtype is DType.BOOL:
        return cx.b.binary("LOGICAL_AND", *_cast_operands(cx, x, y))
    return _lower_arithmetic(cx, cx.b.mul, x, y, is_single_operator=True)


@mul.integer_rule
def _(cx: Context, x: Operand, y: Operand) -> Value | Operand:
    """Multiply in INT32, in which products of int16 are exact.

    A product that is not quantized stays INT32; an addition reads it (``fusion.rules.is_summed_product``).

    If one operand is int8 and the other int16, both are multiplied as int16. For [64, 128] elements, this takes 17,152
    cycles on U55-128 and 6,592 on U85-256; multiplied as INT32, 65,536 and 39,424.
    """
    left, right = to_common_rank(cx.to_fixed_point(x), cx.to_fixed_point(y))
    if {left.dtype, right.dtype} in ({DType.INT16}, {DType.INT8, DType.INT16}):
        left, right = left.to_int16(), right.to_int16()
    else:
        left, right = left.to_int32(), right.to_int32()
    product = left * right
    if cx.result_q is None:
        return Operand(product.value, QParams(product.scale, 0, DType.INT32, product.low, product.high))
    return product.requantize(cx.q)


@op(
    aten.div.Tensor,
    aten.div.Scalar,
    scale_factor=_reciprocal_factor,
    interval=intervals.elementwise(intervals.divide),
    compute_fp32=True,
    **_ARITHMETIC_ATTRIBUTES,
)
def div(cx: Context, x: Operand | float, y: Operand | float) -> Value:
    """x / y as x * (1 / y)."""
    dividend = FloatExpr(cx.b, cx.to_value(x, cx.dtype))
    if not isinstance(y, Operand) and abs(y) >= _MIN_SAFE_DIVISOR:
        return (dividend / y).value
    divisor = FloatExpr(cx.b, cx.to_value(y, cx.dtype))
    if _may_be_tiny(divisor.value):  # 1 / y could overflow where x / y does not
        factor = abs(divisor).less(_MIN_SAFE_DIVISOR).where(1 / _MIN_SAFE_DIVISOR, divisor.full_like(1.0))
        dividend, divisor = dividend * factor, divisor * factor
    return (dividend / divisor).value


def _may_be_tiny(divisor: Value) -> bool:
    if divisor.data is not None:
        return bool(np.any(np.abs(divisor.data) < _MIN_SAFE_DIVISOR))
    producer = divisor.producer
    return producer is None or producer.kind != "CLAMP" or producer.attrs["min_val"] < _MIN_SAFE_DIVISOR


div.integer_rule(divide)


def _register_max_or_min(name: str, nan_ignoring: OpOverload, *overloads: OpOverload) -> None:
    """Register ``maximum`` or ``minimum``. The overload ``nan_ignoring`` returns the other operand if one is NaN."""

    def rule(cx: Context, x: Operand, y: Operand) -> Value:
        return _lower_arithmetic(cx, getattr(cx.b, name), x, y, is_single_operator=True)

    def integer_rule(cx: Context, x: Operand, y: Operand) -> Value:
        """Requantize both operands first. This changes no result, because rounding is monotonic."""
        operands = to_common_rank(cx.to_fixed_point(x), cx.to_fixed_point(y))
        # TOSA compares int32 only. The RESCALEs keep the zero point: Vela fuses them and the operator to one operation.
        left, right = (cx.b.rescale(z.requantize(cx.q), DType.INT32, 1.0) for z in operands)
        return cx.b.rescale(getattr(cx.b, name)(left, right), cx.q.dtype, 1.0)

    def rule_ignoring_nan(cx: Context, x: Operand, y: Operand) -> Value:
        result: Value = getattr(cx.b, name)(*_cast_operands(cx, x, y), ignore_nan=True)
        return result

    record_attributes: dict[str, Any] = {
        "absorbs_activation": True,
        "is_univariate": True,
        "interval": intervals.any_operand,
    }
    op(*overloads, **record_attributes)(rule).integer_rule(integer_rule)
    op(nan_ignoring)(rule_ignoring_nan).integer_rule(integer_rule)


_register_max_or_min("maximum", aten.fmax.default, aten.maximum.default, aten.clamp_min.Tensor)
_register_max_or_min("minimum", aten.fmin.default, aten.minimum.default, aten.clamp_max.Tensor)


@op(aten.pow.Tensor_Tensor, is_univariate=True, compute_fp32=True, error_bound=2.0**-11)
def power(cx: Context, x: Operand, y: Operand) -> Value:
    """x**y."""
    if not cx.dtype.is_float:
        raise Unsupported("TOSA has no power of integers; convert them with .to(torch.float32)")
    base, exponent = (FloatExpr(cx.b, value) for value in _cast_operands(cx, x, y))
    return (base**exponent).value


@power.integer_rule
def _(cx: Context, x: Operand, y: Operand) -> Value:
    """x**y as exp(y * ln(x)). A negative x is replaced by 0, because its powers are defined only for integer y."""
    base, exponent = to_common_rank(*(cx.to_fixed_point(z).to_int32() for z in (x, y)))
    positive_steps = base.with_scale(1.0).maximum(0)
    log = fixed_point.logarithm(positive_steps.maximum(1))
    log = log + round(math.log(base.scale) / log.scale)
    power = exponent.mul(log, max((log.peak * exponent.peak).bit_length() - 28, 0))
    sign_at_zero = (positive_steps.maximum(1) - positive_steps).assume_range(0, 1) * exponent.sign().with_scale(
        1.0
    )  # for x = 0, where ln(x) is infinite
    return fixed_point.exponential(power - sign_at_zero.mul(1 << 29).with_scale(power.scale), cx.q).requantize(cx.q)


# A PReLU whose operand is also its weight is a function of one tensor, so it may become a TABLE. ``evaluate`` computes
# the entries of the table with one slope for each entry. Of the two overloads, only ``_prelu_kernel`` accepts that.
@op(aten.prelu.default, aten._prelu_kernel.default, is_univariate=True, evaluate=aten._prelu_kernel.default)
def prelu(cx: Context, x: Operand, weight: Operand) -> Value:
    """PReLU of x [N, C, ...]: x where it is positive, else weight * x, with weight [C] or [1].

    For ``_prelu_kernel``, the weight already has a shape that broadcasts.
    """
    positive = cx.b.compare("GREATER", x.value, cx.to_value(0.0))
    return cx.b.select(positive, x.value, cx.b.mul(x.value, _broadcast_prelu_weight(cx, x, weight)))


@prelu.integer_rule
def _(cx: Context, x: Operand, weight: Operand) -> Value:
    """max(x, 0) + min(x, 0) * weight in INT32. The weight is quantized like an activation, with its own scale."""
    if weight.is_constant and (slopes := _channel_slopes(cx, x, weight)) is not None:
        return _prelu_by_channel(cx, x, slopes)
    value = cx.to_fixed_point(x).to_int32()
    gain = cx.to_fixed_point(weight).to_int32()
    gain = replace(gain, value=_broadcast_prelu_weight(cx, x, Operand(gain.value)))
    positive, negative = to_common_scale(value.maximum(0), value.minimum(0) * gain, cx.q)
    return (positive + negative).requantize(cx.q)


def _channel_slopes(cx: Context, x: Operand, weight: Operand) -> np.ndarray[Any, Any] | None:
    """The constant slopes of a PReLU, [C]; None without channel dimension or if slopes vary along another dimension."""
    shape = _broadcast_prelu_weight(cx, x, weight).shape
    if x.rank < 2 or any(size != 1 for i, size in enumerate(reversed(shape)) if i != x.rank - 2):
        return None
    return np.broadcast_to(weight.float_values.reshape(-1), (x.shape[1],))


def _prelu_by_channel(cx: Context, x: Operand, slopes: np.ndarray[Any, Any]) -> Value:
    """PReLU with one slope per channel, in int8 or int16: max(x, slope * x) if no slope exceeds 1.

    If all slopes are at least 1, PReLU is min(x, slope * x). Rounding is monotonic, so that the maximum of two rounded
    numbers equals the rounded maximum. ``_prelu_by_sign`` handles other slopes. An int8 tensor [1, 32, 48, 48] takes
    113,000 cycles on U55-128 and 57,000 on U85-256. In INT32, PReLU takes 1,088,000 and 376,000.
    """
    if slopes.max() > 1 > slopes.min():
        return _prelu_by_sign(cx, x, slopes)
    straight, sloped = _results_to_int32(cx, _requantize_image(cx, x), scale_channels(cx, x, slopes))
    result = straight.maximum(sloped) if slopes.max() <= 1 else straight.minimum(sloped)
    return result.requantize(cx.q)


def _prelu_by_sign(cx: Context, x: Operand, slopes: np.ndarray[Any, Any]) -> Value:
    """max(x, 0) + slope * min(x, 0). At least one summand is 0, so the sum is rounded once.

    If no slope is negative, the product is clamped instead of x: an NPU fuses that CLAMP with the convolution.
    """
    assert x.q is not None
    positive = cx.b.clamp(_requantize_image(cx, x), cx.q.zero_point, cx.q.qmax)
    if slopes.min() >= 0:
        negative = cx.b.clamp(scale_channels(cx, x, slopes), cx.q.qmin, cx.q.zero_point)
    else:
        low_part = replace(x, value=cx.b.clamp(x.value, x.q.qmin, x.q.zero_point))
        negative = scale_channels(cx, low_part, slopes)
    left, right = _results_to_int32(cx, positive, negative)
    return (left + right).requantize(cx.q)


def _requantize_image(cx: Context, x: Operand) -> Value:
    """Convert x [N, C, ...] to the result's quantization parameters.

    On NPUs, a depthwise convolution converts x: on int8, it takes half the cycles of a RESCALE.
    """
    if not cx.target.hardware.is_ethos_u or cx.q.is_equivalent(x.q):
        return cx.requantize(x, cx.q)
    return scale_channels(cx, x, np.ones(x.shape[1]))


def _results_to_int32(cx: Context, *values: Value) -> list[FixedPoint]:
    """Convert values with the result's quantization parameters to INT32, at the same scale. Vela fuses the RESCALEs."""
    return [FixedPoint.from_value(cx.b, value, cx.q).to_int32() for value in values]


def _broadcast_prelu_weight(cx: Context, x: Operand, weight: Operand) -> Value:
    if overload_of(cx.node.target) is aten._prelu_kernel.default:
        return weight.value
    return cx.b.reshape(weight.value, (weight.value.size, *(1,) * max(x.rank - 2, 0))[: x.rank])
