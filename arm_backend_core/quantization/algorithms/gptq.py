"""GPTQ (Frantar et al. 2022): round weights with few levels to minimize the squared error of the layer's output.

Weights are rounded column by column. After each column, the columns that are not rounded yet are changed to compensate
for the rounding error. The compensation uses the covariance of the inputs over the calibration samples. Bias correction
removes the constant part of the error. GPTQ applies to layers with one input vector for each position: linear layers
and 1x1 convolutions.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.quantization.graph_observers import find_observed_weight
from arm_backend_core.quantization.ptq import ObservedProgram

#: GPTQ rounds weights with fewer levels than this on either side of 0. With more levels, GPTQ gains little, because
#: quantized activations cause a larger error than quantized weights.
_MAX_LEVELS = 16
#: Maximum number of input channels; beyond it, computing the covariance takes longer than the layer.
_MAX_COLUMNS = 1024
#: Number of columns that are rounded before the columns of later blocks are updated.
_BLOCK_COLUMNS = 32
#: GPTQ rounds a weight only if calibration observed at least one input vector for every 4 input channels. With fewer
#: vectors, the rounding would overfit to the samples.
_MAX_COLUMNS_PER_VECTOR = 4


class Gptq:
    """Accumulates input covariances of layers during calibration, then rounds their weights.

    Args:
        centered: True if bias correction follows. Bias correction removes the mean error, so GPTQ uses centered
            covariances.
    """

    def __init__(self, model: ObservedProgram, *, centered: bool) -> None:
        self._model, self._centered = model, centered
        self._moments: dict[Node, tuple[list[Node], _Moments]] = {}
        readers: dict[Node, list[Node]] = {}
        for node in model.graph.nodes:
            weight = _find_weight(model, node)
            if weight is not None:
                readers.setdefault(weight, []).append(node)
        for weight, nodes in readers.items():
            has_one_observer = len({model.observers[weight, node] for node in nodes}) == 1
            if weight.users.keys() == set(nodes) and has_one_observer:
                moments = _Moments(axis=1 - weight.meta["val"].dim())
                self._moments[weight] = nodes, moments
                sources: Any = dict.fromkeys(node.args[0] for node in nodes)
                model.value_hooks += [(source, moments) for source in sources]

    def apply(self) -> None:
        """Round the weights; runs after calibration and before bias correction."""
        module = self._model.graph_module
        for weight, (nodes, moments) in self._moments.items():
            name, observer = str(weight.target), self._model.observers[weight, nodes[0]]
            float_weight = attrgetter(name)(module).detach()
            if moments.count * _MAX_COLUMNS_PER_VECTOR < weight.meta["val"].shape[1]:
                continue  # too few samples: the rounding would overfit to them
            scale = observer.calculate_qparams()[0].double().reshape(-1, 1)
            rounded = _round_weight(
                float_weight.double().flatten(1), scale, observer.quant_max, moments.covariance(self._centered)
            )
            self._model.original_values[name] = float_weight
            setattr(module, name, rounded.reshape(float_weight.shape).to(float_weight.dtype))


class _Moments:
    """Accumulates first and second moments of a tensor's vectors along ``axis``."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._sum, self._products, self.count = torch.zeros(1), torch.zeros(1), 0

    def __call__(self, x: Tensor) -> None:
        rows = x.movedim(self._axis, -1).flatten(0, -2) if x.dim() > 1 else x[None]
        self._sum, self._products = self._sum + rows.sum(0), self._products + rows.T @ rows
        self.count += len(rows)

    def covariance(self, centered: bool) -> Tensor:
        """Estimate the covariance with shrinkage towards its diagonal.

        The shrinkage coefficient follows from oracle approximating shrinkage (OAS, Chen et al. 2010).

        Args:
            centered: whether to subtract the mean; if False, the result is the matrix of second moments.
        """
        mean = self._sum.double() / self.count * centered
        sample = self._products.double() / self.count - mean[:, None] * mean
        n, diagonal = len(mean), sample.diagonal().clamp_min(0)
        squares, trace = float(sample.square().sum()), float(diagonal.sum())
        denominator = (self.count + 1 - 2 / n) * (squares - trace**2 / n)
        shrinkage = min(1.0, ((1 - 2 / n) * squares + trace**2) / denominator) if denominator > 0 else 1.0
        return (1 - shrinkage) * sample + torch.diag(shrinkage * diagonal + 0.01 * trace / n + 1e-30)


def _find_weight(model: ObservedProgram, node: Node) -> Node | None:
    """Return the weight of a layer to which GPTQ applies: a single matrix with few levels and columns; else None."""
    observed = find_observed_weight(model.observers, node)
    if observed is None:
        return None
    weight, observer = observed
    values, x = weight.meta["val"], node.args[0]
    assert isinstance(x, Node)
    columns = values[0].numel()
    is_matrix = columns == values.shape[1] == x.meta["val"].shape[1 - values.dim()]
    return weight if is_matrix and columns <= _MAX_COLUMNS and observer.quant_max < _MAX_LEVELS else None


def _round_weight(weight: Tensor, scale: Tensor, quant_max: int, covariance: Tensor) -> Tensor:
    """Round a weight [rows, columns] to multiples of ``scale``; later columns compensate for each column's error.

    Weights that are 0 stay 0, because a pruned model would lose its sparsity (as in SparseGPT, Frantar et al. 2023).
    """
    order = covariance.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(covariance[order][:, order])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    remaining, result = weight[:, order].T.contiguous(), torch.empty_like(weight.T)
    is_kept = remaining != 0
    steps = scale[:, 0]
    for start in range(0, len(remaining), _BLOCK_COLUMNS):
        stop = min(start + _BLOCK_COLUMNS, len(remaining))
        errors = torch.empty_like(remaining[start:stop])
        for column in range(start, stop):
            row = remaining[column]
            result[column] = (row / steps).round_().clamp_(-quant_max, quant_max).mul_(steps * is_kept[column])
            errors[column - start] = (row - result[column]) / factor[column, column]
            remaining[column + 1 : stop] -= factor[column, column + 1 : stop, None] * errors[column - start]
        remaining[stop:] -= factor[start:stop, stop:].T @ errors
    return result[order.argsort()].T
