"""Bias correction: subtract the mean quantization error of the weights' products from the bias.

With weights w + e instead of w, a sum over inputs x has the mean error sum(e * mean(x)). Behind a relu, where means are
not 0, that is most of the error of weight quantization (Nagel et al. 2019, "Data-Free Quantization Through Weight
Equalization and Bias Correction"; here mean(x) is measured on the calibration samples).
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

from arm_backend_core.graph_edits import add_buffer_node
from arm_backend_core.nodes import TIMESTEP_SLOT, readers_through
from arm_backend_core.ops.catalog import find_record, is_data_movement
from arm_backend_core.quantization.graph_observers import find_observed_weight
from arm_backend_core.quantization.ptq import CHUNK_ELEMENTS, ObservedProgram


@dataclass(frozen=True)
class _Use:
    """Operators of one model that share a weight and a bias (or have no bias)."""

    model: ObservedProgram
    weight: Node
    bias: Node | None
    nodes: list[Node]

    @property
    def key(self) -> Hashable:
        """Key of the tensors, equal for another method's use of the same tensors."""
        return tuple(_tensor_key(self.model, node) for node in (self.weight, self.bias) if node is not None)

    @property
    def bias_tensor(self) -> Hashable:
        """Identity of the bias among the user's tensors; None if it is not one of them."""
        return None if self.bias is None else self.model.tensor_ids.get(self.bias)

    @property
    def owns_bias(self) -> bool:
        """Whether only these operators read the bias."""
        return self.bias is None or self.bias.users.keys() == set(self.nodes)


class BiasCorrection:
    """Records the mean inputs of operators with quantized weights during calibration, then corrects their biases.

    An operator without a bias gets one; the target adds a bias in any case. Not corrected are:

    - a bias that several weights share, or that the model reads elsewhere too,
    - a bias in front of an RMS norm. On a row of zeros quantized weights have no error, so the correction would add
      one, and the norm would amplify it.

    Methods share one bias for a layer, corrected for the mean over the inputs of all methods.
    """

    def __init__(self, models: Sequence[ObservedProgram]) -> None:
        groups: dict[Hashable, list[_Use]] = {}
        for model in models:
            seen = Counter[Hashable]()  # within a model, layers are corrected one by one
            for use in _find_uses(model):
                groups.setdefault((use.key, seen[use.key]), []).append(use)
                seen[use.key] += 1
        owned = {use.bias for uses in groups.values() for use in uses if use.owns_bias}
        read_elsewhere = {
            key for model in models for node, key in model.tensor_ids.items() if node.users and node not in owned
        }
        self._layers: list[tuple[list[_Use], _ChannelMean]] = []
        for uses in groups.values():
            if all(use.owns_bias and use.bias_tensor not in read_elsewhere for use in uses):
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
    """Return the identity of the user's tensor; for a derived tensor, such as a folded one, a hash of its values."""
    if node in model.tensor_ids:
        return model.tensor_ids[node]
    tensor: Tensor = attrgetter(str(node.target))(model.model).detach()
    return tuple(tensor.shape), hashlib.sha256(tensor.contiguous().numpy().data).digest()


def _correct_bias(use: _Use, mean: _ChannelMean) -> tuple[Tensor, Tensor]:
    """Return the bias and the corrected bias."""
    shift = _mean_output_error(use.model, use.weight, use.nodes[0], mean)
    if use.bias is None:
        old = torch.zeros(len(shift), dtype=torch.float32)
    else:
        old = attrgetter(str(use.bias.target))(use.model.model)
    return old, (old.detach().double() - shift).to(old.dtype)


def _mean_output_error(model: ObservedProgram, weight: Node, node: Node, mean: _ChannelMean) -> Tensor:
    """Compute the mean error of each output channel that the quantized weight causes."""
    name = str(weight.target)
    current = attrgetter(name)(model.model).detach()
    exact = model.original_values.get(name, current).detach()
    observer = model.observers[weight, node]
    scale = observer.calculate_qparams()[0].to(exact.dtype).reshape(-1, *[1] * (exact.dim() - 1))
    scale = scale.expand(len(exact), *scale.shape[1:])
    inputs = (mean.total / mean.count).reshape(-1, exact.shape[1])
    group = torch.arange(len(exact)) * len(inputs) // len(exact)
    shift = torch.empty(len(exact), dtype=torch.float64)
    # In chunks: temporaries as large as the weights would fragment memory.
    for part in torch.arange(len(exact)).split(max(1, CHUNK_ELEMENTS * len(exact) // exact.numel())):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        error = (current[rows] / scale[rows]).round_().clamp_(observer.quant_min, observer.quant_max)
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
        constant = add_buffer_node(module, f"{first.name}_corrected", new)
    model.float_constants[str(constant.target)] = old.detach()
    record = find_record(first)
    assert record is not None
    place = record.bias
    for node in use.nodes:
        node.args = (*node.args[:place], constant, *node.args[place + 1 :])


class _ChannelMean:
    """Accumulates the mean of a tensor over the samples, for each channel along ``axis``."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.total, self.count = torch.zeros(1, dtype=torch.float64), 0

    def __call__(self, x: Tensor) -> None:
        others = [axis for axis in range(x.dim()) if axis != self._axis % x.dim()]
        self.total = self.total + (x.sum(others) if others else x).double()
        self.count += x.numel() // x.shape[self._axis]


def _find_quantized_operands(model: ObservedProgram, node: Node) -> tuple[Node, Node | None] | None:
    """Return weight (output channels first) and bias of an operator with a quantized weight; else None."""
    record, observed = find_record(node), find_observed_weight(model.observers, node)
    if record is None or observed is None or _is_normalized(node):
        return None
    weight, bias = observed[0], node.args[record.bias] if len(node.args) > record.bias else None
    if (
        bias is None and "bias" not in node.kwargs and TIMESTEP_SLOT not in node.meta
    ):  # in a time step, each bias would cost an ADD
        return weight, None
    return (weight, bias) if isinstance(bias, Node) and bias.op == "get_attr" else None


def _is_normalized(node: Node) -> bool:
    """Whether an RMS norm reads the node, directly or through data movement."""
    readers = readers_through(node, is_data_movement)
    return any(reader.target is torch.ops.aten.rms_norm.default for reader in readers)


def _operand(node: Node, place: int) -> Node:
    operand = node.args[place]
    assert isinstance(operand, Node)
    return operand
