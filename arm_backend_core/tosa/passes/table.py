"""Table composition: chains of elementwise operators on one int8 tensor become one TABLE of all 256 values."""

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
    """Replace int8 -> ... -> int8 by a TABLE where that removes at least two operators.

    The chain may branch and join (x * sigmoid(x)) and may read constants of one element. The result is exact, because
    the chain itself is evaluated on each of the 256 inputs.
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
        # Keep the value, change its producer: readers need no update.
        graph.ops[-1].output = op.output
        op.output.producer = graph.ops[-1]
        finder.position[graph.ops[-1]] = finder.position[op]
        assert result.shape == op.output.shape
    graph.remove_dead()


class _ChainFinder:
    """Finds chains of elementwise operators.

    Attributes:
        roots: the int8 value that each value is an elementwise function of, or None.
    """

    def __init__(self, graph: Graph) -> None:
        self.users = graph.users()
        self.outputs = set(graph.outputs)
        self.roots: dict[Value, Value | None] = {}
        self.position = {op: i for i, op in enumerate(graph.ops)}
        for op in graph.ops:
            self.roots[op.output] = self._root(op)

    def _root(self, op: Op) -> Value | None:
        """The int8 value that the result is an elementwise function of, or None."""
        if op.kind not in ELEMENTWISE or op.attrs.get("per_channel") or op.output.dtype.is_float:
            return None
        roots = {self._source(value) for value in op.inputs if value.data is None and not _is_rescaled_scalar(value)}
        constants = all(value.size == 1 for value in op.inputs if value.data is not None)
        root = roots.pop() if len(roots) == 1 else None
        return root if constants and root is not None and root.shape == op.output.shape else None

    def _source(self, value: Value) -> Value | None:
        root = self.roots.get(value)
        return root if root is not None else value if value.dtype is DType.INT8 else None

    def find_table(self, op: Op) -> tuple[Value, Array, Origins] | None:
        """Root, table entries and origins, if ``op`` ends a chain that is worth replacing; else None."""
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
        """Whether every reader belongs to the same chain and returns int8: the chain should end there."""
        users = self.users.get(op.output, [])
        if op.output in self.outputs or not users:
            return False
        return all(u.output.dtype is DType.INT8 and self.roots.get(u.output) is root for u in users)

    def _collect_chain(self, op: Op, root: Value) -> list[Op]:
        """The operators between ``root`` and ``op``, in execution order."""
        members, pending = {op}, [op]
        while pending:
            inner = {v.producer for v in pending.pop().inputs if v is not root and v.producer is not None} - members
            members |= inner
            pending += inner
        return sorted(members, key=self.position.__getitem__)

    def _is_read_within(self, value: Value, chain: set[Op]) -> bool:
        """Whether only operators of the chain read ``value``."""
        return value not in self.outputs and all(user in chain for user in self.users.get(value, []))

    def _evaluate(self, chain: list[Op], root: Value) -> Array | None:
        """The chain's result for all int8 values; None if an operator cannot be evaluated."""
        known: dict[Value, Array] = {root: _ALL_INT8}
        for op in chain:
            arrays = [v.data.reshape(-1) if v.data is not None else known[v] for v in op.inputs]
            result = evaluate(op, arrays)
            if result is None:
                return None
            known[op.output] = np.broadcast_to(result, _ALL_INT8.shape)
        return known[chain[-1].output]


def _is_rescaled_scalar(value: Value) -> bool:
    """Whether a value is the RESCALE of a scalar constant, which constant folding keeps for its reader."""
    rescale = producer(value, "RESCALE")
    return value.size == 1 and rescale is not None and rescale.inputs[0].data is not None
