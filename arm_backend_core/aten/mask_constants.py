"""Clamp the constants of masks, and rewrite comparisons with extrema, so that both can be quantized.

An attention mask holds -inf, the type's minimum, or -10000 where softmax or exp must give 0. One such value would
consume the quantization range that it shares with the scores. Values below the bound ``QUANTIZABLE_LOWEST`` (-64) are
therefore replaced by the bound. The exponential of a masked score is still negligible if the scores span at most 52. If
they span more, the algorithm ``mask_bounds`` lowers the bounds after calibration. The metadata key ``MASK_BOUND`` marks
nodes with a bound as an argument.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.nodes import is_float, readers_through
from arm_backend_core.ops.catalog import has_shared_qparams
from arm_backend_core.ops.comparison_and_logic import where
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST
from arm_backend_core.ops.normalization import log_softmax, safe_softmax, softmax

aten = torch.ops.aten

_SOFTMAX = (*softmax.overloads, *safe_softmax.overloads, *log_softmax.overloads)
EXPONENTIAL_OPS = (*_SOFTMAX, aten.logsumexp.default, aten.exp.default, aten.exp2.default, aten.sigmoid.default)
_MAXIMA = (aten.amax.default, aten.max.dim)
_MAXIMUM_PATH = (*_MAXIMA, operator.getitem, aten.detach.default)
_MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
#: For each operator: the positions of the arguments whose values appear in the result, unchanged or as terms of a sum.
VALUE_OPERANDS = {
    aten.add.Tensor: (0, 1),
    **dict.fromkeys(where.overloads, (1, 2)),
    aten.masked_fill.Scalar: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    aten.sub.Tensor: (0,),
    aten.clamp.default: (0,),
}
#: A product of a tensor of 0 and 1 with at least this factor is a mask, because scores are not scaled that much.
_MASK_FACTOR = 1000.0
#: Node metadata of a clamp or a fill: index of the argument that is the bound of a mask.
MASK_BOUND = "mask_bound"
#: Node metadata: the bound of the masked values of a tensor, for tensors between a mask and an exponential.
MASKED_VALUE = "masked_value"
#: Node metadata: calibration clamps values to this minimum, because smaller ones make no difference to the program.
CALIBRATION_MINIMUM = "calibration_minimum"
#: Numbers of at least this magnitude are masks, not scores.
MASK_THRESHOLD = 9999.0
_EXTREME_COMPARISONS: dict[Any, Any] = {
    (aten.eq.Tensor, aten.maximum.default): aten.ge.Tensor,
    (aten.ne.Tensor, aten.maximum.default): aten.lt.Tensor,
    (aten.eq.Tensor, aten.minimum.default): aten.le.Tensor,
    (aten.ne.Tensor, aten.minimum.default): aten.gt.Tensor,
}


def rewrite_extreme_comparisons(module: GraphModule) -> None:
    """Rewrite x == maximum(x, y) as x >= y, and likewise for != and minimum.

    Quantized x and maximum may have different scales, so that they differ where they should be equal.
    """
    for node in [node for node in module.graph.nodes if node.target in (aten.eq.Tensor, aten.ne.Tensor)]:
        for x, extreme in (node.args, node.args[::-1]):
            comparison = _EXTREME_COMPARISONS.get((node.target, extreme.target)) if isinstance(extreme, Node) else None
            if comparison is not None and isinstance(x, Node) and x in extreme.args:
                first, second = extreme.args
                node.target, node.args = comparison, (x, second if x is first else first)
                break


def bound_masks(module: GraphModule) -> None:
    """Bound large negative constants by ``QUANTIZABLE_LOWEST`` where softmax or another exponential reads them."""
    exponentials = [
        node for target in EXPONENTIAL_OPS for node in module.graph.find_nodes(op="call_function", target=target)
    ]
    if exponentials:
        bound = _MaskBounder(module)
        for node in exponentials:
            node.replace_input_with(node.args[0], bound(node.args[0]))


def _is_attention_bound(node: Node) -> bool:
    """Whether ``node`` is the clamp that the decomposition of attention applies to a float mask."""
    return node.target is aten.clamp.default and bool(node.args[1] == QUANTIZABLE_LOWEST)


class _MaskBounder:
    """Creates copies of nodes with bounded mask values; other readers keep the original nodes."""

    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        self._bounded_nodes: dict[tuple[Node, float], Node] = {}
        self._constants = Constants(module)

    def __call__(self, x: Any, lowest: float = QUANTIZABLE_LOWEST) -> Any:
        """``x`` itself, or its bounded replacement; ``x`` may be a number, or a list of tensors."""
        if isinstance(x, (list, tuple)):
            bounded = [self(item, lowest) for item in x]
            return x if all(new is old for new, old in zip(bounded, x, strict=True)) else bounded
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return lowest if x < lowest else x
        if not isinstance(x, Node) or not is_float(x):
            return x
        if (x, lowest) not in self._bounded_nodes:
            self._bounded_nodes[x, lowest] = self._bound(x, lowest)
        return self._bounded_nodes[x, lowest]

    def _bound(self, node: Node, lowest: float) -> Node:
        if node in self._constants:
            return node if self._minimum(node) >= lowest else self._insert_clamp(node, lowest)
        own_lowest, factor = lowest, self._constant_factor(node)
        positions = VALUE_OPERANDS.get(node.target, (0,) if has_shared_qparams(node) else ())  # type: ignore[call-overload]
        if self._is_mask_product(node, -1.0):
            return self._insert_clamp(node, lowest)
        if _is_attention_bound(node):
            node.meta |= {MASK_BOUND: 1, MASKED_VALUE: lowest}
            self._ignore_values_below_bound(node)
        if 0 < factor < _MASK_FACTOR:
            positions, lowest = (0, 1), lowest / factor
        is_sum = node.target in (aten.add.Tensor, aten.sub.Tensor)
        if is_sum:  # a number that is added to all elements is not a mask
            positions = tuple(
                position
                for position in positions
                if isinstance(x := node.args[position], Node) and not self._is_single_element_constant(x)
            )
        arguments: list[Any] = [
            self(x, lowest + is_sum * self._negative_maximum(x)) if i in positions else x
            for i, x in enumerate(node.args)
        ]
        subtracted = node.args[1] if node.target is aten.sub.Tensor else None
        if isinstance(subtracted, Node) and self._is_mask_product(subtracted, 1.0):
            arguments[1] = self._insert_clamp(subtracted, -lowest)
        if isinstance(subtracted, Node) and arguments[0] is not node.args[0]:
            arguments[1] = self._bound_maximum(subtracted, node.args[0], arguments[0])
        operands = pytree.tree_leaves(arguments)
        if any(MASKED_VALUE in x.meta for x in operands if isinstance(x, Node)):
            node.meta[MASKED_VALUE] = own_lowest
        if all(new is old for new, old in zip(arguments, node.args, strict=True)):
            return node
        with self._graph.inserting_after(node):
            copy = self._graph.create_node("call_function", node.target, tuple(arguments), dict(node.kwargs))
        copy.meta = dict(node.meta)
        for i in positions:
            if arguments[i] is not node.args[i] and isinstance(arguments[i], (int, float)):
                copy.meta |= {MASK_BOUND: i, MASKED_VALUE: own_lowest}
        return copy

    def _bound_maximum(self, node: Node, x: Any, bounded: Any) -> Node:
        """In x - max(x) of a stable softmax, compute the maximum from ``bounded``.

        Args:
            node: the subtracted tensor, or a tensor on the path from the maximum to it.
            x: the tensor from which ``node`` is subtracted.
            bounded: the replacement of ``x``.

        Returns:
            The copy; ``node`` itself if it is not the maximum of ``x``.
        """
        if node.target not in _MAXIMUM_PATH and not has_shared_qparams(node):
            return node
        operand = node.args[0]
        if not isinstance(operand, Node):
            return node
        is_maximum = node.target in _MAXIMA and operand is x
        source = bounded if is_maximum else self._bound_maximum(operand, x, bounded)
        if source is operand:
            return node
        with self._graph.inserting_after(node):  # not after ``source``: other arguments of ``node`` may follow it
            copy = self._graph.create_node("call_function", node.target, (source, *node.args[1:]), dict(node.kwargs))
        copy.meta = dict(node.meta)
        return copy

    def _ignore_values_below_bound(self, clamp: Node) -> None:
        """Mark the sources of ``clamp``: calibration clamps them to the bound, because a mask input may hold -inf."""
        node = clamp
        while (node is clamp or has_shared_qparams(node)) and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
            readers = list(readers_through(node, has_shared_qparams))
            if all(has_shared_qparams(reader) or _is_attention_bound(reader) for reader in readers):
                node.meta[CALIBRATION_MINIMUM] = QUANTIZABLE_LOWEST

    def _constant_factor(self, node: Node) -> float:
        """The number by which ``node`` multiplies a tensor (1 / n for a division by n); 0 for other operators."""
        divides = node.target in (aten.div.Tensor, aten.div.Scalar)
        if not divides and node.target not in _MULTIPLICATIONS:
            return 0.0
        operands: tuple[Any, ...] = node.args[divides:]
        numeric = [x for x in operands if isinstance(x, (int, float)) or self._is_single_element_constant(x)]
        numbers = [self._minimum(x) if isinstance(x, Node) else float(x) for x in numeric[:1]]
        number = numbers[0] if numbers else 0.0
        return 1 / number if divides and number else number

    def _is_mask_product(self, node: Node, sign: float) -> bool:
        """Whether ``node`` scales a 0/1 mask by a large number of this sign."""
        factor = self._constant_factor(node) * sign if node.target in _MULTIPLICATIONS else 0.0
        return factor >= _MASK_FACTOR and all(self._is_binary(x, factor) for x in node.all_input_nodes)

    def _is_binary(self, node: Node, factor: float) -> bool:
        """Whether ``node`` may be a 0/1 mask.

        A constant may be a mask. So may a tensor that is computed from integers or booleans by casts, data movement,
        and sums, differences and products with constants. If ``factor`` is at least ``MASK_THRESHOLD``, the tensor may
        also be a float input, or be computed from one in this way.
        """
        while node not in self._constants and is_float(node) and node.op == "call_function":
            elementwise = (aten.sub.Tensor, aten.rsub.Scalar, aten.add.Tensor, aten.mul.Tensor)
            operands = [x for x in node.all_input_nodes if x not in self._constants]
            if len(operands) != 1 or not (has_shared_qparams(node) or node.target in elementwise):
                return False
            (node,) = operands
        return node in self._constants or not is_float(node) or factor >= MASK_THRESHOLD

    def _negative_maximum(self, x: Any) -> float:
        """The largest element of a constant if that is finite and negative, else 0."""
        value = self._constants.value(x) if isinstance(x, Node) and x in self._constants else torch.zeros(1)
        maximum = float(value.max()) if value.numel() else 0.0
        return min(maximum, 0.0) if math.isfinite(maximum) else 0.0

    def _is_single_element_constant(self, x: Any) -> bool:
        return x in self._constants and x.meta["val"].numel() == 1

    def _insert_clamp(self, node: Node, bound: float) -> Node:
        bounds = (bound,) if bound < 0 else (None, bound)
        with self._graph.inserting_after(node):
            clamp = self._graph.call_function(aten.clamp.default, (node, *bounds))
        clamp.meta = dict(node.meta) | {MASK_BOUND: len(bounds), MASKED_VALUE: bound}
        return clamp

    def _minimum(self, node: Node) -> float:
        """The smallest element of a constant; 0 if the constant has no elements."""
        value = self._constants.value(node)
        return float(value.min()) if value.numel() else 0.0
