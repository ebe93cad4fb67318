"""What rounding the weights adds to an operator's sums on average is taken off its bias.

With weights w + e in place of w, a sum over inputs x is off by the sum of e * mean(x) in every sample. Behind a relu,
where means are not 0, that is most of the error that rounding the weights makes.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.aten.constants import attribute
from arm_backend_core.nodes import PLACE
from arm_backend_core.ops.registry import Kind, find
from arm_backend_core.quantizer.observer import WeightObserver
from arm_recipes.stages.post_training import AT_A_TIME, Observed


class BiasCorrection:
    """Watches what operators with quantized weights read while samples run, then corrects their biases.

    One that has none gets one: the target adds a bias in any case. A bias that several weights share, or that the model
    reads elsewhere too, is left alone, and so is one before an RMS norm: that makes much of the little that would be
    added to a row of zeros, where rounded weights err by nothing.
    """

    def __init__(self, model: Observed) -> None:
        self._model = model
        groups: dict[tuple[Node, Node | None], list[Node]] = {}
        weights: dict[Node, set[Node]] = {}
        for node in model.graph.nodes:
            operands = _rounded(model, node)
            if operands is not None:
                groups.setdefault(operands, []).append(node)
                weights.setdefault(operands[1] or node, set()).add(operands[0])
        self._means: list[tuple[Node, Node | None, list[Node], _Mean]] = []
        for (weight, bias), nodes in groups.items():
            if bias is None or (len(weights[bias]) == 1 and bias.users.keys() == set(nodes)):
                mean = _Mean(axis=1 - weight.meta["val"].dim())
                self._means.append((weight, bias, nodes, mean))
                model.watchers += [(source, mean) for source in dict.fromkeys(_operand(node, 0) for node in nodes)]

    def apply(self) -> None:
        """Correct the biases, after the samples and before the model is quantized."""
        for weight, bias, nodes, mean in self._means:
            if mean.count:
                self._correct(bias, nodes, self._shift(weight, nodes[0], mean))

    def _shift(self, weight: Node, node: Node, mean: _Mean) -> Tensor:
        """What each output channel is off by."""
        name = str(weight.target)
        given = attrgetter(name)(self._model.model).detach()
        exact = self._model.corrected.get(name, given).detach()
        observer = self._model.observers[weight, node]
        scale = observer.calculate_qparams()[0].to(exact.dtype).reshape(-1, *[1] * (exact.dim() - 1))
        scale = scale.expand(len(exact), *scale.shape[1:])
        inputs = (mean.total / mean.count).reshape(-1, exact.shape[1])
        group = torch.arange(len(exact)) * len(inputs) // len(exact)
        shift = torch.empty(len(exact), dtype=torch.float64)
        # By parts: what a large weight takes as a whole is laid out behind the last one's, and memory is in pieces.
        for part in torch.arange(len(exact)).split(max(1, AT_A_TIME * len(exact) // exact.numel())):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            error = (given[rows] / scale[rows]).round_().clamp_(observer.quant_min, observer.quant_max)
            error = error.mul_(scale[rows]).sub_(exact[rows])
            error = error.reshape(*error.shape[:2], -1).sum(2, dtype=torch.float64)
            shift[rows] = (error * inputs[group[rows]]).sum(1)
        return shift

    def _correct(self, bias: Node | None, nodes: list[Node], shift: Tensor) -> None:
        model, module, first = self._model, self._model.model, nodes[0]
        name = f"{first.name}_bias" if bias is None else str(bias.target)
        old = torch.zeros(len(shift), dtype=torch.float32) if bias is None else attrgetter(name)(module)
        new = (old.detach().double() - shift).to(old.dtype)
        if bias is not None and (bias, first) in model.observers:
            model.corrected[name] = old
            setattr(module, name, new)
            return
        with model.graph.inserting_before(first):
            constant = attribute(module, f"{first.name}_corrected", new)
        model.floats[str(constant.target)] = old.detach()
        record = find(first)
        assert record is not None
        place = record.bias
        for node in nodes:
            node.args = (*node.args[:place], constant, *node.args[place + 1 :])


class _Mean:
    """The mean of a tensor over the samples, for each channel along ``axis``."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.total, self.count = torch.zeros(1, dtype=torch.float64), 0

    def __call__(self, x: Tensor) -> None:
        others = [axis for axis in range(x.dim()) if axis != self._axis % x.dim()]
        self.total = self.total + (x.sum(others) if others else x).double()
        self.count += x.numel() // x.shape[self._axis]


def _rounded(model: Observed, node: Node) -> tuple[Node, Node | None] | None:
    """Weight and bias of an operator whose weight is quantized, output channels first."""
    record = find(node)
    if record is None or record.kind is not Kind.CONV or record.weight_axis(node):
        return None
    if _is_normalized(node):
        return None
    weight, bias = _operand(node, record.weight), node.args[record.bias] if len(node.args) > record.bias else None
    if not isinstance(model.observers.get((weight, node)), WeightObserver) or weight.op != "get_attr":
        return None
    if bias is None and "bias" not in node.kwargs and PLACE not in node.meta:  # a step's sums would each cost an ADD
        return weight, None
    return (weight, bias) if isinstance(bias, Node) and bias.op == "get_attr" else None


def _is_normalized(node: Node) -> bool:
    """Whether an RMS norm reads it, or what is moved from it."""
    kinds = {user: getattr(find(user), "kind", None) for user in node.users}
    return any(
        user.target is torch.ops.aten.rms_norm.default or (kind is Kind.SHARED and _is_normalized(user))
        for user, kind in kinds.items()
    )


def _operand(node: Node, place: int) -> Node:
    operand = node.args[place]
    assert isinstance(operand, Node)
    return operand
