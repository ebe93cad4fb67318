"""Replace the fill value of ``masked_fill`` before a maximum or minimum, so that it does not consume the int8 range.

To exclude elements from a maximum (padding, suppressed detections), models replace them by a number far below all
others. A tensor has one scale. With such a number in the tensor, almost no int8 levels remain for all other values.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.aten.mask_constants import MASK_THRESHOLD
from arm_backend_core.graph_edits import eliminate_dead_code, insert_call
from arm_backend_core.nodes import is_float, readers_through
from arm_backend_core.ops.catalog import has_shared_qparams
from arm_backend_core.ops.comparison_and_logic import where

aten = torch.ops.aten

#: Operators whose result depends only on the order of the values, not on the distances between them.
_MAX_OPS = (aten.amax.default, aten.argmax.default, aten.max.default, aten.max.dim, aten.topk.default)
_MIN_OPS = (aten.amin.default, aten.argmin.default, aten.min.default, aten.min.dim)
_COMPARISON_OPS = {getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
#: For each fill operator, pairs of argument indices (tensor to fill, fill value). ``where`` can fill either operand.
_FILL_ARGUMENTS: dict[Any, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(where.overloads, ((1, 2), (2, 1))),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), ((0, 2),)),
}


def bound_mask_fill(module: GraphModule) -> list[str]:
    """Replace the extreme fill values of masks before maxima and minima by a bound just outside of the other values.

    The bound is min - (max - min) / 16 for a maximum, and max + (max - min) / 16 for a minimum. min and max are the
    smallest and the largest element of the tensor before it is filled. Every inference computes the bound: two
    reductions and a few scalar operators are inserted before the maximum or minimum. The maximum of a row that is
    masked entirely is then the bound. It cannot be the fill value, which int8 cannot represent beside the other values.
    A fill value stays if a comparison reads the maximum or minimum, because the comparison may test for the fill value.

    Returns:
        A note for the user for each maximum or minimum whose masks changed.
    """
    notes: list[str] = []
    extremum_nodes = [node for node in module.graph.nodes if node.target in (*_MAX_OPS, *_MIN_OPS)]
    if not extremum_nodes:
        return notes
    constants = Constants(module)
    for node in extremum_nodes:
        sign = -1 if node.target in _MAX_OPS else 1
        if node.target is aten.topk.default and not (*node.args, -1, True)[3]:
            sign = 1
        fills, source = [], node.args[0]
        while (match := _match_fill(source, sign, constants)) is not None:
            fills.append((source, *match))
            source = match[0]
        if not fills or _is_compared(node):
            continue
        notes.append(
            f"'{fills[0][0].name}': the fill value {fills[0][2]:g} is replaced by a value just outside of the other "
            "values, because int8 cannot represent both"
        )
        with module.graph.inserting_before(node):
            smallest, largest = (
                insert_call(node, extreme, source) for extreme in (aten.amin.default, aten.amax.default)
            )
            margin = insert_call(
                node, aten.mul.Scalar, insert_call(node, aten.sub.Tensor, largest, smallest), sign / 16
            )
            bound, result = insert_call(node, aten.add.Tensor, smallest if sign < 0 else largest, margin), source
            for fill_node, _, _, index in reversed(fills):
                values = (result, bound) if index == 1 else (bound, result)
                result = insert_call(fill_node, aten.where.self, fill_node.args[index == 0], *values)
            node.replace_input_with(fills[0][0], result)
    eliminate_dead_code(module.graph)
    return notes


def _match_fill(node: Node, sign: int, constants: Constants) -> tuple[Node, float, int] | None:
    """Match a fill with an extreme number; return the tensor to fill, the number and the tensor's argument index.

    Args:
        sign: -1 to match numbers of at most -``MASK_THRESHOLD``, 1 to match numbers of at least ``MASK_THRESHOLD``.
    """
    for index, fill_index in _FILL_ARGUMENTS.get(node.target, ()):
        x, number = node.args[index], node.args[fill_index]
        if isinstance(number, Node) and number in constants and number.meta["val"].numel() == 1:
            number = constants.value(number).item()
        if isinstance(number, (int, float)) and number * sign >= MASK_THRESHOLD and isinstance(x, Node) and is_float(x):
            return x, number, index
    return None


def _is_compared(node: Node) -> bool:
    """Whether a comparison reads the result of ``node``, directly or through data movement."""

    def through(reader: Node) -> bool:
        return has_shared_qparams(reader) or (reader.target is operator.getitem and reader.args[1:] == (0,))

    reading_ops = {getattr(reader.target, "overloadpacket", None) for reader in readers_through(node, through)}
    return bool(reading_ops & _COMPARISON_OPS)
