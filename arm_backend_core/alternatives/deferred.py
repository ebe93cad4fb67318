"""Deferred tuning: keep the graph before alternatives are chosen; a sweep chooses them for each configuration."""

from __future__ import annotations

import pickle

from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value


class DeferredTuningSpec(TosaCompileSpec):
    """A TOSA spec that also keeps the graphs before alternatives are chosen; the payload is the default flatbuffer.

    Attributes:
        graphs: pickled graph of each delegate, in order, for ``unpickle_graph``.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.graphs: list[bytes] = []


def pickle_graph(graph: Graph) -> bytes:
    """Pickle a graph without origins; equal graphs give equal bytes.

    The graph is flattened first, because operators reference each other and pickle would recurse thousands deep.
    """
    values = list(dict.fromkeys([*graph.inputs, *(x for op in graph.ops for x in (*op.inputs, *op.results))]))
    number = {value: i for i, value in enumerate(values)}
    rows = [(value.shape, value.dtype, value.name, value.data) for value in values]
    ops = [(op.kind, [number[x] for x in op.inputs], [number[x] for x in op.results], op.attrs) for op in graph.ops]
    ends = [[number[x] for x in side] for side in (graph.inputs, graph.outputs)]
    return pickle.dumps((rows, ops, ends, graph._count), pickle.HIGHEST_PROTOCOL)


def unpickle_graph(data: bytes) -> Graph:
    """Restore a graph from ``pickle_graph``."""
    rows, ops, ends, count = pickle.loads(data)
    values, graph = [Value(*row) for row in rows], Graph()
    graph.inputs, graph.outputs = ([values[i] for i in side] for side in ends)
    for kind, inputs, outputs, attrs in ops:
        results = [values[i] for i in outputs]
        op = Op(kind, [values[i] for i in inputs], results[0], attrs, extra_outputs=results[1:])
        for result in results:
            result.producer = op
        graph.ops.append(op)
    graph._count = count  # new values get unused names
    return graph
