"""A batch norm is taken into the convolution or linear layer before it, or becomes a depthwise 1x1 convolution.

In that each channel has one weight, so that per-channel quantization keeps it exactly. And torchao's ``convert_pt2e``
spends 35 seconds on patterns of quantization-aware training if it sees any batch norm.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.nodes import attribute
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind

aten = torch.ops.aten


def remove_batch_norms(module: GraphModule) -> None:
    """Replace batch norms with statistics of the training, on [N, C], [N, C, L] and images of two or three axes."""
    for node in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, *parameters, training, _, eps = cast(tuple[Any, ...], node.args[:8])
        weight, bias, mean, variance = (_attribute(module, parameter) for parameter in parameters)
        known = all(parameter is None or parameter.op == "get_attr" for parameter in parameters)
        if training or not known or mean is None or variance is None:
            continue
        if len(x.meta["val"].shape) not in (2, 3, 4, 5) or not x.meta["val"].numel():
            continue
        gain = torch.rsqrt(variance + eps) * (1.0 if weight is None else weight)
        offset = (0.0 if bias is None else bias) - mean * gain
        with module.graph.inserting_before(node):
            result = x if _absorbed(module, x, gain, offset) else _depthwise(module, node, x, gain, offset)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)


def _absorbed(module: GraphModule, x: Node, gain: Tensor, offset: Tensor) -> bool:
    """Multiply weight and bias of ``x`` by ``gain`` [C] and add ``offset`` [C], if the batch norm alone reads it."""
    record = find_record(x)
    if record is None or record.kind is not Kind.CONV or len(x.users) != 1 or x.kwargs:
        return False
    weight: Any = x.args[record.weight]
    bias: Any = x.args[record.bias] if len(x.args) > record.bias else None
    axis = record.weight_axis(x)
    if weight.op != "get_attr" or weight.meta["val"].shape[axis] != gain.numel():  # groups of a transposed one
        return False
    if bias is not None and bias.op != "get_attr":
        return False
    shape = [-1 if i == axis else 1 for i in range(weight.meta["val"].dim())]
    shift = offset if bias is None else offset + _attribute(module, bias) * gain
    with module.graph.inserting_before(x):
        arguments: list[Any] = list(x.args) + [None] * (record.bias + 1 - len(x.args))
        arguments[record.weight] = attribute(module, weight.name, _attribute(module, weight) * gain.reshape(shape))
        arguments[record.bias] = attribute(module, f"{weight.name}_offset", shift)
        x.args = tuple(arguments)
    return True


def _depthwise(module: GraphModule, origin: Node, x: Node, gain: Tensor, offset: Tensor) -> Node:
    """x [N, C, ...] with its further axes as one or two of an image."""
    shape = list(x.meta["val"].shape)
    flat = len(shape) in (2, 5)
    spatial = [math.prod(shape[2:-1]), *shape[4:]] if flat else shape[2:]
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    weight = attribute(module, f"{origin.name}_gain", gain.reshape(-1, 1, *ones))
    bias = attribute(module, f"{origin.name}_offset", offset)
    operator = aten.conv1d.default if len(spatial) == 1 else aten.conv2d.default
    image = call(origin, aten.reshape.default, x, [*shape[:2], *spatial]) if flat else x
    result = call(origin, operator, image, weight, bias, ones, zeros, ones, gain.numel())
    return call(origin, aten.reshape.default, result, shape) if flat else result


def call(origin: Node, operator: Any, *args: Any, **keywords: Any) -> Node:
    """An operator in the place of ``origin``, with its trace and its fake tensor."""
    node = origin.graph.call_function(operator, args, keywords)
    node.meta = dict(origin.meta)
    values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
    like = next(value for value in values if isinstance(value, Tensor))
    shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in values]
    made = operator(*shapes, **keywords)
    node.meta["val"] = like.new_empty(made.shape, dtype=made.dtype)
    return node


def _attribute(module: GraphModule, node: Any) -> Any:
    """A parameter's tensor; None where the operator has none, or computes it."""
    is_held = isinstance(node, Node) and node.op == "get_attr"
    return attrgetter(str(node.target))(module).detach() if is_held else None
