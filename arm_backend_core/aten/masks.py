"""Comparisons and attention masks that a model writes itself, in forms that can be quantized.

A mask puts -inf, the type's least number, or -10000 where softmax or exp is to give 0. One such value would take all
steps of the scale that the scores share with it. exp of QUANTIZABLE_LOWEST is nothing beside any score that counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constants import Constants
from arm_backend_core.nodes import is_float
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST
from arm_backend_core.ops.registry import Kind, find

aten = torch.ops.aten

_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_EXPONENTIAL = (*_SOFTMAX, aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.logsumexp.default)
#: Operator -> which of its arguments are values of its result, as they are or added up.
_CHOICES = {
    aten.add.Tensor: (0, 1),
    aten.where.self: (1, 2),
    aten.where.ScalarOther: (1, 2),
    aten.where.ScalarSelf: (1, 2),
    aten.where.Scalar: (1, 2),
    aten.masked_fill.Scalar: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    **dict.fromkeys((aten.clamp.default, aten._to_copy.default, aten.to.dtype), (0,)),
}
#: A product with such a number is a mask: no score is scaled so.
_MASKING = -1000.0
_EXTREMES: dict[Any, Any] = {
    (aten.eq.Tensor, aten.maximum.default): aten.ge.Tensor,
    (aten.ne.Tensor, aten.maximum.default): aten.lt.Tensor,
    (aten.eq.Tensor, aten.minimum.default): aten.le.Tensor,
    (aten.ne.Tensor, aten.minimum.default): aten.gt.Tensor,
}


def compare_operands(module: GraphModule) -> None:
    """Have x == maximum(x, y) ask whether x >= y: quantized, the maximum has other steps, which x does not meet."""
    for node in [node for node in module.graph.nodes if node.target in (aten.eq.Tensor, aten.ne.Tensor)]:
        for x, extreme in (node.args, node.args[::-1]):
            wanted = _EXTREMES.get((node.target, extreme.target)) if isinstance(extreme, Node) else None
            if wanted is not None and isinstance(x, Node) and x in extreme.args:
                first, second = extreme.args
                node.target, node.args = wanted, (x, second if x is first else first)
                break


def bound_masks(module: GraphModule) -> None:
    """Replace values far below zero on their way to exponentials, and nowhere else, by ``QUANTIZABLE_LOWEST``."""
    softmaxes = [node for target in _EXPONENTIAL for node in module.graph.find_nodes(op="call_function", target=target)]
    if softmaxes:
        bound = _Bound(module)
        for node in softmaxes:
            node.replace_input_with(node.args[0], bound(node.args[0]))


class _Bound:
    """Copies of nodes whose masking values are bounded; other readers keep the nodes that they have."""

    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        self._known: dict[Node, Node] = {}
        self._constants = Constants(module)

    def __call__(self, x: Any) -> Any:
        """``x``, or what takes its place; a number too."""
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return max(float(x), QUANTIZABLE_LOWEST) if x < QUANTIZABLE_LOWEST else x
        if not isinstance(x, Node) or not is_float(x):
            return x
        if x not in self._known:
            self._known[x] = self._bounded(x)
        return self._known[x]

    def _bounded(self, node: Node) -> Node:
        if node in self._constants:
            return node if self._least(node) >= QUANTIZABLE_LOWEST else self._clamped(node)
        record = find(node)
        moves = record is not None and record.kind is Kind.SHARED
        places = _CHOICES.get(node.target, (0,) if moves else ())  # type: ignore[call-overload]
        if not places and self._masks(node):
            return self._clamped(node)
        arguments = [self(x) if place in places else x for place, x in enumerate(node.args)]
        if all(new is old for new, old in zip(arguments, node.args, strict=True)):
            return node
        with self._graph.inserting_after(node):
            copy = self._graph.create_node("call_function", node.target, tuple(arguments), dict(node.kwargs))
        copy.meta = dict(node.meta)
        return copy

    def _masks(self, node: Node) -> bool:
        """Whether ``node`` multiplies by a number that makes a mask of ones and zeros."""
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            return False
        factors = [x if isinstance(x, (int, float)) else None for x in node.args]
        factors += [self._least(x) for x in node.all_input_nodes if x in self._constants and x.meta["val"].numel() == 1]
        return any(factor is not None and factor <= _MASKING for factor in factors)

    def _clamped(self, node: Node) -> Node:
        with self._graph.inserting_after(node):
            clamp = self._graph.call_function(aten.clamp.default, (node, QUANTIZABLE_LOWEST))
        clamp.meta = dict(node.meta)
        return clamp

    def _least(self, node: Node) -> float:
        """The smallest value of a constant."""
        value = self._constants.value(node)
        return float(value.min()) if value.numel() else 0.0
