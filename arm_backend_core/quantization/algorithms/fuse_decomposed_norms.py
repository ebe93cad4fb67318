"""RMS and layer norms that a model writes out become the operators that keep precision inside.

Step by step, x * rsqrt(mean(x * x) + eps), as models of language have it, squares and their mean would be quantized for
all rows alike: what is small beside the largest row would be lost. So would what a softmax gives for the improbable,
whose logarithm is asked next.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.batch_norm import call
from arm_backend_core.nodes import constant_nodes, drop_unread

aten = torch.ops.aten
#: What gives its operand where the type is the same.
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.detach.default}


@dataclass(frozen=True)
class _Norm:
    """gain * (x - mean) / sqrt(variance + eps) over ``dims``; without ``centred`` the mean is taken as 0."""

    x: Node
    dims: tuple[int, ...]
    eps: float
    centred: bool
    gain: float = 1.0

    def emit(self, node: Node, weight: Node | None) -> Node:
        """The operator in the place of ``node``; ``weight`` [n] of the dimensions, which are the last ones then."""
        rank = self.x.meta["val"].dim()
        order = [*(dim for dim in range(rank) if dim not in self.dims), *self.dims]
        x = self.x if order == list(range(rank)) else call(node, aten.permute.default, self.x, order)
        sizes = [int(self.x.meta["val"].shape[dim]) for dim in self.dims]
        if self.centred:
            y = call(node, aten.layer_norm.default, x, sizes, weight, None, self.eps)
        else:
            y = call(node, aten.rms_norm.default, x, sizes, weight, self.eps)
        if x is not self.x:
            y = call(node, aten.permute.default, y, [order.index(dim) for dim in range(rank)])
        return y if self.gain == 1.0 else call(node, aten.mul.Scalar, y, self.gain)


def fuse_log_softmax(module: GraphModule) -> None:
    """Replace logarithms of softmaxes."""
    logarithms = module.graph.find_nodes(op="call_function", target=aten.log.default)
    found = {log: x for log in logarithms if (x := _skip_casts(log.args[0])).target is aten.softmax.int}
    for log, softmax in found.items():
        with module.graph.inserting_before(log):
            log.replace_all_uses_with(call(log, aten.log_softmax.int, *softmax.args))
    if found:
        drop_unread(module.graph)


def fuse_norms(module: GraphModule, algorithms: Collection[str]) -> None:
    """Replace norms that ``algorithms`` names, with the product by a constant of its size where one follows."""
    norms = {node: found for node in module.graph.nodes if (found := _match_norm(node)) is not None}
    norms = {
        node: found
        for node, found in norms.items()
        if ("fused_norms" if found.centred else "fused_rms_norms") in algorithms
    }
    if not norms:
        return
    for check in module.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        module.graph.erase_node(check)  # of types, while the model was traced
    constants = constant_nodes(module.graph)
    for node, norm in norms.items():
        last, weight = _match_weight(node, norm, constants)
        with module.graph.inserting_before(last):
            last.replace_all_uses_with(norm.emit(last, weight))
    drop_unread(module.graph)


def _match_norm(node: Node) -> _Norm | None:
    """The norm that ``node`` is the end of, of float32."""
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
    """x and y where ``node`` is x / sqrt(y), by a product or a division."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) != 2 or node.kwargs:
        return
    product = node.target is aten.mul.Tensor
    for x, factor in (node.args, node.args[::-1]) if product else (node.args,):
        if isinstance(x, Node) and isinstance(factor, Node):
            if factor.target is aten.reciprocal.default and product and isinstance(factor.args[0], Node):
                inverse, factor = aten.sqrt.default, factor.args[0]
            else:
                inverse = aten.rsqrt.default if product else aten.sqrt.default
            powers = aten.pow.Tensor_Scalar, -0.5 if inverse is aten.rsqrt.default else 0.5
            if factor.target is inverse or (factor.target, *factor.args[1:]) == powers:
                yield x, _skip_casts(factor.args[0])


def _match_numerator(x: Node, variance: Node, eps: float) -> _Norm | None:
    """The norm whose numerator is ``x``."""
    whole, centre = _match_centred(x)
    if variance.target is aten.mean.dim:
        found = _match_mean(variance)
        squared = _match_square(found[0]) if found is not None else None
        if found is None or squared is None or not (squared is x or _match_centred(squared) == (whole, centre)):
            return None
        dims = found[1]
        return _Norm(whole, dims, eps, True) if dims == centre else _Norm(x, dims, eps, False)
    spread = _match_variance(variance)
    if spread is None or centre is None or spread[0] not in (x, whole) or spread[1] != centre:
        return None
    count = math.prod(x.meta["val"].shape[dim] for dim in centre)
    part = (count - spread[2]) / count  # of the sum of squares
    return _Norm(whole, centre, eps * part, True, math.sqrt(part)) if part > 0 else None


def _skip_casts(node: Any) -> Any:
    """What a node is but for casts that change nothing."""
    while isinstance(node, Node) and node.target in _CASTS:
        source: Any = node.args[0]
        if node.meta["val"].dtype is not source.meta["val"].dtype:
            return node
        node = source
    return node


def _reduction(x: Any, dims: Any) -> tuple[Any, tuple[int, ...]]:
    """An operand and the dimensions that it is reduced over."""
    rank = x.meta["val"].dim()
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return _skip_casts(x), tuple(sorted(dim % rank for dim in dims))


def _match_mean(node: Node) -> tuple[Any, tuple[int, ...]] | None:
    """What ``node`` is the mean of, and along which dimensions, which it keeps."""
    if node.target is operator.getitem and node.args[1] == 1:
        spread = _match_variance(node.args[0])
        return spread and spread[:2]
    if node.target is not aten.mean.dim or node.kwargs or len(node.args) != 3 or not node.args[2]:
        return None
    return _reduction(*node.args[:2])


def _match_variance(node: Any) -> tuple[Any, tuple[int, ...], float] | None:
    """What ``node`` is the variance of, along which dimensions, which it keeps, and by what the count is lessened."""
    if node.target is operator.getitem and node.args[1] == 0:
        return _match_variance(node.args[0])
    if node.target in (aten.var.correction, aten.var_mean.correction):
        less, keepdim = node.kwargs.get("correction", 1), node.kwargs.get("keepdim", False)
    elif node.target in (aten.var.dim, aten.var_mean.dim):
        less, keepdim = ([*node.args[2:], *(True, False)[len(node.args) - 2 :]])[:2]
    else:
        return None
    dims = node.args[1] if len(node.args) > 1 else None
    return (*_reduction(node.args[0], dims), float(1 if less is None else less)) if keepdim else None


def _match_square(node: Node) -> Any:
    """What ``node`` is the square of."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return _skip_casts(node.args[0])
    if node.target is aten.mul.Tensor and _skip_casts(node.args[0]) is _skip_casts(node.args[1]):
        return _skip_casts(node.args[0])
    return _skip_casts(node.args[0]) if node.target is aten.square.default else None


def _match_centred(x: Node) -> tuple[Node, tuple[int, ...] | None]:
    """What ``x`` is without its mean, and along which dimensions; else x."""
    if x.target is aten.sub.Tensor and not x.kwargs and len(x.args) == 2:
        whole, mean = map(_skip_casts, x.args)
        found = _match_mean(mean) if isinstance(mean, Node) else None
        if isinstance(whole, Node) and found is not None and found[0] is whole:
            return whole, found[1]
    return x, None


def _match_weight(node: Node, norm: _Norm, constants: Collection[Node]) -> tuple[Node, Node | None]:
    """The end of a norm, and the constant that its result is multiplied with if nothing else reads it."""
    shape = norm.x.meta["val"].shape
    if norm.dims != (len(shape) - 1,) or norm.gain != 1.0:
        return node, None
    end = node
    while len(end.users) == 1 and next(iter(end.users)).target in _CASTS:
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
