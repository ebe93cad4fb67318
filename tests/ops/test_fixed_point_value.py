"""Integer lowering rules with random and degenerate quantization parameters: at most one step from float64.

Scales lie between 1e-30 and 1e30, with extreme ratios to one another, as if a tensor was zero in all samples.
A rule may refuse; it may not overflow, which ``FixedPoint`` raises when the rule is built.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.catalog import aten_entries
from arm_backend_core.ops.common_scale import to_common_int16, to_common_scale
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import Record
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.pipeline import run as optimise
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import FULL_TARGET, make_target

aten = torch.ops.aten
Array = np.ndarray[Any, Any]
I8, I16 = DType.INT8, DType.INT16
SHAPE = (4, 64)


def draw(rng: np.random.Generator, near: float | None = None, dtype: DType | None = None) -> QParams:
    """Parameters of a tensor: any scale, or one that is at most 2**24 times as large or small as ``near``."""
    exponent = rng.uniform(-30, 30) if near is None else np.log10(near) + rng.uniform(-7, 7)
    dtype = dtype or (I8 if rng.random() < 0.5 else I16)
    zero_point = int(rng.integers(-128, 128)) if dtype is I8 else 0
    scale = float(np.float32(10.0 ** np.clip(exponent, -30, 30)))
    return QParams(scale, zero_point, dtype, *dtype.range)


def integers(rng: np.random.Generator, q: QParams) -> Array:
    """Draw elements over the whole range; some are its limits, some are zero or next to it."""
    x = rng.integers(q.qmin, q.qmax, SHAPE, endpoint=True)
    x[0, :20] = q.zero_point
    x[0, 20:30], x[0, 30:40] = q.qmin, q.qmax
    x[1] = np.clip(q.zero_point + rng.integers(-2, 3, SHAPE[1]), q.qmin, q.qmax)
    x[2, :32] = q.zero_point
    return rng.permutation(x.T).T if rng.random() < 0.5 else x


def evaluate(
    overload: OpOverload,
    operands: Sequence[tuple[Array, QParams]],
    out: QParams | None,
    shape: Sequence[int],
    *arguments: Any,
    constant: Sequence[int] = (),
    target: Target = FULL_TARGET,
) -> Array:
    """Run an operator's integer rule on the TOSA reference model; ``constant`` has the indices of constant operands."""
    graph = Graph()
    tensors, fed = [], []
    for i, (x, q) in enumerate(operands):
        array = x.astype(q.dtype.numpy)
        if i in constant:
            tensors.append(Operand(Value(array.shape, q.dtype, f"c{i}", array), q))
        else:
            tensors.append(Operand(graph.add_input(array.shape, q.dtype, f"x{i}"), q))
            fed.append(array)
    result = torch.empty(tuple(shape), dtype=torch.float32)
    source = types.SimpleNamespace(target=None, users=())
    node: Any = types.SimpleNamespace(meta={"val": result}, target=overload, all_input_nodes=[source])
    rule = _integer_rule(overload)
    graph.outputs = [rule(Context(LegalizingBuilder(graph, target), node, out), *tensors, *arguments)]
    graph.remove_dead()
    return np.asarray(reference_model.run(serialize(graph), fed)[0])


def _integer_rule(overload: OpOverload) -> Callable[..., Any]:
    record = aten_entries()[overload]
    assert isinstance(record, Record)
    assert record.lower_integer is not None
    return record.lower_integer


def check(got: Array, real: Array, out: QParams, steps: float = 1) -> None:
    defined = ~np.isnan(real)
    expected = out.quantize(np.where(defined, real, 0.0))
    error = np.abs(got.astype(np.int64) - expected)[defined]
    worst = int(error.argmax()) if error.size else 0
    assert error.size == 0 or error.max() <= steps, (error.max(), got[defined][worst], expected[defined][worst], out)


def _divide(x: Array, y: Array) -> Array:
    """Divide as torch.div does. A quantized zero has no sign and counts as +0."""
    with np.errstate(all="ignore"):
        return x / np.where(y == 0, 0.0, y)


BINARY: dict[OpOverload, Callable[[Array, Array], Array]] = {
    aten.add.Tensor: np.add,
    aten.sub.Tensor: np.subtract,
    aten.rsub.Tensor: lambda x, y: y - x,
    aten.mul.Tensor: np.multiply,
    aten.div.Tensor: _divide,
    aten.maximum.default: np.maximum,
    aten.minimum.default: np.minimum,
}


@pytest.mark.parametrize("overload", BINARY, ids=str)
@pytest.mark.parametrize("near", [True, False])
def test_binary(overload: OpOverload, near: bool) -> None:
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        p = draw(rng)
        q = draw(rng, float(p.scale) if near else None)
        x, y = integers(rng, p), integers(rng, q)
        with np.errstate(over="ignore"):
            exact = BINARY[overload](p.dequantize(x), q.dequantize(y))
        spread = float(np.abs(exact[np.isfinite(exact)]).max())
        out = draw(rng, spread / 100 if near else None)
        constant = (1,) if rng.random() < 0.3 else ()
        try:
            check(evaluate(overload, [(x, p), (y, q)], out, SHAPE, constant=constant), exact, out)
        except Unsupported:
            refused += 1
    assert refused <= 30


@pytest.mark.parametrize("shape", [(64,), (4, 1), SHAPE])
@pytest.mark.parametrize("overload", [aten.add.Tensor, aten.mul.Tensor, aten.maximum.default], ids=str)
def test_int8_constants_are_not_widened(overload: OpOverload, shape: tuple[int, ...]) -> None:
    """They take a quarter of int32's bytes, and an NPU fuses the RESCALE of each operand into the operator."""
    q, target = QParams(0.1, 3, I8, -128, 127), make_target("ethos-u55")
    graph = Graph()
    x = Operand(graph.add_input(SHAPE, I8, "x"), q)
    numbers = np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    rule = _integer_rule(overload)
    cx = Context(LegalizingBuilder(graph, target), types.SimpleNamespace(), QParams(0.2, 0, I8, -128, 127))  # type: ignore[arg-type]
    graph.outputs = [rule(cx, x, Operand(Value(shape, I8, "c", numbers), QParams(0.05, 1, I8, -128, 127)))]
    optimise(graph, target)
    assert len(graph.ops) == (5 if overload is aten.maximum.default else 4)  # a maximum requantizes its operands first
    constants = [value for op in graph.ops for value in op.inputs if value.data is not None]
    assert [value.dtype for value in constants] == [I8]


@pytest.mark.parametrize("slopes", [(0.0, 0.9), (1.0, 1.7), (0.0, 1.7), (-1.2, 0.9), (-1.2, 1.7)])
@pytest.mark.parametrize("npu", [None, "ethos-u55"])
def test_prelu_with_slopes_per_channel(slopes: tuple[float, float], npu: str | None) -> None:
    """The result is at most one step off, for slopes below 0, between 0 and 1, and above 1."""
    rng, target = np.random.default_rng(0), make_target(npu) if npu else FULL_TARGET
    for _ in range(30):
        p = draw(rng)
        x, weight = integers(rng, p), rng.uniform(*slopes, SHAPE[1])
        q = QParams(float(np.float32(np.abs(weight).max() / 120)), 0, I8, -128, 127)
        steps, real = q.quantize(weight), p.dequantize(x)
        exact = np.where(real > 0, real, real * q.dequantize(steps))
        out = draw(rng, float(np.abs(exact).max()) / 100, p.dtype)
        check(evaluate(aten.prelu.default, [(x, p), (steps, q)], out, SHAPE, constant=(1,), target=target), exact, out)


# -- functions of one tensor ---------------------------------------------------------------------------------


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _layer_norm(x: Array) -> Array:
    centred = x - x.mean(1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(1, keepdims=True) + 1e-5)


def _rms_norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)


#: Operator -> its arguments after the tensor, and its function in float64.
ALONG_ROWS: dict[OpOverload, tuple[tuple[Any, ...], Callable[[Array], Array]]] = {
    aten.mean.dim: (([1], True), lambda x: x.mean(1, keepdims=True)),
    aten.sum.dim_IntList: (([1], True), lambda x: x.sum(1, keepdims=True)),
    aten.var.dim: (([1], True, True), lambda x: x.var(1, keepdims=True, ddof=1)),
    aten.std.dim: (([1], True, True), lambda x: x.std(1, keepdims=True, ddof=1)),
    aten.softmax.int: ((1,), _softmax),
    aten.log_softmax.int: ((1,), _log_softmax),
    aten.layer_norm.default: (([SHAPE[1]],), _layer_norm),
    aten.rms_norm.default: (([SHAPE[1]], None, 1e-5), _rms_norm),
}


@pytest.mark.parametrize("overload", ALONG_ROWS, ids=str)
@pytest.mark.parametrize("result", [I8, I16])
def test_rows(overload: OpOverload, result: DType) -> None:
    """An int16 result may also err by 2**-12 of the largest result, because tables have 14 bits."""
    rng, refused = np.random.default_rng(1), 0
    arguments, function = ALONG_ROWS[overload]
    for i in range(60):
        p = draw(rng, 10.0 ** rng.uniform(-4, 1) if i % 2 else None)
        x = integers(rng, p)
        with np.errstate(all="ignore"):
            exact = function(p.dequantize(x))
        out = draw(rng, float(np.abs(exact).max()) / 100 if i % 2 else None, result)
        if overload is aten.softmax.int and i % 4:
            out = QParams(1 / 256, -128, I8, -128, 127) if result is I8 else QParams(2.0**-15, 0, I16, -32768, 32767)
        error = 0.0 if result is I8 else float(np.abs(exact).max() / float(out.scale)) * 2.0**-12
        try:
            check(evaluate(overload, [(x, p)], out, exact.shape, *arguments), exact, out, 1 + error)
        except Unsupported:
            refused += 1
    assert refused <= 25


COMPARISONS: dict[OpOverload, Callable[[Array, Array], Array]] = {
    aten.eq.Tensor: np.equal,
    aten.ne.Tensor: np.not_equal,
    aten.gt.Tensor: np.greater,
    aten.ge.Tensor: np.greater_equal,
    aten.lt.Tensor: np.less,
    aten.le.Tensor: np.less_equal,
}


@pytest.mark.parametrize("overload", COMPARISONS, ids=str)
def test_comparison(overload: OpOverload) -> None:
    """Operands that differ by less than a thousandth of the coarser one's step may compare either way."""
    rng = np.random.default_rng(2)
    for i in range(40):
        p = draw(rng)
        q = p if i % 4 == 0 else draw(rng, float(p.scale) if i % 2 else None)
        x, y = integers(rng, p), integers(rng, q)
        left, right = p.dequantize(x), q.dequantize(y)
        got = evaluate(overload, [(x, p), (y, q)], None, SHAPE)
        clear = (np.abs(left - right) > 1e-3 * max(float(p.scale), float(q.scale))) | (left == right)
        np.testing.assert_array_equal(got[clear], COMPARISONS[overload](left, right)[clear])


@pytest.mark.parametrize("number", [0, 1.5, -1e30, 1e-30, math.inf, -math.inf])
def test_scalar_operands(number: float) -> None:
    """In comparisons with a tensor, and in sums."""
    rng = np.random.default_rng(6)
    for q in (QParams(1.0, 3, I8, -128, 127), QParams(2.0**-60, 0, I16, -32768, 32767)):
        x = integers(rng, q)
        for overload, compare in ((aten.gt.Scalar, np.greater), (aten.le.Scalar, np.less_equal)):
            got = evaluate(overload, [(x, q)], None, SHAPE, number)
            np.testing.assert_array_equal(got, compare(q.dequantize(x), number))
        for out in (q, QParams(100.0, 0, I8, -128, 127)):
            check(evaluate(aten.add.Scalar, [(x, q)], out, SHAPE, number), q.dequantize(x) + number, out)


# -- products ------------------------------------------------------------------------------------------------


def _weights(rng: np.random.Generator) -> tuple[Array, QParams]:
    w = rng.integers(-127, 128, (8, SHAPE[1]))
    w[0], w[1], w[2] = 0, 127, -127
    return w, QParams(10.0 ** (rng.uniform(-28, 28) + rng.uniform(-2, 2, 8)), 0, I8, -127, 127, 0)


@pytest.mark.parametrize("dtype", [I8, I16])
def test_linear(dtype: DType) -> None:
    rng, refused = np.random.default_rng(3), 0
    for i in range(60):
        p, (w, wq) = draw(rng, None, dtype), _weights(rng)
        if i % 2:
            wq = QParams(float(10.0 ** rng.uniform(-30, 30)), 0, I8, -127, 127)
        x = integers(rng, p)
        exact = ((x - p.zero_point) @ w.T) * (float(p.scale) * np.asarray(wq.scale))
        out = draw(rng, float(np.abs(exact).max()) / 100 if i % 4 else None, dtype)
        # TOSA rescales the 48-bit sums of int16 by 15-bit multipliers.
        steps = 1 if dtype is I8 else 2
        try:
            got = evaluate(aten.linear.default, [(x, p), (w, wq)], out, exact.shape, constant=(1,))
            check(got, exact, out, steps)
        except Unsupported:
            refused += 1
    assert refused <= 25


@pytest.mark.parametrize("target", [FULL_TARGET, make_target("ethos-u55")], ids=["tosa", "u55"])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_matmul(dtype: DType, target: Target) -> None:
    rng, refused = np.random.default_rng(4), 0
    for i in range(40):
        p, q = draw(rng, None, dtype), draw(rng, None, dtype)
        x, y = integers(rng, p), integers(rng, q).T.copy()
        exact = ((x - p.zero_point) @ (y - q.zero_point)) * (float(p.scale) * float(q.scale))
        out = draw(rng, float(np.abs(exact).max()) / 100 if i % 2 else None, dtype)
        try:
            got = evaluate(aten.mm.default, [(x, p), (y, q)], out, exact.shape, target=target)
            check(got, exact, out)
        except Unsupported:
            refused += 1
    assert refused <= 25


@pytest.mark.parametrize("scale", [2.0**-60, 1e-9])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_bias_beyond_the_range_of_the_accumulator(dtype: DType, scale: float) -> None:
    """An input that was zero in all samples has so small a scale that the bias exceeds the accumulator."""
    rng = np.random.default_rng(5)
    p = QParams(scale, 0, dtype, *dtype.range)
    x, (w, _) = integers(rng, p), _weights(rng)
    bias = rng.normal(0.0, 1.0, 8).astype(np.float32)
    graph = Graph()
    tensors = [
        Operand(graph.add_input(x.shape, dtype, "x"), p),
        Operand(Value(w.shape, I8, "w", w.astype(np.int8)), QParams(0.01, 0, I8, -127, 127)),
        Operand(Value(bias.shape, DType.FP32, "b", bias)),
    ]
    out = QParams(3 / dtype.range[1], 0, dtype, *dtype.range)
    node: Any = types.SimpleNamespace(meta={"val": torch.empty(SHAPE[0], 8)})
    rule = _integer_rule(aten.linear.default)
    graph.outputs = [rule(Context(LegalizingBuilder(graph, FULL_TARGET), node, out), *tensors)]
    got = reference_model.run(serialize(graph), [x.astype(dtype.numpy)])[0]
    check(got, p.dequantize(x) @ w.T * 0.01 + bias, out)


def test_bias_that_does_not_fit_int32_is_refused() -> None:
    graph = Graph()
    x = Operand(graph.add_input(SHAPE, I8, "x"), QParams(2.0**-60, 0, I8, -128, 127))
    weight = Operand(Value(SHAPE, I8, "w", np.ones(SHAPE, np.int8)), QParams(0.01, 0, I8, -127, 127))
    bias = Operand(Value((4,), DType.FP32, "b", np.ones(4, np.float32)))
    node: Any = types.SimpleNamespace(meta={"val": torch.empty(4, 4)})
    rule = _integer_rule(aten.linear.default)
    with pytest.raises(Unsupported, match=r"its bias does not fit int32 sums .* in which input and result vary"):
        rule(Context(LegalizingBuilder(graph, FULL_TARGET), node, QParams(1e-9, 0, I8, -128, 127)), x, weight, bias)


# -- the arithmetic itself -----------------------------------------------------------------------------------


def _operand(builder: Builder, low: int, high: int, dtype: DType = DType.INT32) -> FixedPoint:
    return FixedPoint(builder, builder.graph.add_input((2, 8), dtype, "x"), low, high)


def _builder() -> Builder:
    return LegalizingBuilder(Graph(), FULL_TARGET)


@pytest.mark.parametrize(
    "overflow",
    [
        lambda x: x + x,
        lambda x: x - x * -1,
        lambda x: x * x,
        lambda x: x.sum(1),
        lambda x: x.rescale(I16, 1.0),
        lambda x: x.rescale(DType.INT32, 1.0),
        lambda x: x.add_fraction_bits(1),
        lambda x: x.mul(1 << 8, shift=7),
        lambda x: FixedPoint.const(x.b, 1 << 31),
    ],
)
def test_overflow_is_an_error_when_the_rule_is_built(overflow: Callable[[FixedPoint], FixedPoint]) -> None:
    with pytest.raises(OverflowError):
        overflow(_operand(_builder(), -(1 << 30), 1 << 30))


def test_an_interval_beyond_the_range_of_its_type_is_an_error() -> None:
    with pytest.raises(OverflowError, match=r"\[0, 128\], which exceeds int8"):
        _operand(_builder(), 0, 128, I8)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 5,
        lambda x: x - 7,
        lambda x: x * x,
        lambda x: x * -3,
        lambda x: x.mul(12345, shift=6),
        lambda x: abs(x),
        lambda x: x.maximum(3),
        lambda x: x.minimum(-3),
        lambda x: x.sign(),
        lambda x: x.sum(1),
        lambda x: x.rescale(DType.INT32, 0.37),
        lambda x: x.rescale(I8, 0.37, saturate=True),
        lambda x: x.add_fraction_bits(3),
        lambda x: abs(x).leading_zeros(),
        lambda x: x.shift_right(x.full_like(3)),
    ],
)
def test_intervals_contain_the_results_of_the_reference_model(operation: Callable[[FixedPoint], FixedPoint]) -> None:
    """They are tight for elementwise operations on an operand that reaches both limits of its interval."""
    builder = _builder()
    x = np.linspace(-1000, 700, 16).astype(np.int32).reshape(2, 8)
    x[1] = x[0, 0], x[0, 0], -1, 0, 1, 2, 700, 700
    y = operation(_operand(builder, -1000, 700))
    builder.graph.outputs = [y.value]
    got = reference_model.run(serialize(builder.graph), [x])[0]
    assert y.low <= got.min()
    assert got.max() <= y.high
    if got.shape == x.shape:
        assert (y.low, y.high) == (got.min(), got.max())


def test_operands_of_rank_0_saturate() -> None:
    p, out = QParams(1e10, 0, I16, -32768, 32767), QParams(1e-10, 5, I8, -128, 127)
    for overload in (aten.mul.Tensor, aten.sub.Tensor, aten.prelu.default):
        got = evaluate(overload, [(np.array(-32768), p), (np.array(-32768), p)], out, (), constant=(1,))
        assert got.shape == ()
        assert got == (5 if overload is aten.sub.Tensor else 127)


@pytest.mark.parametrize("power", [-40, -20, -3, 0, 9, 13, 14, 15, 17, 30, 60])
@pytest.mark.parametrize("result", [I8, I16])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_requantize_between_any_two_scales(dtype: DType, result: DType, power: int) -> None:
    """As in selections. If one step of the operand exceeds the range of the result, the result saturates."""
    builder, narrow = _builder(), {I8: 7, I16: 0}
    p = QParams(0.5, narrow[dtype], dtype, *dtype.range)
    out = QParams(0.5 * 2.0**-power, narrow[result], result, *result.range)
    x = np.append(np.arange(-4, 5) + p.zero_point, dtype.range)
    whole = FixedPoint.from_value(builder, builder.graph.add_input(x.shape, dtype, "x"), p)
    builder.graph.outputs = [whole.requantize(out)]
    got = reference_model.run(serialize(builder.graph), [x.astype(dtype.numpy)])[0]
    check(got, p.dequantize(x), out)


@pytest.mark.parametrize(("scale", "is_int16"), [(0.01, True), (0.04, False)])
def test_int8_and_int16_are_added_as_int16(scale: float, is_int16: bool) -> None:
    """On NPUs, if int16 represents both operands with one scale. The result is at most one step off."""
    rng = np.random.default_rng(0)
    p, q, out = QParams(scale, 7, I8, -128, 127), QParams(1e-4, 0, I16, *I16.range), QParams(1.3e-4, 0, I16, *I16.range)
    x, y = rng.integers(-128, 128, 500), rng.integers(-32768, 32768, 500)
    target = make_target("ethos-u55")
    builder = LegalizingBuilder(Graph(), target)
    left, right = (
        FixedPoint.from_value(builder, builder.graph.add_input((500,), z.dtype, z.dtype.value), z) for z in (p, q)
    )
    assert (to_common_int16(left, right, out) is not None) == is_int16
    check(
        evaluate(aten.add.Tensor, [(x, p), (y, q)], out, (500,), target=target), p.dequantize(x) + q.dequantize(y), out
    )


@pytest.mark.parametrize("constant_scale", [1e-5, 2e-4])
def test_an_int16_constant_is_added_at_the_scale_of_the_result(constant_scale: float) -> None:
    """The NPU adds int16 tensors in one operation. The result is at most one step off."""
    rng = np.random.default_rng(0)
    p, q = QParams(0.01, 7, I8, -128, 127), QParams(constant_scale, 0, I16, *I16.range)
    out = QParams(2.3e-4, 0, I16, *I16.range)
    x, y = rng.integers(-128, 128, 500), rng.integers(-32768, 32768, 500)
    target = make_target("ethos-u55")
    builder = LegalizingBuilder(Graph(), target)
    left = FixedPoint.from_value(builder, builder.graph.add_input((500,), I8, "x"), p)
    constant = FixedPoint.from_value(builder, builder.const(y, I16), q)
    pair = to_common_int16(left, constant, out)
    assert pair is not None
    assert [z.value.producer.inputs[0].dtype for z in pair if z.value.producer] == [I16, I16]
    got = evaluate(aten.add.Tensor, [(x, p), (y, q)], out, (500,), target=target, constant=(1,))
    check(got, p.dequantize(x) + q.dequantize(y), out)
    few = FixedPoint.from_value(builder, builder.const(y[:1], I16), q)
    assert to_common_int16(left, few, out) is None
    int8_constant = FixedPoint.from_value(builder, builder.const(x, I8), p)
    assert to_common_int16(left, int8_constant, out) is None


@pytest.mark.parametrize("constant", [(), (1,)])
def test_prelu_of_int16_with_one_slope(constant: tuple[int, ...]) -> None:
    """Its sum of two INT32 operands has different headrooms."""
    rng = np.random.default_rng(0)
    p, q, out = QParams(1e-4, 0, I16, *I16.range), QParams(1e-5, 0, I16, *I16.range), QParams(1e-4, 0, I16, *I16.range)
    x, slope = rng.integers(-32768, 32768, 64), np.array([25_000])
    got = evaluate(aten._prelu_kernel.default, [(x, p), (slope, q)], out, (64,), constant=constant)
    real = p.dequantize(x)
    check(got, np.where(real > 0, real, real * q.dequantize(slope)), out)


def test_the_operand_with_the_smaller_scale_is_multiplied() -> None:
    """Also if the other one is a constant with few bits. Vela fuses such a pair of RESCALEs with the sum on U55."""
    builder = _builder()
    x = FixedPoint.from_value(builder, builder.graph.add_input((4,), I8, "x"), QParams(0.1, 3, I8, -128, 127))
    constant = FixedPoint.from_value(builder, builder.const(np.arange(4), I8), QParams(0.15, 0, I8, -128, 127))
    left, right = to_common_scale(x, constant, QParams(0.3, 0, I8, -128, 127))
    assert left.scale == right.scale == 0.15 * 2.0**-19


@pytest.mark.parametrize("constant", [(), (0,), (1,)])
def test_int8_and_int16_are_multiplied_as_int16(constant: tuple[int, ...]) -> None:
    """Without RESCALE to INT32, which would be a separate operation on an NPU."""
    rng = np.random.default_rng(0)
    p, q, out = QParams(0.04, 7, I8, -128, 127), QParams(1e-4, 0, I16, *I16.range), QParams(6e-4, 0, I16, *I16.range)
    x, y = rng.integers(-128, 128, 500), rng.integers(-32768, 32768, 500)
    got = evaluate(aten.mul.Tensor, [(x, p), (y, q)], out, (500,), constant=constant)
    check(got, p.dequantize(x) * q.dequantize(y), out)
    builder = _builder()
    whole = FixedPoint.from_value(builder, builder.graph.add_input((500,), I8, "x"), p).to_int16()
    assert (whole.dtype, whole.low, whole.high, whole.zero_point) == (I16, -135, 120, 0)


def test_operands_with_one_scale_are_added_exactly() -> None:
    builder = _builder()
    q = QParams(0.1, 3, I8, -128, 127)
    x, y = (FixedPoint.from_value(builder, builder.graph.add_input((4,), I8, "x"), q) for _ in range(2))
    left, right = to_common_scale(x, y, QParams(1e-30, 0, I8, -128, 127))
    assert left.scale == right.scale
    assert left.high == 124 << 19
