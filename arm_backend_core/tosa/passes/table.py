"""Table composition: a chain of elementwise operators on one int8 tensor becomes one TABLE with 256 entries."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Origins, Value, merge_origins
from arm_backend_core.tosa.operators import ELEMENTWISE, Array, evaluate
from arm_backend_core.tosa.passes.rewrite import producer

_ALL_INT8 = np.arange(-128, 128).astype(np.int8)


def compose_tables(graph: Graph, target: Target) -> None:
    """Replace chains from int8 to int8 by a TABLE if this removes at least two operators.

    A chain may branch and join, as in x * sigmoid(x), and may read constants of one element. The TABLE is exact: its
    entries are the results of the chain for all 256 int8 values.
    """
    finder = _ChainFinder(graph)
    build = Builder(graph, target)
    ops, graph.ops = graph.ops, []
    for op in ops:
        table = finder.find_table(op)
        if table is None:
            graph.ops.append(op)
            continue
        root, entries, build.origins = table
        try:
            result = build.table(root, entries)
        except Unsupported:
            graph.ops.append(op)
            continue
        # Keep the result value and change its producer, so that the readers need no update.
        graph.ops[-1].output = op.output
        op.output.producer = graph.ops[-1]
        finder.position[graph.ops[-1]] = finder.position[op]
        assert result.shape == op.output.shape
    graph.remove_dead()


class _ChainFinder:
    """Finds chains of elementwise operators on one int8 tensor.

    Attributes:
        roots: {value: the int8 value that it is an elementwise function of, or None}.
    """

    def __init__(self, graph: Graph) -> None:
        self.users = graph.users()
        self.outputs = set(graph.outputs)
        self.roots: dict[Value, Value | None] = {}
        self.position = {op: i for i, op in enumerate(graph.ops)}
        for op in graph.ops:
            self.roots[op.output] = self._find_root(op)

    def _find_root(self, op: Op) -> Value | None:
        """The int8 value that the result of ``op`` is an elementwise function of, or None."""
        if op.kind not in ELEMENTWISE or op.attrs.get("per_channel") or op.output.dtype.is_float:
            return None
        operands = [value for value in op.inputs if value.data is None and not _is_rescaled_scalar(value)]
        roots = {self._root_or_self(value) for value in operands}
        has_scalar_constants = all(value.size == 1 for value in op.inputs if value.data is not None)
        root = roots.pop() if len(roots) == 1 else None
        return root if has_scalar_constants and root is not None and root.shape == op.output.shape else None

    def _root_or_self(self, value: Value) -> Value | None:
        root = self.roots.get(value)
        return root if root is not None else value if value.dtype is DType.INT8 else None

    def find_table(self, op: Op) -> tuple[Value, Array, Origins] | None:
        """The TABLE that can replace a chain that ends at ``op``: (root, entries, origins); None if there is none."""
        root = self.roots.get(op.output)
        if root is None or op.output.dtype is not DType.INT8 or self._is_continued(op, root):
            return None
        chain = self._collect_chain(op, root)
        members = set(chain)
        removed = [m for m in chain if m is op or self._is_read_within(m.output, members)]
        if len(removed) < 2 or root.producer in members:
            return None
        entries = self._evaluate(chain, root)
        return None if entries is None else (root, entries, merge_origins(removed))

    def _is_continued(self, op: Op, root: Value) -> bool:
        """Whether every reader of ``op`` continues the chain and returns int8, so that a longer chain ends there."""
        users = self.users.get(op.output, [])
        if op.output in self.outputs or not users:
            return False
        return all(u.output.dtype is DType.INT8 and self.roots.get(u.output) is root for u in users)

    def _collect_chain(self, op: Op, root: Value) -> list[Op]:
        """The operators between ``root`` and ``op``, in execution order."""
        members, pending = {op}, [op]
        while pending:
            operands = [v for v in pending.pop().inputs if v is not root]
            producers = {v.producer for v in operands if v.producer is not None} - members
            members |= producers
            pending += producers
        return sorted(members, key=self.position.__getitem__)

    def _is_read_within(self, value: Value, chain: set[Op]) -> bool:
        """Whether only operators of the chain read ``value``."""
        return value not in self.outputs and all(user in chain for user in self.users.get(value, []))

    def _evaluate(self, chain: list[Op], root: Value) -> Array | None:
        """The result of the chain for all int8 values of ``root``; None if an operator cannot be evaluated."""
        results: dict[Value, Array] = {root: _ALL_INT8}
        for op in chain:
            arrays = [v.data.reshape(-1) if v.data is not None else results[v] for v in op.inputs]
            result = evaluate(op, arrays)
            if result is None:
                return None
            results[op.output] = np.broadcast_to(result, _ALL_INT8.shape)
        return results[chain[-1].output]


def _is_rescaled_scalar(value: Value) -> bool:
    """Whether ``value`` is the RESCALE of a constant of one element. ``fold_constants`` keeps such a RESCALE."""
    rescale = producer(value, "RESCALE")
    return value.size == 1 and rescale is not None and rescale.inputs[0].data is not None
