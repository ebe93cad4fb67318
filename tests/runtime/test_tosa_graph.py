"""Facts of TOSA flatbuffers: positions of constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes.branches import outline_control_flow
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.tosa_graph import find_constant_spans
from tests.graphs import build_graph

_CONTROL_FLOW = Target.from_tosa_spec("TOSA-1.0+INT+controlflow")


def test_constants_in_branches_have_positions() -> None:
    """Methods with control flow share the constants of their branches too."""
    values = np.arange(512, dtype=np.int32).reshape(2, 256)

    def body(b: Any, condition: Value, x: Value) -> Value:
        result: Value = b.select(condition, b.add(x, b.const(values, DType.INT32)), b.sub(x, b.unary("CLZ", x)))
        return result

    graph = build_graph(body, ((1, 1), DType.BOOL), ((2, 256), DType.INT32), target=_CONTROL_FLOW)
    outline_control_flow(graph, _CONTROL_FLOW)
    assert [op.kind for op in graph.ops] == ["COND_IF"]
    flatbuffer = serialize(graph)
    ((start, end),) = find_constant_spans(memoryview(flatbuffer), 1024)
    np.testing.assert_array_equal(np.frombuffer(flatbuffer[start:end], "<i4"), values.ravel())
