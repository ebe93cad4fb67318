"""Deferred tuning: record graphs before alternatives are chosen, so that a sweep chooses for each NPU configuration."""

from __future__ import annotations

import pickle

from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value


class DeferredTuningSpec(TosaCompileSpec):
    """A TOSA compile spec that records each graph before alternatives are chosen. The payload is the usual flatbuffer.

    Attributes:
        target: the target of the compilation.
        graphs: one pickled graph for each delegate, in order. ``unpickle_graph`` restores it.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.graphs: list[bytes] = []


def pickle_graph(graph: Graph) -> bytes:
    """Pickle a graph; the origins of its operators are omitted. Equal graphs give equal bytes.

    Operators and values reference each other, so that pickle would exceed the recursion limit. The function therefore
    pickles a list of values, and a list of operators with the indices of their values.
    """
    values = list(dict.fromkeys([*graph.inputs, *(x for op in graph.ops for x in (*op.inputs, *op.results))]))
    index = {value: i for i, value in enumerate(values)}
    value_fields = [(value.shape, value.dtype, value.name, value.data) for value in values]
    ops = [(op.kind, [index[x] for x in op.inputs], [index[x] for x in op.results], op.attrs) for op in graph.ops]
    inputs_outputs = [[index[x] for x in values] for values in (graph.inputs, graph.outputs)]
    return pickle.dumps((value_fields, ops, inputs_outputs, graph._count), pickle.HIGHEST_PROTOCOL)


def unpickle_graph(data: bytes) -> Graph:
    """Restore a graph from the bytes of ``pickle_graph``."""
    value_fields, ops, inputs_outputs, count = pickle.loads(data)
    values, graph = [Value(*fields) for fields in value_fields], Graph()
    graph.inputs, graph.outputs = ([values[i] for i in indices] for indices in inputs_outputs)
    for kind, inputs, outputs, attrs in ops:
        results = [values[i] for i in outputs]
        op = Op(kind, [values[i] for i in inputs], results[0], attrs, extra_outputs=results[1:])
        for result in results:
            result.producer = op
        graph.ops.append(op)
    graph._count = count  # so that new values get unused names
    return graph
