"""Batch norm and dropout, which differ between training and the program: what they do while a model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from arm_backend_core.aten.functionalize import DROPOUT
from arm_backend_core.ops.catalog import find
from arm_backend_core.ops.registry import Kind

aten = torch.ops.aten
#: A gain below this is that of a channel which is off, whose statistics cannot be told from what it gives.
_LEAST_GAIN = 1e-12


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm that is part of the convolution or linear layer before it.

    Attributes:
        weight, bias, mean, variance: names in the model; the first two may be None.
    """

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    momentum: float
    eps: float

    def normalize_by_batch(self, y: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """``y``, which was normalized by running statistics, by those of the batch; running ones are updated.

        y = gain * (z - mean) + bias, where z is what the layer itself gives, so that statistics of z follow from those
        of y. Weights are rounded with the gain of the running statistics, as in the program, whatever the batch.
        """
        mean, variance = tensors[self.mean], tensors[self.variance]
        count = y.numel() // y.shape[1]
        if count < 2:
            return y
        ones = torch.ones_like(mean)
        gain = torch.rsqrt(variance.clone() + self.eps) * (ones if self.weight is None else tensors[self.weight])
        bias = torch.zeros_like(mean) if self.bias is None else tensors[self.bias]
        axes = [axis for axis in range(y.dim()) if axis != 1]
        least, spread = y.mean(axes), y.var(axes, unbiased=False)
        on = gain.abs() > _LEAST_GAIN
        safe = torch.where(on, gain, ones)
        batch = torch.where(on, spread / safe.square(), variance.clone())
        shape = [-1 if axis == 1 else 1 for axis in range(y.dim())]
        ratio = ((variance.clone() + self.eps) / (batch + self.eps)).sqrt()
        made = (y - least.reshape(shape)) * ratio.reshape(shape) + bias.reshape(shape)
        with torch.no_grad():
            centre = torch.where(on, (least - bias) / safe + mean, mean)
            mean.lerp_(centre, self.momentum)
            variance.lerp_(torch.where(on, batch * count / (count - 1), variance), self.momentum)
            count_name = f"{self.mean.removesuffix('running_mean')}num_batches_tracked"
            if count_name in tensors:
                tensors[count_name].add_(1)
        return made


@dataclass(frozen=True)
class Dropout:
    """A dropout, which the program has not.

    Attributes:
        function: of PyTorch.
        probability: of what is dropped.
    """

    function: Any
    probability: float

    def __call__(self, x: Tensor) -> Tensor:
        """Drop some of ``x``."""
        made: Tensor = self.function(x, self.probability, True)
        return made


@dataclass
class TrainingLayers:
    """Those of a captured program.

    Attributes:
        norms: by the name of each batch norm, with the name of the node that it reads.
        dropouts: by the name of the node that each reads, and nothing else reads.
    """

    norms: dict[str, tuple[str, BatchNorm]]
    dropouts: dict[str, Dropout]

    @classmethod
    def from_program(cls, program: ExportedProgram) -> TrainingLayers:
        """To be asked before the program is prepared."""
        signature = program.graph_signature
        names: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        norms, dropouts = {}, {}
        for node in program.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
            x, *given, training, momentum, eps = cast(tuple[Any, ...], node.args[:8])
            weight, bias, mean, variance = (None if one is None else names.get(one.name) for one in given)
            if not training and mean is not None and variance is not None:
                norms[node.name] = x.name, BatchNorm(weight, bias, mean, variance, momentum or 0.1, eps)
        for function in DROPOUT:
            for node in program.graph.find_nodes(op="call_function", target=function):
                if len(node.args[0].users) == 1 and node.args[1]:
                    name = function._schema.name.removeprefix("aten::").removesuffix("_")
                    dropouts[node.args[0].name] = Dropout(getattr(aten, name).default, float(node.args[1]))
        return cls(norms, dropouts)

    def locate(self, graph: Graph) -> tuple[dict[Node, BatchNorm], dict[Node, Dropout]]:
        """Where they are in the program as it was prepared: the nodes whose results they change."""
        nodes = {node.name: node for node in graph.nodes}
        norms = {}
        for name, (source, norm) in self.norms.items():
            node = _find_norm_convolution(graph, name) or nodes.get(source)
            record = None if node is None else find(node)
            if node is not None and record is not None and record.kind is Kind.CONV and name not in nodes:
                norms[node] = norm
        return norms, {nodes[name]: dropout for name, dropout in self.dropouts.items() if name in nodes}


def _find_norm_convolution(graph: Graph, norm: str) -> Node | None:
    """The convolution that stands for a batch norm which nothing before it could take in."""
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target).rstrip("_") == f"{norm}_gain":
            return next(iter(node.users), None)
    return None


def named_tensors(model: torch.nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers by name, tied ones by each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
