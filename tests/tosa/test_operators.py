"""The records of TOSA operators: that mistakes in them are found at import, and what single operators may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tosa_serializer

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legality import refusal
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.operators.record import ANY, define, same_shape

FP = Target.from_tosa_spec("TOSA-1.0+FP")


@pytest.mark.parametrize(
    ("kind", "rows", "facts", "message"),
    [
        ("ADD", "i8>i8:INT", {}, "has a record already"),
        ("NEW", "i8>i9:INT", {}, "unknown i9"),
        ("NEW", "i8>i8:INTEGER", {}, "unknown INTEGER"),
        ("NEW", "i8>i8:INT i8>i8:INT", {}, "twice"),
        ("NEW", "i8>i8:INT i8,i8>i8:INT", {}, "number of operands"),
        ("NEW", "i8>i8:INT", {"fields": ("axis",), "operands": (("axis", "shape"),)}, "two places"),
        ("NEW", "i8>i8:INT", {"operands": (("zp", "input1"),)}, "unknown type 'input1'"),
    ],
)
def test_mistakes_in_a_record_are_errors(kind: str, rows: str, facts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        define(kind, rows, [ANY], same_shape, **facts)
    assert "NEW" not in OPERATORS


@pytest.mark.parametrize("kind", OPERATORS)
def test_records_are_those_of_the_flatbuffer(kind: str) -> None:
    record = OPERATORS[kind]
    assert hasattr(tosa_serializer.Op, kind)
    getattr(tosa_serializer.TosaSerializerAttribute(), record.attribute + "Attribute")


def test_a_later_version_is_only_rows() -> None:
    later = replace(FP, version=(1, 1))
    assert refusal(FP, "GATHER", [DType.INT8, DType.INT32], DType.INT8) == (
        "GATHER (int8, int32 -> int8) needs TOSA INT, which TOSA-1.0+FP lacks"
    )
    assert refusal(FP, "GATHER", [DType.BOOL, DType.INT32], DType.BOOL) == (
        "TOSA 1.0 has no GATHER (bool, int32 -> bool)"
    )
    assert refusal(later, "GATHER", [DType.INT8, DType.INT32], DType.INT8) is None
    assert refusal(later, "GATHER", [DType.BOOL, DType.INT32], DType.BOOL) is None


def test_a_wrong_shape_is_a_fault_and_not_a_refusal() -> None:
    graph = Graph()
    x = graph.add_input((2, 3), DType.FP32, "x")
    with pytest.raises(AssertionError, match=r"its shape must be \[2, 3\]"):
        Builder(graph, FP).emit("EXP", (x,), (3, 2), DType.FP32)
    with pytest.raises(AssertionError, match="attributes must be"):
        Builder(graph, FP).emit("EXP", (x,), (2, 3), DType.FP32, axis=0)
    assert not graph.ops


def test_seven_dimensions_are_refused() -> None:
    graph = Graph()
    x = graph.add_input((1,) * 6 + (2,), DType.FP32, "x")
    with pytest.raises(Unsupported, match=r"7 dimensions in x:fp32\[1, 1, 1, 1, 1, 1, 2\] \(0 to 6\); reshape it"):
        Builder(graph, FP).unary("EXP", x)


def test_an_npu_says_how_many_multipliers_it_has() -> None:
    with pytest.raises(ValueError, match="macs: ethos-u55 needs"):
        Target("ethos-u55", frozenset({"INT"}), frozenset(), "ethos-u55")
