"""RMS and layer norms that a model writes out become the operators that keep precision inside.

Step by step, x * rsqrt(mean(x * x) + eps), as models of language have it, squares and their mean would be quantized for
all rows alike: what is small beside the largest row would be lost.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.batch_norm import call
from arm_backend_core.nodes import constant_nodes, drop_unread

aten = torch.ops.aten
#: What gives its operand where the type is the same.
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default}


def join_norms(module: GraphModule) -> None:
    """Replace norms over the last dimension, with the product by a constant of its size where one follows.

    With x less its mean in place of x it is a layer norm.
    """
    norms = {node: found for node in module.graph.nodes if (found := _normalized(node)) is not None}
    if not norms:
        return
    for check in module.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        module.graph.erase_node(check)  # of types, while the model was traced
    constants = constant_nodes(module.graph)
    for node, (x, eps) in norms.items():
        n = int(x.meta["val"].shape[-1])
        last, weight = _weighted(node, n, constants)
        centred = _centred(x)
        with module.graph.inserting_before(last):
            if centred is None:
                result = call(last, aten.rms_norm.default, x, [n], weight, eps)
            else:
                result = call(last, aten.layer_norm.default, centred, [n], weight, None, eps)
        last.replace_all_uses_with(result)
    drop_unread(module.graph)


def _normalized(node: Node) -> tuple[Node, float] | None:
    """x and eps where ``node`` is x / sqrt(mean(x * x) + eps) of float32, by a product or a division."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    inverse = aten.rsqrt.default if node.target is aten.mul.Tensor else aten.sqrt.default
    pairs = [node.args, node.args[::-1]] if node.target is aten.mul.Tensor else [node.args]
    for x, factor in pairs:
        if not isinstance(x, Node) or not isinstance(factor, Node) or factor.target is not inverse:
            continue
        x, total = _origin(x), factor.args[0]
        if not isinstance(total, Node) or total.target not in (aten.add.Tensor, aten.add.Scalar):
            continue
        mean, eps = total.args[:2]
        if isinstance(mean, Node) and isinstance(eps, float) and not total.kwargs and _mean(mean) is not None:
            square = _mean(mean)
            if square is not None and _squared(square) is x and x.meta["val"].dtype is torch.float32:
                return x, eps
    return None


def _origin(node: Any) -> Any:
    """What a node is but for casts that change nothing."""
    while isinstance(node, Node) and node.target in _CASTS:
        source: Any = node.args[0]
        if node.meta["val"].dtype is not source.meta["val"].dtype:
            return node
        node = source
    return node


def _mean(node: Node) -> Node | None:
    """What ``node`` is the mean of along the last dimension, which it keeps."""
    if node.target is not aten.mean.dim or node.kwargs or len(node.args) != 3 or not node.args[2]:
        return None
    x, dims, _ = cast(Any, node.args)
    if not isinstance(x, Node) or not isinstance(dims, (list, tuple)):
        return None
    rank = x.meta["val"].dim()
    return x if rank and [dim % rank for dim in dims] == [rank - 1] else None


def _squared(node: Node) -> Any:
    """What ``node`` is the square of."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return _origin(node.args[0])
    if node.target is aten.mul.Tensor and _origin(node.args[0]) is _origin(node.args[1]):
        return _origin(node.args[0])
    return _origin(node.args[0]) if node.target is aten.square.default else None


def _centred(x: Node) -> Node | None:
    """What ``x`` is without its mean."""
    if x.target is not aten.sub.Tensor or x.kwargs or len(x.args) != 2:
        return None
    whole, mean = x.args
    found = _mean(mean) if isinstance(mean, Node) else None
    return whole if isinstance(whole, Node) and found is not None and _origin(found) is _origin(whole) else None


def _weighted(node: Node, n: int, constants: Collection[Node]) -> tuple[Node, Node | None]:
    """The end of a norm, and the constant that its result is multiplied with if nothing else reads it."""
    end = node
    while len(end.users) == 1 and next(iter(end.users)).target in _CASTS:
        cast = next(iter(end.users))
        if _origin(cast) is not _origin(end):
            break
        end = cast
    reader = next(iter(end.users)) if len(end.users) == 1 else None
    if reader is None or reader.target is not aten.mul.Tensor or len(reader.args) != 2:
        return node, None
    operands: Any = reader.args
    for weight in operands:
        if weight is not end and weight in constants and tuple(weight.meta["val"].shape) == (n,):
            return reader, weight
    return node, None
