"""Convolutions and linear layers: per-channel weights, int32 accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.rules.context import Context, Weight, multipliers, rule, single_multiplier
from arm_backend_core.cortex_m.values import Value
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of
from arm_backend_core.targets.cortex_m import Isa

aten = torch.ops.aten
_NHWC, _NLC = (0, 2, 3, 1), (0, 2, 1)
#: Most groups of a transposed convolution that are computed as one, with as many times the weights.
_MAX_JOINED_GROUPS = 8


@dataclass(frozen=True)
class _Window:
    """Parameters of a 2D convolution, (height, width) each; ``pad`` is (top, bottom, left, right)."""

    stride: list[int]
    pad: tuple[int, int, int, int]
    dilation: list[int]


def _pair(values: Any, spatial: int, default: int) -> list[int]:
    """(height, width) of a parameter; ``default`` is the height of a 1D operator."""
    values = [values] if isinstance(values, int) else list(values)
    values = values * spatial if len(values) == 1 else values
    return [default, *values][-2:]


@rule(aten.conv1d.default, aten.conv2d.default)
def convolve(cx: Context) -> Value:
    """Convolution of [N, C, (H,) W]."""
    arguments = arguments_of(cx.node)
    spatial = cx.node.meta["val"].dim() - 2
    pad_height, pad_width = _pair(arguments["padding"], spatial, 0)
    return _convolve(cx, arguments, spatial, (pad_height, pad_height, pad_width, pad_width))


@rule(aten.conv1d.padding, aten.conv2d.padding)
def convolve_with_padding_mode(cx: Context) -> Value:
    """Convolution with padding "same" or "valid"; an odd total pads one more at the end, as in PyTorch."""
    arguments = arguments_of(cx.node)
    spatial = cx.node.meta["val"].dim() - 2
    kernel = _pair(arguments["weight"].meta["val"].shape[2:], spatial, 1)
    dilation = _pair(arguments["dilation"], spatial, 1)
    height, width = (
        d * (k - 1) if arguments["padding"] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
    )
    return _convolve(cx, arguments, spatial, (height // 2, height - height // 2, width // 2, width - width // 2))


def _convolve(cx: Context, arguments: dict[str, Any], spatial: int, pad: tuple[int, int, int, int]) -> Value:
    if spatial not in (1, 2) or cx.node.meta["val"].dim() != spatial + 2:
        raise Unsupported("the kernels convolve batches of rows or images")
    window = _Window(_pair(arguments["stride"], spatial, 1), pad, _pair(arguments["dilation"], spatial, 1))
    x, weight = cx.operand(arguments["input"]), cx.weight(arguments["weight"], 0)
    image = _image(cx, x)
    kernel = weight.data if spatial == 2 else weight.data[:, :, None, :]
    node = _convolve_image(cx, x, image, Weight(kernel, weight.scale), arguments["bias"], window, arguments["groups"])
    if spatial == 2:
        return cx.computed(node, _NHWC)
    n, _, length, channels = node.meta["val"].shape
    return cx.computed(cx.emit.reshape(node, (n, length, channels)), _NLC)


def _image(cx: Context, x: Value) -> Node:
    """[N, C, (H,) W] as an NHWC image."""
    if x.rank == 4:
        return cx.emit.store(x, _NHWC)
    n, channels, length = x.shape
    return cx.emit.reshape(cx.emit.store(x, _NLC), (n, 1, length, channels))


def _pad_image(cx: Context, image: Node, x: Value, pad: tuple[int, int, int, int]) -> tuple[Node, list[int]]:
    """The padding that the kernel applies itself, after a pad of the image where its sides differ."""
    top, bottom, left, right = pad
    if top == bottom and left == right:
        return image, [top, left]
    return cx.emit.kernel("pad", image, [0, top, left, 0], [0, bottom, right, 0], x.zero_point), [0, 0]


def _convolve_image(
    cx: Context, x: Value, image: Node, weight: Weight, bias: Any, window: _Window, groups: int
) -> Node:
    """Convolve an NHWC image with a weight [OC, C / groups, KH, KW]; returns an NHWC image."""
    channels, (n, *_, in_channels) = weight.data.shape[0], image.meta["val"].shape
    image, pad = _pad_image(cx, image, x, window.pad)
    accumulator_scale = x.scale * weight.scale
    bias_data = cx.bias(bias, accumulator_scale, channels)
    if bias_data is None and groups > 1:  # the kernels index the bias by group
        bias_data = np.zeros(channels, np.int32)
    # With one input channel, CMSIS-NN's convolution is faster than its depthwise kernel with many results per channel.
    is_depthwise = groups == in_channels > 1 and n == 1
    order = (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1)
    bias_node = None if bias_data is None else cx.emit.constant(bias_data, "bias")
    arguments: list[Any] = [image, cx.emit.constant(weight.data.transpose(order), "weight"), bias_node]
    arguments += [window.stride, pad, window.dilation]
    if is_depthwise:
        arguments.append(channels // in_channels)
    arguments += [-x.zero_point, cx.result.q.zero_point]
    arguments += _requantization(cx, accumulator_scale, channels)
    name = "quantized_depthwise_conv2d_nhwc" if is_depthwise else "quantized_conv2d_nhwc"
    return cx.emit.kernel(name, *arguments, cx.result.low, cx.result.high)


def _requantization(cx: Context, accumulator_scale: Array, channels: int) -> list[Node]:
    multiplier, shift = multipliers(accumulator_scale / float(cx.result.q.scale), channels)
    return [cx.emit.constant(multiplier, "multiplier"), cx.emit.constant(shift, "shift")]


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input)
def convolve_transposed(cx: Context) -> Value:
    """Transposed convolution of [N, C, (H,) W]. The kernel has neither groups nor dilation: weights of 0 stand in."""
    arguments = arguments_of(cx.node)
    spatial = cx.node.meta["val"].dim() - 2
    x, weight = cx.operand(arguments["input"]), _join_groups(cx.weight(arguments["weight"], 1), arguments["groups"])
    dilation = _pair(arguments["dilation"], spatial, 1)
    kernel = _dilate(weight.data if spatial == 2 else weight.data[:, :, None, :], dilation)
    channels = kernel.shape[1]
    accumulator_scale = x.scale * weight.scale
    bias = cx.bias(arguments["bias"], accumulator_scale, channels)
    bias_data = np.zeros(channels, np.int32) if bias is None else bias
    node = cx.emit.kernel(
        "quantized_transpose_conv2d_nhwc",
        _image(cx, x),
        cx.emit.constant(kernel.transpose(1, 2, 3, 0), "weight"),
        cx.emit.constant(bias_data, "bias"),
        _pair(arguments["stride"], spatial, 1),
        _pair(arguments["padding"], spatial, 0),
        _pair(arguments["output_padding"], spatial, 0),
        [1, 1],
        -x.zero_point,
        cx.result.q.zero_point,
        *_requantization(cx, accumulator_scale, channels),
        cx.result.low,
        cx.result.high,
    )
    if spatial == 2:
        return cx.computed(node, _NHWC)
    n, _, length, _ = node.meta["val"].shape
    return cx.computed(cx.emit.reshape(node, (n, length, channels)), _NLC)


def _join_groups(weight: Weight, groups: int) -> Weight:
    """The weight [IC, OC, ...] without groups of a transposed convolution's weight [IC, OC / groups, ...].

    Raises:
        Unsupported: too many groups.
    """
    if groups > _MAX_JOINED_GROUPS:
        raise Unsupported(
            f"the kernel of transposed convolutions has no groups, and {groups} groups would need {groups} times the "
            f"weights (up to {_MAX_JOINED_GROUPS} groups are joined)"
        )
    rows, columns, *rest = weight.data.shape
    data = np.zeros((groups, rows // groups, groups, columns, *rest), np.int8)
    for group, part in enumerate(np.split(weight.data, groups)):
        data[group, :, group] = part
    scale = np.tile(weight.scale, groups) if weight.scale.ndim else weight.scale
    return Weight(data.reshape(rows, groups * columns, *rest), scale)


def _dilate(kernel: Array, dilation: list[int]) -> Array:
    """Insert zeros between the elements of a weight [IC, OC, KH, KW]."""
    sizes = [(size - 1) * step + 1 for size, step in zip(kernel.shape[2:], dilation, strict=True)]
    data = np.zeros((*kernel.shape[:2], *sizes), np.int8)
    data[:, :, :: dilation[0], :: dilation[1]] = kernel
    return data


@rule(aten.linear.default)
def multiply_by_weight(cx: Context) -> Value:
    """Linear layer of [..., IC] and a weight [OC, IC].

    With per-channel scales, it is a 1x1 convolution: ``quantized_linear`` has one multiplier for all channels.
    """
    arguments = arguments_of(cx.node)
    x, weight = cx.operand(arguments["input"]), cx.weight(arguments["weight"], 0)
    last = x.rank - 1
    layout = x.layout if x.layout[-1] == last else tuple(range(x.rank))
    stored = cx.emit.store(x, layout)
    shape: Sequence[int] = stored.meta["val"].shape
    channels, in_channels = weight.data.shape
    if weight.scale.ndim == 0 or np.all(weight.scale == weight.scale.flat[0]):
        node = _multiply_per_tensor(cx, x, stored, weight, arguments["bias"])
        return cx.computed(node, layout)
    rows = cx.emit.reshape(stored, (1, 1, int(np.prod(shape[:-1])), in_channels))
    kernel, window = Weight(weight.data[:, :, None, None], weight.scale), _Window([1, 1], (0, 0, 0, 0), [1, 1])
    node = _convolve_image(cx, x, rows, kernel, arguments["bias"], window, 1)
    return cx.computed(cx.emit.reshape(node, (*shape[:-1], channels)), layout)


def _multiply_per_tensor(cx: Context, x: Value, stored: Node, weight: Weight, bias: Any) -> Node:
    scale = x.scale * float(weight.scale.flat[0])
    channels = weight.data.shape[0]
    bias_data = cx.bias(bias, np.asarray(scale), channels)
    multiplier, shift = single_multiplier(scale / float(cx.result.q.scale))
    bias_node = sums_node = None
    if cx.isa is Isa.MVE:  # the MVE kernel reads sums of the weights, which contain the bias, and ignores the bias
        sums = -x.zero_point * weight.data.astype(np.int64).sum(1) + (0 if bias_data is None else bias_data)
        sums_node = cx.emit.constant(sums.astype(np.int32)[None], "weight_sums")
    elif bias_data is not None:
        bias_node = cx.emit.constant(bias_data, "bias")
    limits = cx.result.high, cx.result.low  # the schema has the upper limit first
    return cx.emit.kernel(
        "quantized_linear",
        *(stored, cx.emit.constant(weight.data, "weight"), bias_node, sums_node),
        *(-x.zero_point, 0, cx.result.q.zero_point, [multiplier], [shift], *limits),
    )


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def multiply_matrices(cx: Context) -> Value:
    """Product of two computed tensors [..., M, K] and [..., K, N]."""
    first, second = (cx.operand(argument) for argument in cx.node.args[:2])
    if min(first.rank, second.rank) < 2:
        raise Unsupported("the kernel multiplies matrices, and an operand is a vector")
    *batch, rows, columns = cx.node.meta["val"].shape
    depth, batch_size = first.shape[-1], int(np.prod(batch))
    swapped = (*range(second.rank - 2), second.rank - 1, second.rank - 2)
    left, right = cx.emit.store_plain(first), cx.emit.store(second, swapped)
    left = cx.emit.expand(_with_rank(cx, left, len(batch) + 2), (*batch, rows, depth))
    right = cx.emit.expand(_with_rank(cx, right, len(batch) + 2), (*batch, columns, depth))
    multiplier, shift = single_multiplier(first.scale * second.scale / float(cx.result.q.scale))
    node = cx.emit.kernel(
        "quantized_batch_matmul",
        *(cx.emit.reshape(left, (batch_size, rows, depth)), -first.zero_point),
        *(cx.emit.reshape(right, (batch_size, columns, depth)), -second.zero_point),
        *(cx.result.q.zero_point, multiplier, shift),
    )
    return cx.clamp(cx.computed(cx.emit.reshape(node, (*batch, rows, columns))))


def _with_rank(cx: Context, node: Node, rank: int) -> Node:
    shape = tuple(node.meta["val"].shape)
    return cx.emit.reshape(node, (*(1,) * (rank - len(shape)), *shape))
