"""Inline the subgraphs of higher-order operators (``cond``, ``map``, ``scan``, ``while_loop``).

Delegates cannot contain subgraphs.

- ``torch.cond`` becomes both branches and a SELECT between their results. Branches have no side effects, so the
  program is equivalent. The program executes both branches. Exception: if the target has COND_IF, a later pass turns
  the SELECTs into COND_IF (``tosa/passes/control_flow``).
- ``map`` and ``scan`` are unrolled, except loops whose body runs as a delegate (``DELEGATE_LOOP``). ``while_loop`` is
  unrolled too if its trip count is known and at most 64. Otherwise, the loop's condition and body are inlined once,
  between markers (``ops/loop_markers``).
- The bodies of ``no_grad`` and a disabled ``autocast`` are inlined unchanged.
- ``flex_attention`` becomes its decomposition, with its score and mask functions inlined.
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

from arm_backend_core.aten.decompose import trace
from arm_backend_core.graph_edits import add_buffer, replace_node
from arm_backend_core.nodes import BRANCH_SELECT, DELEGATE_LOOP, evaluate_node, is_constant, is_state
from arm_backend_core.ops.composites.attention import flex_attention
from arm_backend_core.ops.loop_markers import LOOP_IN, LOOP_OUT

aten = torch.ops.aten
_HIGHER_ORDER = torch.ops.higher_order

_MAX_UNROLLED_ITERATIONS = 64  #: Maximum trip count of an unrolled ``while_loop``; compile time grows with it.


def inline_higher_order_ops(module: GraphModule, constants: Mapping[Node, Tensor]) -> bool:
    """Inline the higher-order operators, nested ones too.

    Three kinds are not inlined: operators with ``DELEGATE_LOOP``, an enabled ``autocast``, and a ``while_loop`` whose
    state contains Python numbers.

    Args:
        module: the module to edit.
        constants: values of constant placeholders.

    Returns:
        Whether the graph changed.
    """
    changed = False
    while calls := [
        call for node in module.graph.nodes if (call := _HigherOrderCall(module, node, constants)).is_inlinable
    ]:
        changed = True
        for call in calls:
            _inline(call)
    return changed


@dataclass(frozen=True)
class _HigherOrderCall:
    """A call of a higher-order operator."""

    module: GraphModule
    node: Node
    constants: Mapping[Node, Tensor]

    @property
    def args(self) -> Any:
        """The arguments from the first subgraph on: the subgraphs, then the operands."""
        return self.node.args[INLINE_RULES[self.node.target][0] :]

    @property
    def is_inlinable(self) -> bool:
        """Whether the node is a higher-order operator whose subgraphs can be inlined."""
        if self.node.target is _HIGHER_ORDER.while_loop:
            return all(isinstance(x, Node) for x in self.args[2])
        if self.node.target is _HIGHER_ORDER.wrap_with_autocast:
            return self.node.args[2] is False
        return self.node.target in INLINE_RULES and DELEGATE_LOOP not in self.node.meta

    def insert_node(self, operator: Any, *args: Any) -> Node:
        """Insert a node before the call."""
        node = self.module.graph.call_function(operator, args)
        node.meta["val"] = operator(*map_arg(args, lambda x: x.meta["val"]))
        return node

    def unstack_rows(self, xs: Sequence[Node]) -> Iterator[list[Node]]:
        """For each index i of the first dimension, yield slice i of every tensor."""
        for i in range(xs[0].meta["val"].shape[0]):
            yield [self.insert_node(aten.select.int, x, 0, i) for x in xs]

    def stack_rows(self, rows: Sequence[Sequence[Node]]) -> list[Node]:
        """Stack the rows of each tensor along a new first dimension: the inverse of ``unstack_rows``."""
        return [self.insert_node(aten.stack.default, list(parts)) for parts in zip(*rows, strict=True)]

    @cached_property
    def trip_count(self) -> int | None:
        """The trip count of a ``while_loop``; None if it depends on inputs or exceeds ``_MAX_UNROLLED_ITERATIONS``."""
        condition, body, carried, captured = self.args
        values = _propagate_constants(self.module, dict(self.constants))
        state = [values.get(x) for x in (*carried, *captured)]
        for count in range(_MAX_UNROLLED_ITERATIONS + 1):
            (continues,) = _evaluate_graph(self.module, condition, state)
            if continues is None or not continues:
                return None if continues is None else count
            state[: len(carried)] = _evaluate_graph(self.module, body, state)
        return None


def _evaluate_graph(module: GraphModule, graph: Node, operands: Sequence[Any]) -> list[Any]:
    """Evaluate the results of a subgraph; None for those that depend on unknown operands."""
    body: GraphModule = operator.attrgetter(str(graph.target))(module)
    inputs = zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    values = _propagate_constants(body, {node: value for node, value in inputs if value is not None})
    return [values.get(result) for result in pytree.tree_leaves(body.graph.output_node().args[0])]


def _propagate_constants(module: GraphModule, values: dict[Node, Any]) -> dict[Node, Any]:
    """Extend ``values`` by the nodes that can be evaluated from it and from constants."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and not is_state(node):
            values[node] = operator.attrgetter(str(node.target))(module)
        elif is_constant(node, values) or (node.target is aten.detach_.default and node.args[0] in values):
            values[node] = evaluate_node(node, values.__getitem__)
    return values


def _inline_unchanged(call: _HigherOrderCall) -> list[Node]:
    return _inline_subgraph(call.module, call.args[0], call.args[1:])


def _inline_cond(call: _HigherOrderCall) -> list[Node]:
    *branches, operands = call.args
    condition = call.node.args[0]
    if isinstance(condition, Node) and "val" in condition.meta and condition.meta["val"].dim():
        condition = call.insert_node(
            aten.reshape.default, condition, []
        )  # ``where`` would broadcast the results to the rank of a one-element condition
    first, second = (_inline_subgraph(call.module, branch, operands) for branch in branches)
    return [_select(call.node, condition, x, y) for x, y in zip(first, second, strict=True)]


def _inline_map(call: _HigherOrderCall) -> list[Node]:
    body, xs, captured = call.args
    return call.stack_rows([_inline_subgraph(call.module, body, [*row, *captured]) for row in call.unstack_rows(xs)])


def _inline_scan(call: _HigherOrderCall) -> list[Node]:
    body, carried, xs, captured = call.args
    results = []
    for row in call.unstack_rows(xs):
        outputs = _inline_subgraph(call.module, body, [*carried, *row, *captured])
        carried = outputs[: len(carried)]
        results.append(outputs[len(carried) :])
    return [*carried, *call.stack_rows(results)]


def _inline_while_loop(call: _HigherOrderCall) -> list[Node]:
    condition, body, carried, captured = call.args
    for _ in range(call.trip_count or 0):
        carried = _inline_subgraph(call.module, body, [*carried, *captured])
    if call.trip_count is not None:
        return list(carried)
    loop = sum(node.target is LOOP_IN for node in call.module.graph.nodes)  # unique number of the loop
    starts = [call.insert_node(LOOP_IN, x, loop, position) for position, x in enumerate(carried)]
    (continues,) = _inline_subgraph(call.module, condition, [*starts, *captured])
    results = call.insert_node(
        LOOP_OUT, continues, _inline_subgraph(call.module, body, [*starts, *captured]), starts, loop
    )
    return [call.insert_node(operator.getitem, results, position) for position in range(len(starts))]


def _inline_flex_attention(call: _HigherOrderCall) -> list[Any]:
    *tensors, score, block_mask, scale, _, captured, mask_captured = cast(Any, call.node.args)
    functions = tuple(operator.attrgetter(str(graph.target))(call.module) for graph in (score, block_mask[-1]))
    used = {cast(int, getitem.args[1]) for getitem in call.node.users if getitem.users}
    function = partial(
        flex_attention, functions=functions, scale=scale, num_score_buffers=len(captured), used_results=used
    )
    operands = [*tensors, *captured, *mask_captured]
    return _inline_graph(call.module, trace(function, [x.meta["val"] for x in operands]), operands)


#: For each operator: index of its first subgraph among the arguments, and the function that emits the inlined nodes.
INLINE_RULES: dict[Any, tuple[int, Callable[[_HigherOrderCall], list[Node]]]] = {
    _HIGHER_ORDER.cond: (1, _inline_cond),
    _HIGHER_ORDER.map_impl: (0, _inline_map),
    _HIGHER_ORDER.scan: (0, _inline_scan),
    _HIGHER_ORDER.while_loop: (0, _inline_while_loop),
    _HIGHER_ORDER.wrap_with_set_grad_enabled: (1, _inline_unchanged),
    _HIGHER_ORDER.wrap_with_autocast: (4, _inline_unchanged),
    _HIGHER_ORDER.flex_attention: (3, _inline_flex_attention),
}


def _inline(call: _HigherOrderCall) -> None:
    graph, node = call.module.graph, call.node
    graphs = {x for x in node.all_input_nodes if x.op == "get_attr"}
    with graph.inserting_before(node):
        results = INLINE_RULES[node.target][1](call)
    replace_node(node, results)
    for get_attr in graphs:
        if not get_attr.users:
            graph.erase_node(get_attr)


def _inline_subgraph(module: GraphModule, branch: Node, operands: Sequence[Any]) -> list[Node]:
    return _inline_graph(module, operator.attrgetter(str(branch.target))(module), operands)


def _inline_graph(module: GraphModule, body: GraphModule, operands: Sequence[Any]) -> list[Any]:
    """Copy the nodes of ``body`` into the graph; returns the nodes of its results."""
    placeholders = body.graph.find_nodes(op="placeholder")
    copies: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copies[node] = module.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copies[node].target = _register_attribute(module, operator.attrgetter(str(node.target))(body))
    return [result and copies[result] for result in pytree.tree_leaves(body.graph.output_node().args[0])]


def _register_attribute(module: GraphModule, value: Any) -> str:
    """Register a constant or a nested subgraph of an inlined subgraph on the outer module; returns its name."""
    if isinstance(value, Tensor):
        return add_buffer(module, "_of_branch", value)
    module.add_module(name := f"_branch_{len(module._modules)}", value)
    return name


def _select(origin: Node, condition: Any, x: Node, y: Node) -> Node:
    if isinstance(condition, bool) or x is y:
        return x if condition is True or x is y else y
    result = origin.graph.call_function(aten.where.self, (condition, x, y))
    result.meta = {**x.meta, BRANCH_SELECT: True, "stack_trace": origin.meta.get("stack_trace")}
    return result
