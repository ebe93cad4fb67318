"""What rounding the weights adds to an operator's sums on average is taken off its bias.

With weights w + e in place of w, a sum over inputs x is off by the sum of e * mean(x) in every sample. Behind a relu,
where means are not 0, that is most of the error of weights of four bits.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.ops.registry import Kind, find
from arm_backend_core.quantizer.observer import FEW, WeightObserver
from arm_recipes.stages.post_training import Observed


class BiasCorrection:
    """Watches what operators with weights of few levels read while samples run, then corrects their biases.

    A bias that stays in floating point is left alone: the program has it as the model does. So is one that several
    weights share, or that the model reads elsewhere too.
    """

    def __init__(self, model: Observed) -> None:
        self._model = model
        self._means: dict[Node, _Mean] = {}
        readers: dict[Node, list[Node]] = {}
        for node in model.graph.nodes:
            if (bias := _rounded_bias(model, node)) is not None:
                readers.setdefault(bias, []).append(node)
        for bias, nodes in readers.items():
            weights = {_weight(node) for node in nodes}
            if len(weights) == 1 and bias.users.keys() == set(nodes):
                self._means[bias] = mean = _Mean(axis=1 - weights.pop().meta["val"].dim())
                model.watchers += [(source, mean) for source in dict.fromkeys(_activation(node) for node in nodes)]

    def apply(self) -> None:
        """Correct the biases, after the samples and before the model is quantized."""
        module = self._model.model
        for bias, mean in self._means.items():
            node = next(iter(bias.users))
            weight = attrgetter(str(_weight(node).target))(module).detach().double()
            observer = self._model.observers[_weight(node), node]
            scale = observer.calculate_qparams()[0].double().reshape(-1, *[1] * (weight.dim() - 1))
            error = (weight / scale).round().clamp(observer.quant_min, observer.quant_max) * scale - weight
            error = error.reshape(*weight.shape[:2], -1).sum(2)
            groups = mean.total.numel() // weight.shape[1]
            inputs = (mean.total / max(mean.count, 1)).reshape(groups, 1, -1)
            shift = (error.reshape(groups, -1, weight.shape[1]) * inputs).sum(2).flatten()
            tensor = attrgetter(str(bias.target))(module)
            self._model.corrected[str(bias.target)] = tensor
            setattr(module, str(bias.target), (tensor.detach().double() - shift).to(tensor.dtype))


class _Mean:
    """The mean of a tensor over the samples, for each channel along ``axis``."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.total, self.count = torch.zeros(1, dtype=torch.float64), 0

    def __call__(self, x: Tensor) -> None:
        rows = x.movedim(self._axis, -1).reshape(-1, x.shape[self._axis])
        self.total = self.total + rows.sum(0, dtype=torch.float64)
        self.count += len(rows)


def _rounded_bias(model: Observed, node: Node) -> Node | None:
    """The quantized bias of an operator whose weight has few levels, output channels first."""
    record = find(node)
    if record is None or record.kind is not Kind.CONV or len(node.args) <= record.bias or record.weight_axis(node):
        return None
    bias, observer = node.args[record.bias], model.observers.get((node.args[record.weight], node))
    few = isinstance(observer, WeightObserver) and observer.quant_max < FEW
    return bias if few and isinstance(bias, Node) and (bias, node) in model.observers else None


def _weight(node: Node) -> Node:
    record = find(node)
    assert record is not None
    weight = node.args[record.weight]
    assert isinstance(weight, Node)
    return weight


def _activation(node: Node) -> Node:
    activation = node.args[0]
    assert isinstance(activation, Node)
    return activation
