"""Facts of TOSA flatbuffers: positions of constants, and sizes of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.control_flow import outline_control_flow
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.tosa_flatbuffer import find_constant_spans, read_tosa_graph
from tests.tosa_graphs import build_graph

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


#: Bits of an element whose type is not as large as ``DType.bytes``.
_PACKED_BITS = {DType.INT4: 4, DType.FP4E2M1: 4, DType.FP6E2M3: 6, DType.FP6E3M2: 6}


@pytest.mark.parametrize("dtype", DType)
def test_tensors_of_every_type_have_a_size(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of a report counts these bytes, also of block-scaled tensors and their scales."""
    monkeypatch.setattr("arm_backend_core.tosa.serialize._required_version", lambda graph, target: (1, 1))
    graph, result = Graph(), Value((2, 3), dtype, "y")
    graph.inputs.append(Value((1, 3), dtype, "x"))
    graph.ops, graph.outputs = [Op("CONCAT", graph.inputs * 2, result, {"axis": 0})], [result]
    bits = _PACKED_BITS.get(dtype, 8 * dtype.bytes)
    sizes = read_tosa_graph(memoryview(serialize(graph))).tensor_bytes
    assert sorted(sizes.values()) == [-(-3 * bits // 8), -(-6 * bits // 8)]
