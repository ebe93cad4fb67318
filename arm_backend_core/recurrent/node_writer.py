"""Node writer: emits nodes with metadata, and quantizes and dequantizes the values that loops carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from arm_backend_core.nodes import TIMESTEP_SLOT
from arm_backend_core.recurrent.unrolled_steps import QdqOp, YieldedValue


def copy_meta(like: Node, value: Any) -> dict[str, Any]:
    """Copy the metadata of ``like``, with "val" replaced by the fake tensor ``value``, and without ``TIMESTEP_SLOT``.

    ``TIMESTEP_SLOT`` marks the operators of an unrolled time step. The new node does not belong to one.
    """
    return {**{key: entry for key, entry in like.meta.items() if key != TIMESTEP_SLOT}, "val": value}


class NodeWriter:
    """Emits nodes into a graph, but equal quantize or dequantize nodes of one tensor only once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._qdq_nodes: dict[tuple[Node, QdqOp], Node] = {}
        self._values: dict[tuple[Any, int, tuple[Any, ...]], tuple[Any, Any]] = {}

    def call(self, target: Any, *args: Any, like: Node) -> Node:
        """Emit a node that belongs to no time step; its metadata, apart from the value, are copied from ``like``."""
        node = self.graph.call_function(target, args)
        node.meta = copy_meta(like, self._compute_value(target, args))
        return node

    def _compute_value(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Compute the fake result of a call.

        Results are cached: each fake-tensor call takes 0.5 ms. Without the cache, these calls would take a fifth of the
        export time of long recurrent layers. ``select`` nodes of one tensor share a result for all indices.
        Equal quantize or dequantize nodes of these ``select`` nodes also share a result.
        """
        values: tuple[Any, ...] = map_arg(args, lambda x: x.meta["val"])
        if not isinstance(args[0], Node) or any(isinstance(x, (Node, list, tuple)) for x in args[1:]):
            return target(*values)
        # The dict keeps its values alive, so that no ``id`` of a value is reused.
        key = target, id(values[0]), args[1:2] if target is torch.ops.aten.select.int else args[1:]
        if key not in self._values:
            self._values[key] = values[0], target(*values)
        return self._values[key][1]

    def apply_qdq_ops(self, node: Node, qdq_ops: Sequence[QdqOp]) -> Node:
        """Apply quantize and dequantize operations to ``node``, in order."""
        for op in qdq_ops:
            if (node, op) not in self._qdq_nodes:
                self._qdq_nodes[node, op] = self.call(op.target, node, *op.args, like=node)
            node = self._qdq_nodes[node, op]
        return node

    def quantize_yielded(self, node: Node, yielded: YieldedValue) -> Node:
        """Quantize the float value ``node`` by ``yielded.quantize``. If this operation is None, return ``node``."""
        return self.apply_qdq_ops(node, [yielded.quantize] if yielded.quantize else [])

    def dequantize_yielded(self, node: Node, yielded: YieldedValue) -> Node:
        """Dequantize ``node``: the inverse of ``quantize_yielded``. Without ``yielded.quantize``, return ``node``."""
        return self.apply_qdq_ops(node, [yielded.quantize.inverse] if yielded.quantize else [])
