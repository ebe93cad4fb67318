"""What rounding the weights adds to an operator's sums on average is taken off its bias.

With weights w + e in place of w, a sum over inputs x is off by the sum of e * mean(x) in every sample. Behind a relu,
where means are not 0, that is most of the error that rounding the weights makes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.nodes import TIMESTEP_SLOT, attribute
from arm_backend_core.ops.catalog import find, is_data_movement
from arm_backend_core.ops.registry import Kind
from arm_backend_core.quantization.graph_interpreter import readers_through
from arm_backend_core.quantization.observer import WeightObserver
from arm_backend_core.quantization.ptq import CHUNK_ELEMENTS, ObservedProgram


@dataclass(frozen=True)
class _Use:
    """Operators of one model that have a weight and a bias, or none, in common."""

    model: ObservedProgram
    weight: Node
    bias: Node | None
    nodes: list[Node]

    @property
    def key(self) -> Hashable:
        """The same for another method's use of these tensors."""
        return tuple(_tensor_key(self.model, node) for node in (self.weight, self.bias) if node is not None)

    @property
    def bias_tensor(self) -> Hashable:
        """Which of the user's tensors the bias is, None if it is none of these."""
        return None if self.bias is None else self.model.tensor_ids.get(self.bias)

    @property
    def owns_bias(self) -> bool:
        """Whether nothing else reads the bias."""
        return self.bias is None or self.bias.users.keys() == set(self.nodes)


class BiasCorrection:
    """Watches what operators with quantized weights read while samples run, then corrects their biases.

    One that has none gets one: the target adds a bias in any case. A bias that several weights share, or that the model
    reads elsewhere too, is left alone, and so is one before an RMS norm: that makes much of the little that would be
    added to a row of zeros, where rounded weights err by nothing. Methods have one bias for one layer, corrected for
    the mean of what all of them read.
    """

    def __init__(self, models: Sequence[ObservedProgram]) -> None:
        groups: dict[Hashable, list[_Use]] = {}
        for model in models:
            seen = Counter[Hashable]()  # within a model, layers are corrected one by one
            for use in _find_uses(model):
                groups.setdefault((use.key, seen[use.key]), []).append(use)
                seen[use.key] += 1
        whole = {use.bias for uses in groups.values() for use in uses if use.owns_bias}
        elsewhere = {
            key for model in models for node, key in model.tensor_ids.items() if node.users and node not in whole
        }
        self._layers: list[tuple[list[_Use], _ChannelMean]] = []
        for uses in groups.values():
            if all(use.owns_bias and use.bias_tensor not in elsewhere for use in uses):
                mean = _ChannelMean(axis=1 - uses[0].weight.meta["val"].dim())
                self._layers.append((uses, mean))
                for use in uses:
                    sources = dict.fromkeys(_operand(node, 0) for node in use.nodes)
                    use.model.watchers += [(source, mean) for source in sources]

    def apply(self) -> None:
        """Correct the biases, after the samples and before the models are quantized."""
        for uses, mean in self._layers:
            if mean.count:
                old, new = _correct_bias(uses[0], mean)
                for use in uses:
                    _set_bias(use, old, new)


def _find_uses(model: ObservedProgram) -> Iterator[_Use]:
    uses: dict[tuple[Node, Node | None], _Use] = {}
    for node in model.graph.nodes:
        operands = _find_quantized_operands(model, node)
        if operands is not None:
            uses.setdefault(operands, _Use(model, *operands, [])).nodes.append(node)
    yield from uses.values()


def _tensor_key(model: ObservedProgram, node: Node) -> Hashable:
    """Which tensor of the user's model it is; of one that was made of these, as by folding a norm, what it holds."""
    if node in model.tensor_ids:
        return model.tensor_ids[node]
    tensor: Tensor = attrgetter(str(node.target))(model.model).detach()
    return tuple(tensor.shape), hashlib.sha256(tensor.contiguous().numpy().data).digest()


def _correct_bias(use: _Use, mean: _ChannelMean) -> tuple[Tensor, Tensor]:
    """The bias as it was and as it is to be."""
    shift = _mean_output_error(use.model, use.weight, use.nodes[0], mean)
    if use.bias is None:
        old = torch.zeros(len(shift), dtype=torch.float32)
    else:
        old = attrgetter(str(use.bias.target))(use.model.model)
    return old, (old.detach().double() - shift).to(old.dtype)


def _mean_output_error(model: ObservedProgram, weight: Node, node: Node, mean: _ChannelMean) -> Tensor:
    """What each output channel is off by."""
    name = str(weight.target)
    given = attrgetter(name)(model.model).detach()
    exact = model.original_values.get(name, given).detach()
    observer = model.observers[weight, node]
    scale = observer.calculate_qparams()[0].to(exact.dtype).reshape(-1, *[1] * (exact.dim() - 1))
    scale = scale.expand(len(exact), *scale.shape[1:])
    inputs = (mean.total / mean.count).reshape(-1, exact.shape[1])
    group = torch.arange(len(exact)) * len(inputs) // len(exact)
    shift = torch.empty(len(exact), dtype=torch.float64)
    # By parts: what a large weight takes as a whole is laid out behind the last one's, and memory is in pieces.
    for part in torch.arange(len(exact)).split(max(1, CHUNK_ELEMENTS * len(exact) // exact.numel())):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        error = (given[rows] / scale[rows]).round_().clamp_(observer.quant_min, observer.quant_max)
        error = error.mul_(scale[rows]).sub_(exact[rows])
        error = error.reshape(*error.shape[:2], -1).sum(2, dtype=torch.float64)
        shift[rows] = (error * inputs[group[rows]]).sum(1)
    return shift


def _set_bias(use: _Use, old: Tensor, new: Tensor) -> None:
    model, module, first = use.model, use.model.model, use.nodes[0]
    if use.bias is not None and (use.bias, first) in model.observers:
        model.original_values[str(use.bias.target)] = old
        setattr(module, str(use.bias.target), new)
        return
    with model.graph.inserting_before(first):
        constant = attribute(module, f"{first.name}_corrected", new)
    model.float_constants[str(constant.target)] = old.detach()
    record = find(first)
    assert record is not None
    place = record.bias
    for node in use.nodes:
        node.args = (*node.args[:place], constant, *node.args[place + 1 :])


class _ChannelMean:
    """The mean of a tensor over the samples, for each channel along ``axis``."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.total, self.count = torch.zeros(1, dtype=torch.float64), 0

    def __call__(self, x: Tensor) -> None:
        others = [axis for axis in range(x.dim()) if axis != self._axis % x.dim()]
        self.total = self.total + (x.sum(others) if others else x).double()
        self.count += x.numel() // x.shape[self._axis]


def _find_quantized_operands(model: ObservedProgram, node: Node) -> tuple[Node, Node | None] | None:
    """Weight and bias of an operator whose weight is quantized, output channels first."""
    record = find(node)
    if record is None or record.kind is not Kind.CONV or record.weight_axis(node):
        return None
    if _is_normalized(node):
        return None
    weight, bias = _operand(node, record.weight), node.args[record.bias] if len(node.args) > record.bias else None
    if not isinstance(model.observers.get((weight, node)), WeightObserver) or weight.op != "get_attr":
        return None
    if (
        bias is None and "bias" not in node.kwargs and TIMESTEP_SLOT not in node.meta
    ):  # a step's sums would each cost an ADD
        return weight, None
    return (weight, bias) if isinstance(bias, Node) and bias.op == "get_attr" else None


def _is_normalized(node: Node) -> bool:
    """Whether an RMS norm reads it, or what is moved from it."""
    readers = readers_through(node, is_data_movement)
    return any(reader.target is torch.ops.aten.rms_norm.default for reader in readers)


def _operand(node: Node, place: int) -> Node:
    operand = node.args[place]
    assert isinstance(operand, Node)
    return operand
