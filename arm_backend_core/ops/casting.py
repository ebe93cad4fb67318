"""Changes of element type."""

from __future__ import annotations

from typing import Any

import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.expression import Float
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, made_of, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


def to_bool(cx: Context, x: Tensor) -> Value:
    """Whether elements are not 0."""
    value = x.value if x.q is None else cx.integer(x).in_steps().value
    if value.dtype is DType.BOOL:
        return value
    if not value.dtype.is_float:
        return cx.b.cast(value, DType.BOOL)
    return cx.b.unary("LOGICAL_NOT", cx.b.compare("EQUAL", value, cx.b.const(0, value.dtype)))


@op(
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    kind=Kind.SHARED,
)
def to(cx: Context, x: Tensor, *_: Any, **__: Any) -> Value:
    """PyTorch cuts fractions off where TOSA's CAST rounds; a quantized tensor stays as it is between float types."""
    if cx.dtype is DType.BOOL:
        return to_bool(cx, x)
    if x.q is not None:
        if not cx.dtype.is_float:
            raise Unsupported(f"cast of a quantized tensor to {cx.dtype.value}")
        return x.value
    if cx.out is not None:  # whole numbers as real ones
        return cx.whole(x).to(cx.q)
    if not x.value.dtype.is_float or cx.dtype.is_float:
        return cx.b.cast(x.value, cx.dtype)
    return cx.b.cast(Float(cx.b, x.value).truncated().value, cx.dtype)


@made_of(aten.to.other, aten.type_as.default)
def to_other(
    x: torch.Tensor,
    other: torch.Tensor,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Of ``other`` the element type alone is read: no target is given the tensor."""
    return aten.to.dtype(x, other.dtype, non_blocking, copy, memory_format)
