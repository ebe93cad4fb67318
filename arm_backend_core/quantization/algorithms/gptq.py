"""Weights of few levels are rounded for the least squared error of what they sum, not for the least of their own.

What rounding a weight adds to a sum, the weights that are rounded after it can take off again as far as their inputs
vary together: column by column, with the inputs' covariance over the samples (GPTQ, Frantar et al. 2022). The part that
is the same in every sample is left to the bias. Layers whose inputs are one vector a position: linear ones and
convolutions of 1x1.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.ops.catalog import find
from arm_backend_core.ops.registry import Kind
from arm_backend_core.quantization.observer import WeightObserver
from arm_backend_core.quantization.ptq import ObservedProgram

#: Most levels on either side of 0: of more, what is lost by rounding is below what activations lose.
_MAX_LEVELS = 16
#: Most inputs: the covariance of more takes longer than the layer.
_MAX_COLUMNS = 1024
_BLOCK = 32
#: Inputs for each vector that was seen, at most.
_MAX_COLUMNS_PER_VECTOR = 4


class Gptq:
    """Watches what layers with such weights read while samples run, then rounds the weights.

    Args:
        centred: biases are corrected afterwards, which takes the mean of the errors away.
    """

    def __init__(self, model: ObservedProgram, *, centred: bool) -> None:
        self._model, self._centred = model, centred
        self._moments: dict[Node, tuple[list[Node], _Moments]] = {}
        readers: dict[Node, list[Node]] = {}
        for node in model.graph.nodes:
            weight = _find_weight(model, node)
            if weight is not None:
                readers.setdefault(weight, []).append(node)
        for weight, nodes in readers.items():
            shared = len({model.observers[weight, node] for node in nodes}) > 1
            if weight.users.keys() == set(nodes) and not shared:
                moments = _Moments(axis=1 - weight.meta["val"].dim())
                self._moments[weight] = nodes, moments
                sources: Any = dict.fromkeys(node.args[0] for node in nodes)
                model.watchers += [(source, moments) for source in sources]

    def apply(self) -> None:
        """Round the weights, after the samples and before biases are corrected."""
        module = self._model.model
        for weight, (nodes, moments) in self._moments.items():
            name, observer = str(weight.target), self._model.observers[weight, nodes[0]]
            exact = attrgetter(name)(module).detach()
            if moments.count * _MAX_COLUMNS_PER_VECTOR < weight.meta["val"].shape[1]:
                continue  # so few say more of themselves than of what will come
            scale = observer.calculate_qparams()[0].double().reshape(-1, 1)
            rounded = _round_weight(
                exact.double().flatten(1), scale, observer.quant_max, moments.covariance(self._centred)
            )
            self._model.original_values[name] = exact
            setattr(module, name, rounded.reshape(exact.shape).to(exact.dtype))


class _Moments:
    """Sums of a tensor's vectors along ``axis`` and of their products."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._sum, self._products, self.count = torch.zeros(1), torch.zeros(1), 0

    def __call__(self, x: Tensor) -> None:
        rows = x.movedim(self._axis, -1).flatten(0, -2) if x.dim() > 1 else x[None]
        self._sum, self._products = self._sum + rows.sum(0), self._products + rows.T @ rows
        self.count += len(rows)

    def covariance(self, centred: bool) -> Tensor:
        """Their mean, drawn towards its diagonal by as much as few vectors leave open (Chen et al. 2010).

        Args:
            centred: of what the vectors differ from their mean.
        """
        mean = self._sum.double() / self.count * centred
        found = self._products.double() / self.count - mean[:, None] * mean
        n, diagonal = len(mean), found.diagonal().clamp_min(0)
        spread, total = float(found.square().sum()), float(diagonal.sum())
        below = (self.count + 1 - 2 / n) * (spread - total**2 / n)
        part = min(1.0, ((1 - 2 / n) * spread + total**2) / below) if below > 0 else 1.0
        return (1 - part) * found + torch.diag(part * diagonal + 0.01 * total / n + 1e-30)


def _find_weight(model: ObservedProgram, node: Node) -> Node | None:
    """The weight of a layer that is one matrix of few levels."""
    record = find(node)
    if record is None or record.kind is not Kind.CONV or record.weight_axis(node):
        return None
    weight = node.args[record.weight]
    observer = model.observers.get((weight, node))
    if not isinstance(weight, Node) or weight.op != "get_attr" or not isinstance(observer, WeightObserver):
        return None
    values, x = weight.meta["val"], node.args[0]
    assert isinstance(x, Node)
    columns = values[0].numel()
    whole = columns == values.shape[1] == x.meta["val"].shape[1 - values.dim()]
    return weight if whole and columns <= _MAX_COLUMNS and observer.quant_max < _MAX_LEVELS else None


def _round_weight(weight: Tensor, scale: Tensor, largest: int, covariance: Tensor) -> Tensor:
    """[rows, columns] in steps of ``scale``; each column's error goes on to those that come after it."""
    order = covariance.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(covariance[order][:, order])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    left, result = weight[:, order].T.contiguous(), torch.empty_like(weight.T)
    steps = scale[:, 0]
    for start in range(0, len(left), _BLOCK):
        stop = min(start + _BLOCK, len(left))
        errors = torch.empty_like(left[start:stop])
        for column in range(start, stop):
            row = left[column]
            result[column] = (row / steps).round_().clamp_(-largest, largest).mul_(steps)
            errors[column - start] = (row - result[column]) / factor[column, column]
            left[column + 1 : stop] -= factor[column, column + 1 : stop, None] * errors[column - start]
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return result[order.argsort()].T
