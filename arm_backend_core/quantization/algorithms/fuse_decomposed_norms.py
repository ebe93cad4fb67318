"""Norm fusion: decomposed RMS norms, layer norms and log-softmaxes become the composite operators.

The intermediate values of a composite operator keep their precision. In the decomposed form of language models,
x * rsqrt(mean(x * x) + eps), squares and their mean would have one scale for all rows. The squares of rows that are
small beside the largest row would be rounded to 0. Likewise, log(softmax(x)) would lose small probabilities.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import eliminate_dead_code, insert_call
from arm_backend_core.nodes import constant_nodes, source_through
from arm_backend_core.ops.catalog import is_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class _Norm:
    """scale * (x - mean) / sqrt(variance + eps) over ``dims``; if not ``is_centered``, mean is 0 (RMS norm).

    ``scale`` is a number. It differs from 1 only if the variance has a correction (Bessel's).
    """

    x: Node
    dims: tuple[int, ...]
    eps: float
    is_centered: bool
    scale: float = 1.0

    def emit(self, node: Node, weight: Node | None) -> Node:
        """Insert the composite operator at ``node``.

        Args:
            weight: one factor for each element of the last dimension. None unless ``dims`` is only this dimension.
        """
        rank = self.x.meta["val"].dim()
        order = [*(dim for dim in range(rank) if dim not in self.dims), *self.dims]
        x = self.x if order == list(range(rank)) else insert_call(node, aten.permute.default, self.x, order)
        sizes = [int(self.x.meta["val"].shape[dim]) for dim in self.dims]
        if self.is_centered:
            y = insert_call(node, aten.layer_norm.default, x, sizes, weight, None, self.eps)
        else:
            y = insert_call(node, aten.rms_norm.default, x, sizes, weight, self.eps)
        if x is not self.x:
            y = insert_call(node, aten.permute.default, y, [order.index(dim) for dim in range(rank)])
        return y if self.scale == 1.0 else insert_call(node, aten.mul.Scalar, y, self.scale)


def fuse_log_softmax(module: GraphModule) -> None:
    """Replace log(softmax(x)) by log_softmax(x)."""
    logarithms = module.graph.find_nodes(op="call_function", target=aten.log.default)
    matches = {log: x for log in logarithms if (x := _skip_casts(log.args[0])).target is aten.softmax.int}
    for log, softmax in matches.items():
        with module.graph.inserting_before(log):
            log.replace_all_uses_with(insert_call(log, aten.log_softmax.int, *softmax.args))
    if matches:
        eliminate_dead_code(module.graph)


def fuse_norms(module: GraphModule, algorithms: Collection[str]) -> None:
    """Replace decomposed norms, including a following multiplication by a constant weight.

    Args:
        algorithms: names of algorithms. "fused_norms" enables layer norms, "fused_rms_norms" enables RMS norms.
    """
    _move_weights_after_division(module)
    norms = {node: norm for node in module.graph.nodes if (norm := _match_norm(node)) is not None}
    norms = {
        node: norm
        for node, norm in norms.items()
        if ("fused_norms" if norm.is_centered else "fused_rms_norms") in algorithms
    }
    if not norms:
        return
    for check in module.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        module.graph.erase_node(check)  # an assertion on dtypes, which has an effect only during tracing
    constants = constant_nodes(module.graph)
    for node, norm in norms.items():
        last, weight = _match_weight(node, norm, constants)
        with module.graph.inserting_before(last):
            last.replace_all_uses_with(norm.emit(last, weight))
    eliminate_dead_code(module.graph)


def _move_weights_after_division(module: GraphModule) -> None:
    """Rewrite weight * (x - mean) / sqrt(y) as (x - mean) / sqrt(y) * weight."""
    constants = constant_nodes(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.div.Tensor):
        product, root = node.args[:2]
        if not isinstance(product, Node) or product.target is not aten.mul.Tensor or len(product.users) != 1:
            continue
        weights = [x for x in product.args if x in constants]
        centered = [x for x in product.args if isinstance(x, Node) and _match_centered(x)[1] is not None]
        is_root = isinstance(root, Node) and root.target is aten.sqrt.default and root not in constants
        same_shape = centered and centered[0].meta["val"].shape == node.meta["val"].shape
        if len(weights) == len(centered) == 1 and is_root and same_shape and not node.kwargs:
            with module.graph.inserting_before(node):
                quotient = insert_call(node, aten.div.Tensor, centered[0], root)
                node.replace_all_uses_with(insert_call(node, aten.mul.Tensor, quotient, weights[0]))
            module.graph.erase_node(node)
            module.graph.erase_node(product)


def _match_norm(node: Node) -> _Norm | None:
    """Match ``node`` as the last operator of a float32 norm."""
    for x, total in _match_quotients(node):
        if total.target not in (aten.add.Tensor, aten.add.Scalar) or total.kwargs:
            continue
        variance, eps = total.args
        x = _skip_casts(x)
        if isinstance(variance, Node) and isinstance(eps, float) and x.meta["val"].dtype is torch.float32:
            norm = _match_numerator(x, variance, eps)
            if norm is not None:
                return norm
    return None


def _match_quotients(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (x, y) for each match of ``node`` with x / sqrt(y), as a product or a division."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) != 2 or node.kwargs:
        return
    product = node.target is aten.mul.Tensor
    for x, factor in (node.args, node.args[::-1]) if product else (node.args,):
        if isinstance(x, Node) and isinstance(factor, Node):
            if factor.target is aten.reciprocal.default and product and isinstance(factor.args[0], Node):
                root_op, factor = aten.sqrt.default, factor.args[0]
            else:
                root_op = aten.rsqrt.default if product else aten.sqrt.default
            powers = aten.pow.Tensor_Scalar, -0.5 if root_op is aten.rsqrt.default else 0.5
            if factor.target is root_op or (factor.target, *factor.args[1:]) == powers:
                yield x, _skip_casts(factor.args[0])


def _match_numerator(x: Node, variance: Node, eps: float) -> _Norm | None:
    """Match the norm ``x`` / sqrt(``variance`` + ``eps``).

    In an RMS norm, ``x`` is the input of the norm. In a layer norm, ``x`` is the input minus its mean.
    """
    source, centered_dims = _match_centered(x)
    if variance.target is aten.mean.dim:
        mean = _match_mean(variance)
        squared = _match_square(mean[0]) if mean is not None else None
        if mean is None or squared is None or not (squared is x or _match_centered(squared) == (source, centered_dims)):
            return None
        dims = mean[1]
        return _Norm(source, dims, eps, True) if dims == centered_dims else _Norm(x, dims, eps, False)
    match = _match_variance(variance)
    if match is None or centered_dims is None or match[0] not in (x, source) or match[1] != centered_dims:
        return None
    count = math.prod(x.meta["val"].shape[dim] for dim in centered_dims)
    ratio = (count - match[2]) / count  # biased variance = ratio * variance with the correction match[2]
    return _Norm(source, centered_dims, eps * ratio, True, math.sqrt(ratio)) if ratio > 0 else None


def _is_cast(node: Node) -> bool:
    return is_cast(node) or node.target is aten.detach.default


def _skip_casts(node: Any) -> Any:
    """Return the source of a node, skipping casts that change nothing; a number is returned as it is."""

    def changes_nothing(x: Node) -> bool:
        return _is_cast(x) and x.meta["val"].dtype is x.all_input_nodes[0].meta["val"].dtype

    return source_through(node, changes_nothing) if isinstance(node, Node) else node


def _parse_reduction(x: Any, dims: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the operand of a reduction, and its dimensions as sorted non-negative numbers."""
    rank = x.meta["val"].dim()
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return _skip_casts(x), tuple(sorted(dim % rank for dim in dims))


def _match_mean(node: Node) -> tuple[Any, tuple[int, ...]] | None:
    """Match a mean with keepdim; return its operand and dimensions."""
    if node.target is operator.getitem and node.args[1] == 1:
        match = _match_variance(node.args[0])
        return match and match[:2]
    if node.target is not aten.mean.dim or node.kwargs or len(node.args) != 3 or not node.args[2]:
        return None
    return _parse_reduction(*node.args[:2])


def _match_variance(node: Any) -> tuple[Any, tuple[int, ...], float] | None:
    """Match a variance with keepdim; return its operand, dimensions and correction (Bessel's: 1)."""
    if node.target is operator.getitem and node.args[1] == 0:
        return _match_variance(node.args[0])
    if node.target in (aten.var.correction, aten.var_mean.correction):
        correction, keepdim = node.kwargs.get("correction", 1), node.kwargs.get("keepdim", False)
    elif node.target in (aten.var.dim, aten.var_mean.dim):
        correction, keepdim = ([*node.args[2:], *(True, False)[len(node.args) - 2 :]])[:2]
    else:
        return None
    dims = node.args[1] if len(node.args) > 1 else None
    return (*_parse_reduction(node.args[0], dims), float(1 if correction is None else correction)) if keepdim else None


def _match_square(node: Node) -> Any:
    """Match a square; return its operand."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return _skip_casts(node.args[0])
    if node.target is aten.mul.Tensor and _skip_casts(node.args[0]) is _skip_casts(node.args[1]):
        return _skip_casts(node.args[0])
    return _skip_casts(node.args[0]) if node.target is aten.square.default else None


def _match_centered(x: Node) -> tuple[Node, tuple[int, ...] | None]:
    """Match y - mean(y); return y and the dimensions of the mean, else (x, None)."""
    if x.target is aten.sub.Tensor and not x.kwargs and len(x.args) == 2:
        source, mean = map(_skip_casts, x.args)
        match = _match_mean(mean) if isinstance(mean, Node) else None
        if isinstance(source, Node) and match is not None and match[0] is source:
            return source, match[1]
    return x, None


def _match_weight(node: Node, norm: _Norm, constants: Collection[Node]) -> tuple[Node, Node | None]:
    """Match a multiplication of the norm's result by a constant weight; return the last node and the weight, if any."""
    shape = norm.x.meta["val"].shape
    if norm.dims != (len(shape) - 1,) or norm.scale != 1.0:
        return node, None
    end = node
    while len(end.users) == 1 and _is_cast(next(iter(end.users))):
        cast = next(iter(end.users))
        if _skip_casts(cast) is not _skip_casts(end):
            break
        end = cast
    reader = next(iter(end.users)) if len(end.users) == 1 else None
    if reader is None or reader.target is not aten.mul.Tensor or len(reader.args) != 2:
        return node, None
    operands: Any = reader.args
    for weight in operands:
        if weight is not end and weight in constants and tuple(weight.meta["val"].shape) == shape[-1:]:
            return reader, weight
    return node, None
