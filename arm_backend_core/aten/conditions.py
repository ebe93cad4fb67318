"""``torch.cond`` becomes both branches and a choice between their results, which every target with SELECT runs whole.

Branches are functions without side effects, so that is the same program; it takes the time of both.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constants import held

aten = torch.ops.aten


def inline_conditions(module: GraphModule) -> bool:
    """Write the branches of every ``torch.cond`` into the graph around it, inner ones too; whether there was one."""
    graph, found = module.graph, False
    while conditions := graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        found = True
        for node in conditions:
            _inline(module, node)
    return found


def _inline(module: GraphModule, node: Node) -> None:
    graph = module.graph
    condition, *branches, operands = node.args
    with graph.inserting_before(node):
        first, second = (_copied(module, cast(Node, branch), cast(Any, operands)) for branch in branches)
        results = [_choice(module, condition, x, y) for x, y in zip(first, second, strict=True)]
    for pick in list(node.users):
        assert pick.target is operator.getitem, pick
        pick.replace_all_uses_with(results[cast(int, pick.args[1])])
        graph.erase_node(pick)
    graph.erase_node(node)
    for branch in {cast(Node, branch) for branch in branches}:
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


def _choice(module: GraphModule, condition: Any, x: Node, y: Node) -> Node:
    if isinstance(condition, bool) or x is y:
        return x if condition is True or x is y else y
    if condition.meta["val"].dim():  # of one element, which would give the result dimensions
        scalar = condition.meta["val"].reshape(())
        condition = module.graph.call_function(aten.reshape.default, (condition, []))
        condition.meta["val"] = scalar
    chosen = module.graph.call_function(aten.where.self, (condition, x, y))
    chosen.meta = dict(x.meta)
    return chosen
