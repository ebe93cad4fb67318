"""Masked rows: set each softmax row to 0 if all of its elements are masked, as PyTorch's attention does.

A floating-point program recognizes a masked element by its score, -inf. Quantized scores are finite, so this rewrite
finds the fully masked rows from the mask itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.graph_edits import insert_call
from arm_backend_core.nodes import arguments_of, evaluate_node, is_float
from arm_backend_core.ops.catalog import has_shared_qparams, is_cast
from arm_backend_core.ops.comparison_and_logic import where
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST
from arm_backend_core.ops.normalization import safe_softmax, softmax

aten = torch.ops.aten

_MATMULS = (aten.matmul.default, aten.bmm.default)
_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def zero_masked_rows(module: GraphModule) -> None:
    """Set the rows whose scores are all -inf to 0, by a select after the softmax.

    This applies to ``_safe_softmax``, and to a ``softmax`` that only ``nan_to_num`` operators read. The select after
    such a ``softmax`` inserts the number by which ``nan_to_num`` replaces NaN, by default 0. If the ``nan_to_num``
    operators have different numbers, there is one select for each number. A constant mask without a fully masked row
    needs no select. If only the matrix product with the values reads the attention weights, the select follows that
    product. The select then usually reads fewer elements, and the quantization of the attention weights does not
    change.
    """
    finder = _MaskFinder(module)
    targets = [target for record in (safe_softmax, softmax) for target in record.overloads]
    for node in [node for target in targets for node in module.graph.find_nodes(op="call_function", target=target)]:
        readers = {0.0: list(node.users)} if node.target in safe_softmax.overloads else _group_nan_replacements(node)
        masked = finder(node.args[0]) if readers else None
        if masked is None:
            continue
        source, dim = node.args[0], node.args[1]
        shape = source.meta["val"].shape
        is_last = dim % len(shape) == len(shape) - 1
        with module.graph.inserting_before(node):
            if not is_last and masked.meta["val"].shape != shape:
                masked = finder.insert(node, aten.expand.default, masked, list(shape))
            rows = finder.insert(node, aten.all.dim, masked, -1 if is_last else dim % len(shape), True)
        if rows not in finder.constants or bool(finder.value(rows).any()):
            for number, nodes in readers.items():
                _fill_masked_rows(node, rows, number, nodes, is_last=is_last)


def _group_nan_replacements(node: Node) -> dict[float, list[Node]]:
    """Group the readers by the number that replaces NaN: {0.0: [reader, ...]}; empty if one is not a ``nan_to_num``."""
    groups: dict[float, list[Node]] = {}
    for user in node.users:
        if user.target is not aten.nan_to_num.default:
            return {}
        groups.setdefault(float(arguments_of(user)["nan"] or 0.0), []).append(user)
    return groups


def _fill_masked_rows(weights: Node, rows: Node, number: float, readers: list[Node], *, is_last: bool) -> None:
    """Replace ``rows`` of the attention weights by ``number`` in the operand of ``readers``.

    If the softmax is along the last dimension, and the only reader of the weights is a matrix product, the rows of the
    product are replaced instead, for all readers of the product.
    """
    result, users = weights, list(weights.users)
    if is_last and len(users) == 1 and users[0].target in _MATMULS and users[0].args[0] is weights:
        (result,) = users
        readers = list(result.users)
    with result.graph.inserting_after(result):
        selected = result.graph.call_function(aten.where.ScalarSelf, (rows, number, result))
    selected.meta = dict(result.meta)
    for reader in readers:
        reader.replace_input_with(result, selected)


class _MaskFinder:
    """For a tensor, finds the boolean node that is true where the tensor is -inf because of a mask."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._masks: dict[Node, Node | None] = {}
        self._values: dict[Node, torch.Tensor] = {}
        self._float_constants = Constants(module)
        self.constants: set[Node] = set()

    def __call__(self, x: Any) -> Node | None:
        """The boolean node that is true where ``x`` is masked; None if ``x`` has no mask."""
        if not isinstance(x, Node) or not is_float(x):
            return None
        if x not in self._masks:
            self._masks[x] = self._find(x)
        return self._masks[x]

    def value(self, node: Node) -> torch.Tensor:
        """The value of a constant."""
        if node in self._float_constants:
            return self._float_constants.value(node)
        if node not in self._values:
            self._values[node] = evaluate_node(node, self.value)
        return self._values[node]

    def insert(self, origin: Node, target: Any, *args: Any) -> Node:
        """Insert an operator at the graph's insertion point."""
        node = insert_call(origin, target, *args)
        if all(x in self.constants or x in self._float_constants for x in node.all_input_nodes):
            self.constants.add(node)
        return node

    def _find(self, x: Node) -> Node | None:
        is_bounded = x.target is aten.clamp.default and x.args[1] == QUANTIZABLE_LOWEST
        if x in self._float_constants and not is_bounded:
            lowest = self._is_negative_infinity(x, every=False)
            return self._insert_after(x, aten.eq.Scalar, x, -math.inf) if lowest else None
        if is_bounded:
            return self._find_in_bounded_mask(x)
        if x.target in where.overloads or x.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            return self._find_in_fill(x)
        is_sum, is_scaling = (
            x.target in (aten.add.Tensor, aten.sub.Tensor),
            x.target in _SCALINGS and self._has_positive_factor(x),
        )
        operands = (
            x.args[: 2 if x.target is aten.add.Tensor else 1] if is_sum or is_scaling or has_shared_qparams(x) else ()
        )
        masks = [mask for operand in operands if (mask := self(operand)) is not None]
        # An operator that keeps the quantization parameters moves elements, so it moves their mask, too.
        if has_shared_qparams(x) and not is_cast(x):
            return self._move_mask(x, masks[0]) if masks and len(x.all_input_nodes) == 1 else None
        return self._combine_masks(x, masks)

    def _find_in_bounded_mask(self, x: Node) -> Node | None:
        """The boolean mask of a float mask that ``attention`` has clamped to ``QUANTIZABLE_LOWEST``.

        If the float mask is an input, the program computes the boolean mask: true for elements of at most
        ``QUANTIZABLE_LOWEST`` + 1.
        """
        assert isinstance(x.args[0], Node)
        mask, source = self(x.args[0]), x.args[0]
        while has_shared_qparams(source) and len(source.all_input_nodes) == 1:
            (source,) = source.all_input_nodes
        if mask is None and source.op == "placeholder":
            return self._insert_after(x, aten.le.Scalar, x, QUANTIZABLE_LOWEST + 1)
        return mask

    def _find_in_fill(self, x: Node) -> Node | None:
        """The boolean mask of a select between -inf and another tensor."""
        is_where = x.target in where.overloads
        condition, fill, other = (x.args[0], x.args[1], x.args[2]) if is_where else (x.args[1], x.args[2], x.args[0])
        if self._is_negative_infinity(fill):
            masked = condition
        elif self._is_negative_infinity(other):
            masked = self._insert_after(x, aten.logical_not.default, condition)
            other = fill
        else:
            return None
        assert isinstance(masked, Node)
        inner = self(other)
        return self._combine_masks(x, [masked] if inner is None else [masked, inner])

    def _has_positive_factor(self, x: Node) -> bool:
        """Whether the second operand of a product or quotient is a number or constant with only positive elements."""
        factor = x.args[1]
        if isinstance(factor, Node):
            return factor in self._float_constants and bool((self.value(factor) > 0).all())
        return isinstance(factor, (int, float)) and factor > 0

    def _is_negative_infinity(self, x: Any, *, every: bool = True) -> bool:
        """Whether ``x`` is the number -inf or a constant of -inf only; if not ``every``, one element -inf is enough."""
        if isinstance(x, Node):
            if x not in self._float_constants or not is_float(x):
                return False
            infinite = self.value(x) == -math.inf
            return bool(infinite.all() if every else infinite.any())
        return isinstance(x, float) and x == -math.inf

    def _combine_masks(self, x: Node, masks: list[Node]) -> Node | None:
        if not masks:
            return None
        result = masks[0]
        for mask in masks[1:]:
            result = self._insert_after(x, aten.logical_or.default, result, mask)
        return result

    def _move_mask(self, x: Node, mask: Node) -> Node:
        """Apply the data movement of ``x`` to the mask of its operand."""
        source = x.all_input_nodes[0]
        if mask.meta["val"].shape != source.meta["val"].shape:
            mask = self._insert_after(x, aten.expand.default, mask, list(source.meta["val"].shape))
        return self._insert_after(x, x.target, mask, *x.args[1:])

    def _insert_after(self, x: Node, target: Any, *args: Any) -> Node:
        """Insert an operator after ``x`` and after the operator's operands."""
        with self._module.graph.inserting_before(self._insertion_point(x, args)):
            return self.insert(x, target, *args)

    def _insertion_point(self, x: Node, args: tuple[Any, ...]) -> Node:
        latest = max(node for node in (x, *args) if isinstance(node, Node))
        return latest.next
