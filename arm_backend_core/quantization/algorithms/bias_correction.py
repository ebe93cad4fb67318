"""Bias correction: subtract from the bias the mean output error that weight quantization causes.

With weights w + e instead of w, a sum over inputs x has the mean error sum(e * mean(x)). Behind a relu, where means are
not 0, this mean error is most of the error of weight quantization (Nagel et al. 2019, "Data-Free Quantization Through
Weight Equalization and Bias Correction"). This module measures mean(x) on the calibration samples.
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
from arm_backend_core.ops.catalog import find_record, has_shared_qparams
from arm_backend_core.quantization.graph_observers import find_observed_weight
from arm_backend_core.quantization.ptq import CHUNK_ELEMENTS, ObservedProgram


@dataclass(frozen=True)
class _WeightUse:
    """Operators of one model that share a weight, and share a bias or have none."""

    model: ObservedProgram
    weight: Node
    bias: Node | None
    nodes: list[Node]

    @property
    def key(self) -> Hashable:
        """Key of weight and bias, the same in all methods that share these tensors."""
        return tuple(_tensor_key(self.model, node) for node in (self.weight, self.bias) if node is not None)

    @property
    def bias_identity(self) -> Hashable:
        """Identity of the bias among the model's tensors; None if there is no bias, or if a pass created the bias."""
        return None if self.bias is None else self.model.tensor_ids.get(self.bias)

    @property
    def owns_bias(self) -> bool:
        """Whether no operator besides ``nodes`` reads the bias."""
        return self.bias is None or self.bias.users.keys() == set(self.nodes)


class BiasCorrection:
    """Records the mean inputs of operators with quantized weights during calibration, then corrects their biases.

    An operator without a bias gets a bias, because the target adds a bias in any case. Three kinds of operators are not
    corrected:

    - operators whose bias belongs to several weights, or is also read elsewhere in the model,
    - operators whose result an RMS norm reads. For an input row of zeros, quantized weights cause no error. The
      correction would add an error, which the norm would amplify,
    - operators without a bias in a recurrent layer: a bias would cost an ADD in each time step.

    The methods of a program share the bias of a layer, so the bias is corrected for the mean input over all methods.
    """

    def __init__(self, models: Sequence[ObservedProgram]) -> None:
        groups: dict[Hashable, list[_WeightUse]] = {}
        for model in models:
            # Layers of one model that share tensors have equal keys. This count keeps them in separate groups.
            use_counts = Counter[Hashable]()
            for use in _find_uses(model):
                key = use.key if len(models) > 1 else (use.weight, use.bias)  # nodes, because hashing values takes time
                groups.setdefault((key, use_counts[key]), []).append(use)
                use_counts[key] += 1
        exclusive_biases = {use.bias for uses in groups.values() for use in uses if use.owns_bias}
        read_elsewhere = {
            key
            for model in models
            for node, key in model.tensor_ids.items()
            if node.users and node not in exclusive_biases
        }
        self._layers: list[tuple[list[_WeightUse], _ChannelMean]] = []
        for uses in groups.values():
            if all(use.owns_bias and use.bias_identity not in read_elsewhere for use in uses):
                mean = _ChannelMean(axis=1 - uses[0].weight.meta["val"].dim())
                self._layers.append((uses, mean))
                for use in uses:
                    sources = dict.fromkeys(_operand(node, 0) for node in use.nodes)
                    use.model.value_hooks += [(source, mean) for source in sources]

    def apply(self) -> None:
        """Correct the biases. Call this after calibration, and before the models are quantized."""
        for uses, mean in self._layers:
            if mean.count:
                old, new = _correct_bias(uses[0], mean)
                for use in uses:
                    _set_bias(use, old, new)


def _find_uses(model: ObservedProgram) -> Iterator[_WeightUse]:
    uses: dict[tuple[Node, Node | None], _WeightUse] = {}
    for node in model.graph.nodes:
        operands = _find_quantized_operands(model, node)
        if operands is not None:
            uses.setdefault(operands, _WeightUse(model, *operands, [])).nodes.append(node)
    yield from uses.values()


def _tensor_key(model: ObservedProgram, node: Node) -> Hashable:
    """Return the identity of a model's tensor. For a tensor that a pass created, return a hash of its values."""
    if node in model.tensor_ids:
        return model.tensor_ids[node]
    tensor: Tensor = attrgetter(str(node.target))(model.graph_module).detach()
    return tuple(tensor.shape), hashlib.sha256(tensor.contiguous().numpy().data).digest()


def _correct_bias(use: _WeightUse, mean: _ChannelMean) -> tuple[Tensor, Tensor]:
    """Return the bias before and after the correction; zeros before the correction if the operator has no bias."""
    mean_error = _mean_output_error(use.model, use.weight, use.nodes[0], mean)
    if use.bias is None:
        old = torch.zeros(len(mean_error), dtype=torch.float32)
    else:
        old = attrgetter(str(use.bias.target))(use.model.graph_module)
    return old, (old.detach().double() - mean_error).to(old.dtype)


def _mean_output_error(model: ObservedProgram, weight: Node, node: Node, mean: _ChannelMean) -> Tensor:
    """Compute the mean error that quantization of the weight causes, for each output channel."""
    name = str(weight.target)
    current = attrgetter(name)(model.graph_module).detach()
    float_weight = model.original_values.get(name, current).detach()
    observer = model.observers[weight, node]
    scale = observer.calculate_qparams()[0].to(float_weight.dtype).reshape(-1, *[1] * (float_weight.dim() - 1))
    scale = scale.expand(len(float_weight), *scale.shape[1:])
    inputs = (mean.total / mean.count).reshape(-1, float_weight.shape[1])
    group = torch.arange(len(float_weight)) * len(inputs) // len(float_weight)
    mean_error = torch.empty(len(float_weight), dtype=torch.float64)
    # In chunks: temporaries as large as the weights would fragment memory.
    for part in torch.arange(len(float_weight)).split(
        max(1, CHUNK_ELEMENTS * len(float_weight) // float_weight.numel())
    ):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        error = (current[rows] / scale[rows]).round_().clamp_(observer.quant_min, observer.quant_max)
        error = error.mul_(scale[rows]).sub_(float_weight[rows])
        error = error.reshape(*error.shape[:2], -1).sum(2, dtype=torch.float64)
        mean_error[rows] = (error * inputs[group[rows]]).sum(1)
    return mean_error


def _set_bias(use: _WeightUse, old: Tensor, new: Tensor) -> None:
    model, module, first = use.model, use.model.graph_module, use.nodes[0]
    if use.bias is not None and (use.bias, first) in model.observers:
        model.original_values[str(use.bias.target)] = old
        setattr(module, str(use.bias.target), new)
        return
    with model.graph.inserting_before(first):
        constant = add_buffer_node(module, f"{first.name}_corrected", new)
    model.float_constants[str(constant.target)] = old.detach()
    record = find_record(first)
    assert record is not None
    position = record.bias
    for node in use.nodes:
        node.args = (*node.args[:position], constant, *node.args[position + 1 :])


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
    """Return weight (output channels first) and bias of an operator whose bias may be corrected, else None.

    The weight must be quantized. The bias must be an attribute; outside of recurrent layers, it may also be missing. No
    RMS norm may read the result.
    """
    record, observed = find_record(node), find_observed_weight(model.observers, node)
    if record is None or observed is None or _is_read_by_rms_norm(node):
        return None
    weight, bias = observed[0], node.args[record.bias] if len(node.args) > record.bias else None
    # In a time step of a recurrent layer, a new bias would cost an ADD.
    if bias is None and "bias" not in node.kwargs and TIMESTEP_SLOT not in node.meta:
        return weight, None
    return (weight, bias) if isinstance(bias, Node) and bias.op == "get_attr" else None


def _is_read_by_rms_norm(node: Node) -> bool:
    """Whether an RMS norm reads the node, directly or through data movement."""
    readers = readers_through(node, has_shared_qparams)
    return any(reader.target is torch.ops.aten.rms_norm.default for reader in readers)


def _operand(node: Node, position: int) -> Node:
    operand = node.args[position]
    assert isinstance(operand, Node)
    return operand
