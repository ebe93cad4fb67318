"""Graphs inside a graph, which delegates do not look into, are written into it.

``torch.cond`` becomes both branches and a choice between their results, which every target with SELECT runs whole.
Branches are functions without side effects, so that is the same program; it takes the time of both, but where the
target has COND_IF (``tosa/passes/branches``). What ``no_grad`` and a disabled ``autocast`` are around is written out as
it is.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constants import held
from arm_backend_core.nodes import CHOICE

aten = torch.ops.aten
_HIGHER = torch.ops.higher_order

#: Where the (first) graph is among the arguments.
BODY: dict[Any, int] = {_HIGHER.cond: 1, _HIGHER.wrap_with_set_grad_enabled: 1, _HIGHER.wrap_with_autocast: 4}


def inline_conditions(module: GraphModule) -> bool:
    """Write what every ``torch.cond`` and its like hold into the graph around it; whether there was one."""
    found = False
    while nodes := [node for node in module.graph.nodes if _holds(node)]:
        found = True
        for node in nodes:
            _inline(module, node)
    return found


def _holds(node: Node) -> bool:
    """Whether a graph inside ``node`` is as good as its nodes in its place."""
    return node.target in BODY and (node.target is not _HIGHER.wrap_with_autocast or node.args[2] is False)


def _inline(module: GraphModule, node: Node) -> None:
    graph = module.graph
    place = BODY[node.target]
    branches, operands = [cast(Node, node.args[place])], node.args[place + 1 :]
    if node.target is _HIGHER.cond:
        branches, operands = cast(Any, node.args[1:3]), cast(Any, node.args[3])
    with graph.inserting_before(node):
        condition = _scalar(module, node.args[0])
        first, *second = (_copied(module, branch, cast(Any, operands)) for branch in branches)
        results = [_choice(node, condition, x, y) for x, y in zip(first, *second, strict=True)] if second else first
    for pick in list(node.users):
        assert pick.target is operator.getitem, pick
        pick.replace_all_uses_with(results[cast(int, pick.args[1])])
        graph.erase_node(pick)
    graph.erase_node(node)
    for branch in set(branches):
        if not branch.users:
            graph.erase_node(branch)


def _copied(module: GraphModule, branch: Node, operands: list[Node]) -> list[Node]:
    """The nodes of a branch, in front of its condition; returns its results."""
    body = operator.attrgetter(str(branch.target))(module)
    placeholders = body.graph.find_nodes(op="placeholder")
    known: dict[Node, Node] = dict(zip(placeholders, operands, strict=True))
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known[node] = module.graph.node_copy(node, known.__getitem__)
        if node.op == "get_attr":
            known[node].target = _adopted(module, operator.attrgetter(str(node.target))(body))
    return [known[result] for result in body.graph.output_node().args[0]]


def _adopted(module: GraphModule, value: Any) -> str:
    """The name under which an inner branch, or a constant of a branch, is known to the whole module."""
    if isinstance(value, Tensor):
        return held(module, "_of_branch", value)
    module.add_module(name := f"_branch_{len(module._modules)}", value)
    return name


def _scalar(module: GraphModule, condition: Any) -> Any:
    """A condition of one element without dimensions, which it would give the results."""
    if not isinstance(condition, Node) or "val" not in condition.meta or not condition.meta["val"].dim():
        return condition
    scalar = module.graph.call_function(aten.reshape.default, (condition, []))
    scalar.meta["val"] = condition.meta["val"].reshape(())
    return scalar


def _choice(origin: Node, condition: Any, x: Node, y: Node) -> Node:
    if isinstance(condition, bool) or x is y:
        return x if condition is True or x is y else y
    chosen = origin.graph.call_function(aten.where.self, (condition, x, y))
    chosen.meta = {**x.meta, CHOICE: True, "stack_trace": origin.meta.get("stack_trace")}
    return chosen
