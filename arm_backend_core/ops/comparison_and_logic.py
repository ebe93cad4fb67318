"""Comparisons, ``where``, and logical, bitwise and shift operators."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.ops import intervals
from arm_backend_core.ops.casting import to_bool
from arm_backend_core.ops.common_scale import to_common_scale
from arm_backend_core.ops.operands import Context, Operand, to_tosa_dtype
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.ops.value_ranges import find_range
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


def _cast_to_comparable(cx: Context, *operands: Operand | float) -> list[Value]:
    """Cast unquantized operands to one element type that the target can compare.

    If one operand is floating point, the other operand is cast to its type. If both are floating point and their types
    differ, PyTorch's type promotion decides: a scalar tensor takes the type of the other operand.
    """
    values = [x.value for x in operands if isinstance(x, Operand)]
    floats = {value.dtype for value in values if value.dtype.is_float}
    has_fraction = any(isinstance(x, float) and not x.is_integer() for x in operands)
    if len(floats) > 1:
        floats = {to_tosa_dtype(torch.result_type(*(x.meta["val"] for x in cx.node.all_input_nodes)))}
    dtype = floats.pop() if floats else DType.FP32 if has_fraction else DType.INT32
    if dtype is DType.INT32 and not cx.target.has_int_profile and all(value.dtype is DType.BOOL for value in values):
        dtype = DType.FP32
    return [_cast_operand(cx, x, dtype) for x in operands]


def _cast_operand(cx: Context, x: Operand | float, dtype: DType) -> Value:
    return cx.b.cast(x.value, dtype) if isinstance(x, Operand) else cx.b.const(x, dtype)


def _register_comparison(kind: str, *overloads: OpOverload, swap: bool = False, negate: bool = False) -> None:
    """Register comparisons that the TOSA operator ``kind`` computes, with swapped operands or a negated result."""

    def compare(cx: Context, left: Value, right: Value) -> Value:
        result = cx.b.compare(kind, right, left) if swap else cx.b.compare(kind, left, right)
        return cx.b.reshape(cx.b.unary("LOGICAL_NOT", result) if negate else result, cx.shape)

    @op(*overloads)
    def plain(cx: Context, x: Operand, y: Operand | float) -> Value:
        return compare(cx, *_cast_to_comparable(cx, x, y))

    @plain.integer_rule
    def quantized(cx: Context, x: Operand, y: Operand | float) -> Value:
        """Compare quantized operands. A number is compared with x in half steps of x's scale.

        Compare two operands that are exact integers as INT32, all others at a common scale.
        """
        if not isinstance(y, Operand) and x.q is not None and x.q.dtype is not DType.INT32 and not math.isnan(y):
            return compare(
                cx,
                cx.to_fixed_point(x).rescale(DType.INT32, 2.0).value,
                cx.b.const(_threshold_in_half_steps(x.q, y), DType.INT32),
            )
        one, other = (_to_exact_int32(cx, z) for z in (x, y))
        if one is not None and other is not None:
            return compare(cx, one, other)
        left, right = to_common_scale(cx.to_fixed_point(x), cx.to_fixed_point(y))
        return compare(cx, left.value, right.value)


def _to_exact_int32(cx: Context, x: Operand | float) -> Value | None:
    """Convert an unquantized INT32 tensor, or a constant tensor of int32 numbers, to INT32; None for other operands."""
    if not isinstance(x, Operand) or (x.q is None and x.value.dtype is DType.INT32):
        return x.value if isinstance(x, Operand) else None
    real = x.float_values if x.is_constant else np.array(0.5)
    fits = (real == np.rint(real)).all() and np.abs(real).max(initial=0) < 1 << 31
    return cx.b.const(real, DType.INT32) if fits else None


def _threshold_in_half_steps(q: QParams, number: float) -> int:
    """Return 2k if ``number`` is the k-th step of ``q``, and 2k + 1 if it lies between the steps k and k + 1.

    k counts from the zero point. PyTorch compares with the dequantized steps in float32, and so does this function.
    """
    low, high = q.dtype.range
    real = q.dequantize(np.arange(low, high + 1)).astype(np.float32)
    below, up_to = (int(np.searchsorted(real, np.float32(number), side)) for side in ("left", "right"))
    return 2 * (low - q.zero_point) + below + up_to - 1


_register_comparison("EQUAL", aten.eq.Tensor, aten.eq.Scalar)
_register_comparison("EQUAL", aten.ne.Tensor, aten.ne.Scalar, negate=True)
_register_comparison("GREATER", aten.gt.Tensor, aten.gt.Scalar)
_register_comparison("GREATER_EQUAL", aten.ge.Tensor, aten.ge.Scalar)
_register_comparison("GREATER", aten.lt.Tensor, aten.lt.Scalar, swap=True)
_register_comparison("GREATER_EQUAL", aten.le.Tensor, aten.le.Scalar, swap=True)


@op(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    is_select=True,
    interval=intervals.where,
)
def where(cx: Context, condition: Operand, x: Operand | float, y: Operand | float) -> Value:
    """Select x where the condition is true, else y."""
    return cx.b.select(to_bool(cx, condition), _cast_operand(cx, x, cx.dtype), _cast_operand(cx, y, cx.dtype))


@where.integer_rule
def _(cx: Context, condition: Operand, x: Operand | float, y: Operand | float) -> Value:
    """Select between operands that are requantized to the result's parameters."""

    def quantize_operand(z: Operand | float) -> Value:
        if not isinstance(z, Operand):
            return cx.b.const(cx.q.quantize(np.array(float(z))), cx.q.dtype)
        return cx.requantize(z, cx.q)

    return cx.b.select(to_bool(cx, condition), quantize_operand(x), quantize_operand(y))


def _register_bitwise(kind: str, *overloads: OpOverload, logical: bool) -> None:
    """Register ``and``, ``or`` or ``xor``: torch.logical_* if ``logical``, else torch.bitwise_*."""
    interval = intervals.bitwise_and if kind == "AND" else intervals.bitwise_or

    @op(*overloads, interval=intervals.elementwise(interval))
    def rule(cx: Context, x: Operand | float, y: Operand | float) -> Value:
        """LOGICAL_* on booleans, BITWISE_* on integers. Logical operators convert numbers to the boolean x != 0."""
        x, y = (x, y) if isinstance(x, Operand) else (y, x)
        assert isinstance(x, Operand)
        if logical or cx.dtype is DType.BOOL:
            right = to_bool(cx, y) if isinstance(y, Operand) else cx.b.const(bool(y), DType.BOOL)
            return cx.b.binary(f"LOGICAL_{kind}", to_bool(cx, x), right)
        return cx.b.binary(f"BITWISE_{kind}", _cast_operand(cx, x, cx.dtype), _cast_operand(cx, y, cx.dtype))

    rule.integer_rule(rule.lower)


for _kind in ("and", "or", "xor"):
    _register_bitwise(_kind.upper(), getattr(aten, f"logical_{_kind}").default, logical=True)
    _bitwise, _dunder = getattr(aten, f"bitwise_{_kind}"), getattr(aten, f"__{_kind}__")
    _overloads = (_bitwise.Tensor, _bitwise.Scalar, _bitwise.Scalar_Tensor, _dunder.Tensor, _dunder.Scalar)
    _register_bitwise(_kind.upper(), *_overloads, logical=False)


def _shift(cx: Context, x: Operand | float, y: Operand | float, *, left: bool) -> Value:
    """Shift x by y bits, as PyTorch does for any y.

    If y is negative or at least the number of bits, a left shift gives 0, and a right shift gives 0 or -1 by the sign
    of x.
    """
    b, value, amount = cx.b, _cast_operand(cx, x, cx.dtype), _cast_operand(cx, y, cx.dtype)
    low, high = find_range(amount)
    last = 8 * cx.dtype.bytes - 1
    clamped_amount = amount
    if amount.data is not None:
        clamped_amount = b.const(np.where(amount.data < 0, last, np.minimum(amount.data, last)), cx.dtype)
    elif high > last:
        clamped_amount = b.minimum(amount, b.const(last, cx.dtype))
    if low < 0 and amount.data is None:
        is_negative = b.compare("GREATER", b.const(0, cx.dtype), amount)
        clamped_amount = b.select(is_negative, b.const(last, cx.dtype), clamped_amount)
    if not left:
        return b.arithmetic_right_shift(value, clamped_amount)
    shifted = b.logical_left_shift(value, clamped_amount)
    if low >= 0 and high <= last:
        return shifted
    in_range = b.compare("EQUAL", clamped_amount, amount)
    return b.select(in_range, shifted, b.const(0, cx.dtype))


for _left, _bitwise, _dunder in (
    (True, aten.bitwise_left_shift, aten.__lshift__),
    (False, aten.bitwise_right_shift, aten.__rshift__),
):
    _overloads = (_bitwise.Tensor, _bitwise.Tensor_Scalar, _bitwise.Scalar_Tensor, _dunder.Tensor, _dunder.Scalar)
    _interval = intervals.elementwise(intervals.left_shift if _left else intervals.right_shift)
    op(*_overloads, kind=AnnotationKind.PASSTHROUGH, compute_fp32=True, interval=_interval)(partial(_shift, left=_left))


@op(aten.logical_not.default)
def logical_not(cx: Context, x: Operand) -> Value:
    """Logical negation: x == 0 as BOOL."""
    return cx.b.unary("LOGICAL_NOT", to_bool(cx, x))


logical_not.integer_rule(logical_not.lower)


@op(aten.bitwise_not.default, kind=AnnotationKind.PASSTHROUGH, interval=intervals.elementwise(intervals.bitwise_not))
def bitwise_not(cx: Context, x: Operand) -> Value:
    """Invert all bits."""
    return cx.b.unary("LOGICAL_NOT" if x.value.dtype is DType.BOOL else "BITWISE_NOT", x.value)


@op(aten.isnan.default)
def isnan(cx: Context, x: Operand) -> Value:
    """x != x, which is true only for NaN."""
    return cx.b.unary("LOGICAL_NOT", cx.b.compare("EQUAL", x.value, x.value))


@op(aten.isinf.default)
def isinf(cx: Context, x: Operand) -> Value:
    """abs(x) == infinity."""
    return cx.b.compare("EQUAL", cx.b.unary("ABS", x.value), cx.b.const(math.inf, x.value.dtype))


def _emit_false(cx: Context, x: Operand) -> Value:
    """Emit False for every element, because quantized values are always finite."""
    value = cx.to_fixed_point(x).to_int32().value
    return cx.b.compare("GREATER", value, value)


for _record in (isnan, isinf):
    _record.integer_rule(_emit_false)
