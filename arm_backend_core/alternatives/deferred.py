"""Forms that another process chooses: a graph as it is before, for each of many configurations of one NPU."""

from __future__ import annotations

import pickle

from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value


class DeferredTuningSpec(TosaCompileSpec):
    """Stop before forms are chosen, too: the payload is the flatbuffer in the usual ones.

    Attributes:
        graphs: of each delegate, in their order, as ``unpickle_graph`` takes it.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.graphs: list[bytes] = []


def pickle_graph(graph: Graph) -> bytes:
    """What ``unpickle_graph`` makes the graph of, but for origins: equal for equal graphs, wherever they come from.

    Not by pickling it as it is: operators hold each other, thousands deep.
    """
    values = list(dict.fromkeys([*graph.inputs, *(x for op in graph.ops for x in (*op.inputs, *op.results))]))
    number = {value: i for i, value in enumerate(values)}
    rows = [(value.shape, value.dtype, value.name, value.data) for value in values]
    ops = [(op.kind, [number[x] for x in op.inputs], [number[x] for x in op.results], op.attrs) for op in graph.ops]
    ends = [[number[x] for x in side] for side in (graph.inputs, graph.outputs)]
    return pickle.dumps((rows, ops, ends, graph._count), pickle.HIGHEST_PROTOCOL)


def unpickle_graph(data: bytes) -> Graph:
    """The graph that ``pickle_graph`` was given."""
    rows, ops, ends, count = pickle.loads(data)
    values, graph = [Value(*row) for row in rows], Graph()
    graph.inputs, graph.outputs = ([values[i] for i in side] for side in ends)
    for kind, read, made, attrs in ops:
        results = [values[i] for i in made]
        op = Op(kind, [values[i] for i in read], results[0], attrs, extra_outputs=results[1:])
        for result in results:
            result.producer = op
        graph.ops.append(op)
    graph._count = count  # what is written gets names that are not there
    return graph
