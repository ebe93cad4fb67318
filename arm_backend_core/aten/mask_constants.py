"""Comparisons and attention masks that a model writes itself, in forms that can be quantized.

A mask puts -inf, the type's least number, or -10000 where softmax or exp is to give 0. One such value would take all
steps of the scale that the scores share with it. exp of QUANTIZABLE_LOWEST is nothing beside any score that counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constants import Constants
from arm_backend_core.nodes import is_float
from arm_backend_core.ops.catalog import is_data_movement
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST

aten = torch.ops.aten

_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_LOGARITHM = (aten.log_softmax.int, aten._log_softmax.default, aten.logsumexp.default)
_EXPONENTIAL = (*_SOFTMAX, *_LOGARITHM, aten.exp.default, aten.exp2.default, aten.sigmoid.default)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
#: Operator -> which of its arguments are values of its result, as they are or added up.
_VALUE_OPERANDS = {
    aten.add.Tensor: (0, 1),
    aten.where.self: (1, 2),
    aten.where.ScalarOther: (1, 2),
    aten.where.ScalarSelf: (1, 2),
    aten.where.Scalar: (1, 2),
    aten.masked_fill.Scalar: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    aten.sub.Tensor: (0,),
    **dict.fromkeys((aten.clamp.default, *_CASTS), (0,)),
}
#: A product with such a number is a mask: no score is scaled so.
_MASK_FACTOR = 1000.0
#: From here on no score is.
MASK_THRESHOLD = 9999.0
_EXTREME_COMPARISONS: dict[Any, Any] = {
    (aten.eq.Tensor, aten.maximum.default): aten.ge.Tensor,
    (aten.ne.Tensor, aten.maximum.default): aten.lt.Tensor,
    (aten.eq.Tensor, aten.minimum.default): aten.le.Tensor,
    (aten.ne.Tensor, aten.minimum.default): aten.gt.Tensor,
}


def rewrite_extreme_comparisons(module: GraphModule) -> None:
    """Have x == maximum(x, y) ask whether x >= y: quantized, the maximum has other steps, which x does not meet."""
    for node in [node for node in module.graph.nodes if node.target in (aten.eq.Tensor, aten.ne.Tensor)]:
        for x, extreme in (node.args, node.args[::-1]):
            wanted = _EXTREME_COMPARISONS.get((node.target, extreme.target)) if isinstance(extreme, Node) else None
            if wanted is not None and isinstance(x, Node) and x in extreme.args:
                first, second = extreme.args
                node.target, node.args = wanted, (x, second if x is first else first)
                break


def bound_masks(module: GraphModule) -> None:
    """Replace values far below zero on their way to exponentials, and nowhere else, by ``QUANTIZABLE_LOWEST``."""
    softmaxes = [node for target in _EXPONENTIAL for node in module.graph.find_nodes(op="call_function", target=target)]
    if softmaxes:
        bound = _MaskBounder(module)
        for node in softmaxes:
            node.replace_input_with(node.args[0], bound(node.args[0]))


class _MaskBounder:
    """Copies of nodes whose masking values are bounded; other readers keep the nodes that they have."""

    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        self._known: dict[tuple[Node, float], Node] = {}
        self._constants = Constants(module)

    def __call__(self, x: Any, lowest: float = QUANTIZABLE_LOWEST) -> Any:
        """``x``, or what takes its place; a number too."""
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return lowest if x < lowest else x
        if not isinstance(x, Node) or not is_float(x):
            return x
        if (x, lowest) not in self._known:
            self._known[x, lowest] = self._bound(x, lowest)
        return self._known[x, lowest]

    def _bound(self, node: Node, lowest: float) -> Node:
        if node in self._constants:
            return node if self._minimum(node) >= lowest else self._insert_clamp(node, lowest)
        factor = self._factor(node)
        places = _VALUE_OPERANDS.get(node.target, (0,) if is_data_movement(node) else ())  # type: ignore[call-overload]
        if self._is_mask_product(node, -1.0):
            return self._insert_clamp(node, lowest)
        if 0 < factor < _MASK_FACTOR:
            places, lowest = (0, 1), lowest / factor
        added = node.target in (aten.add.Tensor, aten.sub.Tensor)
        if added:  # what is added to all alike is no mask
            places = tuple(
                place for place in places if isinstance(x := node.args[place], Node) and not self._is_number(x)
            )
        arguments = [
            self(x, lowest + added * self._negative_maximum(x)) if i in places else x for i, x in enumerate(node.args)
        ]
        subtracted = node.args[1] if node.target is aten.sub.Tensor else None
        if isinstance(subtracted, Node) and self._is_mask_product(subtracted, 1.0):
            arguments[1] = self._insert_clamp(subtracted, -lowest)
        if all(new is old for new, old in zip(arguments, node.args, strict=True)):
            return node
        with self._graph.inserting_after(node):
            copy = self._graph.create_node("call_function", node.target, tuple(arguments), dict(node.kwargs))
        copy.meta = dict(node.meta)
        return copy

    def _factor(self, node: Node) -> float:
        """The number that ``node`` multiplies by, or divides, else 0."""
        divides = node.target in (aten.div.Tensor, aten.div.Scalar)
        if not divides and node.target not in _PRODUCTS:
            return 0.0
        operands: tuple[Any, ...] = node.args[divides:]
        known = [x for x in operands if isinstance(x, (int, float)) or self._is_number(x)]
        numbers = [self._minimum(x) if isinstance(x, Node) else float(x) for x in known[:1]]
        number = numbers[0] if numbers else 0.0
        return 1 / number if divides and number else number

    def _is_mask_product(self, node: Node, sign: float) -> bool:
        """Whether ``node`` multiplies by a number, of this sign, that makes a mask of ones and zeros."""
        factor = self._factor(node) * sign if node.target in _PRODUCTS else 0.0
        return factor >= _MASK_FACTOR and all(self._is_binary(x, factor) for x in node.all_input_nodes)

    def _is_binary(self, node: Node, factor: float) -> bool:
        """Whether ``node`` may be ones and zeros: integers as they are, moved or taken from a number; or an input."""
        while node not in self._constants and is_float(node) and node.op == "call_function":
            plain = (*_CASTS, aten.sub.Tensor, aten.rsub.Scalar, aten.add.Tensor, aten.mul.Tensor)
            others = [x for x in node.all_input_nodes if x not in self._constants]
            if len(others) != 1 or not (is_data_movement(node) or node.target in plain):
                return False
            (node,) = others
        return node in self._constants or not is_float(node) or factor >= MASK_THRESHOLD

    def _negative_maximum(self, x: Any) -> float:
        """The largest element of a constant where it is below 0, else 0."""
        value = self._constants.value(x) if isinstance(x, Node) and x in self._constants else torch.zeros(1)
        most = float(value.max()) if value.numel() else 0.0
        return min(most, 0.0) if math.isfinite(most) else 0.0

    def _is_number(self, x: Any) -> bool:
        return x in self._constants and x.meta["val"].numel() == 1

    def _insert_clamp(self, node: Node, bound: float) -> Node:
        bounds = (bound,) if bound < 0 else (None, bound)
        with self._graph.inserting_after(node):
            clamp = self._graph.call_function(aten.clamp.default, (node, *bounds))
        clamp.meta = dict(node.meta)
        return clamp

    def _minimum(self, node: Node) -> float:
        """The smallest value of a constant."""
        value = self._constants.value(node)
        return float(value.min()) if value.numel() else 0.0
