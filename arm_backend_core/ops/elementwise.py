"""Arithmetic of two tensors, or a tensor and a number, with broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import fixed_point
from arm_backend_core.ops.expression import Float
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import op
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Operand = Tensor | float
_TINY = 2.0**-64  #: beside it every divisor with an infinite reciprocal is small, and its inverse far from overflow
_ARITHMETIC: dict[str, Any] = {"univariate": True, "fuses": True}


def _common(cx: Context, *operands: Operand) -> list[Value]:
    """Plain operands in the result's element type."""
    return [cx.operand(x, cx.dtype) for x in operands]


def _steps(cx: Context, x: Operand, scale: float) -> Value:
    """A quantized operand as INT32, zero point removed, counting in steps of ``scale``."""
    if not isinstance(x, Tensor):
        return cx.b.const(np.rint(x / scale), DType.INT32)
    if x.q is None:
        raise Unsupported("one of its operands is quantized and the other is not")
    if x.is_constant:
        return cx.b.const(np.rint(x.real / scale), DType.INT32)
    return cx.b.rescale(x.value, DType.INT32, float(x.q.scale) / scale, x.q.zero_point)


def _fine_scale(*operands: Operand) -> float:
    """A step that both operands can be counted in with guard bits.

    The coarser operand is multiplied by 2**19 (int8: |x - zp| < 2**8, so a sum stays below 2**28) or by 2**14 (int16,
    sum up to 2**30); the other by less. Rounding is then 2**-19 (2**-14) of the coarser operand's step.
    """
    quantized = [x.q for x in operands if isinstance(x, Tensor) and x.q is not None]
    wide = any(q.dtype is DType.INT16 for q in quantized)
    return max(float(q.scale) for q in quantized) * 2.0 ** -(14 if wide else 19)


def _scaled(x: Operand, factor: float) -> Operand:
    """factor * x by its scale alone; for a negative factor see ``_sum``."""
    if not isinstance(x, Tensor):
        return x * factor
    if x.q is None or factor == 1:
        return x
    return Tensor(x.value, QParams(float(x.q.scale) * factor, x.q.zero_point, x.q.dtype, x.q.qmin, x.q.qmax))


def _sum(cx: Context, x: Operand, y: Operand, factor: float) -> Value:
    """x + factor * y on quantized operands."""
    if factor == 0:
        raise Unsupported("alpha=0")
    y = _scaled(y, abs(factor))
    scale = _fine_scale(x, y)
    left, right = _steps(cx, x, scale), _steps(cx, y, scale)
    total = cx.b.add(left, right) if factor > 0 else cx.b.sub(left, right)
    return cx.result(total, scale)


def _plain_sum(cx: Context, x: Operand, y: Operand, factor: float) -> Value:
    if abs(factor) != 1:
        return cx.widened(_plain_scaled_sum, x, y, factor)
    left, right = _common(cx, x, y)
    return cx.b.add(left, right) if factor > 0 else cx.b.sub(left, right)


def _plain_scaled_sum(cx: Context, x: Operand, y: Operand, factor: float) -> Value:
    left, right = _common(cx, x, y)
    return cx.b.add(left, cx.b.mul(right, cx.operand(factor)))


@op(aten.add.Tensor, aten.add.Scalar, **_ARITHMETIC)
def add(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """x + alpha * y."""
    return _plain_sum(cx, x, y, alpha)


@add.integer
def _(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return _sum(cx, x, y, alpha)


@op(aten.sub.Tensor, aten.sub.Scalar, **_ARITHMETIC)
def sub(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """x - alpha * y."""
    return _plain_sum(cx, x, y, -alpha)


@sub.integer
def _(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return _sum(cx, x, y, -alpha)


@op(aten.rsub.Tensor, aten.rsub.Scalar, **_ARITHMETIC)
def rsub(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """y - alpha * x."""
    return _plain_sum(cx, y, x, -alpha)


@rsub.integer
def _(cx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return _sum(cx, y, x, -alpha)


def _positive(x: Any, y: Any) -> float | None:
    """The number that the other operand is multiplied by, if it is a positive Python number."""
    return float(y) if isinstance(y, (int, float)) and not isinstance(y, bool) and y > 0 else None


def _inverse(x: Any, y: Any) -> float | None:
    factor = _positive(x, y)
    return None if factor is None else 1 / factor


@op(aten.mul.Tensor, aten.mul.Scalar, factor=_positive, **_ARITHMETIC)
def mul(cx: Context, x: Operand, y: Operand) -> Value:
    """x * y; of booleans, whether both hold."""
    left, right = _common(cx, x, y)
    return cx.b.bitwise("LOGICAL_AND", left, right) if cx.dtype is DType.BOOL else cx.b.mul(left, right)


@mul.integer
def _(cx: Context, x: Tensor, y: Tensor) -> Value:
    return _multiply(cx, x, y)


def _multiply(cx: Context, x: Tensor, y: Tensor) -> Value:
    """(x - zx) * (y - zy) < 2**31 for int16 operands (below 2**16 for int8), so INT32 holds it exactly."""
    if x.q is None or y.q is None:
        raise Unsupported("one of its operands is quantized and the other is not")
    left, right = _steps(cx, x, float(x.q.scale)), _steps(cx, y, float(y.q.scale))
    return cx.result(cx.b.mul(left, right), float(x.q.scale) * float(y.q.scale))


@op(aten.div.Tensor, aten.div.Scalar, factor=_inverse, wide=True, **_ARITHMETIC)
def div(cx: Context, x: Operand, y: Operand) -> Value:
    """x / y as x * (1 / y)."""
    dividend = Float(cx.b, cx.operand(x, cx.dtype))
    if not isinstance(y, Tensor) and abs(y) >= _TINY:
        return (dividend / y).value
    divisor = Float(cx.b, cx.operand(y, cx.dtype))
    if _may_be_tiny(divisor.value):  # 1 / y could overflow where x / y does not
        grown = abs(divisor).less(_TINY).where(1 / _TINY, divisor.like(1.0))
        dividend, divisor = dividend * grown, divisor * grown
    return (dividend / divisor).value


def _may_be_tiny(divisor: Value) -> bool:
    if divisor.data is not None:
        return bool(np.any(np.abs(divisor.data) < _TINY))
    maker = divisor.producer
    return maker is None or maker.kind != "CLAMP" or maker.attrs["min_val"] < _TINY


@div.integer
def _(cx: Context, x: Operand, y: Tensor) -> Value:
    """x * sign(y) * (2**30 / abs(y)) in integers; the reciprocal has 16 significant bits whatever y is.

    With abs(x) < 2**n, n = 8 or 16, the product is below 2**(30 + n): n bits are dropped. y = 0 gives 0.
    """
    if y.q is None:
        raise Unsupported("one of its operands is quantized and the other is not")
    if not isinstance(x, Tensor):
        raise Unsupported("a number divided by a tensor, which must be one function of that tensor")
    if x.q is None:
        raise Unsupported("one of its operands is quantized and the other is not")
    b = cx.b
    dividend, divisor = _steps(cx, x, float(x.q.scale)), _steps(cx, y, float(y.q.scale))
    one = b.const(1, DType.INT32)
    sign = b.maximum(b.minimum(divisor, one), b.const(-1, DType.INT32))
    inverse = fixed_point.reciprocal(b, b.maximum(b.unary("ABS", divisor), one))
    bits = 8 if x.q.dtype is DType.INT8 else 16
    quotient = b.mul(b.mul(dividend, sign), inverse, shift=bits)
    return cx.result(quotient, float(x.q.scale) / float(y.q.scale) * 2.0 ** (bits - 30))


@op(aten.maximum.default, aten.clamp_min.Tensor, fuses=True, univariate=True)
def maximum(cx: Context, x: Tensor, y: Tensor) -> Value:
    """Elementwise maximum."""
    return cx.b.maximum(*_common(cx, x, y))


@maximum.integer
def _(cx: Context, x: Tensor, y: Tensor) -> Value:
    scale = _fine_scale(x, y)
    return cx.result(cx.b.maximum(_steps(cx, x, scale), _steps(cx, y, scale)), scale)


@op(aten.minimum.default, aten.clamp_max.Tensor, fuses=True, univariate=True)
def minimum(cx: Context, x: Tensor, y: Tensor) -> Value:
    """Elementwise minimum."""
    return cx.b.minimum(*_common(cx, x, y))


@minimum.integer
def _(cx: Context, x: Tensor, y: Tensor) -> Value:
    scale = _fine_scale(x, y)
    return cx.result(cx.b.minimum(_steps(cx, x, scale), _steps(cx, y, scale)), scale)


@op(aten.fmax.default)
def fmax(cx: Context, x: Tensor, y: Tensor) -> Value:
    """The other operand where one is not a number."""
    return cx.b.maximum(*_common(cx, x, y), ignore_nan=True)


@op(aten.fmin.default)
def fmin(cx: Context, x: Tensor, y: Tensor) -> Value:
    """The other operand where one is not a number."""
    return cx.b.minimum(*_common(cx, x, y), ignore_nan=True)


for _ignoring, _record in ((fmax, maximum), (fmin, minimum)):
    assert _record.lower_integer is not None
    _ignoring.integer(_record.lower_integer)


@op(aten.pow.Tensor_Tensor, univariate=True, wide=True)
def power(cx: Context, x: Tensor, y: Tensor) -> Value:
    """x ** y."""
    if not cx.dtype.is_float:
        raise Unsupported("a power of integers: TOSA has none; convert with .to(torch.float32)")
    base, exponent = (Float(cx.b, value) for value in _common(cx, x, y))
    return (base**exponent).value


@op(aten.prelu.default, aten._prelu_kernel.default, univariate=True)
def prelu(cx: Context, x: Tensor, weight: Tensor) -> Value:
    """x [N, C, ...] where it is positive, weight [C] (or one) times x where it is negative.

    The weight of ``_prelu_kernel`` has been brought to a shape that broadcasts.
    """
    negative = cx.b.minimum(x.value, cx.operand(0.0))
    return cx.b.add(cx.b.maximum(x.value, cx.operand(0.0)), cx.b.mul(negative, _per_channel(cx, x, weight)))


@prelu.integer
def _(cx: Context, x: Tensor, weight: Tensor) -> Value:
    """The negative part times the weight in its own steps (8 bits, as calibrated), both parts in fine steps."""
    if x.q is None or weight.q is None:
        raise Unsupported("one of its operands is quantized and the other is not")
    steps = cx.b.const(np.rint(weight.real / float(weight.q.scale)), DType.INT32)
    value = cx.b.rescale(x.value, DType.INT32, 1.0, x.q.zero_point)
    zero = cx.b.const(0, DType.INT32)
    product = cx.b.mul(cx.b.minimum(value, zero), _per_channel(cx, x, Tensor(steps)))
    scale = _fine_scale(x)
    positive = cx.b.rescale(cx.b.maximum(value, zero), DType.INT32, float(x.q.scale) / scale)
    negative = cx.b.rescale(product, DType.INT32, float(x.q.scale) * float(weight.q.scale) / scale)
    return cx.result(cx.b.add(positive, negative), scale)


def _per_channel(cx: Context, x: Tensor, weight: Tensor) -> Value:
    if cx.node.target is aten._prelu_kernel.default:
        return weight.value
    return cx.b.reshape(weight.value, (weight.value.size, *(1,) * max(x.rank - 2, 0)))
