"""Pooling, means and softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.arithmetic import quantize_multiplier
from arm_backend_core.cortex_m.rules.context import Context, multipliers, rule, single_multiplier
from arm_backend_core.cortex_m.rules.convolution import _pair
from arm_backend_core.cortex_m.values import Value
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of
from arm_backend_core.qparams import QParams

aten = torch.ops.aten
_NHWC = (0, 2, 3, 1)
#: Bits of the integer part of softmax's fixed-point argument (``arm_softmax_s8``).
_SOFTMAX_INTEGER_BITS = 5
#: Parameters of the result of the softmax kernel.
_SOFTMAX_RESULT = QParams(1 / 256, -128, DType.INT8, -128, 127)


def _average(cx: Context, x: Value, kernel: list[int], stride: list[int], pad: list[int]) -> Value:
    """Mean over windows of [N, C, (H,) W]; padding counts as zeros.

    Without padding and with equal parameters, the pooling kernel computes it. Otherwise, a depthwise convolution with
    weights of 1 divides and requantizes in one rounding.
    """
    if x.q.is_equivalent(cx.result.q) and pad == [0, 0]:
        multiplier, shift = quantize_multiplier(x.scale)
        parameters = (kernel, stride, pad, False, x.zero_point, multiplier, shift)
        return cx.clamp(_from_image(cx, cx.emit.kernel("quantized_avg_pool2d_nhwc", _to_image(cx, x), *parameters)))
    factor = 1 / (kernel[0] * kernel[1])
    if [1, *x.shape[2:]][-2:] == kernel and pad == [0, 0]:
        return _sum_dimensions(cx, x, list(range(2, x.rank)), factor)
    return _from_image(cx, _sum_windows(cx, x, _to_image(cx, x), kernel, stride, pad, factor))


def _sum_dimensions(cx: Context, x: Value, reduced: list[int], factor: float) -> Value:
    """Sum over dimensions, times ``factor``: a product of matrices with a row of ones.

    A depthwise convolution would need as many weights as the operand has elements, and its scratch memory grows with
    the window: 6 MB for 112x112 pixels with MVE.
    """
    kept = [d for d in range(x.rank) if d not in reduced]
    size, count = (int(np.prod([x.shape[d] for d in part])) for part in (reduced, kept))
    rows = cx.emit.reshape(cx.emit.store(x, (*kept, *reduced)), (1, count, size))
    multiplier, shift = single_multiplier(x.scale * factor / float(cx.result.q.scale))
    node = cx.emit.kernel(
        "quantized_batch_matmul",
        *(cx.emit.constant(np.ones((1, 1, size), np.int8), "ones"), 0, rows, -x.zero_point),
        *(cx.result.q.zero_point, multiplier, shift),
    )
    return cx.clamp(cx.computed(cx.emit.reshape(node, cx.node.meta["val"].shape)))


def _sum_windows(
    cx: Context, x: Value, image: Node, kernel: list[int], stride: list[int], pad: list[int], factor: float
) -> Node:
    """Sum over windows of an NHWC image, times ``factor``, by a depthwise convolution with weights of 1."""
    channels = image.meta["val"].shape[3]
    scale, shift = multipliers(x.scale * factor / float(cx.result.q.scale), channels)
    return cx.emit.kernel(
        "quantized_depthwise_conv2d_nhwc",
        image,
        cx.emit.constant(np.ones((1, *kernel, channels), np.int8), "ones"),
        cx.emit.constant(np.zeros(channels, np.int32), "bias"),
        *(stride, pad, [1, 1], 1, -x.zero_point, cx.result.q.zero_point),
        *(cx.emit.constant(scale, "multiplier"), cx.emit.constant(shift, "shift")),
        *(cx.result.low, cx.result.high),
    )


@rule(aten.avg_pool2d.default, aten.avg_pool1d.default)
def average_pool(cx: Context) -> Value:
    """Average pooling of [N, C, (H,) W]."""
    arguments = arguments_of(cx.node)
    x = cx.operand(arguments["input"] if "input" in arguments else arguments["self"])
    spatial = cx.node.meta["val"].dim() - 2
    kernel = _pair(arguments["kernel_size"], spatial, 1)
    stride = _pair(arguments["stride"] or arguments["kernel_size"], spatial, 1)
    pad = _pair(arguments["padding"], spatial, 0)
    if arguments["ceil_mode"] and _has_partial_windows(cx, x, kernel, stride, pad):
        raise Unsupported("the pooling kernels have no ceil_mode")
    if arguments.get("divisor_override") is not None:
        raise Unsupported("the pooling kernels have no divisor_override")
    if pad != [0, 0] and not arguments["count_include_pad"]:
        if not x.q.is_equivalent(cx.result.q):
            raise Unsupported("count_include_pad=False needs equal parameters of operand and result")
        multiplier, shift = quantize_multiplier(x.scale)
        image = _to_image(cx, x)
        parameters = (kernel, stride, pad, False, x.zero_point, multiplier, shift)
        return cx.clamp(_from_image(cx, cx.emit.kernel("quantized_avg_pool2d_nhwc", image, *parameters)))
    return _average(cx, x, kernel, stride, pad)


def _has_partial_windows(cx: Context, x: Value, kernel: list[int], stride: list[int], pad: list[int]) -> bool:
    """Whether ceil_mode adds windows that reach beyond the padded image."""
    sizes, results = [1, *x.shape[2:]][-2:], [1, *cx.node.meta["val"].shape[2:]][-2:]
    return any(
        (size + 2 * p - k) // s + 1 != result
        for size, p, k, s, result in zip(sizes, pad, kernel, stride, results, strict=True)
    )


def _to_image(cx: Context, x: Value) -> Node:
    if x.rank == 4:
        return cx.emit.store(x, _NHWC)
    if x.rank != 3:
        raise Unsupported("the pooling kernels take batches of rows or images")
    n, channels, length = x.shape
    return cx.emit.reshape(cx.emit.store(x, (0, 2, 1)), (n, 1, length, channels))


def _from_image(cx: Context, node: Node) -> Value:
    if cx.node.meta["val"].dim() == 4:
        return cx.computed(node, _NHWC)
    n, _, length, channels = node.meta["val"].shape
    return cx.computed(cx.emit.reshape(node, (n, length, channels)), (0, 2, 1))


@rule(aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool1d.default)
def average_to_size(cx: Context) -> Value:
    """Adaptive average pooling where all windows have one size."""
    x = cx.operand(cx.node.args[0])
    spatial = cx.node.meta["val"].dim() - 2
    sizes, results = ([1, *shape][-2:] for shape in (x.shape[2:], tuple(cx.node.meta["val"].shape)[2:]))
    if any(size % result for size, result in zip(sizes, results, strict=True)) or spatial not in (1, 2):
        raise Unsupported("the windows of adaptive pooling have different sizes")
    kernel = [size // result for size, result in zip(sizes, results, strict=True)]
    return _average(cx, x, kernel, kernel, [0, 0])


@rule(aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default)
def reduce_mean(cx: Context) -> Value:
    """Mean or sum over dimensions."""
    arguments = arguments_of(cx.node)
    x = cx.operand(cx.node.args[0])
    dims: Any = arguments.get("dim")
    reduced = sorted({d % x.rank for d in (range(x.rank) if dims is None or dims == [] else dims)})
    is_mean = cx.node.target in (aten.mean.dim, aten.mean.default)
    if is_mean and x.q.is_equivalent(cx.result.q):
        return _average_dimensions(cx, x, reduced)
    size = int(np.prod([x.shape[d] for d in reduced]))
    return _sum_dimensions(cx, x, reduced, 1 / size if is_mean else 1.0)


def _average_dimensions(cx: Context, x: Value, reduced: list[int]) -> Value:
    """Mean with the parameters of the operand: a pooling whose window is the image. Kept dimensions become channels."""
    kept = [d for d in range(x.rank) if d not in reduced]
    size, channels = (int(np.prod([x.shape[d] for d in part])) for part in (reduced, kept))
    image = cx.emit.reshape(cx.emit.store(x, (*reduced, *kept)), (1, size, 1, channels))
    multiplier, shift = quantize_multiplier(x.scale)
    parameters = ([size, 1], [1, 1], [0, 0], False, x.zero_point, multiplier, shift)
    node = cx.emit.kernel("quantized_avg_pool2d_nhwc", image, *parameters)
    return cx.clamp(cx.computed(cx.emit.reshape(node, cx.node.meta["val"].shape)))


@rule(aten.max_pool2d.default, aten.max_pool1d.default)
def maximum_pool(cx: Context) -> Value:
    """Maximum pooling of [N, C, (H,) W]; padding never wins."""
    arguments = arguments_of(cx.node)
    x = cx.requantize(cx.operand(arguments["self"]), cx.result.q)
    spatial = cx.node.meta["val"].dim() - 2
    kernel = _pair(arguments["kernel_size"], spatial, 1)
    stride = _pair(arguments["stride"] or arguments["kernel_size"], spatial, 1)
    pad, dilation = _pair(arguments["padding"], spatial, 0), _pair(arguments["dilation"], spatial, 1)
    if dilation != [1, 1]:
        raise Unsupported("the pooling kernels have no dilation")
    image = _to_image(cx, x)
    if arguments["ceil_mode"] and _has_partial_windows(cx, x, kernel, stride, pad):
        image, pad = _pad_for_ceil_mode(cx, image, kernel, stride, pad), [0, 0]
    parameters = (kernel, stride, pad, dilation, False, x.zero_point, x.zero_point, cx.result.low, cx.result.high)
    return _from_image(cx, cx.emit.kernel("quantized_max_pool2d_nhwc", image, *parameters))


def _pad_for_ceil_mode(cx: Context, image: Node, kernel: list[int], stride: list[int], pad: list[int]) -> Node:
    """Pad an NHWC image with the smallest integer, so that windows that reach beyond it become whole."""
    sizes, results = image.meta["val"].shape[1:3], [1, *cx.node.meta["val"].shape[2:]][-2:]
    post = [
        (result - 1) * s + k - size - p
        for result, s, k, size, p in zip(results, stride, kernel, sizes, pad, strict=True)
    ]
    return cx.emit.kernel("pad", image, [0, *pad, 0], [0, *(max(x, 0) for x in post), 0], -128)


@rule(aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
def softmax(cx: Context) -> Value:
    """Softmax, along any dimension: the kernel computes it along the last one."""
    x, dim = cx.operand(cx.node.args[0]), int(arguments_of(cx.node)["dim"])
    layout = (*(axis for axis in x.layout if axis != dim % x.rank), dim % x.rank)
    fraction_bits = 31 - _SOFTMAX_INTEGER_BITS
    multiplier, shift = quantize_multiplier(min(x.scale * (1 << fraction_bits), float((1 << 31) - 1)))
    diff_min = -math.floor(((1 << _SOFTMAX_INTEGER_BITS) - 1) * math.ldexp(1.0, fraction_bits - shift))
    node = cx.emit.kernel(
        "softmax", cx.emit.store(x, layout), x.rank - 1, x.zero_point, -128, multiplier, shift, diff_min
    )
    value = Value.computed(node, _SOFTMAX_RESULT, layout)
    return cx.clamp(cx.requantize(value, cx.result.q))
