"""Origins of operators after passes have merged, moved and replaced them."""

from __future__ import annotations

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import COPY_OPERATOR, Graph, Op, Origin, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.layout_assignment import assign_layouts
from arm_backend_core.tosa.passes.pipeline import run, simplify
from arm_backend_core.tosa.passes.table import compose_tables

TARGET = Target.from_tosa_spec("TOSA-1.0+INT+FP+int16+doubleround")


class Traced:
    """A graph under construction, whose operators have origins."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.b = LegalizingBuilder(self.graph, TARGET)

    def input(self, *shape: int, dtype: DType = DType.INT32) -> Value:
        return self.graph.add_input(shape, dtype, f"input_{len(self.graph.inputs)}")

    def of(self, name: str, work: int = 1) -> Builder:
        """Return the builder. The operators that it emits next have the origin ``name``."""
        self.b.origins = {Origin(name, f"aten.{name}"): work}
        return self.b

    def returns(self, *values: Value) -> Graph:
        self.graph.outputs = list(values)
        return self.graph

    def origins(self) -> list[tuple[str, list[str]]]:
        """Kind and origins of each operator. Origins that only move data are in parentheses."""
        names = [[f"({o.node})" if o.is_transpose else o.node for o in op.origins] for op in self.graph.ops]
        return [(op.kind, sorted(nodes)) for op, nodes in zip(self.graph.ops, names, strict=True)]


def test_tile_fused_into_arithmetic_keeps_its_origin() -> None:
    t = Traced()
    x, y = t.input(1, 8), t.input(4, 8)
    repeated = t.of("repeat", 5).tile(x, (4, 1))
    t.returns(t.of("add", 7).add(repeated, y))
    simplify(t.graph, TARGET)
    assert t.origins() == [("ADD", ["add", "repeat"])]
    assert sorted(t.graph.ops[0].origins.values()) == [5, 7]


def test_arithmetic_folded_into_weights_keeps_its_origin() -> None:
    t = Traced()
    weight, bias = np.ones((2, 1, 1, 3), np.float32), np.zeros(2, np.float32)
    constants = t.b.const(weight, DType.FP32), t.b.const(bias, DType.FP32)
    y = t.of("conv", 6).conv2d(t.input(1, 4, 4, 3, dtype=DType.FP32), *constants, pad=(0, 0, 0, 0))
    scaled = t.of("mul", 2).mul(y, t.b.const(np.full((1, 1, 1, 1), 2, np.float32), DType.FP32))
    t.returns(t.of("add", 3).add(scaled, t.b.const(np.ones((1, 1, 1, 2), np.float32), DType.FP32)))
    simplify(t.graph, TARGET)
    assert t.origins() == [("CONV2D", ["add", "conv", "mul"])]


def test_operators_that_swap_places_keep_their_origins() -> None:
    t = Traced()
    turned = t.of("permute").transpose(t.input(2, 3, 4), (2, 0, 1))
    t.returns(t.of("add").add(turned, t.b.const(np.ones((1, 1, 1)), DType.INT32)))
    simplify(t.graph, TARGET)
    assert t.origins() == [("ADD", ["add"]), ("TRANSPOSE", ["(permute)"])]


def test_merged_transposes_have_both_origins() -> None:
    t = Traced()
    turned = t.of("permute").transpose(t.input(2, 3, 4), (2, 0, 1))
    t.returns(t.of("movedim").transpose(turned, (0, 2, 1)))
    simplify(t.graph, TARGET)
    assert t.origins() == [("TRANSPOSE", ["(movedim)", "(permute)"])]


def test_unused_operator_leaves_no_origin() -> None:
    t = Traced()
    x = t.input(1, 8)
    kept, dropped = t.of("kept").add(x, x), t.of("dropped").sub(x, x)
    both = t.of("cat").concat([kept, dropped], 0)
    t.returns(t.of("select").slice(both, (0, 2), (1, 4)))
    simplify(t.graph, TARGET)
    assert t.origins() == [("ADD", ["kept"]), ("SLICE", ["cat", "select"])]


def test_cancelled_transposes_leave_no_origin_at_the_convolution() -> None:
    t = Traced()
    weight = t.b.const(np.ones((8, 3, 3, 4)), DType.INT8)
    bias = t.b.const(np.zeros(8), DType.INT32)
    image = t.of("permute").transpose(t.input(1, 4, 8, 8, dtype=DType.INT8), (0, 2, 3, 1))
    turned = t.of("contiguous").transpose(image, (0, 3, 1, 2))
    back = t.of("conv").transpose(turned, (0, 2, 3, 1))
    t.returns(t.of("conv").conv2d(back, weight, bias, pad=[1] * 4))
    simplify(t.graph, TARGET)
    assign_layouts(t.graph, TARGET)
    assert t.origins()[-1] == ("CONV2D", ["conv"])


def test_shared_common_subexpression_has_both_origins() -> None:
    t = Traced()
    x = t.input(4)
    t.returns(t.of("a", 3).unary("ABS", x), t.of("b", 5).unary("ABS", x))
    eliminate_common_subexpressions(t.graph, TARGET)
    assert t.origins() == [("ABS", ["a", "b"])]


def test_composed_table_has_the_origins_of_all_its_operators() -> None:
    t = Traced()
    x = t.input(1, 8, dtype=DType.INT8)
    wide = t.of("mul").rescale(x, DType.INT32, 64.0)
    square = t.of("mul").mul(wide, wide)
    narrow = t.of("mul").rescale(square, DType.INT8, 1e-5)
    t.returns(t.of("relu").clamp(narrow, 0, 127))
    compose_tables(t.graph, TARGET)
    assert t.origins() == [("TABLE", ["mul", "relu"])]


def test_operator_without_origin_gets_those_of_its_operands() -> None:
    t = Traced()
    x = t.input(4)
    y = t.of("add").add(x, x)
    t.b.origins = {}
    t.returns(t.b.unary("IDENTITY", y), t.b.unary("IDENTITY", x))
    assert t.origins() == [("ADD", ["add"]), ("IDENTITY", ["add"]), ("IDENTITY", ["input_0"])]


def test_returned_input_has_the_copy_origin() -> None:
    t = Traced()
    x = t.input(4)
    t.returns(t.of("add").add(x, x), x)
    run(t.graph, TARGET)
    assert [origin.operator for op in t.graph.ops for origin in op.origins] == ["aten.add", COPY_OPERATOR]


_IMAGE = (1, 8, 8, 4)


@pytest.mark.parametrize(
    ("kind", "shapes", "result", "work"),
    [
        ("CONV2D", [_IMAGE, (16, 3, 3, 4), (16,)], (1, 8, 8, 16), 64 * 16 * 36),
        ("DEPTHWISE_CONV2D", [_IMAGE, (3, 3, 4, 2), (8,)], (1, 8, 8, 8), 64 * 8 * 9),
        ("TRANSPOSE_CONV2D", [_IMAGE, (16, 2, 2, 4), (16,)], (1, 16, 16, 16), 64 * 4 * 16 * 4),
        ("MATMUL", [(2, 5, 7), (2, 7, 3)], (2, 5, 3), 2 * 5 * 7 * 3),
        ("REDUCE_SUM", [(4, 8)], (4, 1), 32),
        ("TILE", [(4, 1)], (4, 8), 32),
        ("ADD", [(), ()], (), 1),
    ],
)
def test_work_is_the_number_of_multiplications_or_elements(
    kind: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], work: int
) -> None:
    attrs = {"weight_zp": 0} if "CONV" in kind else {}
    values = [Value(shape, DType.INT8) for shape in shapes]
    assert Op(kind, values, Value(result, DType.INT32), attrs).work == work
