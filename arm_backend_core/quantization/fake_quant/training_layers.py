"""Batch norm and dropout in training; the exported program folds batch norms and omits dropout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from arm_backend_core.aten.functionalize import DROPOUT
from arm_backend_core.aten.layer_affine import ChannelAffine
from arm_backend_core.nodes import REPLACED_NAME
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind

aten = torch.ops.aten
#: Minimum magnitude of a channel's gain. With a smaller gain, the output of the batch norm is constant, so the
#: statistics of the batch norm's input cannot be computed from the output.
_MIN_GAIN = 1e-12


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm that is folded into the convolution or linear layer before it, or becomes a depthwise convolution.

    Attributes:
        weight, bias, mean, variance: names in the model; the first two may be None.
        momentum, eps: as in ``torch.nn.BatchNorm2d``. A momentum of None or 0 becomes 0.1, because a captured program
            holds 0 for both.
    """

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    momentum: float
    eps: float

    def normalize_by_batch(
        self, y: Tensor, tensors: Mapping[str, Tensor], affine: ChannelAffine | None = None
    ) -> Tensor:
        """Renormalize ``y`` from running statistics to batch statistics, and update the running statistics.

        y = gain * (z - mean) + bias, where z is the output of the convolution or linear layer. Mean and variance of z
        over the batch follow from mean and variance of y. The weights stay folded and rounded with the gain of the
        running statistics, as in the program. If y has one value per channel, there is no variance, and y is returned
        unchanged.

        Args:
            y: output of the layer with its batch norm, [N, C, ...].
            tensors: parameters and buffers of the model, by name.
            affine: gain and offset per channel that follow the batch norm, and that ``y`` includes; None if there are
                none. ``gain`` and ``bias`` of the equation above include them.
        """
        mean, variance = tensors[self.mean], tensors[self.variance]
        count = y.numel() // y.shape[1]
        if count < 2:
            return y
        ones = torch.ones_like(mean)
        gain = torch.rsqrt(variance.clone() + self.eps) * (ones if self.weight is None else tensors[self.weight])
        bias = torch.zeros_like(mean) if self.bias is None else tensors[self.bias]
        if affine is not None and affine.gain is not None:
            gain, bias = gain * affine.gain, bias * affine.gain
        if affine is not None and affine.offset is not None:
            bias = bias + affine.offset
        axes = [axis for axis in range(y.dim()) if axis != 1]
        y_mean, y_variance = y.mean(axes), y.var(axes, unbiased=False)
        is_active = gain.abs() > _MIN_GAIN
        safe_gain = torch.where(is_active, gain, ones)
        batch_variance = torch.where(is_active, y_variance / safe_gain.square(), variance.clone())
        shape = [-1 if axis == 1 else 1 for axis in range(y.dim())]
        ratio = ((variance.clone() + self.eps) / (batch_variance + self.eps)).sqrt()
        result = (y - y_mean.reshape(shape)) * ratio.reshape(shape) + bias.reshape(shape)
        with torch.no_grad():
            batch_mean = torch.where(is_active, (y_mean - bias) / safe_gain + mean, mean)
            mean.lerp_(batch_mean, self.momentum)
            variance.lerp_(torch.where(is_active, batch_variance * count / (count - 1), variance), self.momentum)
            count_name = f"{self.mean.removesuffix('running_mean')}num_batches_tracked"
            if count_name in tensors:
                tensors[count_name].add_(1)
        return result


@dataclass(frozen=True)
class Dropout:
    """A dropout, which the exported program omits.

    Attributes:
        function: ATen operator.
        probability: fraction of the elements that are dropped.
    """

    function: Any
    probability: float

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the dropout."""
        result: Tensor = self.function(x, self.probability, True)
        return result


@dataclass
class TrainingLayers:
    """Batch norms and dropouts of a captured program.

    Attributes:
        norms: {node name of a batch norm: (node name of its input, batch norm)}.
        dropouts: {node name of a dropout's input: dropout}. Only the dropout reads this input.
    """

    norms: dict[str, tuple[str, BatchNorm]]
    dropouts: dict[str, Dropout]

    @classmethod
    def from_program(cls, program: ExportedProgram) -> TrainingLayers:
        """Collect the layers of a program; call it before annotation edits the graph."""
        signature = program.graph_signature
        names: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        norms, dropouts = {}, {}
        for node in program.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
            x, *parameters, training, momentum, eps = cast(tuple[Any, ...], node.args[:8])
            weight, bias, mean, variance = (
                None if parameter is None else names.get(parameter.name) for parameter in parameters
            )
            if not training and mean is not None and variance is not None:
                norms[node.name] = x.name, BatchNorm(weight, bias, mean, variance, momentum or 0.1, eps)
        for function in DROPOUT:
            for node in program.graph.find_nodes(op="call_function", target=function):
                if len(node.args[0].users) == 1 and node.args[1]:
                    name = function._schema.name.removeprefix("aten::").removesuffix("_")
                    dropouts[node.args[0].name] = Dropout(getattr(aten, name).default, float(node.args[1]))
        return cls(norms, dropouts)

    def locate(self, graph: Graph) -> tuple[dict[Node, BatchNorm], dict[Node, Dropout]]:
        """Find the nodes of the annotated graph to whose results training applies a batch norm or a dropout."""
        nodes = {node.meta[REPLACED_NAME]: node for node in graph.nodes if REPLACED_NAME in node.meta}
        nodes |= {node.name: node for node in graph.nodes}
        norms = {}
        for name, (source, norm) in self.norms.items():
            node = _find_norm_convolution(graph, name) or nodes.get(source)
            record = None if node is None else find_record(node)
            if node is not None and record is not None and record.kind is AnnotationKind.CONV and name not in nodes:
                norms[node] = norm
        return norms, {nodes[name]: dropout for name, dropout in self.dropouts.items() if name in nodes}


def _find_norm_convolution(graph: Graph, norm: str) -> Node | None:
    """Find the depthwise convolution that replaces the batch norm ``norm``; None if a layer absorbed the norm."""
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target).rstrip("_") == f"{norm}_gain":
            return next(iter(node.users), None)
    return None


def named_tensors(model: torch.nn.Module) -> Mapping[str, Tensor]:
    """Return parameters and buffers by name; a tied tensor has all of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
