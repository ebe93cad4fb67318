"""Fake quantization: decompositions of the operators that quantization-aware training (QAT) leaves in a model."""

from __future__ import annotations

import torch
from torch import Tensor

from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten
ResultAndMask = tuple[Tensor, Tensor]


@decomposition(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize_per_tensor(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> ResultAndMask:
    """Fake quantization per tensor: (clamp(round(x / scale) + zero_point) - zero_point) * scale.

    The second result is the mask of elements that were not clamped.
    """
    scale_fp32 = torch.as_tensor(scale, dtype=torch.float32)  # the kernel multiplies by 1 / scale, rounded to float32
    quantized = torch.round(x * (1.0 / scale_fp32)) + zero_point
    result = (quantized.clamp(quant_min, quant_max) - zero_point) * scale_fp32
    return result.to(x.dtype), (quantized >= quant_min) & (quantized <= quant_max)


@decomposition(aten.fake_quantize_per_tensor_affine.default, aten.fake_quantize_per_tensor_affine.tensor_qparams)
def fake_quantize_per_tensor_without_mask(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """Fake quantization per tensor, without the mask."""
    return fake_quantize_per_tensor(x, scale, zero_point, quant_min, quant_max)[0]


@decomposition(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> ResultAndMask:
    """Fake quantization with one scale and zero point for each index along ``axis``.

    The second result is the mask of elements that were not clamped.
    """
    channel_shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
    return fake_quantize_per_tensor(
        x, scale.reshape(channel_shape), zero_point.reshape(channel_shape), quant_min, quant_max
    )


@decomposition(aten.fake_quantize_per_channel_affine.default)
def fake_quantize_per_channel_without_mask(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """Fake quantization per channel, without the mask."""
    return fake_quantize_per_channel(x, scale, zero_point, axis, quant_min, quant_max)[0]


@decomposition(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_per_tensor_with_enable_flag(
    x: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> ResultAndMask:
    """Fake quantization per tensor. If ``fake_quant_enabled`` is 0, return x unchanged and a mask of ones."""
    result, mask = fake_quantize_per_tensor(x, scale, zero_point, quant_min, quant_max)
    enabled = fake_quant_enabled != 0
    return torch.where(enabled, result, x), mask | ~enabled


@decomposition(aten._fake_quantize_learnable_per_tensor_affine.default)
def learnable_fake_quantize_per_tensor(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """Fake quantization with a learned real zero point, which is rounded and clamped; ``scale`` has shape [1]."""
    return fake_quantize_per_tensor(x, scale, zero_point.round().clamp(quant_min, quant_max), quant_min, quant_max)[0]


@decomposition(aten._fake_quantize_learnable_per_channel_affine.default)
def learnable_fake_quantize_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """Fake quantization with learned scales and zero points, one for each index along ``axis``."""
    zero_points = zero_point.round().clamp(quant_min, quant_max)
    return fake_quantize_per_channel(x, scale, zero_points, axis, quant_min, quant_max)[0]
