"""Quotients of quantized tensors whose divisor has a known range: at most one step from float64."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.quantized_division import divide
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize
from tests.ops.runner import Case, Input, lower, quantize_case
from tests.tosa_graphs import FULL_TARGET

Array = np.ndarray[Any, Any]
I8, I16, I32 = DType.INT8, DType.INT16, DType.INT32
SHAPE = (4, 64)


def _positive_table(b: Builder, z: Value, rng: np.random.Generator) -> Value:
    """An int16 function of an int8 tensor, with values from ``low`` to ``high``."""
    low, high = sorted(int(x) for x in 2 ** rng.uniform(0, 15, 2))
    entries = np.linspace(low, min(high + 1, 32767), 513) * rng.choice([-1, 1])
    return b.rescale(b.table(b.rescale(z, I16, 256.0), np.rint(entries)), I16, 1 / 128)


def _clamped(b: Builder, z: Value, rng: np.random.Generator) -> Value:
    """An int16 tensor of one sign, by a CLAMP."""
    low, high = sorted(int(x) for x in 2 ** rng.uniform(0, 15, 2))
    low, high = low, min(high + 1, 32767)
    return b.clamp(z, low, high) if rng.random() < 0.5 else b.clamp(z, -high, -low)


def _not_negative(b: Builder, z: Value, rng: np.random.Generator) -> Value:
    """An int16 tensor that may be 0 but not negative."""
    return b.clamp(z, 0, int(2 ** rng.uniform(1, 15)))


DIVISORS: dict[str, tuple[DType, Callable[[Builder, Value, np.random.Generator], Value]]] = {
    "int8": (I8, lambda b, z, rng: z),
    "int16": (I16, lambda b, z, rng: z),
    "function_of_int8": (I8, _positive_table),
    "clamped": (I16, _clamped),
    "not_negative": (I16, _not_negative),
}


def _build(
    rng: np.random.Generator, divisor: str, result: DType, shape: tuple[int, ...], target: Target
) -> tuple[Graph, list[Array], QParams, tuple[QParams, QParams]]:
    """A graph with the quotient and the divisor as outputs, its inputs, and the quantization parameters."""
    graph = Graph()
    b = LegalizingBuilder(graph, target)
    z_dtype, make_divisor = DIVISORS[divisor]
    p = _draw(rng, I8 if rng.random() < 0.3 else I16, 1.0)
    x = rng.integers(p.qmin, p.qmax, SHAPE, endpoint=True)
    x[0] = np.clip(p.zero_point + rng.integers(-2, 3, SHAPE[1]), p.qmin, p.qmax)
    z = rng.integers(*z_dtype.range, shape, endpoint=True)
    z[0, : shape[1] // 2] = z[0, : shape[1] // 2] // 32
    y = make_divisor(b, graph.add_input(shape, z_dtype, "z"), rng)
    q = _draw(rng, y.dtype, 1.0)
    out = _draw(rng, result, float(10 ** rng.uniform(-4, 4)))
    node: Any = types.SimpleNamespace(meta={"val": torch.empty(SHAPE)}, target=None, users=(), all_input_nodes=[])
    value = divide(Context(b, node, out), Operand(graph.add_input(SHAPE, p.dtype, "x"), p), Operand(y, q))
    graph.outputs = [value, b.rescale(y, I32, 1.0)]
    inputs = [z.astype(z_dtype.numpy), x.astype(p.dtype.numpy)]
    return graph, inputs, out, (p, q)


def _draw(rng: np.random.Generator, dtype: DType, near: float) -> QParams:
    scale = float(np.float32(near * 10 ** rng.uniform(-2, 2)))
    return QParams(scale, int(rng.integers(-128, 128)) if dtype is I8 else 0, dtype, *dtype.range)


@pytest.mark.parametrize("shape", [SHAPE, (4, 1)], ids=["same", "broadcast"])
@pytest.mark.parametrize("result", [I8, I16], ids=["int8", "int16"])
@pytest.mark.parametrize("divisor", DIVISORS)
def test_at_most_one_step(divisor: str, result: DType, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        graph, inputs, out, (p, q) = _build(rng, divisor, result, shape, FULL_TARGET)
        graph.verify()
        quotient, y = reference_model.run(serialize(graph), inputs)
        with np.errstate(all="ignore"):
            exact = p.dequantize(inputs[1]) / (q.dequantize(np.asarray(y)) + 0.0)
        expected = out.quantize(np.nan_to_num(exact, nan=0.0, posinf=1e30, neginf=-1e30))
        error = np.abs(quotient.astype(np.int64) - expected)
        assert error.max() <= 1, (p, q, out, error.max())


@pytest.mark.parametrize(
    ("divide_tensors", "kinds", "count"),
    [
        (lambda x, z: x / (1 + z.abs()), {"TABLE", "RESCALE", "MUL"}, 6),
        (lambda x, z: x / (z.sigmoid() + 0.5), {"TABLE", "RESCALE", "MUL"}, 6),
        (lambda x, z: x / (x.abs() + z.abs() + 1), {"TABLE", "RESCALE", "MUL", "ADD"}, 17),
        (lambda x, z: x / (z.abs() + 1e-6), {"TABLE", "RESCALE", "MUL", "ARITHMETIC_RIGHT_SHIFT"}, 9),
    ],
    ids=["absolute", "sigmoid", "two_tensors", "epsilon"],
)
def test_int8_quotients_by_a_function_take_few_operators(
    divide_tensors: Callable[..., torch.Tensor], kinds: set[str], count: int
) -> None:
    """No normalization by leading zeros, and no cases for a divisor of 0 or for its sign."""
    case = Case("quotient", divide_tensors, [Input((2, 8, 8)), Input((2, 8, 8))])
    result = quantize_case(case, int16=False)
    log = lower(torch.export.export(result, case.sample()), "int").log
    (delegate,) = log.delegates
    operators = [name for name in delegate.tosa_operators if name not in ("CONST", "CONST_SHAPE")]
    assert set(operators) <= kinds
    assert len(operators) <= count
