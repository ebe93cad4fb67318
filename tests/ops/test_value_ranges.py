"""Range analysis of TOSA values: ranges contain all computed integers, and int8 functions equal them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.ops.value_ranges import find_int8_function, find_range
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import FULL_TARGET

I8, I16, I32 = DType.INT8, DType.INT16, DType.INT32


def _absolute(b: Builder, x: Value) -> Value:
    return b.unary("ABS", b.rescale(x, I32, 1.0, 3))


def _square(b: Builder, x: Value) -> Value:
    wide = b.rescale(x, I32, 1.0)
    return b.mul(wide, wide, 2)


def _table(b: Builder, x: Value) -> Value:
    entries = np.rint(1000 + 3000 * np.cos(np.arange(513) / 100))
    return b.rescale(b.table(b.rescale(x, I16, 256.0), entries), I16, 1 / 128)


#: Name -> (function of an int8 tensor [4, 64], its range).
FUNCTIONS: dict[str, tuple[Callable[[Builder, Value], Value], tuple[int, int]]] = {
    "input": (lambda b, x: x, (-128, 127)),
    "abs": (_absolute, (0, 131)),
    "square": (_square, (0, 4096)),
    "clamp": (lambda b, x: b.clamp(b.rescale(x, I16, 256.0), -7, 9), (-7, 9)),
    "table": (_table, (-2000, 4000)),
    "sum": (lambda b, x: b.reduce("REDUCE_SUM", _square(b, x), 1), (0, 4096 * 64)),
    "difference": (lambda b, x: b.sub(_absolute(b, x), _square(b, x)), (-4096, 131)),
    "minimum": (lambda b, x: b.minimum(_square(b, x), b.const(np.full((1, 1), 77), I32)), (0, 77)),
    "maximum": (lambda b, x: b.maximum(b.rescale(x, I32, 2.0), b.const(np.full((1, 1), 1), I32)), (1, 254)),
    "concat": (lambda b, x: b.concat([_absolute(b, x), b.const(np.full((4, 2), 500), I32)], 1), (0, 500)),
    "movement": (lambda b, x: b.transpose(b.reshape(_absolute(b, x), (8, 32)), (1, 0)), (0, 131)),
    "padding": (lambda b, x: b.pad(b.clamp(x, 2, 5), [(0, 1), (0, 0)], 0), (-128, 127)),
}
_ELEMENTWISE = ("input", "abs", "square", "clamp", "table", "difference", "minimum", "maximum")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranges_and_functions(name: str) -> None:
    function, expected = FUNCTIONS[name]
    graph = Graph()
    x = graph.add_input((4, 64), I8, "x")
    result = function(LegalizingBuilder(graph, FULL_TARGET), x)
    assert find_range(result) == expected
    found = find_int8_function(result)
    if name not in _ELEMENTWISE:
        assert found is None or found.base is not x
        return
    assert found is not None
    assert found.base is x
    graph.outputs = [result]
    numbers = np.arange(-128, 128).astype(np.int8).reshape(4, 64)
    computed = numbers if result is x else reference_model.run(serialize(graph), [numbers])[0]
    np.testing.assert_array_equal(found.values, np.asarray(computed).reshape(-1))
    assert expected[0] <= found.values.min() <= found.values.max() <= expected[1]


def test_functions_of_two_tensors_and_constants_of_several_elements_are_none() -> None:
    graph = Graph()
    b = LegalizingBuilder(graph, FULL_TARGET)
    x, y = (b.rescale(graph.add_input((4, 64), I8, name), I32, 1.0) for name in "xy")
    assert find_int8_function(b.add(x, y)) is None
    assert find_int8_function(b.add(x, b.const(np.arange(64)[None], I32))) is None
    assert find_range(b.add(x, y)) == (-256, 254)


def test_long_chains_have_the_range_of_their_type() -> None:
    graph = Graph()
    b = LegalizingBuilder(graph, FULL_TARGET)
    x = b.rescale(graph.add_input((4, 64), I8, "x"), I32, 1.0)
    for _ in range(100):
        x = b.add(x, b.const(np.ones((1, 1)), I32))
    low, high = find_range(x)
    assert low <= -28
    assert high >= 227
