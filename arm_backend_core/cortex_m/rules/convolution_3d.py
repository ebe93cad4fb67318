"""3D convolutions: 2D convolutions of images whose channels include the depth of the kernel.

For each output depth, the input slices that the kernel covers are concatenated along the channels to one image. The
images of all output depths are the batch of a single kernel call. The results are exact, because each accumulator adds
the same products as in the 3D convolution.

The copied slices and their concatenation need 2 * KD times the memory of the input, where KD is the kernel's depth.
Kernels of size (KD, 1, 1) need no copies. Kernels of size (1, KH, KW) need copies only for padding or a stride along
the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, Weight, rule
from arm_backend_core.cortex_m.rules.convolution import ConvParameters, convolve, convolve_image, convolve_transposed
from arm_backend_core.cortex_m.rules.image_layout import from_nhwc_image, read_sizes, to_nhwc_image
from arm_backend_core.nodes import arguments_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _DepthWindows:
    """Kernel size, stride, padding and dilation along the depth of a volume."""

    size: int
    stride: int
    pad: int
    dilation: int


@rule(aten.conv3d.default)
def convolve_volume(cx: KernelContext) -> QuantizedValue:
    """Convolution of [(N,) C, D, H, W] with a weight [OC, C / groups, KD, KH, KW]."""
    arguments = arguments_of(cx.node)
    x, weight = cx.operand(arguments["input"]), cx.weight(arguments["weight"], 0)
    stride, pad, dilation = (read_sizes(arguments[name], 3) for name in ("stride", "padding", "dilation"))
    depth = _DepthWindows(weight.data.shape[2], stride[0], pad[0], dilation[0])
    volume, bias, groups = to_nhwc_image(cx, x, 3), arguments["bias"], arguments["groups"]
    if [*weight.data.shape[3:], *stride[1:], *pad[1:]] == [1, 1, 1, 1, 0, 0]:
        return from_nhwc_image(cx, _convolve_depth(cx, x, volume, weight, bias, depth, groups), 3)
    image = _gather_depth_windows(cx, volume, x.zero_point, depth, groups)
    kernel = Weight(_with_depth_as_channels(weight.data), weight.scale)
    conv = ConvParameters(stride[1:], (pad[1], pad[1], pad[2], pad[2]), dilation[1:])
    return from_nhwc_image(cx, convolve_image(cx, x, image, kernel, bias, conv, groups), 3)


@rule(aten.convolution.default)
def convolve_any_rank(cx: KernelContext) -> QuantizedValue:
    """The core ATen operator for 1D, 2D and 3D convolutions, and for 1D and 2D transposed convolutions."""
    arguments = arguments_of(cx.node)
    if arguments["transposed"]:
        return convolve_transposed(cx)
    return convolve_volume(cx) if arguments["weight"].meta["val"].dim() == 5 else convolve(cx)


def _convolve_depth(
    cx: KernelContext,
    x: QuantizedValue,
    volume: Node,
    weight: Weight,
    bias: Node | None,
    depth: _DepthWindows,
    groups: int,
) -> Node:
    """Convolve along the depth with a kernel of size (KD, 1, 1): each slice of the volume becomes a row of an image."""
    n, slices, height, width, channels = volume.meta["val"].shape
    image = cx.emit.reshape(volume, (n, slices, height * width, channels))
    kernel = Weight(weight.data[..., 0], weight.scale)
    conv = ConvParameters([depth.stride, 1], (depth.pad, depth.pad, 0, 0), [depth.dilation, 1])
    node = convolve_image(cx, x, image, kernel, bias, conv, groups)
    n, slices, _, channels = node.meta["val"].shape
    return cx.emit.reshape(node, (n, slices, height, width, channels))


def _gather_depth_windows(cx: KernelContext, volume: Node, zero_point: int, depth: _DepthWindows, groups: int) -> Node:
    """Images [N * OD, H, W, C * KD]: the slices of a volume [N, D, H, W, C] that the kernel covers.

    OD is the number of output depths. The channels of a group are contiguous, and ordered by slice.
    """
    padded = cx.emit.pad(volume, [0, depth.pad, 0, 0, 0], [0, depth.pad, 0, 0, 0], zero_point)
    n, slices, height, width, channels = padded.meta["val"].shape
    results = (slices - depth.dilation * (depth.size - 1) - 1) // depth.stride + 1
    parts = []
    for first in range(0, depth.size * depth.dilation, depth.dilation):
        part = padded
        if results < slices:
            last = first + (results - 1) * depth.stride
            part = cx.emit.call(aten.slice_copy.Tensor, padded, 1, first, last + 1, depth.stride)
        parts.append(cx.emit.reshape(part, (n * results, height, width, groups, channels // groups)))
    image = parts[0] if depth.size == 1 else cx.emit.call(aten.cat.default, parts, 4)
    return cx.emit.reshape(image, (n * results, height, width, depth.size * channels))


def _with_depth_as_channels(weight: Array) -> Array:
    """A weight [OC, C, KD, KH, KW] as [OC, KD * C, KH, KW]."""
    shape: Sequence[int] = weight.shape
    return weight.swapaxes(1, 2).reshape(shape[0], shape[1] * shape[2], *shape[3:])
