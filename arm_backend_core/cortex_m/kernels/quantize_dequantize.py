"""Kernels at the boundary to float32: quantize and dequantize."""

from __future__ import annotations

from typing import Any

import numpy as np

from arm_backend_core.cortex_m.kernels.registry import Array, kernel

_ARGUMENTS = "Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype"

#: NumPy types by the value of the enumeration ScalarType, which is the same in ExecuTorch and PyTorch.
_SCALAR_TYPES: dict[int, Any] = {1: np.int8, 2: np.int16}


@kernel("quantize_per_tensor", _ARGUMENTS)
def quantize_per_tensor(x: Array, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> Array:
    """Quantize float32 to int8 or int16 as PyTorch does, for any shape and memory format.

    The result is round(x * float32(1 / scale)) + zero_point, with ties to even, saturated. NaN becomes the integer 0.

    ExecuTorch's kernel differs in the following cases, which this function does not emulate:

    - With MVE instructions (blocks of 16 int8 or 8 int16 elements), the product is not rounded to float32 first. A
      number near the middle between two integers may be rounded to the other one.
    - With MVE instructions, int8 results wrap where |x / scale| is 32768 or more: a large positive number may become
      -128. All results are wrong from 2^22 on.
    - Without MVE instructions, the kernel adds the zero point before it saturates. The sum may wrap where the
      product exceeds int32.
    - The kernel computes the reciprocal from float32(scale). For some scales, the reciprocal's last bit differs.

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

    The arguments are those of ``quantize_per_tensor``. The limits and the type have no effect.
    """
    with np.errstate(over="ignore"):
        return np.asarray((x.astype(np.float32) - np.float32(zero_point)) * np.float32(scale))
