"""What is filled with a number far beyond real ones, to be chosen last: masked maxima, seen items, detections.

One such number would take all steps of the scale that the others share with it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core import events
from arm_backend_core.aten.batch_norm import call
from arm_backend_core.aten.constants import Constants
from arm_backend_core.aten.mask_constants import FAR
from arm_backend_core.nodes import drop_unread, is_float
from arm_backend_core.ops.catalog import is_data_movement
from arm_backend_core.quantization.graph_interpreter import readers_through

aten = torch.ops.aten

#: What chooses the largest, or the least, whatever the numbers are.
_MAX_OPS = (aten.amax.default, aten.argmax.default, aten.max.default, aten.max.dim, aten.topk.default)
_MIN_OPS = (aten.amin.default, aten.argmin.default, aten.min.default, aten.min.dim)
_COMPARISON_OPS = {getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
#: What fills -> (which argument is filled, the number) of each way.
_FILL_ARGUMENTS: dict[Any, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), ((1, 2), (2, 1))),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), ((0, 2),)),
}


def bound_mask_fill(module: GraphModule) -> None:
    """Fill with a little less than the least of all where a number far below them is to be chosen last; or with more.

    Where a row has nothing else, int8 would hold no more of such a number; a comparison may still tell it from others.
    """
    chosen = [node for node in module.graph.nodes if node.target in (*_MAX_OPS, *_MIN_OPS)]
    if not chosen:
        return
    constants = Constants(module)
    for node in chosen:
        last = -1 if node.target in _MAX_OPS else 1
        if node.target is aten.topk.default and not (*node.args, -1, True)[3]:
            last = 1
        layers, source = [], node.args[0]
        while (found := _match_fill(source, last, constants)) is not None:
            layers.append((source, *found))
            source = found[0]
        if not layers or _is_compared(node):
            continue
        notes = events.current().notes
        note = (
            f"in '{layers[0][0].name}' a number beyond the others takes the place of {layers[0][2]:g}, which int8 lacks"
        )
        notes += [note] if note not in notes else []
        with module.graph.inserting_before(node):
            least, largest = (call(node, extreme, source) for extreme in (aten.amin.default, aten.amax.default))
            apart = call(node, aten.mul.Scalar, call(node, aten.sub.Tensor, largest, least), last / 16)
            bound, result = call(node, aten.add.Tensor, least if last < 0 else largest, apart), source
            for filled, _, _, of in reversed(layers):
                parts = (result, bound) if of == 1 else (bound, result)
                result = call(filled, aten.where.self, filled.args[of == 0], *parts)
            node.replace_input_with(layers[0][0], result)
    drop_unread(module.graph)


def _match_fill(node: Node, last: int, constants: Constants) -> tuple[Node, float, int] | None:
    """What ``node`` fills with a number far beyond real ones, the number, and which argument is filled."""
    for of, filling in _FILL_ARGUMENTS.get(node.target, ()):
        x, number = node.args[of], node.args[filling]
        if isinstance(number, Node) and number in constants and number.meta["val"].numel() == 1:
            number = constants.value(number).item()
        if isinstance(number, (int, float)) and number * last >= FAR and isinstance(x, Node) and is_float(x):
            return x, number, of
    return None


def _is_compared(node: Node) -> bool:
    """Whether a comparison reads what ``node`` chooses, or what is moved of it."""

    def through(reader: Node) -> bool:
        return is_data_movement(reader) or (reader.target is operator.getitem and reader.args[1:] == (0,))

    read = {getattr(reader.target, "overloadpacket", None) for reader in readers_through(node, through)}
    return bool(read & _COMPARISON_OPS)
