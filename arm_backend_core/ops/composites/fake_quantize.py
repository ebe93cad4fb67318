"""Decompositions of fake quantization, which networks from quantization-aware training contain."""

from __future__ import annotations

import torch
from torch import Tensor

from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten
TensorPair = tuple[Tensor, Tensor]


@decomposition(aten.fake_quantize_per_tensor_affine_cachemask.default)
def per_tensor(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> TensorPair:
    """(clamp(round(x / scale) + zero_point) - zero_point) * scale, and the mask of elements that were not clamped."""
    step = torch.as_tensor(scale, dtype=torch.float32)  # the kernel multiplies by 1 / scale, rounded to float32
    steps = torch.round(x * (1.0 / step)) + zero_point
    result = (steps.clamp(quant_min, quant_max) - zero_point) * step
    return result.to(x.dtype), (steps >= quant_min) & (steps <= quant_max)


@decomposition(aten.fake_quantize_per_tensor_affine.default, aten.fake_quantize_per_tensor_affine.tensor_qparams)
def per_tensor_without_mask(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """Without the mask."""
    return per_tensor(x, scale, zero_point, quant_min, quant_max)[0]


@decomposition(aten.fake_quantize_per_channel_affine_cachemask.default)
def per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> TensorPair:
    """One scale and zero point for each index along ``axis``."""
    sizes = [-1 if dim == axis else 1 for dim in range(x.dim())]
    return per_tensor(x, scale.reshape(sizes), zero_point.reshape(sizes), quant_min, quant_max)


@decomposition(aten.fake_quantize_per_channel_affine.default)
def per_channel_without_mask(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """Without the mask."""
    return per_channel(x, scale, zero_point, axis, quant_min, quant_max)[0]


@decomposition(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def per_tensor_with_switch(
    x: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> TensorPair:
    """Per tensor; if ``fake_quant_enabled`` is 0, x unchanged and a mask of ones."""
    result, within = per_tensor(x, scale, zero_point, quant_min, quant_max)
    enabled = fake_quant_enabled != 0
    return torch.where(enabled, result, x), within | ~enabled


@decomposition(aten._fake_quantize_learnable_per_tensor_affine.default)
def learnable_per_tensor(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """Learnable zero points are real numbers, which are rounded and clamped to the integer range; ``scale`` is [1]."""
    return per_tensor(x, scale, zero_point.round().clamp(quant_min, quant_max), quant_min, quant_max)[0]


@decomposition(aten._fake_quantize_learnable_per_channel_affine.default)
def learnable_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """One scale and zero point for each index along ``axis``."""
    steps = zero_point.round().clamp(quant_min, quant_max)
    return per_channel(x, scale, steps, axis, quant_min, quant_max)[0]
