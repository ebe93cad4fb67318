"""Casts between element types."""

from __future__ import annotations

import math
from typing import Any

import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import intervals
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.ops.float_expression import FloatExpr
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, decomposition, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


def to_bool(cx: Context, x: Operand) -> Value:
    """x != 0 as BOOL."""
    value = x.value if x.q is None else cx.to_fixed_point(x).to_int32().value
    if value.dtype is DType.BOOL:
        return value
    if not value.dtype.is_float and cx.target.hardware.has_booleans:
        return cx.b.cast(value, DType.BOOL)
    value = value if value.dtype.is_float else cx.b.cast(value, DType.INT32)
    return cx.b.unary("LOGICAL_NOT", cx.b.compare("EQUAL", value, cx.b.const(0, value.dtype)))


def _truncate_to_int32(cx: Context, x: FixedPoint) -> Value:
    """Truncate towards zero to INT32.

    Numbers very close to an integer may become this integer. Let u be 2**-fraction_bits. Positive numbers are affected
    if they are less than 1.5 u below an integer, negative numbers if they are less than 0.5 u above an integer.

    Raises:
        Unsupported: the values of x may exceed 2**28.
    """
    fraction_bits = min(16, 29 - math.ceil(math.log2(max(x.max_abs, 1))))
    if fraction_bits < 1:
        raise Unsupported(
            f"cannot cast a quantized tensor to integers: its values reach {x.max_abs:g}, the limit is 2**28; "
            "scale the tensor down in the model"
        )
    scaled = x.rescale(DType.INT32, x.scale * 2.0**fraction_bits)
    # The shift rounds (Ethos-U55 has no truncating shift), so first move the value towards 0 by almost one half.
    nearly_half = cx.b.const((1 << fraction_bits - 1) - 1, DType.INT32)
    inward = cx.b.sub(scaled.value, cx.b.mul(scaled.sign().value, nearly_half))
    return cx.b.arithmetic_right_shift(inward, cx.b.const(fraction_bits, DType.INT32), round=True)


@op(
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    kind=AnnotationKind.SHARED,
    is_cast=True,
    interval=intervals.cast_to_integer,
)
def to(cx: Context, x: Operand, *_: Any, **__: Any) -> Value:
    """Cast to another element type. A quantized tensor that is cast to a float type stays quantized and unchanged.

    PyTorch truncates floats to integers. TOSA's CAST rounds, so floats are truncated before it.
    """
    if cx.dtype is DType.BOOL:
        return to_bool(cx, x)
    if x.q is not None:
        return x.value if cx.dtype.is_float else cx.b.cast(_truncate_to_int32(cx, cx.to_fixed_point(x)), cx.dtype)
    if cx.result_q is not None:  # integers to quantized numbers
        return cx.integer_to_fixed_point(x).requantize(cx.q)
    if not x.value.dtype.is_float or cx.dtype.is_float:
        return cx.b.cast(x.value, cx.dtype)
    return cx.b.cast(FloatExpr(cx.b, x.value).trunc().value, cx.dtype)


@decomposition(aten.to.other, aten.type_as.default)
def to_other(
    x: torch.Tensor,
    other: torch.Tensor,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Cast x to the element type of the tensor ``other``."""
    return aten.to.dtype(x, other.dtype, non_blocking, copy, memory_format)


@decomposition(torch.ops.prims.convert_element_type.default)
def convert_element_type(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Cast x to ``dtype``.

    PyTorch's reference decompositions emit this operator, which ExecuTorch does not have.
    """
    return aten.to.dtype(x, dtype)
