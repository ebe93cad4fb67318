"""Quotients rounded to whole numbers, and what remains of them."""

from __future__ import annotations

from typing import Any, cast

import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops.casting import to_number
from arm_backend_core.ops.elementwise import div
from arm_backend_core.ops.expression import Float
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Operand = Tensor | float
_WHOLE: dict[str, Any] = {"univariate": True, "wide": True}


def _divided(cx: Context, x: Operand, y: Operand) -> tuple[Value, Value]:
    """x / y rounded down, and what remains, which has the sign of y.

    The reciprocal errs by a few units in the last place, so the nearest whole number is taken: it is the quotient, or
    one more, which shows in the sign of what remains. INTDIV rounds towards zero, with the same consequence.
    """
    b, dividend, divisor = cx.b, cx.operand(x, cx.dtype), cx.operand(y, cx.dtype)
    if cx.dtype.is_float:
        quotient = (Float(b, dividend) / Float(b, divisor) + 0.5).unary("FLOOR").value
    else:
        quotient = b.bitwise("INTDIV", dividend, divisor)
    rest = b.sub(dividend, b.mul(quotient, divisor))
    wrong = _opposed(cx, rest, divisor)
    return b.sub(quotient, wrong), b.add(rest, b.mul(wrong, divisor))


def _opposed(cx: Context, x: Value, y: Value) -> Value:
    """1 where x is not 0 and has another sign than y, else 0. The FP profile compares in FP32, which keeps signs."""
    b, kind = cx.b, DType.INT32 if cx.target.integer and not cx.dtype.is_float else DType.FP32
    zero, x, y = b.const(0, kind), b.cast(x, kind), b.cast(y, kind)
    differ = b.bitwise("LOGICAL_XOR", b.compare("GREATER", zero, x), b.compare("GREATER", zero, y))
    some = b.unary("LOGICAL_NOT", b.compare("EQUAL", x, zero))
    return b.cast(to_number(b, b.bitwise("LOGICAL_AND", differ, some), kind), cx.dtype)


@op(aten.floor_divide.default, aten.floor_divide.Scalar, **_WHOLE)
def floor_divide(cx: Context, x: Operand, y: Operand) -> Value:
    """x / y rounded down."""
    return _divided(cx, x, y)[0]


@op(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor, **_WHOLE)
def remainder(cx: Context, x: Operand, y: Operand) -> Value:
    """x - y * floor(x / y), with the sign of y; off by at most a unit in the last place of x."""
    return _divided(cx, x, y)[1]


@op(aten.div.Tensor_mode, aten.div.Scalar_mode, **_WHOLE)
def div_mode(cx: Context, x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Value:
    """x / y, rounded down or towards zero if it is to be: one more than down where what remains has not x's sign."""
    if rounding_mode is None:
        return cast(Value, div.lower(cx, x, y))
    quotient, rest = _divided(cx, x, y)
    if rounding_mode == "floor":
        return quotient
    return cx.b.add(quotient, _opposed(cx, rest, cx.operand(x, cx.dtype)))
