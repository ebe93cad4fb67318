"""Pooling, means and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.fixed_point import quantize_multiplier
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, quantize_single_multiplier, rule
from arm_backend_core.cortex_m.rules.image_layout import (
    from_nhwc_image_in_layout,
    spatial_pair,
    to_height_width,
    to_pooling_nhwc_image,
)
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of, operator_name

aten = torch.ops.aten


@dataclass(frozen=True)
class _Windows:
    """Kernel size, stride and padding of a pooling operator; each is (height, width)."""

    kernel: list[int]
    stride: list[int]
    pad: list[int]


def _read_windows(cx: KernelContext, arguments: dict[str, Any]) -> _Windows:
    spatial = _count_spatial_dims(cx)
    return _Windows(
        to_height_width(arguments["kernel_size"], spatial, 1),
        to_height_width(arguments["stride"] or arguments["kernel_size"], spatial, 1),
        to_height_width(arguments["padding"], spatial, 0),
    )


def _count_spatial_dims(cx: KernelContext) -> int:
    """Number of spatial dimensions of a pooling operator: 1 or 2."""
    return 1 if "1d" in operator_name(cx.node) else 2


def _average(cx: KernelContext, x: QuantizedValue, window: _Windows) -> QuantizedValue:
    """Mean over windows of [(N,) C, (H,) W]; the padding consists of zeros, which the mean includes.

    Without padding and with equal quantization parameters, the pooling kernel computes the mean. Otherwise, the
    elements are summed with weights of 1, by a matrix product (if one window covers the image) or by a depthwise
    convolution. The requantization of the sum includes the division, so that the mean is rounded once.
    """
    spatial, factor = _count_spatial_dims(cx), 1 / (window.kernel[0] * window.kernel[1])
    is_unpadded = window.pad == [0, 0]
    is_whole = list(spatial_pair(x.shape, spatial)) == window.kernel
    if is_unpadded and is_whole and not x.q.is_equivalent(cx.result.q):
        return _sum_dimensions(cx, x, list(range(x.rank - spatial, x.rank)), factor)
    image, layout = to_pooling_nhwc_image(cx, x, spatial)
    if x.q.is_equivalent(cx.result.q) and is_unpadded:
        node = _average_excluding_padding(cx, x, image, window, False)
    else:
        node = _sum_windows(cx, x, image, window, factor)
    return cx.clamp(from_nhwc_image_in_layout(cx, node, layout))


def _average_excluding_padding(
    cx: KernelContext, x: QuantizedValue, image: Node, window: _Windows, ceil_mode: bool
) -> Node:
    """Mean over the elements of each window that are not padding.

    Raises:
        Unsupported: operand and result have different quantization parameters.
    """
    if not x.q.is_equivalent(cx.result.q):
        raise Unsupported(
            "the kernel for averages that exclude padding needs equal quantization parameters of operand and result"
        )
    parameters = (window.kernel, window.stride, window.pad, ceil_mode, x.zero_point, *quantize_multiplier(x.scale))
    return cx.emit.call_kernel("quantized_avg_pool2d_nhwc", image, *parameters)


def _sum_windows(cx: KernelContext, x: QuantizedValue, image: Node, window: _Windows, factor: float) -> Node:
    """Sum over windows of an NHWC image, times ``factor``, by a depthwise convolution with weights of 1."""
    n, _, _, channels = image.meta["val"].shape
    is_single = n == 1  # the depthwise kernel takes a batch of 1
    shape = (1, *window.kernel, channels) if is_single else (channels, *window.kernel, 1)
    return cx.emit.call_kernel(
        "quantized_depthwise_conv2d_nhwc" if is_single else "quantized_conv2d_nhwc",
        *(image, cx.emit.constant(np.ones(shape, np.int8), "ones")),
        cx.emit.constant(np.zeros(channels, np.int32), "bias"),
        *(window.stride, window.pad, [1, 1], *[1] * is_single, -x.zero_point, cx.result.q.zero_point),
        *cx.requantization_constants(np.asarray(x.scale * factor), channels),
        *(cx.result.low, cx.result.high),
    )


@rule(aten.avg_pool2d.default, aten.avg_pool1d.default)
def average_pool(cx: KernelContext) -> QuantizedValue:
    """Average pooling of [(N,) C, (H,) W]."""
    arguments = arguments_of(cx.node)
    x = cx.operand(arguments["input"] if "input" in arguments else arguments["self"])
    spatial, window = _count_spatial_dims(cx), _read_windows(cx, arguments)
    is_partial = arguments["ceil_mode"] and _has_partial_windows(cx, x, window)
    divisor = arguments.get("divisor_override")
    if is_partial and (divisor is not None or (window.pad != [0, 0] and arguments["count_include_pad"])):
        raise Unsupported("with ceil_mode, the kernels compute only averages that exclude padding")
    excludes_padding = is_partial or (window.pad != [0, 0] and not arguments["count_include_pad"])
    if divisor is None and not excludes_padding:
        return _average(cx, x, window)
    image, layout = to_pooling_nhwc_image(cx, x, spatial)
    if divisor is not None:
        node = _sum_windows(cx, x, image, window, 1 / divisor)
    else:
        window = _clip_large_windows(window, spatial_pair(x.shape, spatial))
        node = _average_excluding_padding(cx, x, image, window, is_partial)
    return cx.clamp(from_nhwc_image_in_layout(cx, node, layout))


def _clip_large_windows(window: _Windows, size: Sequence[int]) -> _Windows:
    """Clip windows to an image of ``size`` if they are larger than the padded image, because the kernel refuses these.

    With ceil_mode, an axis may have one such window. It contains all elements along the axis.
    """
    is_large = [k > n + 2 * p for k, n, p in zip(window.kernel, size, window.pad, strict=True)]
    kernel = [n if large else k for large, n, k in zip(is_large, size, window.kernel, strict=True)]
    pad = [0 if large else p for large, p in zip(is_large, window.pad, strict=True)]
    return _Windows(kernel, window.stride, pad)


def _has_partial_windows(cx: KernelContext, x: QuantizedValue, window: _Windows) -> bool:
    """Whether ceil_mode adds windows that reach beyond the padded image."""
    spatial = _count_spatial_dims(cx)
    sizes, results = (spatial_pair(shape, spatial) for shape in (x.shape, cx.node.meta["val"].shape))
    parameters = (window.kernel, window.stride, window.pad)
    return any(
        (size + 2 * p - k) // s + 1 != result for size, result, k, s, p in zip(sizes, results, *parameters, strict=True)
    )


@rule(aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool1d.default)
def adaptive_average_pool(cx: KernelContext) -> QuantizedValue:
    """Adaptive average pooling where all windows have one size."""
    x = cx.operand(cx.node.args[0])
    spatial = _count_spatial_dims(cx)
    sizes, results = (spatial_pair(shape, spatial) for shape in (x.shape, cx.node.meta["val"].shape))
    if any(size % result for size, result in zip(sizes, results, strict=True)):
        raise Unsupported("the windows of adaptive pooling have different sizes")
    kernel = [size // result for size, result in zip(sizes, results, strict=True)]
    return _average(cx, x, _Windows(kernel, kernel, [0, 0]))


@rule(aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default)
def mean_or_sum(cx: KernelContext) -> QuantizedValue:
    """Mean or sum over dimensions."""
    arguments = arguments_of(cx.node)
    x = cx.operand(cx.node.args[0])
    dims: Any = arguments.get("dim")
    reduced = sorted({x.normalize_dim(d) for d in (range(x.rank) if dims is None or dims == [] else dims)})
    is_mean = cx.node.target in (aten.mean.dim, aten.mean.default)
    if is_mean and x.q.is_equivalent(cx.result.q):
        return _average_dimensions(cx, x, reduced)
    size = int(np.prod([x.shape[d] for d in reduced]))
    return _sum_dimensions(cx, x, reduced, 1 / size if is_mean else 1.0)


def _average_dimensions(cx: KernelContext, x: QuantizedValue, reduced: list[int]) -> QuantizedValue:
    """Mean over dimensions by average pooling, for a result with the operand's quantization parameters.

    The window covers all reduced dimensions. The other dimensions become channels.
    """
    kept = [d for d in range(x.rank) if d not in reduced]
    size, channels = (int(np.prod([x.shape[d] for d in part])) for part in (reduced, kept))
    image = cx.emit.reshape(cx.emit.materialize(x, (*reduced, *kept)), (1, size, 1, channels))
    node = _average_excluding_padding(cx, x, image, _Windows([size, 1], [1, 1], [0, 0]), False)
    return cx.clamp(cx.make_result(cx.emit.reshape(node, cx.node.meta["val"].shape)))


def _sum_dimensions(cx: KernelContext, x: QuantizedValue, reduced: list[int], factor: float) -> QuantizedValue:
    """Sum over dimensions, times ``factor``, by a matrix product of a row of ones and the elements.

    A depthwise convolution would need as many weights as the operand has elements, and its scratch memory grows with
    the window: 6 MB for 112x112 pixels with MVE.
    """
    kept = [d for d in range(x.rank) if d not in reduced]
    size, count = (int(np.prod([x.shape[d] for d in part])) for part in (reduced, kept))
    rows = cx.emit.reshape(cx.emit.materialize(x, (*kept, *reduced)), (1, count, size))
    multiplier, shift = quantize_single_multiplier(x.scale * factor / float(cx.result.q.scale))
    node = cx.emit.call_kernel(
        "quantized_batch_matmul",
        *(cx.emit.constant(np.ones((1, 1, size), np.int8), "ones"), 0, rows, -x.zero_point),
        *(cx.result.q.zero_point, multiplier, shift),
    )
    return cx.clamp(cx.make_result(cx.emit.reshape(node, cx.node.meta["val"].shape)))


@rule(aten.max_pool2d.default, aten.max_pool1d.default)
def maximum_pool(cx: KernelContext) -> QuantizedValue:
    """Maximum pooling of [(N,) C, (H,) W]; the maximum ignores padding."""
    arguments = arguments_of(cx.node)
    x = cx.requantize(cx.operand(arguments["self"]), cx.result.q)
    spatial, window = _count_spatial_dims(cx), _read_windows(cx, arguments)
    dilation = to_height_width(arguments["dilation"], spatial, 1)
    if dilation != [1, 1]:
        raise Unsupported("the pooling kernels have no dilation")
    if window == _Windows([1, 1], [1, 1], [0, 0]):
        # A 3D pooling is decomposed to a pooling of planes and a pooling along the depth. One of them may be trivial.
        return cx.clamp(x)
    (image, layout), pad = to_pooling_nhwc_image(cx, x, spatial), window.pad
    if arguments["ceil_mode"] and _has_partial_windows(cx, x, window):
        image, pad = _pad_for_ceil_mode(cx, image, window), [0, 0]
    limits = (x.zero_point, x.zero_point, cx.result.low, cx.result.high)
    parameters = (window.kernel, window.stride, pad, dilation, False, *limits)
    return from_nhwc_image_in_layout(cx, cx.emit.call_kernel("quantized_max_pool2d_nhwc", image, *parameters), layout)


def _pad_for_ceil_mode(cx: KernelContext, image: Node, window: _Windows) -> Node:
    """Pad an NHWC image with -128, so that no window of ``ceil_mode`` reaches beyond the padded image."""
    sizes, results = image.meta["val"].shape[1:3], spatial_pair(cx.node.meta["val"].shape, _count_spatial_dims(cx))
    parameters = (window.kernel, window.stride, window.pad)
    post = [
        max((result - 1) * s + k - size - p, 0)
        for size, result, k, s, p in zip(sizes, results, *parameters, strict=True)
    ]
    return cx.emit.pad(image, [0, *window.pad, 0], [0, *post, 0], -128)
