"""Kernels at the boundary to float32: quantize and dequantize."""

from __future__ import annotations

from typing import Any

import numpy as np

from arm_backend_core.cortex_m.kernels.registry import Array, kernel

_ARGUMENTS = "Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype"

#: Number of ExecuTorch's and PyTorch's ScalarType -> type of integers.
_SCALAR_TYPES: dict[int, Any] = {1: np.int8, 2: np.int16}


@kernel("quantize_per_tensor", _ARGUMENTS)
def quantize_per_tensor(x: Array, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> Array:
    """Quantize float32 to int8 or int16 as PyTorch does, for any shape and memory format. NaN becomes 0.

    round(x * float32(1 / scale)) + zero_point, ties to even, saturated. ExecuTorch's kernel differs where the processor
    has MVE: it rounds the product and its sum with the zero point at once, int8 results wrap for |x / scale| of 32768
    and more, and all results are wrong from 2^22. On other processors it converts to int32 before it saturates, and
    Arm's conversion saturates, so only the addition of the zero point may wrap. For a scale that float32 does not
    represent, its reciprocal may differ in the last bit.

    Args:
        x: float32.
        scale: positive and finite.
        zero_point: in the range of the integer type.
        quant_min: lower limit, in the range of the integer type.
        quant_max: upper limit, in the range of the integer type.
        dtype: 1 for int8, 2 for int16.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = x.astype(np.float32) * np.float32(1.0 / scale)
    rounded = np.rint(np.clip(product, np.float32(quant_min - zero_point), np.float32(quant_max - zero_point)))
    integers = np.where(np.isnan(product), np.float32(-zero_point), rounded).astype(np.int32) + zero_point
    return integers.astype(_SCALAR_TYPES[dtype])


@kernel("dequantize_per_tensor", _ARGUMENTS)
def dequantize_per_tensor(x: Array, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> Array:
    """Dequantize int8 or int16 to float32: (x - zero_point) * float32(scale), for any shape and memory format.

    The arguments are those of ``quantize_per_tensor``. The limits and the type change nothing.
    """
    with np.errstate(over="ignore"):
        return np.asarray((x.astype(np.float32) - np.float32(zero_point)) * np.float32(scale))
