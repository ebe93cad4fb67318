"""Batch norm folding: into the preceding convolution or linear layer, else into a depthwise 1x1 convolution.

The depthwise convolution has one weight per channel, which per-channel quantization represents exactly. No batch norm
may remain: torchao's ``convert_pt2e`` then spends 35 seconds on patterns of quantization-aware training.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constants import Constants
from arm_backend_core.graph_edits import add_buffer_node, insert_call
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind

aten = torch.ops.aten


def fold_batch_norms(module: GraphModule) -> None:
    """Fold batch norms with constant (running) statistics, on [N, C], [N, C, L], [N, C, H, W] and [N, C, D, H, W]."""
    constants = Constants(module)
    for node in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, *parameters, training, _, eps = cast(tuple[Any, ...], node.args[:8])
        are_attributes = all(parameter is None or parameter.op == "get_attr" for parameter in parameters)
        if training or not are_attributes or None in parameters[2:]:
            continue
        weight, bias, mean, variance = (parameter and constants.value(parameter) for parameter in parameters)
        if len(x.meta["val"].shape) not in (2, 3, 4, 5) or not x.meta["val"].numel():
            continue
        gain = torch.rsqrt(variance + eps) * (1.0 if weight is None else weight)
        offset = (0.0 if bias is None else bias) - mean * gain
        with module.graph.inserting_before(node):
            is_folded = _fold_into_producer(constants, x, gain, offset)
            result = x if is_folded else _to_depthwise(module, node, x, gain, offset)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)


def _fold_into_producer(constants: Constants, x: Node, gain: Tensor, offset: Tensor) -> bool:
    """Fold ``gain`` [C] and ``offset`` [C] into weight and bias of ``x``.

    Returns:
        False if ``x`` is no convolution or linear layer, its weights are not constant, or it has other readers.
    """
    record = find_record(x)
    if record is None or record.kind is not Kind.CONV or len(x.users) != 1 or x.kwargs:
        return False
    weight: Any = x.args[record.weight]
    bias: Any = x.args[record.bias] if len(x.args) > record.bias else None
    axis = record.weight_axis(x)
    if weight.op != "get_attr" or weight.meta["val"].shape[axis] != gain.numel():  # grouped transposed convolution
        return False
    if bias is not None and bias.op != "get_attr":
        return False
    shape = [-1 if i == axis else 1 for i in range(weight.meta["val"].dim())]
    shift = offset if bias is None else offset + constants.value(bias) * gain
    with x.graph.inserting_before(x):
        arguments: list[Any] = list(x.args) + [None] * (record.bias + 1 - len(x.args))
        scaled = constants.value(weight) * gain.reshape(shape)
        arguments[record.weight] = add_buffer_node(constants.module, weight.name, scaled)
        arguments[record.bias] = add_buffer_node(constants.module, f"{weight.name}_offset", shift)
        x.args = tuple(arguments)
    return True


def _to_depthwise(module: GraphModule, origin: Node, x: Node, gain: Tensor, offset: Tensor) -> Node:
    """Emit the batch norm as a depthwise 1x1 convolution of x [N, C, ...].

    [N, C] is reshaped to [N, C, 1], and [N, C, D, H, W] to [N, C, D * H, W].
    """
    shape = list(x.meta["val"].shape)
    needs_reshape = len(shape) in (2, 5)
    spatial = [math.prod(shape[2:-1]), *shape[4:]] if needs_reshape else shape[2:]
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    weight = add_buffer_node(module, f"{origin.name}_gain", gain.reshape(-1, 1, *ones))
    bias = add_buffer_node(module, f"{origin.name}_offset", offset)
    operator = aten.conv1d.default if len(spatial) == 1 else aten.conv2d.default
    image = insert_call(origin, aten.reshape.default, x, [*shape[:2], *spatial]) if needs_reshape else x
    result = insert_call(origin, operator, image, weight, bias, ones, zeros, ones, gain.numel())
    return insert_call(origin, aten.reshape.default, result, shape) if needs_reshape else result
