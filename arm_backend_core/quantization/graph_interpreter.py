"""Runs a graph node by node, letting whoever runs it see and replace values on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, cast

import torch
from torch.fx import Graph, Node, map_arg

from arm_backend_core.nodes import CHOICE
from arm_backend_core.ops.loops import LOOP_OUT

#: A condition, or a choice, and which way it goes.
Branch = tuple[Any, bool]
BranchConditions = Mapping[Node, tuple[Branch, ...]]


class GraphInterpreter:
    """Runs a graph; fx's interpreter does more by node. A subclass says what of which node is read.

    A branch that is not taken is not computed; without ``paths`` all are, and what was not chosen yet is.

    Args:
        paths: of ``find_branch_conditions``, or empty.

    Attributes:
        taken_branches: choices that were made so far, and how.
    """

    def __init__(self, graph: Graph, paths: BranchConditions, taken: set[Branch] | None = None) -> None:
        self._nodes, self._conditions = list(graph.nodes), paths
        self.taken_branches: set[Branch] = set() if taken is None else taken
        loops = any(node.target is LOOP_OUT for node in self._nodes)
        last = {source: node for node in self._nodes for source in node.all_input_nodes if not loops}
        self._last_reads: dict[Node, list[Node]] = {}
        for source, node in last.items():
            self._last_reads.setdefault(node, []).append(source)

    def get_attr(self, node: Node) -> Any:
        """What an attribute holds."""
        raise NotImplementedError

    def on_result(self, node: Node, value: Any) -> Any:
        """What the readers of ``node`` get of its result."""
        return value

    def on_operand(self, source: Node, reader: Node, value: Any) -> Any:
        """What one reader gets of a value."""
        return value

    def call_function(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        # Attention lays its result out in another way than it was traced with, by which PyTorch chose a view.
        target: Any = torch.reshape if node.target is torch.ops.aten.view.default else node.target
        return target(*args, **kwargs)

    def run(self, inputs: Iterable[Any]) -> list[Any]:
        """What the graph gives for the leaves of its inputs: new values of inputs and buffers, then its results."""
        given, values, place = iter(inputs), dict[Node, Any](), 0
        while place < len(self._nodes):
            node = self._nodes[place]
            place += 1
            path = self._conditions.get(node, ())  # a parameter stands before the condition, which is not known yet
            runs = all(bool(values.get(condition, side)) is side for condition, side in path)
            if runs:
                values[node] = self.on_result(node, self._compute(node, values, given))
            for source in self._last_reads.get(node, ()):
                values.pop(source, None)
            if runs and node.target is LOOP_OUT and self._conditions and bool(values[cast(Node, node.args[0])]):
                starts = cast(list[Node], node.args[2])
                values |= dict(zip(starts, values[node], strict=True))
                place = self._nodes.index(starts[-1]) + 1
        result: list[Any] = values[self._nodes[-1]]
        return result

    def _compute(self, node: Node, values: dict[Node, Any], given: Iterator[Any]) -> Any:
        def read(source: Node) -> Any:
            return self.on_operand(source, node, values[source])

        if node.op == "placeholder":
            return next(given)
        if node.op == "get_attr":
            return self.get_attr(node)
        if node.op == "output":
            return map_arg(list(torch.utils._pytree.tree_leaves(node.args[0])), read)
        if CHOICE in node.meta or node.target is LOOP_OUT:
            condition, *ways = cast(list[Any], node.args[:3])
            side = bool(values[condition])
            if not self._conditions and (node, not side) not in self.taken_branches:
                side = not side
            self.taken_branches.add((node, side))
            return map_arg(ways[not side], read)
        args, kwargs = map_arg((node.args, node.kwargs), read)
        return self.call_function(node, args, kwargs)


def find_branch_conditions(graph: Graph) -> dict[Node, tuple[Branch, ...]]:
    """How conditions must turn out for a node's result to be read, the outermost first."""
    paths: dict[Node, tuple[Branch, ...]] = {}
    for node in reversed(graph.nodes):
        ways = []
        for user in node.users:
            way = paths[user]
            if CHOICE in user.meta and user.args[0] is not node and user.args[1] is not user.args[2]:
                way = (*way, (user.args[0], user.args[1] is node))
            elif user.target is LOOP_OUT and node in cast(Any, user.args[1]) and node not in cast(Any, user.args[2]):
                way = (*way, (user.args[0], True))
            ways.append(way)
        common = takewhile(lambda steps: len(set(steps)) == 1, zip(*ways, strict=False))
        paths[node] = tuple(steps[0] for steps in common)
    return paths


def readers_through(node: Node, through: Callable[[Node], bool]) -> Iterator[Node]:
    """What reads a node, and what reads those of them that ``through`` holds for; each once, however many the paths."""
    todo, seen = list(node.users), set[Node]()
    while todo:
        reader = todo.pop()
        if reader not in seen:
            seen.add(reader)
            todo += reader.users if through(reader) else ()
            yield reader
