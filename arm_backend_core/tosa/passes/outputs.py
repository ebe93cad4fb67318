"""Distinct outputs: the serializer requires that each output is the result of an operator, and returned only once."""

from __future__ import annotations

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value


def make_outputs_distinct(graph: Graph, target: Target) -> None:
    """Insert an IDENTITY before each output that is an input, a constant or an earlier output."""
    build = Builder(graph, target)
    seen: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        if value.producer is None or value in seen:
            graph.outputs[i] = build.emit("IDENTITY", (value,), value.dtype)
        seen.add(graph.outputs[i])
