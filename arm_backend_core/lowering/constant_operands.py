"""Constants of a program as operands of TOSA operators."""

from __future__ import annotations

from typing import Any

import torch

from arm_backend_core.aten.int64_range_analysis import INT32
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.operands import Operand, has_tosa_dtype, to_tosa_dtype
from arm_backend_core.tosa.graph import constant


def constant_operand(name: str, value: Any) -> Any:
    """Convert a constant, or a sequence of constants, to operands; ``name`` becomes the name of the TOSA constant.

    float64 becomes FP32, and int64 is clamped to int32. If TOSA lacks the type, the result is a placeholder, a BOOL
    tensor of False. No TOSA operator reads it: ``require_representable`` refuses each node that reads the constant.
    """
    if isinstance(value, (list, tuple)):
        return [constant_operand(name, item) for item in value]
    tensor = value.detach()
    if tensor.dtype is torch.float64:
        tensor = tensor.float()
    elif tensor.dtype is torch.int64:
        tensor = tensor.clamp(*INT32)
    elif not has_tosa_dtype(tensor.dtype):
        tensor = torch.zeros_like(tensor, dtype=torch.bool)
    dtype = to_tosa_dtype(tensor.dtype)
    array = tensor.float() if dtype.is_float and dtype is not DType.FP16 else tensor
    return Operand(constant(array.cpu().contiguous().numpy(), dtype, name))


def require_representable(name: str, value: Any) -> None:
    """Check that TOSA can represent a constant that an operator reads.

    A constant that is only used to compute other constants needs no check.

    Args:
        name: the constant's name, for the error.
        value: the constant; only tensors are checked.

    Raises:
        Unsupported: int64 values exceed int32, or TOSA lacks the type.
    """
    if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and not value.equal(value.clamp(*INT32)):
        raise Unsupported(f"int64 constant '{name}' has values that int32 cannot hold")
    if isinstance(value, torch.Tensor) and value.dtype is not torch.float64:
        to_tosa_dtype(value.dtype)
