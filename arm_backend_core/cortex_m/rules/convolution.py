"""Convolutions: per-channel weights, int32 accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.emitter import KernelLimitation
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, Weight, rule
from arm_backend_core.cortex_m.rules.image_layout import from_nhwc_image, spatial_pair, to_height_width, to_nhwc_image
from arm_backend_core.nodes import arguments_of

aten = torch.ops.aten


@dataclass(frozen=True)
class ConvParameters:
    """Parameters of a 2D convolution as (vertical, horizontal); ``pad`` is (top, bottom, left, right)."""

    stride: list[int]
    pad: tuple[int, int, int, int]
    dilation: list[int]


def _count_spatial_dims(cx: KernelContext, arguments: dict[str, Any]) -> int:
    """Number of spatial dimensions: 1 or 2."""
    return int(arguments["weight"].meta["val"].dim()) - 2


@rule(aten.conv1d.default, aten.conv2d.default)
def convolve(cx: KernelContext) -> QuantizedValue:
    """Convolution of [(N,) C, (H,) W]."""
    arguments = arguments_of(cx.node)
    pad_height, pad_width = to_height_width(arguments["padding"], _count_spatial_dims(cx, arguments), 0)
    return _convolve(cx, arguments, (pad_height, pad_height, pad_width, pad_width))


@rule(aten.conv1d.padding, aten.conv2d.padding)
def convolve_with_padding_mode(cx: KernelContext) -> QuantizedValue:
    """Convolution with padding "same" or "valid". If the total padding is odd, the end gets one more than the start."""
    arguments = arguments_of(cx.node)
    spatial = _count_spatial_dims(cx, arguments)
    kernel = spatial_pair(arguments["weight"].meta["val"].shape, spatial)
    dilation = to_height_width(arguments["dilation"], spatial, 1)
    height, width = (
        d * (k - 1) if arguments["padding"] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
    )
    return _convolve(cx, arguments, (height // 2, height - height // 2, width // 2, width - width // 2))


def _convolve(cx: KernelContext, arguments: dict[str, Any], pad: tuple[int, int, int, int]) -> QuantizedValue:
    spatial = _count_spatial_dims(cx, arguments)
    conv = ConvParameters(
        to_height_width(arguments["stride"], spatial, 1), pad, to_height_width(arguments["dilation"], spatial, 1)
    )
    x, weight = cx.operand(arguments["input"]), _image_weight(cx.weight(arguments["weight"], 0))
    image = to_nhwc_image(cx, x, spatial)
    node = convolve_image(cx, x, image, weight, arguments["bias"], conv, arguments["groups"])
    return from_nhwc_image(cx, node, spatial)


def _image_weight(weight: Weight) -> Weight:
    """Reshape the weight [OC, IC, KW] of a 1D convolution to [OC, IC, 1, KW]. Return a 4D weight unchanged."""
    shape = weight.data.shape
    return Weight(weight.data.reshape(*shape[:2], *spatial_pair(shape, len(shape) - 2)), weight.scale)


def _pad_image(
    cx: KernelContext, image: Node, x: QuantizedValue, conv: ConvParameters, kernel: Sequence[int]
) -> tuple[Node, list[int]]:
    """Return the image, and the (vertical, horizontal) padding that the kernel applies to it.

    Additional operators pad or crop the image if the padding differs between opposite sides or is negative. They also
    do so if the padding exceeds the kernel size, because some of CMSIS-NN's loops do not support that.
    """
    top, bottom, left, right = conv.pad
    if 0 <= top == bottom <= kernel[0] and 0 <= left == right <= kernel[1]:
        return image, [top, left]
    return cx.emit.pad(image, [0, top, left, 0], [0, bottom, right, 0], x.zero_point), [0, 0]


def convolve_image(
    cx: KernelContext, x: QuantizedValue, image: Node, weight: Weight, bias: Any, conv: ConvParameters, groups: int
) -> Node:
    """Convolve an NHWC image with a weight [OC, C / groups, KH, KW]; returns an NHWC image.

    CMSIS-NN's kernel for images of one row fails for some sizes. In this case, the image is viewed as one column and
    the weight is transposed, so that another kernel convolves them.
    """
    image, pad = _pad_image(cx, image, x, conv, weight.data.shape[2:])
    parameters = (conv.stride, pad, conv.dilation)
    try:
        return _call_convolution(cx, x, image, weight, bias, parameters, groups)
    except KernelLimitation:
        n, height, width, channels = image.meta["val"].shape
        if height != 1 or weight.data.shape[2] != 1 or pad[0]:
            raise
    column = cx.emit.reshape(image, (n, width, 1, channels))
    transposed = Weight(weight.data.swapaxes(2, 3), weight.scale)
    node = _call_convolution(cx, x, column, transposed, bias, tuple(values[::-1] for values in parameters), groups)
    n, width, _, channels = node.meta["val"].shape
    return cx.emit.reshape(node, (n, 1, width, channels))


def _call_convolution(
    cx: KernelContext,
    x: QuantizedValue,
    image: Node,
    weight: Weight,
    bias: Any,
    parameters: tuple[list[int], ...],
    groups: int,
) -> Node:
    """Call a convolution kernel; ``parameters`` are stride, padding and dilation."""
    channels, (n, *_, in_channels) = weight.data.shape[0], image.meta["val"].shape
    accumulator_scale = x.scale * weight.scale
    bias_data = cx.bias(bias, accumulator_scale, channels)
    if bias_data is None and groups > 1:  # with groups, CMSIS-NN's kernels need a bias
        bias_data = np.zeros(channels, np.int32)
    # With one input channel, CMSIS-NN's convolution is faster than its depthwise kernel with many results per channel.
    is_depthwise = groups == in_channels > 1 and n == 1
    order = (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1)
    bias_node = None if bias_data is None else cx.emit.constant(bias_data, "bias")
    arguments: list[Any] = [image, cx.emit.constant(weight.data.transpose(order), "weight"), bias_node, *parameters]
    if is_depthwise:
        arguments.append(channels // in_channels)
    arguments += [-x.zero_point, cx.result.q.zero_point]
    arguments += cx.requantization_constants(accumulator_scale, channels)
    name = "quantized_depthwise_conv2d_nhwc" if is_depthwise else "quantized_conv2d_nhwc"
    return cx.emit.call_kernel(name, *arguments, cx.result.low, cx.result.high)


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input)
def convolve_transposed(cx: KernelContext) -> QuantizedValue:
    """Transposed convolution of [(N,) C, (H,) W].

    The kernel supports neither groups nor dilation, and fails for some paddings. In these cases, zeros are inserted
    between the pixels of the image, and the operator becomes a convolution of this larger image.
    """
    arguments = arguments_of(cx.node)
    spatial = _count_spatial_dims(cx, arguments)
    stride, pad, more, dilation = (
        to_height_width(arguments[name], spatial, default)
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    x, weight = cx.operand(arguments["input"]), _image_weight(cx.weight(arguments["weight"], 1))
    image = to_nhwc_image(cx, x, spatial)
    if arguments["groups"] == 1 and dilation == [1, 1]:
        try:
            return from_nhwc_image(
                cx, _call_transposed(cx, x, image, weight, arguments["bias"], (stride, pad, more, dilation)), spatial
            )
        except KernelLimitation:
            pass  # it becomes a convolution
    upsampled = _insert_zeros(cx, image, stride, x.zero_point)
    before = [d * (k - 1) - p for d, k, p in zip(dilation, weight.data.shape[2:], pad, strict=True)]
    after = [b + m - s + 1 for b, m, s in zip(before, more, stride, strict=True)]
    conv = ConvParameters([1, 1], (before[0], after[0], before[1], after[1]), dilation)
    groups = arguments["groups"]
    kernel = _to_convolution_weight(weight, groups)
    return from_nhwc_image(cx, convolve_image(cx, x, upsampled, kernel, arguments["bias"], conv, groups), spatial)


def _call_transposed(
    cx: KernelContext, x: QuantizedValue, image: Node, weight: Weight, bias: Any, parameters: tuple[list[int], ...]
) -> Node:
    """Call the kernel; ``parameters`` are stride, padding, output padding and dilation."""
    channels = weight.data.shape[1]
    accumulator_scale = x.scale * weight.scale
    bias_data = cx.bias(bias, accumulator_scale, channels)
    return cx.emit.call_kernel(
        "quantized_transpose_conv2d_nhwc",
        *(image, cx.emit.constant(weight.data.transpose(1, 2, 3, 0), "weight")),
        cx.emit.constant(np.zeros(channels, np.int32) if bias_data is None else bias_data, "bias"),
        *(*parameters, -x.zero_point, cx.result.q.zero_point),
        *(*cx.requantization_constants(accumulator_scale, channels), cx.result.low, cx.result.high),
    )


def _insert_zeros(cx: KernelContext, image: Node, stride: Sequence[int], zero_point: int) -> Node:
    """Put stride - 1 zeros (``zero_point``) behind each pixel of an NHWC image, along both axes."""
    n, height, width, channels = image.meta["val"].shape
    after = [0, 0, stride[0] - 1, 0, stride[1] - 1, 0]
    node = cx.emit.pad(cx.emit.reshape(image, (n, height, 1, width, 1, channels)), [0] * 6, after, zero_point)
    return cx.emit.reshape(node, (n, height * stride[0], width * stride[1], channels))


def _to_convolution_weight(weight: Weight, groups: int) -> Weight:
    """Convert the weight [IC, OC / groups, KH, KW] of a transposed convolution to an equivalent convolution's weight.

    The result is [OC, IC / groups, KH, KW]. The kernels are flipped along height and width.
    """
    in_channels, per_group, *kernel = weight.data.shape
    grouped = weight.data.reshape(groups, in_channels // groups, per_group, *kernel).swapaxes(1, 2)
    data = grouped.reshape(groups * per_group, in_channels // groups, *kernel)[:, :, ::-1, ::-1]
    return Weight(data, np.tile(weight.scale, groups) if weight.scale.ndim else weight.scale)
