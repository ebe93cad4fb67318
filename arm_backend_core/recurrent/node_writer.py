"""Node writer: emits nodes with metadata, and casts between real numbers and the integers that loops carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from arm_backend_core.nodes import TIMESTEP_SLOT
from arm_backend_core.recurrent.unrolled_steps import Cast, Port


def copy_meta(like: Node, value: Any) -> dict[str, Any]:
    """Copy the metadata of ``like`` for a node with fake tensor ``value`` that belongs to no step."""
    return {**{key: entry for key, entry in like.meta.items() if key != TIMESTEP_SLOT}, "val": value}


class NodeWriter:
    """Emits nodes into a graph; equal casts of a tensor are emitted once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._casts: dict[tuple[Node, Cast], Node] = {}
        self._values: dict[tuple[Any, int, tuple[Any, ...]], tuple[Any, Any]] = {}

    def call(self, target: Any, *args: Any, like: Node) -> Node:
        """Emit a node that belongs to no step; it inherits the metadata of ``like``."""
        node = self.graph.call_function(target, args)
        node.meta = copy_meta(like, self._compute_value(target, args))
        return node

    def _compute_value(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Compute the fake result of a call.

        The selections of all steps from a tensor have one fake result, and so have equal casts of them: PyTorch takes
        0.5 ms for each, a fifth of the export of long recurrent layers.
        """
        values: tuple[Any, ...] = map_arg(args, lambda x: x.meta["val"])
        if not isinstance(args[0], Node) or any(isinstance(x, (Node, list, tuple)) for x in args[1:]):
            return target(*values)
        # A value in this dict is kept alive by it, so that its identity is not reused.
        key = target, id(values[0]), args[1:2] if target is torch.ops.aten.select.int else args[1:]
        if key not in self._values:
            self._values[key] = values[0], target(*values)
        return self._values[key][1]

    def cast(self, node: Node, casts: Sequence[Cast]) -> Node:
        """Apply casts to ``node``."""
        for cast_op in casts:
            if (node, cast_op) not in self._casts:
                self._casts[node, cast_op] = self.call(cast_op.target, node, *cast_op.args, like=node)
            node = self._casts[node, cast_op]
        return node

    def to_port_type(self, node: Node, port: Port) -> Node:
        """Convert the result of a port's operator to the port's representation (integers if it has a cast)."""
        return self.cast(node, [port.cast] if port.cast else [])

    def to_real(self, node: Node, port: Port) -> Node:
        """Convert a port's representation back to real numbers."""
        return self.cast(node, [port.cast.inverse] if port.cast else [])
