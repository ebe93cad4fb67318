"""Graphs inside a graph, which delegates do not look into, are written into it.

``torch.cond`` becomes both branches and a choice between their results, which every target with SELECT runs whole.
Branches are functions without side effects, so that is the same program; it takes the time of both, but where the
target has COND_IF (``tosa/passes/branches``). ``map`` and ``scan`` become their rounds, ``while_loop`` too where the
number of these is known, else one round between marks (``ops/loop_markers``). What ``no_grad`` and a disabled
``autocast`` are around is written out as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from arm_backend_core.aten.decompose import traced
from arm_backend_core.nodes import CHOICE, LOOP, evaluated, held, is_constant, is_state
from arm_backend_core.ops.composites.attention import flex_attention
from arm_backend_core.ops.loop_markers import LOOP_IN, LOOP_OUT

aten = torch.ops.aten
_HIGHER = torch.ops.higher_order

_MOST = 64  #: Rounds of a loop that are written out; each takes as long to compile as all that it holds.


def inline_higher_order_ops(module: GraphModule, constants: Mapping[Node, Tensor]) -> bool:
    """Write what every ``torch.cond`` and its like hold into the graph around it; whether there was one.

    Args:
        constants: values of placeholders that have one.
    """
    found = False
    while inner := [made for node in module.graph.nodes if (made := _Inner(module, node, constants)).fits]:
        found = True
        for made in inner:
            _inline(made)
    return found


@dataclass(frozen=True)
class _Inner:
    """An operator that holds graphs."""

    module: GraphModule
    node: Node
    constants: Mapping[Node, Tensor]

    @property
    def args(self) -> Any:
        """Its graphs first; the operands follow."""
        return self.node.args[BODY[self.node.target][0] :]

    @property
    def fits(self) -> bool:
        """Whether it is one, and its graphs are as good as their nodes in its place."""
        if self.node.target is _HIGHER.while_loop:
            return all(isinstance(x, Node) for x in self.args[2])
        if self.node.target is _HIGHER.wrap_with_autocast:
            return self.node.args[2] is False
        return self.node.target in BODY and LOOP not in self.node.meta

    def call(self, operator: Any, *args: Any) -> Node:
        """One more node in front of it."""
        made = self.module.graph.call_function(operator, args)
        made.meta["val"] = operator(*map_arg(args, lambda x: x.meta["val"]))
        return made

    def rows(self, xs: Sequence[Node]) -> Iterator[list[Node]]:
        """Of each tensor the first row, the second one and so on."""
        for i in range(xs[0].meta["val"].shape[0]):
            yield [self.call(aten.select.int, x, 0, i) for x in xs]

    def stacked(self, rows: Sequence[Sequence[Node]]) -> list[Node]:
        """The reverse of ``rows``."""
        return [self.call(aten.stack.default, list(parts)) for parts in zip(*rows, strict=True)]

    @cached_property
    def rounds(self) -> int | None:
        """How often a loop's body runs, if that depends on constants alone and is not too often to be written out."""
        condition, body, carried, captured = self.args
        known = _known(self.module, dict(self.constants))
        state = [known.get(x) for x in (*carried, *captured)]
        for count in range(_MOST + 1):
            (goes_on,) = _outcome(self.module, condition, state)
            if goes_on is None or not goes_on:
                return None if goes_on is None else count
            state[: len(carried)] = _outcome(self.module, body, state)
        return None


def _outcome(module: GraphModule, inner: Node, operands: Sequence[Any]) -> list[Any]:
    """Results of a graph as far as they depend on known operands alone; None for the others."""
    body: GraphModule = operator.attrgetter(str(inner.target))(module)
    given = zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    known = _known(body, {node: value for node, value in given if value is not None})
    return [known.get(result) for result in pytree.tree_leaves(body.graph.output_node().args[0])]


def _known(module: GraphModule, known: dict[Node, Any]) -> dict[Node, Any]:
    """``known``, with what is computed from it and from constants alone."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and not is_state(node):
            known[node] = operator.attrgetter(str(node.target))(module)
        elif is_constant(node, known) or (node.target is aten.detach_.default and node.args[0] in known):
            known[node] = evaluated(node, known.__getitem__)
    return known


def _as_it_is(inner: _Inner) -> list[Node]:
    return _copied(inner.module, inner.args[0], inner.args[1:])


def _cond(inner: _Inner) -> list[Node]:
    *branches, operands = inner.args
    condition = inner.node.args[0]
    if isinstance(condition, Node) and "val" in condition.meta and condition.meta["val"].dim():
        condition = inner.call(aten.reshape.default, condition, [])  # one element would give the results dimensions
    first, second = (_copied(inner.module, branch, operands) for branch in branches)
    return [_choice(inner.node, condition, x, y) for x, y in zip(first, second, strict=True)]


def _map(inner: _Inner) -> list[Node]:
    body, xs, captured = inner.args
    return inner.stacked([_copied(inner.module, body, [*row, *captured]) for row in inner.rows(xs)])


def _scan(inner: _Inner) -> list[Node]:
    body, carried, xs, captured = inner.args
    results = []
    for row in inner.rows(xs):
        made = _copied(inner.module, body, [*carried, *row, *captured])
        carried = made[: len(carried)]
        results.append(made[len(carried) :])
    return [*carried, *inner.stacked(results)]


def _loop(inner: _Inner) -> list[Node]:
    condition, body, carried, captured = inner.args
    for _ in range(inner.rounds or 0):
        carried = _copied(inner.module, body, [*carried, *captured])
    if inner.rounds is not None:
        return list(carried)
    loop = sum(node.target is LOOP_IN for node in inner.module.graph.nodes)  # a number that no other has
    starts = [inner.call(LOOP_IN, x, loop, place) for place, x in enumerate(carried)]
    (goes_on,) = _copied(inner.module, condition, [*starts, *captured])
    results = inner.call(LOOP_OUT, goes_on, _copied(inner.module, body, [*starts, *captured]), starts, loop)
    return [inner.call(operator.getitem, results, place) for place in range(len(starts))]


def _flex_attention(inner: _Inner) -> list[Any]:
    *tensors, score, block_mask, scale, _, captured, also = cast(Any, inner.node.args)
    functions = tuple(operator.attrgetter(str(graph.target))(inner.module) for graph in (score, block_mask[-1]))
    read = {cast(int, pick.args[1]) for pick in inner.node.users if pick.users}
    called = partial(flex_attention, functions=functions, scale=scale, count=len(captured), read=read)
    operands = [*tensors, *captured, *also]
    return _written(inner.module, traced(called, [x.meta["val"] for x in operands]), operands)


#: Operator -> where its (first) graph is among the arguments, and what is written in its place.
BODY: dict[Any, tuple[int, Callable[[_Inner], list[Node]]]] = {
    _HIGHER.cond: (1, _cond),
    _HIGHER.map_impl: (0, _map),
    _HIGHER.scan: (0, _scan),
    _HIGHER.while_loop: (0, _loop),
    _HIGHER.wrap_with_set_grad_enabled: (1, _as_it_is),
    _HIGHER.wrap_with_autocast: (4, _as_it_is),
    _HIGHER.flex_attention: (3, _flex_attention),
}


def _inline(inner: _Inner) -> None:
    graph, node = inner.module.graph, inner.node
    graphs = {x for x in node.all_input_nodes if x.op == "get_attr"}
    with graph.inserting_before(node):
        results = BODY[node.target][1](inner)
    for pick in list(node.users):
        assert pick.target is operator.getitem, pick
        if pick.users:
            pick.replace_all_uses_with(results[cast(int, pick.args[1])])
        graph.erase_node(pick)
    graph.erase_node(node)
    for held_graph in graphs:
        if not held_graph.users:
            graph.erase_node(held_graph)


def _copied(module: GraphModule, branch: Node, operands: Sequence[Any]) -> list[Node]:
    return _written(module, operator.attrgetter(str(branch.target))(module), operands)


def _written(module: GraphModule, body: GraphModule, operands: Sequence[Any]) -> list[Any]:
    """The nodes of ``body``, with its results."""
    placeholders = body.graph.find_nodes(op="placeholder")
    known: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known[node] = module.graph.node_copy(node, known.__getitem__)
        if node.op == "get_attr":
            known[node].target = _adopted(module, operator.attrgetter(str(node.target))(body))
    return [result and known[result] for result in pytree.tree_leaves(body.graph.output_node().args[0])]


def _adopted(module: GraphModule, value: Any) -> str:
    """The name under which an inner branch, or a constant of a branch, is known to the whole module."""
    if isinstance(value, Tensor):
        return held(module, "_of_branch", value)
    module.add_module(name := f"_branch_{len(module._modules)}", value)
    return name


def _choice(origin: Node, condition: Any, x: Node, y: Node) -> Node:
    if isinstance(condition, bool) or x is y:
        return x if condition is True or x is y else y
    chosen = origin.graph.call_function(aten.where.self, (condition, x, y))
    chosen.meta = {**x.meta, CHOICE: True, "stack_trace": origin.meta.get("stack_trace")}
    return chosen
