"""Batch, layer, RMS, group and instance normalization; softmax and log-softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops import fixed_point
from arm_backend_core.ops.channel_gain import scale_channels
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.reduction import atleast_1d, reduce_mean
from arm_backend_core.ops.registry import op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
#: Attributes of ``Record`` for operators whose integer rule has intermediates of 16 to 32 bits. Their error comes from
#: 513-entry tables: rounding of the index, rounding of the entries, and interpolation.
_HIGH_PRECISION_ATTRIBUTES: dict[str, Any] = {
    "prefers_int16_input": True,
    "error_bound": 2.0**-13,
    "activation_operands": (0,),
    "compute_fp32": True,
}


def _fold_batch_norm(
    weight: Operand | None, bias: Operand | None, mean: Operand, variance: Operand, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Fold an inference batch norm into gain and offset per channel: y = gain * x + offset."""
    gain = (1.0 if weight is None else weight.float_values) / np.sqrt(variance.float_values + eps)
    offset = (0.0 if bias is None else bias.float_values) - mean.float_values * gain
    return gain, offset


@op(aten.batch_norm.default, activation_operands=(0,), absorbs_activation=True, compute_fp32=True)
def batch_norm(
    cx: Context,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand | None,
    running_var: Operand | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Value:
    """Batch norm of x [N, C, ...]. With running statistics, it is a gain and an offset per channel.

    With batch statistics, it is a group norm in which each channel is a group over the batch and all positions. The
    running statistics are not updated, because the program does not read them.
    """
    if training or running_mean is None or running_var is None:
        swap_batch_and_channels = [1, 0, *range(2, x.rank)]
        channel_major = cx.b.transpose(x.value, swap_batch_and_channels)
        grouped = Operand(
            cx.b.reshape(channel_major, (1, channel_major.shape[0], -(-channel_major.size // channel_major.shape[0]))),
            x.q,
        )
        normalized = group_norm.lower(cx, grouped, grouped.shape[1], weight, bias, eps)
        return cx.b.transpose(cx.b.reshape(normalized, channel_major.shape), swap_batch_and_channels)
    gain, offset = _fold_batch_norm(weight, bias, running_mean, running_var, eps)
    channel_shape = (-1,) + (1,) * (x.rank - 2)
    if x.q is None:
        scaled = cx.b.mul(x.value, cx.b.const(gain.reshape(channel_shape), x.value.dtype))
        return cx.b.add(scaled, cx.b.const(offset.reshape(channel_shape), x.value.dtype))
    return scale_channels(cx, x, gain, offset)


def _standardize(cx: Context, x: Value, axes: Sequence[int], eps: float) -> Value:
    """Standardize an unquantized x over ``axes``: (x - mean) / sqrt(variance + eps)."""
    b = cx.b
    centred = b.sub(x, reduce_mean(cx, Operand(x), axes))
    variance = reduce_mean(cx, Operand(b.mul(centred, centred)), axes)
    return b.mul(centred, b.unary("RSQRT", b.add(variance, cx.to_value(eps))))


def _apply_affine(cx: Context, x: Value, gain: Operand | None, offset: Operand | None, shape: Sequence[int]) -> Value:
    """x * gain + offset. Gain and offset are optional and reshaped to ``shape``, which broadcasts against x."""
    if gain is not None:
        x = cx.b.mul(x, cx.b.reshape(gain.value, shape))
    return x if offset is None else cx.b.add(x, cx.b.reshape(offset.value, shape))


def _dequantize_optional(parameter: Operand | None) -> np.ndarray | None:
    return None if parameter is None else parameter.float_values


def _normalized_axes(x: Operand, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.rank - len(normalized_shape), x.rank))


@op(aten.layer_norm.default, **_HIGH_PRECISION_ATTRIBUTES)
def layer_norm(
    cx: Context,
    x: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Value:
    """Layer norm over the trailing dimensions: (x - mean) / sqrt(variance + eps) * weight + bias."""
    axes = _normalized_axes(x, normalized_shape)
    if x.q is not None:
        return fixed_point.layer_norm(
            cx.b, x.value, x.q, axes, _dequantize_optional(weight), _dequantize_optional(bias), eps, cx.q
        )
    return _apply_affine(cx, _standardize(cx, x.value, axes, eps), weight, bias, normalized_shape)


@op(aten.rms_norm.default, **_HIGH_PRECISION_ATTRIBUTES)
def rms_norm(
    cx: Context, x: Operand, normalized_shape: Sequence[int], weight: Operand | None = None, eps: float | None = None
) -> Value:
    """RMS norm over the trailing dimensions: x / sqrt(mean(x * x) + eps) * weight.

    ``eps`` defaults to the machine epsilon of float32, in which the mean is computed.
    """
    b, axes = cx.b, _normalized_axes(x, normalized_shape)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if x.q is not None:
        return fixed_point.layer_norm(
            b, x.value, x.q, axes, _dequantize_optional(weight), None, eps, cx.q, centre=False
        )
    mean_square = reduce_mean(cx, Operand(b.mul(x.value, x.value)), axes)
    inverse_rms = b.unary("RSQRT", b.add(mean_square, cx.to_value(eps)))
    return _apply_affine(cx, b.mul(x.value, inverse_rms), weight, None, normalized_shape)


@op(aten.group_norm.default, **_HIGH_PRECISION_ATTRIBUTES)
def group_norm(
    cx: Context,
    x: Operand,
    groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Group norm of x [N, C, ...] over C / groups channels and all positions; weight and bias are [C]."""
    if x.q is not None:
        return fixed_point.group_norm(
            cx.b, x.value, x.q, groups, _dequantize_optional(weight), _dequantize_optional(bias), eps, cx.q
        )
    batch, channels = x.shape[:2]
    rows = cx.b.reshape(x.value, (batch, groups, -(-x.value.size // (batch * groups))))
    normalized = cx.b.reshape(_standardize(cx, rows, (2,), eps), x.shape)
    return _apply_affine(cx, normalized, weight, bias, (channels, *(1,) * (x.rank - 2)))


@op(aten.instance_norm.default, **_HIGH_PRECISION_ATTRIBUTES)
def instance_norm(
    cx: Context,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand | None,
    running_var: Operand | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    """Instance norm: group norm with one channel per group. With running statistics, it is a batch norm."""
    if not use_input_stats:
        return batch_norm.lower(cx, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return group_norm.lower(cx, x, x.shape[1], weight, bias, eps)


def _shifted_exponentials(cx: Context, x: Operand, dim: int, min_peak: float = -math.inf) -> tuple[Value, Value, Value]:
    """Return s = x - max(max(x), min_peak), exp(s), and the sum of exp(s) along ``dim``, in the result's type."""
    value, axis = cx.b.cast(x.value, cx.dtype), dim % x.rank
    peak = cx.b.reduce("REDUCE_MAX", value, axis)
    shifted = cx.b.sub(value, peak if min_peak == -math.inf else cx.b.clamp(peak, min_peak, math.inf))
    exponential = cx.b.unary("EXP", shifted)
    return shifted, exponential, cx.b.reduce("REDUCE_SUM", exponential, axis)


@op(aten.softmax.int, aten._softmax.default, **_HIGH_PRECISION_ATTRIBUTES, fixed_range=(0.0, 1.0))
def softmax(cx: Context, x: Operand, dim: int, *_: object, **__: object) -> Value:
    """Softmax along ``dim``: exp(x - max) / sum(exp(x - max))."""
    x = atleast_1d(cx, x)
    if x.q is not None:
        return cx.b.reshape(fixed_point.softmax(cx.b, x.value, x.q, dim % x.rank, cx.q), cx.shape)
    _shifted, exponential, total = _shifted_exponentials(cx, x, dim)
    return cx.b.reshape(cx.b.mul(exponential, cx.b.unary("RECIPROCAL", total)), cx.shape)


@op(aten._safe_softmax.default, **_HIGH_PRECISION_ATTRIBUTES, fixed_range=(0.0, 1.0))
def safe_softmax(cx: Context, x: Operand, dim: int, *_: object, **__: object) -> Value:
    """Softmax that returns 0 for a row in which all elements are -inf, for example if all keys of a query are masked.

    In such a row, all exponentials and their sum are 0. In all other rows, the sum is at least 1. Clamping the sum to
    at least 1 thus changes only such rows, which become 0 / 1. Quantized values are always finite, so the ordinary
    softmax is used.
    """
    if x.q is not None:
        return softmax.lower(cx, x, dim)
    x = atleast_1d(cx, x)
    _shifted, exponential, total = _shifted_exponentials(cx, x, dim, -DType.FP32.max_finite)
    inverse = cx.b.unary("RECIPROCAL", cx.b.clamp(total, 1.0, math.inf))
    return cx.b.reshape(cx.b.mul(exponential, inverse), cx.shape)


@op(aten.log_softmax.int, aten._log_softmax.default, **_HIGH_PRECISION_ATTRIBUTES)
def log_softmax(cx: Context, x: Operand, dim: int, *_: object, **__: object) -> Value:
    """Log-softmax along ``dim``: (x - max) - ln(sum(exp(x - max)))."""
    x = atleast_1d(cx, x)
    if x.q is not None:
        return cx.b.reshape(fixed_point.log_softmax(cx.b, x.value, x.q, dim % x.rank, cx.q), cx.shape)
    shifted, _exponential, total = _shifted_exponentials(cx, x, dim)
    return cx.b.reshape(cx.b.sub(shifted, cx.b.unary("LOG", total)), cx.shape)


_RECORDS = (batch_norm, layer_norm, rms_norm, group_norm, instance_norm, softmax, safe_softmax, log_softmax)
for _record in _RECORDS:  # each rule handles plain and quantized operands
    _record.integer_rule(_record.lower)
