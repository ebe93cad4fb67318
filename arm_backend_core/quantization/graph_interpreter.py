"""Interpreter of an fx graph with hooks that see and replace operands and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, cast

import torch
from torch.fx import Graph, Node, map_arg

from arm_backend_core.nodes import BRANCH_SELECT
from arm_backend_core.ops.loop_markers import LOOP_OUT

#: (condition, its value): the branch that is taken if the condition has this value. In
#: ``GraphInterpreter.taken_branches``, the first item is instead the node that selects between the results of two
#: branches.
Branch = tuple[Any, bool]
#: {node: branches}. The node's result is read only if all of these branches are taken.
BranchConditions = Mapping[Node, tuple[Branch, ...]]


class GraphInterpreter:
    """Runs a graph node by node, with less overhead than ``torch.fx.Interpreter``. Subclasses override the hooks.

    The interpreter computes only branches that are taken. With empty ``conditions``, it computes all branches. A node
    that selects between the results of two branches then returns the result that its condition does not select. If the
    branch of this result is in ``taken_branches``, the node returns the result that its condition selects.

    Args:
        conditions: from ``find_branch_conditions``, or empty.
        taken: the initial ``taken_branches``. ``run`` adds branches to this set.

    Attributes:
        taken_branches: branches taken so far.
    """

    def __init__(self, graph: Graph, conditions: BranchConditions, taken: set[Branch] | None = None) -> None:
        self._nodes, self._conditions = list(graph.nodes), conditions
        self.taken_branches: set[Branch] = set() if taken is None else taken
        has_loops = any(
            node.target is LOOP_OUT for node in self._nodes
        )  # each iteration of a loop reads values again, so no value is freed
        last = {source: node for node in self._nodes for source in node.all_input_nodes if not has_loops}
        self._last_reads: dict[Node, list[Node]] = {}
        for source, node in last.items():
            self._last_reads.setdefault(node, []).append(source)

    def get_attr(self, node: Node) -> Any:
        """Return the value of an attribute."""
        raise NotImplementedError

    def on_result(self, node: Node, value: Any) -> Any:
        """Return the value that all readers of ``node`` get for its result."""
        return value

    def on_operand(self, source: Node, reader: Node, value: Any) -> Any:
        """Return the value that one reader gets for an operand."""
        return value

    def call_function(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Compute the result of an operator."""
        # Some kernels (attention) return tensors with other strides than in the trace, on which ``view`` may fail.
        target: Any = torch.reshape if node.target is torch.ops.aten.view.default else node.target
        return target(*args, **kwargs)

    def run(self, inputs: Iterable[Any]) -> list[Any]:
        """Run the graph on the leaves of its inputs.

        Returns:
            Values of the output node: new values of inputs and buffers, then the results.
        """
        leaves, values, position = iter(inputs), dict[Node, Any](), 0
        while position < len(self._nodes):
            node = self._nodes[position]
            position += 1
            # A parameter's node may precede the condition of its branch. Such a node always runs.
            path = self._conditions.get(node, ())
            runs = all(bool(values.get(condition, side)) is side for condition, side in path)
            if runs:
                values[node] = self.on_result(node, self._compute(node, values, leaves))
            for source in self._last_reads.get(node, ()):
                values.pop(source, None)
            if runs and node.target is LOOP_OUT and self._conditions and bool(values[cast(Node, node.args[0])]):
                starts = cast(list[Node], node.args[2])
                values |= dict(zip(starts, values[node], strict=True))
                position = self._nodes.index(starts[-1]) + 1
        result: list[Any] = values[self._nodes[-1]]
        return result

    def _compute(self, node: Node, values: dict[Node, Any], leaves: Iterator[Any]) -> Any:
        def read(source: Node) -> Any:
            return self.on_operand(source, node, values[source])

        if node.op == "placeholder":
            return next(leaves)
        if node.op == "get_attr":
            return self.get_attr(node)
        if node.op == "output":
            return map_arg(list(torch.utils._pytree.tree_leaves(node.args[0])), read)
        if BRANCH_SELECT in node.meta or node.target is LOOP_OUT:
            condition, *branches = cast(list[Any], node.args[:3])
            side = bool(values[condition])
            if not self._conditions and (node, not side) not in self.taken_branches:
                side = not side
            self.taken_branches.add((node, side))
            return map_arg(branches[not side], read)
        args, kwargs = map_arg((node.args, node.kwargs), read)
        return self.call_function(node, args, kwargs)


def find_branch_conditions(graph: Graph) -> dict[Node, tuple[Branch, ...]]:
    """For each node, find the branches that must be taken for its result to be read, the outermost first."""
    paths: dict[Node, tuple[Branch, ...]] = {}
    for node in reversed(graph.nodes):
        user_paths = []
        for user in node.users:
            path = paths[user]
            if BRANCH_SELECT in user.meta and user.args[0] is not node and user.args[1] is not user.args[2]:
                path = (*path, (user.args[0], user.args[1] is node))
            elif user.target is LOOP_OUT and node in cast(Any, user.args[1]) and node not in cast(Any, user.args[2]):
                path = (*path, (user.args[0], True))
            user_paths.append(path)
        common = takewhile(lambda steps: len(set(steps)) == 1, zip(*user_paths, strict=False))
        paths[node] = tuple(steps[0] for steps in common)
    return paths
