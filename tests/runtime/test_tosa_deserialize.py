"""Deserialization of TOSA flatbuffers: round trips, and refusal of operators that no record describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tosa_serializer as ts

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes.control_flow import outline_control_flow
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.tosa_deserialize import deserialize
from tests.runtime.schemas import tables
from tests.tosa.random_operators import draw_operators
from tests.tosa_graphs import build_graph

_CONTROL = Target.from_tosa_spec("TOSA-1.0+INT+controlflow")


def _graph_of(ops: list[Op]) -> Graph:
    graph = Graph()
    for i, op in enumerate(ops):
        for j, value in enumerate(op.inputs):
            if value.data is None:
                graph.inputs.append(Value(value.shape, value.dtype, f"op{i}_{j}"))
                op.inputs[j] = graph.inputs[-1]
        op.output.producer = op
    graph.ops, graph.outputs = ops, [op.output for op in ops]
    return graph


def _is_legal(target: Target, op: Op) -> bool:
    try:
        return op_refusal(target, op) is None
    except AssertionError:
        return False


def test_round_trip_of_every_operator() -> None:
    """Every operator of TOSA 1.0, with types that are drawn from its record."""
    ops = [op for target, op in draw_operators(3000, seed=3) if _is_legal(target, op)]
    written = serialize(_graph_of(ops))
    read = deserialize(written)
    assert serialize(read) == written
    assert {op.kind for op in read.ops} == {op.kind for op in ops}
    for ours, theirs in zip(read.ops, ops, strict=True):
        assert (ours.kind, ours.attrs.keys()) == (theirs.kind, theirs.attrs.keys())
        for name, value in theirs.attrs.items():
            np.testing.assert_array_equal(ours.attrs[name], np.asarray(value), err_msg=f"{theirs!r}: {name}")
        for x, y in zip(ours.inputs, theirs.inputs, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert (x.data is None) == (y.data is None)
            if x.data is not None and y.data is not None:
                np.testing.assert_array_equal(x.data, y.data)
    assert len(ops) > 1500


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.FP8UE8M0])
def test_round_trip_of_constants_of_every_type(dtype: DType) -> None:
    values = np.arange(64).reshape(2, 32) % 2 if dtype is DType.BOOL else np.arange(64).reshape(2, 32) % 4 - 1
    if dtype is DType.INT48:
        values = values * (1 << 45) + 5
    graph = Graph()
    graph.inputs.append(Value((1, 1, 32), DType.INT8, "x"))
    result = Value((2, 32), dtype, "y")
    op = Op("CONCAT", [constant(values, dtype)] * 2, result, {"axis": 0})
    result.producer = op
    graph.ops, graph.outputs = [op], [result]
    (read,) = _round_trip_of_any_type(graph).ops
    assert read.inputs[0].dtype is dtype
    assert read.inputs[0].data is not None
    np.testing.assert_array_equal(read.inputs[0].data, values.astype(dtype.numpy))


def _round_trip_of_any_type(graph: Graph) -> Graph:
    """Serialize and deserialize a graph, also with types that the operator's record does not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arm_backend_core.tosa.serialize._required_version", lambda graph, target: (1, 1))
        return deserialize(serialize(graph))


def _branches() -> Graph:
    def body(b: Any, condition: Value, x: Value) -> Value:
        chosen: Value = b.select(condition, b.add(x, b.const([[3]], DType.INT32)), b.sub(x, b.unary("CLZ", x)))
        return chosen

    written = build_graph(body, ((1, 1), DType.BOOL), ((2, 3), DType.INT32), target=_CONTROL)
    outline_control_flow(written, _CONTROL)
    assert written.ops[0].kind == "COND_IF"
    return written


def test_round_trip_of_branches() -> None:
    written = serialize(_branches())
    read = deserialize(written)
    assert [[op.kind for op in inner.ops] for inner in read.ops[0].regions] == [["ADD"], ["CLZ", "SUB"]]
    assert [value.name for value in read.ops[0].regions[0].inputs] == ["x0"]
    assert serialize(read) == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda op: op.inputs.__setitem__(0, op.inputs[1]), "its condition is .*, not one boolean"),
        (lambda op: op.inputs.append(op.inputs[1]), "its nested graph has"),
        (lambda op: setattr(op.output, "shape", (3, 3)), "its nested graph has"),
        (lambda op: op.regions[1].outputs.append(op.regions[1].outputs[0]), "its nested graph has"),
    ],
)
def test_branch_with_other_shapes_or_types_than_its_operator_is_refused(change: Any, message: str) -> None:
    written = _branches()
    change(written.ops[0])
    with pytest.raises(PayloadError, match=f"operator 0, COND_IF: {message}"):
        deserialize(serialize(written))


def _program(op: ts.Op, operands: int, results: int, attribute: str, *fields: Any) -> bytes:
    """Serialize one operator on int32 inputs of shape [2]."""
    out = ts.TosaSerializer("", targetMajor=1, targetMinor=0, targetPatch=0, targetDraft=False)
    names = []
    for i in range(operands):
        names.append(f"x{i}")
        out.addInputTensor(ts.TosaSerializerTensor(names[-1], [2], ts.DType.INT32))
    made = [out.addIntermediate([2], ts.DType.INT32) for _ in range(results)]
    table = ts.TosaSerializerAttribute()
    getattr(table, attribute)(*fields)
    out.addOperator(op, names, [tensor.name for tensor in made], table)
    for tensor in made:
        out.addOutputTensor(tensor)
    return bytes(out.serialize())


@pytest.mark.parametrize(
    ("flatbuffer", "message"),
    [
        (_program(ts.Op.ADD, 1, 1, "AddAttribute"), "operator 0, ADD: 1 operands and 1 results, not 2 operands"),
        (_program(ts.Op.ADD, 2, 2, "AddAttribute"), "2 operands and 2 results, not 2 operands and 1 results"),
        (_program(ts.Op.CONCAT, 0, 1, "ConcatAttribute", 0), "0 operands and 1 results, not 1 operands"),
        (_program(ts.Op.FFT2D, 2, 2, "FFT2dAttribute", False, False), "FFT2D: the compiler has no such operator"),
        (_program(ts.Op.MUL, 3, 1, "MulAttribute"), "its shift is not a constant"),
        (_program(ts.Op.RESHAPE, 2, 1, "ReshapeAttribute"), "its shape is not a constant shape"),
        (b"", "truncated or damaged"),
    ],
)
def test_operator_that_no_record_describes_is_refused(flatbuffer: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        deserialize(flatbuffer)


def test_damaged_flatbuffer_is_read_or_refused() -> None:
    """Every third byte is changed in turn. Truncated flatbuffers are always refused."""
    intact = bytearray(serialize(_branches()))
    refused = 0
    for place in range(0, len(intact), 3):
        damaged = bytearray(intact)
        damaged[place] ^= 0x55
        try:
            deserialize(bytes(damaged))
        except PayloadError:
            refused += 1
    assert refused > len(intact) // 30
    for length in range(0, len(intact) - 100, 50):  # the last bytes are the serializer's version, which is not read
        with pytest.raises(PayloadError):
            deserialize(bytes(intact[:length]))


def test_the_fields_of_attributes_are_those_of_the_schema() -> None:
    """The position of a field in a record is its number in the schema."""
    known = tables(Path(ts.__file__).parents[1].joinpath("bin/tosa.fbs").read_text())
    for record in OPERATORS.values():
        if not record.is_placeholder:
            assert tuple(known[f"{record.attribute_table}Attribute"]) == record.fields, record.kind
