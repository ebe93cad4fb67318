"""Cross-layer equalization: rescale the channels between two layers to similar ranges.

An activation has one scale for all channels, so a channel with a small range gets few levels. If only relu or pooling
is between two layers, output channel j of the first layer is divided by s_j. The weights of the second layer that read
this channel are multiplied by s_j. The function of the model does not change. s_j = sqrt(r_j / w_j) equalizes the
range r_j of the channel and the largest weight w_j that reads it (Nagel et al. 2019; behind a norm this is SmoothQuant,
Xiao et al. 2022). Ranges are estimated from the parameters, not from calibration: a few samples do not show the
range of a channel reliably, and values beyond the estimate would be clipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.graph_edits import insert_call
from arm_backend_core.nodes import is_float
from arm_backend_core.program import constants_of, store_of, tensor_identity

aten = torch.ops.aten
#: Layers are equalized if the ratio of the largest to the smallest factor s_j is at least this. Equalization by
#: factors with a smaller ratio does not reduce the error on average.
_MIN_FACTOR_RATIO = 4.0
#: Factors are clamped to [1 / 64, 64].
_MAX_FACTOR = 64.0
#: A concatenation is equalized if the largest weights of two operands differ by at least this factor.
_MIN_CONCAT_RATIO = 8.0
#: Assumed range of a normalized channel, in standard deviations.
_NORM_RANGE = 3.0
#: {layer: channel dimension of its input and output}, for layers whose weight has the output channels first.
_LAYERS: dict[Any, int] = {
    aten.linear.default: -1,
    aten.conv1d.default: 1,
    aten.conv2d.default: 1,
    aten.conv3d.default: 1,
}
#: {norm: channel dimension of its input and output}.
_NORMS: dict[Any, int] = {aten.batch_norm.default: 1, aten.layer_norm.default: -1, aten.rms_norm.default: -1}
#: Operators with f(x / s) = f(x) / s for positive s in each channel.
_EQUIVARIANT_OPS = {
    *(aten.relu.default, aten.relu_.default, aten.leaky_relu.default, aten.leaky_relu_.default),
    *(aten.max_pool1d.default, aten.max_pool2d.default, aten.avg_pool1d.default, aten.avg_pool2d.default),
    *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.dropout.default, aten.dropout_.default),
}


def equalize(program: ExportedProgram, names: Collection[str] | None = None) -> None:
    """Equalize the parameters of a program; the tensors of the model do not change.

    Args:
        names: parameters that may change; None for all. Concatenations are equalized only if ``names`` is None, because
            their equalization inserts operators into the program.
    """
    tensors = _Parameters(program, names)
    for node in list(program.graph.nodes):
        if names is None and node.target is aten.cat.default:
            _equalize_concatenation(node, tensors)
        source = _match_source(node, tensors)
        readers = None if source is None else _find_reading_layers(node, source.axis, tensors)
        if source is None or not readers:
            continue
        factors = _compute_factors(_channel_range(source, tensors), _max_reading_weights(readers, tensors))
        if factors is not None:
            for parameter in (source.weight, source.bias):
                tensors.scale(parameter, 1 / factors, 0)
            for reader in readers:
                tensors.scale(reader.weight, factors, reader.channel_axis)


def _equalize_concatenation(node: Node, tensors: _Parameters) -> None:
    """Divide each operand of a concatenation by a power of two, and multiply the weights that read it by this power.

    The operands share a scale. If the weights that read one operand are much smaller than the others, training has
    adapted them to large values of this operand, for example raw statistics beside learned features. At the common
    scale, the other operands then have few levels. The requantization to the common scale also does the division, so
    the division costs nothing.
    """
    parts, axis = cast(Any, node.args[0]), cast(int, (*node.args, 0)[1])
    readers = _find_reading_layers(node, axis, tensors) if is_float(node) else None
    if not readers:
        return
    sizes = [part.meta["val"].shape[axis] for part in parts]
    largest = [float(part.max()) for part in _max_reading_weights(readers, tensors).split(sizes)]
    if min(largest) <= 0 or max(largest) < _MIN_CONCAT_RATIO * min(largest):
        return
    exponents = [round(math.log2(max(largest) / one)) for one in largest]
    factors = torch.cat([torch.full((size,), 2.0**n) for size, n in zip(sizes, exponents, strict=True)])
    for reader in readers:
        tensors.scale(reader.weight, factors, reader.channel_axis)
    with node.graph.inserting_before(node):
        scaled = [
            insert_call(part, aten.mul.Tensor, part, 2.0**-n) if n else part
            for part, n in zip(parts, exponents, strict=True)
        ]
    node.args = (scaled, *node.args[1:])


def equalize_model(program: ExportedProgram, model: Mapping[str, Tensor]) -> None:
    """Equalize the parameters of a model together with its program, before the model is trained.

    Args:
        model: parameters and buffers, by name, of the model from which the program was captured. They are overwritten.
    """
    before = {name: tensor for name, tensor in program.state_dict.items() if name in model}
    equalize(program, before)
    with torch.no_grad():
        for name, tensor in before.items():
            if program.state_dict[name] is not tensor:
                model[name].copy_(program.state_dict[name])
                program.state_dict[name] = tensor


@dataclass(frozen=True)
class _RescalableLayer:
    """A layer or norm whose output channels can be rescaled through its parameters.

    Attributes:
        axis: channel dimension of its output.
    """

    weight: Node
    bias: Node | None
    axis: int
    is_norm: bool


@dataclass(frozen=True)
class _ReadingLayer:
    """A layer that reads a tensor.

    Attributes:
        channel_axis: the dimension of its weight that corresponds to the tensor's channels.
        gain: factors by which a following batch norm multiplies the output channels.
    """

    weight: Node
    channel_axis: int
    gain: Tensor


class _Parameters:
    """Current values of the parameters, buffers and constants that exactly one operator reads."""

    def __init__(self, program: ExportedProgram, names: Collection[str] | None) -> None:
        self._program, self._constants = program, constants_of(program)
        constants = self._constants
        counts = Counter(tensor_identity(tensor) for tensor in constants.values())
        self._names = {
            spec.arg.name: str(spec.target)
            for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes, strict=False)
            if node in constants and len(node.users) == 1 and counts[tensor_identity(constants[node])] == 1
        }
        if names is not None:
            self._names = {node: name for node, name in self._names.items() if name in names}

    def is_scalable(self, node: Any) -> bool:
        """Whether the node is a float32 tensor of the program that exactly one operator reads, and that may change."""
        return isinstance(node, Node) and node.name in self._names and self.value(node).dtype is torch.float32

    def value(self, node: Node) -> Tensor:
        """Return the current value of a parameter."""
        name = self._names[node.name]
        tensor: Tensor = store_of(self._program, name)[name]
        return tensor.detach()

    def gain(self, layer: Node) -> Tensor:
        """Return the factor per channel of the batch norm that is the only reader of a layer.

        The factor is 1 if there is no such batch norm, or if its variance is no constant. The result can be broadcast
        to the weight of the layer.
        """
        readers = list(layer.users)
        if [reader.target for reader in readers] != [aten.batch_norm.default]:
            return torch.ones(1)
        args: Any = readers[0].args
        weight, variance, eps = args[1], self._constants.get(args[4]), args[7]
        if variance is None:
            return torch.ones(1)
        gain = torch.rsqrt(variance.detach() + eps) * (self.value(weight).abs() if self.is_scalable(weight) else 1.0)
        rank = cast(Any, layer.args[1]).meta["val"].dim()
        return gain.reshape(-1, *[1] * (rank - 1))

    def scale(self, node: Node | None, factors: Tensor, axis: int) -> None:
        """Multiply a parameter by ``factors`` along ``axis``."""
        if node is not None:
            name, tensor = self._names[node.name], self.value(node)
            shape = [-1 if i == axis else 1 for i in range(tensor.dim())]
            scaled = tensor * factors.reshape(shape)
            table = store_of(self._program, name)
            if isinstance(table[name], torch.nn.Parameter):
                scaled = torch.nn.Parameter(scaled, requires_grad=False)
            table[name] = scaled


def _match_source(node: Node, tensors: _Parameters) -> _RescalableLayer | None:
    args: Any = (*node.args, None, None, None)
    if node.kwargs or (node.target not in _NORMS and node.target not in _LAYERS):
        return None
    weight_position = 1 if node.target in _LAYERS or node.target is aten.batch_norm.default else 2
    weight, bias = args[weight_position], None if node.target is aten.rms_norm.default else args[weight_position + 1]
    if not tensors.is_scalable(weight) or not (bias is None or tensors.is_scalable(bias)):
        return None
    if weight_position == 2 and len(args[1]) != 1:  # a norm over several dimensions
        return None
    return _RescalableLayer(weight, bias, (_LAYERS | _NORMS)[node.target], node.target in _NORMS)


def _find_reading_layers(node: Node, axis: int, tensors: _Parameters) -> list[_ReadingLayer] | None:
    """Find the layers that read a tensor, also through ``_EQUIVARIANT_OPS``; None if another operator reads it."""
    layers: list[_ReadingLayer] = []
    for user in node.users:
        inner: Iterable[_ReadingLayer | None] | None
        inner = (
            _find_reading_layers(user, axis, tensors)
            if user.target in _EQUIVARIANT_OPS
            else [_match_layer(user, node, axis, tensors)]
        )
        if inner is None or None in inner:
            return None
        layers += [reader for reader in inner if reader is not None]
    return layers


def _match_layer(node: Node, source: Node, axis: int, tensors: _Parameters) -> _ReadingLayer | None:
    weight: Any = node.args[1] if len(node.args) > 1 else None
    layer_axis, rank = _LAYERS.get(cast(Any, node.target)), source.meta["val"].dim()
    if (
        layer_axis is None
        or layer_axis % rank != axis % rank
        or node.args[0] is not source
        or not tensors.is_scalable(weight)
    ):
        return None
    shape, channels = weight.meta["val"].shape, source.meta["val"].shape[axis]
    depthwise = shape[1] == 1 and shape[0] == channels
    if shape[1] != channels and not depthwise:
        return None
    return _ReadingLayer(weight, 0 if depthwise else 1, tensors.gain(node))


def _channel_range(source: _RescalableLayer, tensors: _Parameters) -> Tensor:
    """Estimate the range r_j of each channel, up to an unknown factor that is the same for all channels."""
    if not source.is_norm:
        return _max_abs(tensors.value(source.weight), 0)
    offset = torch.zeros(1) if source.bias is None else tensors.value(source.bias)
    return _NORM_RANGE * tensors.value(source.weight).abs() + offset.abs()


def _max_reading_weights(readers: Sequence[_ReadingLayer], tensors: _Parameters) -> Tensor:
    """Largest magnitude of the weights that read each channel, [channels]."""
    return torch.stack([_max_abs(tensors.value(x.weight) * x.gain, x.channel_axis) for x in readers]).amax(0)


def _max_abs(weight: Tensor, axis: int) -> Tensor:
    return weight.abs().movedim(axis, 0).flatten(1).amax(1)


def _compute_factors(channel_range: Tensor, max_weights: Tensor) -> Tensor | None:
    """Compute the factor s of each channel, divided by the geometric mean of all factors.

    The factor is 1 for channels without a positive range or weight.

    Returns:
        The factors, [channels]. None if they are all similar (``_MIN_FACTOR_RATIO``), or if no channel has a positive
        range and weight.
    """
    is_positive = (channel_range > 0) & (max_weights > 0)
    factors = (channel_range / max_weights)[is_positive].sqrt()
    if not len(factors) or float(factors.max() / factors.min()) < _MIN_FACTOR_RATIO:
        return None
    result = torch.ones_like(channel_range)
    result[is_positive] = (factors / factors.log().mean().exp()).clamp(1 / _MAX_FACTOR, _MAX_FACTOR)
    return result
