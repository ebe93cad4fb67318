"""A batch norm that no convolution before it takes in becomes a depthwise 1x1 convolution before it is quantized.

Each channel has one weight, so that per-channel quantization keeps it exactly. And torchao's ``convert_pt2e`` spends
35 seconds on patterns of quantization-aware training if it sees any batch norm.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def batch_norm_to_convolution(module: GraphModule) -> None:
    """Replace batch norms with statistics of the training, on [N, C], [N, C, L] and [N, C, H, W]."""
    for node in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, *parameters, training, _, eps = node.args[:8]
        tensors = [_attribute(module, parameter) for parameter in parameters]
        mean, variance = tensors[2:]
        rank = len(x.meta["val"].shape)
        if training or mean is None or variance is None or rank not in (2, 3, 4):
            continue
        gain = torch.rsqrt(variance + eps) * (1.0 if tensors[0] is None else tensors[0])
        offset = (0.0 if tensors[1] is None else tensors[1]) - mean * gain
        with module.graph.inserting_before(node):
            weight = constant(module, f"{node.name}_gain", gain.reshape(-1, 1, *(1,) * max(rank - 2, 1)))
            bias = constant(module, f"{node.name}_offset", offset)
            image = x if rank > 2 else call(node, aten.unsqueeze.default, x, -1)
            result = _convolution(node, rank, image, weight, bias, gain.numel())
            if rank == 2:
                result = call(node, aten.squeeze.dim, result, -1)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _convolution(origin: Node, rank: int, image: Node, weight: Node, bias: Node, channels: int) -> Node:
    spatial = max(rank - 2, 1)
    ones, zeros = [1] * spatial, [0] * spatial
    operator = aten.conv1d.default if spatial == 1 else aten.conv2d.default
    return call(origin, operator, image, weight, bias, ones, zeros, ones, channels)


def call(origin: Node, operator: Any, *args: Any) -> Node:
    """An operator in the place of ``origin``, with its trace and its fake tensor."""
    node = origin.graph.call_function(operator, args)
    node.meta = dict(origin.meta)
    values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
    like = next(value for value in values if isinstance(value, torch.Tensor))
    shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x for x in values]
    node.meta["val"] = like.new_empty(operator(*shapes).shape)
    return node


def _attribute(module: GraphModule, node: Any) -> Any:
    """A parameter's tensor; None where the operator has none."""
    return attrgetter(str(node.target))(module).detach() if isinstance(node, Node) else None


def constant(module: GraphModule, name: str, tensor: torch.Tensor) -> Node:
    """A buffer of the module, read where nodes are inserted."""
    module.register_buffer(name, tensor.detach().clone())
    node = module.graph.get_attr(name)
    node.meta["val"] = tensor
    return node
