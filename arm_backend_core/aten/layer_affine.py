"""Affine functions of channels, y = gain[c] * x + offset[c]: fold them into layers, or emit them as layers.

An affine function of a layer's result or operand can be folded into the weight and bias of the layer. Any other affine
function can become a depthwise 1x1 convolution. This convolution has one weight per channel, which per-channel
quantization represents exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.graph_edits import add_buffer_node, insert_call
from arm_backend_core.nodes import arguments_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind

aten = torch.ops.aten
#: Key in the ``meta`` of a layer: the ``ChannelAffine`` that was folded into its weight and bias. In quantization-aware
#: training, normalizing by batch statistics cancels the function, which is therefore applied after the batch norm.
FOLDED_AFFINE = "arm_folded_affine"
_CONVOLUTIONS = (
    *(aten.conv1d.default, aten.conv2d.default, aten.conv1d.padding, aten.conv2d.padding),
    aten.convolution.default,
)
_RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)
#: Maximum ratio of the largest to the smallest gain that ``fold_into_consumer`` folds. The int8 weights of an output
#: channel have one scale for all input channels, so weights of an input channel with a small gain would lose bits.
_MAX_GAIN_RATIO = 2.0


@dataclass(frozen=True)
class ChannelAffine:
    """y = gain[c] * x + offset[c].

    Attributes:
        gain: [C]; None for 1.
        offset: [C]; None for 0.
    """

    gain: Tensor | None
    offset: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Gain and offset, if they are not None."""
        return [x for x in (self.gain, self.offset) if x is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> ChannelAffine:
        """Apply a function to gain and offset."""
        return ChannelAffine(*(None if x is None else function(x) for x in (self.gain, self.offset)))

    def followed_by(self, other: ChannelAffine) -> ChannelAffine:
        """Return the composition: apply this function, then ``other``."""
        gain, offset = self.gain, self.offset
        if other.gain is not None:
            gain = other.gain if gain is None else gain * other.gain
            offset = None if offset is None else offset * other.gain
        if other.offset is not None:
            offset = other.offset if offset is None else offset + other.offset
        return ChannelAffine(gain, offset)


def fold_into_producer(constants: Constants, layer: Node, affine: ChannelAffine, axis: int = 1) -> str | None:
    """Fold an affine function of the result of ``layer`` into its weight and bias.

    Args:
        constants: the constants of the edited module.
        layer: the node that computes the operand of the function.
        affine: the function.
        axis: dimension of the result of ``layer`` that has the channels.

    Returns:
        None if it is folded, else the reason why not.
    """
    record = find_record(layer)
    if record is None or record.kind is not AnnotationKind.CONV or layer.kwargs:
        return "no layer computes its operand"
    if len(layer.users) != 1:
        return "other operators read its operand"
    weight: Any = layer.args[record.weight]
    bias: Any = layer.args[record.bias] if len(layer.args) > record.bias else None
    if not _are_fixed(constants, weight, bias):
        return "the layer before it has weights that the graph computes or writes"
    result, kernel, weight_axis = layer.meta["val"], weight.meta["val"], record.weight_axis(layer)
    if axis % result.dim() != result.dim() - kernel.dim() + 1:
        return "its channels are not the output channels of the layer before it"
    if kernel.shape[weight_axis] != result.shape[axis]:
        return "the transposed convolution before it has groups"
    new_bias = None if bias is None else constants.value(bias)
    if new_bias is not None and affine.gain is not None:
        new_bias = new_bias * affine.gain
    if affine.offset is not None:
        new_bias = affine.offset if new_bias is None else affine.offset + new_bias
    shape = [-1 if i == weight_axis else 1 for i in range(kernel.dim())]
    new_weight = None if affine.gain is None else constants.value(weight) * affine.gain.reshape(shape)
    _set_parameters(constants, layer, weight, new_weight, new_bias)
    return None


def _are_fixed(constants: Constants, weight: Node, bias: Node | None) -> bool:
    """Whether weight and bias are attributes that the graph does not write."""
    return all(x.op == "get_attr" and x in constants for x in (weight, bias) if x is not None)


def _set_parameters(
    constants: Constants, layer: Node, weight: Node, new_weight: Tensor | None, new_bias: Tensor | None
) -> None:
    """Replace the weight and the bias of a layer; if a new value is None, the old one stays."""
    record = find_record(layer)
    assert record is not None
    arguments: list[Any] = list(layer.args) + [None] * (record.bias + 1 - len(layer.args))
    with layer.graph.inserting_before(layer):
        if new_weight is not None:
            arguments[record.weight] = add_buffer_node(constants.module, weight.name, new_weight)
        if new_bias is not None:
            arguments[record.bias] = add_buffer_node(constants.module, f"{weight.name}_offset", new_bias)
    layer.args = tuple(arguments)


def find_consumer_layer(node: Node) -> tuple[Node, Node | None] | None:
    """Find the convolution, or the linear layer behind a flattening, that is the only reader of ``node`` [N, C, ...].

    Returns:
        The layer, and the flattening if there is one. None if there is no such layer, or if ``node`` or the flattening
        has a second reader.
    """
    flattening, layer = None, next(iter(node.users), None)
    shape = node.meta["val"].shape
    if layer is not None and layer.target in _RESHAPES:
        if tuple(layer.meta["val"].shape) != (shape[0], math.prod(shape[1:])):
            return None
        flattening, layer = layer, next(iter(layer.users), None)
    targets = _CONVOLUTIONS if flattening is None else (aten.linear.default,)
    if layer is None or layer.target not in targets or len(node.users) != 1 or layer.kwargs:
        return None
    if (flattening or node) is not layer.args[0] or (flattening is not None and len(flattening.users) != 1):
        return None
    weight: Any = layer.args[1]
    if flattening is None and weight.meta["val"].dim() != len(shape):  # without a batch dimension
        return None
    return layer, flattening


def fold_into_consumer(constants: Constants, node: Node, layer: Node, affine: ChannelAffine) -> str | None:
    """Fold an affine function, whose result is ``node`` [N, C, ...], into the layer that reads ``node``.

    The caller then makes the layer read the operand of the function.

    Args:
        constants: the constants of the edited module.
        node: the result of the function.
        layer: from ``find_consumer_layer``.
        affine: the function.

    Returns:
        None if it is folded, else the reason why not.
    """
    arguments, gain, offset = arguments_of(layer), affine.gain, affine.offset
    weight, bias = arguments["weight"], arguments["bias"]
    if not _are_fixed(constants, weight, bias):
        return "the layer after it has weights that the graph computes or writes"
    kernel = weight.meta["val"]
    if arguments.get("transposed", False):
        return "the convolution after it is transposed"
    if offset is not None and _pads(arguments, kernel.shape[2:]):
        return "the convolution after it pads with zeros, to which its offset was not added"
    if gain is not None and not gain.abs().max() <= _MAX_GAIN_RATIO * gain.abs().min():
        return (
            f"its gains differ by more than a factor of {_MAX_GAIN_RATIO:g}: the int8 weights after it would lose bits"
        )
    value = constants.value(weight)
    new_bias = None if bias is None else constants.value(bias)
    if offset is not None:
        products = (value * _per_input(offset, node, kernel, arguments)).flatten(1).sum(1)
        new_bias = products if new_bias is None else new_bias + products
    new_weight = None if gain is None else value * _per_input(gain, node, kernel, arguments)
    _set_parameters(constants, layer, weight, new_weight, new_bias)
    return None


def _pads(arguments: dict[str, Any], kernel_size: torch.Size) -> bool:
    """Whether a convolution pads its input; False for a linear layer."""
    padding = arguments.get("padding", 0)
    if isinstance(padding, str):
        return padding != "valid" and max(kernel_size) > 1
    return any(padding) if isinstance(padding, (list, tuple)) else padding != 0


def _per_input(values: Tensor, node: Node, kernel: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Arrange values [C] of the input channels so that they broadcast against the weight of the layer.

    The weight is [O, C / groups, ...]; after a flattening, it is [O, C * n] for n elements per channel.
    """
    groups = arguments.get("groups", 1)
    per_group = values.repeat_interleave(kernel.shape[1] * groups // node.meta["val"].shape[1]).reshape(groups, -1)
    rows = per_group.repeat_interleave(kernel.shape[0] // groups, 0)
    return rows.reshape(*rows.shape, *[1] * (kernel.dim() - 2))


def insert_depthwise(constants: Constants, origin: Node, x: Node, affine: ChannelAffine) -> Node:
    """Emit an affine function of x [N, C, ...] as a depthwise 1x1 convolution, at the graph's insertion point.

    [N, C] is reshaped to [N, C, 1], and [N, C, D, H, W] to [N, C, D * H, W].

    Args:
        constants: the constants of the edited module.
        origin: the node that the result replaces.
        x: the operand.
        affine: the function.
    """
    shape = list(x.meta["val"].shape)
    needs_reshape = len(shape) in (2, 5)
    spatial = [math.prod(shape[2:-1]), *shape[4:]] if needs_reshape else shape[2:]
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    gain = torch.ones(shape[1]) if affine.gain is None else affine.gain
    weight = add_buffer_node(constants.module, f"{origin.name}_gain", gain.reshape(-1, 1, *ones))
    bias = None
    if affine.offset is not None:
        bias = add_buffer_node(constants.module, f"{origin.name}_offset", affine.offset)
    operator = aten.conv1d.default if len(spatial) == 1 else aten.conv2d.default
    image = insert_call(origin, aten.reshape.default, x, [*shape[:2], *spatial]) if needs_reshape else x
    result = insert_call(origin, operator, image, weight, bias, ones, zeros, ones, shape[1])
    return insert_call(origin, aten.reshape.default, result, shape) if needs_reshape else result
