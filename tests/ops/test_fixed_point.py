"""Integer softmax, normalization and reductions against floating point on the dequantized input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import fixed_point
from arm_backend_core.ops.fixed_point import reduction_view
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.hardware import ETHOS_U_FAMILIES
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes.pipeline import run as optimise
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers import vela
from tests.tosa_graphs import assert_valid, build_flatbuffer, build_graph, estimate_npu_cycles, make_target
from tests.verify_only import combine_pairwise

Array = np.ndarray[Any, Any]
I8, I16, I32 = DType.INT8, DType.INT16, DType.INT32
LENGTHS = (4, 10, 64, 197, 1000, 1024)
RANGES = (0.5, 8.0, 11.0, 24.0, 600.0)  # of the whole input, in multiples of the natural unit
U55 = make_target("ethos-u55")  # its legality is the strictest


def params(scale: float, zero_point: int, dtype: DType) -> QParams:
    return QParams(scale, zero_point, dtype, *dtype.range)


def spread(span: float, dtype: DType) -> QParams:
    """Parameters under which the whole integer range is ``span``."""
    low, high = dtype.range
    return params(span / (high - low), 3 if dtype is I8 else 0, dtype)


def execute(lower: Callable[[Builder, Value], Value], x: Array, dtype: DType) -> Array:
    (y,) = reference_model.run(build_flatbuffer(lower, (x.shape, dtype), target=U55), [x.astype(dtype.numpy)])
    return y.astype(np.int64)


def rows(n: int, dtype: DType) -> Array:
    """Random rows, and the extremes: constant, one-hot at full range, a single step, a ramp."""
    rng = np.random.default_rng(n)
    low, high = dtype.range
    x = rng.normal(0.0, 0.2 * high, (48, n))
    x[:8] = rng.integers(low, high + 1, (8, n))
    x[8], x[9], x[10], x[11], x[12], x[13], x[14] = low, high, 0, low, high, low, 5
    x[11, 3], x[12, 0], x[13, :2], x[14, 0] = high, low, high, 6
    x[15] = np.linspace(low, high, n)
    return np.clip(np.rint(x), low, high)


def sqnr(exact: Array, actual: Array) -> float:
    return float(10 * np.log10((exact**2).sum() / max(((actual - exact) ** 2).sum(), 1e-30)))


# -- positive integers -----------------------------------------------------------------------------------------


def positive_integers(bits: int) -> Array:
    rng = np.random.default_rng(0)
    edges = [1 << k for k in range(bits)] + [(1 << k) - 1 for k in range(1, bits + 1)]
    return np.array(edges + list(np.exp2(rng.uniform(0, bits, 4000)))).astype(np.int64).reshape(1, -1)


def of_positive(function: Callable[[FixedPoint], FixedPoint], bits: int) -> Callable[[Builder, Value], Value]:
    """``function`` on integers in [1, 2**bits)."""
    return lambda b, v: function(FixedPoint(b, v, 1, (1 << bits) - 1)).value


def test_sqrt() -> None:
    v = np.concatenate([[[0]], positive_integers(30)], 1)
    lower = lambda b, x: fixed_point.sqrt(FixedPoint(b, x, 0, (1 << 30) - 1)).value  # noqa: E731
    error = np.abs(execute(lower, v, I32) * 2.0**-14 - np.sqrt(v))
    assert np.all(error <= 2.0**-14 + np.sqrt(v) * 2.0**-13)


def test_reciprocal() -> None:
    v = positive_integers(31)
    exact = 2.0**30 / v
    error = np.abs(execute(of_positive(fixed_point.reciprocal, 31), v, I32) - exact)
    assert np.all(error <= 0.5 + exact * 2.0**-14)


def test_rsqrt() -> None:
    v = positive_integers(30)
    exact = 2.0**29 / np.sqrt(v)
    assert np.abs(execute(of_positive(fixed_point.rsqrt, 30), v, I32) / exact - 1).max() <= 2.0**-14


def test_logarithm() -> None:
    v = positive_integers(31)
    error = np.abs(execute(of_positive(fixed_point.logarithm, 31), v, I32) / 2.0**20 - np.log(v))
    assert error.max() <= 2.0**-14.5


@pytest.mark.parametrize("dtype", [I8, I16])
def test_exponential(dtype: DType) -> None:
    """For an int16 result, the exponential has its scale and is rounded once; results beyond its range saturate."""
    out, scale = params(3.0 / dtype.range[1], 0, dtype), 2.0**-20
    v = np.rint(np.random.default_rng(0).uniform(-14, 3, (1, 20000)) / scale)
    lower = lambda b, x: fixed_point.exponential(  # noqa: E731
        FixedPoint(b, x, -(1 << 24), 1 << 24, scale), out
    ).requantize(out)
    steps = execute(lower, v, I32) - np.minimum(np.exp(v * scale) / float(out.scale), dtype.range[1])
    assert np.sqrt((steps**2).mean()) < (0.3 if dtype is I8 else 0.5)
    assert np.abs(steps).max() < (
        0.6 if dtype is I8 else 5
    )  # half a step of the table's operand is 3 steps at the peak


# -- softmax -------------------------------------------------------------------------------------------------


def float_softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize(("n", "dtype", "span"), combine_pairwise(LENGTHS, [I8, I16], RANGES))
def test_softmax_int8(n: int, dtype: DType, span: float) -> None:
    q, out, x = spread(span, dtype), params(1 / 256, -128, I8), rows(n, dtype)
    error = execute(lambda b, v: fixed_point.softmax(b, v, q, 1, out), x, dtype) - out.quantize(
        float_softmax(q.dequantize(x), 1)
    )
    assert np.abs(error).max() <= 1
    assert np.mean(error == 0) > 0.98


@pytest.mark.parametrize(("n", "dtype", "span"), combine_pairwise(LENGTHS, [I8, I16], RANGES))
def test_softmax_int16(n: int, dtype: DType, span: float) -> None:
    q, out, x = spread(span, dtype), params(2.0**-15, 0, I16), rows(n, dtype)
    error = np.abs(
        execute(lambda b, v: fixed_point.softmax(b, v, q, 1, out), x, dtype) * 2.0**-15
        - float_softmax(q.dequantize(x), 1)
    )
    assert error[16:].max() < 2.0**-13
    # In a long row of equal small terms beside one large term, the rounding errors of the terms add up.
    assert error.max() < (2.0**-12 if dtype is I16 and n > 500 else 2.0**-13)


@pytest.mark.parametrize("shape_and_axis", [((2, 5, 3, 4), 1), ((2, 5, 3, 4), -1), ((7,), 0), ((3, 1), 1)])
def test_softmax_axes(shape_and_axis: tuple[tuple[int, ...], int]) -> None:
    shape, axis = shape_and_axis
    q, out = spread(10.0, I8), params(1 / 256, -128, I8)
    x = np.random.default_rng(0).integers(-128, 128, shape)
    expected = out.quantize(float_softmax(q.dequantize(x), axis))
    actual = execute(lambda b, v: fixed_point.softmax(b, v, q, axis, out), x, I8)
    assert np.abs(actual - expected).max() <= 1


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("span", [0.5, 24.0, 600.0])
def test_log_softmax(n: int, dtype: DType, span: float) -> None:
    q, x = spread(span, dtype), rows(n, dtype)
    real = q.dequantize(x)
    shifted = real - real.max(1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    out = params(-exact.min() / 255, 127, I8)
    error = execute(lambda b, v: fixed_point.log_softmax(b, v, q, 1, out), x, dtype) - out.quantize(exact)
    assert np.abs(error).max() <= 1
    assert np.mean(error == 0) > 0.95


# -- normalization -------------------------------------------------------------------------------------------


def float_norm(x: Array, axes: tuple[int, ...], eps: float, *, centre: bool) -> Array:
    c = x - x.mean(axes, keepdims=True) if centre else x
    return c / np.sqrt((c * c).mean(axes, keepdims=True) + eps)


@pytest.mark.parametrize(
    ("n", "dtype", "span", "affine", "centre"),
    combine_pairwise(LENGTHS, [I8, I16], [0.01, 8.0, 1000.0], [True, False], [True, False]),
)
def test_layer_norm_and_rms_norm(n: int, dtype: DType, span: float, affine: bool, centre: bool) -> None:
    rng = np.random.default_rng(1)
    q, x = spread(span, dtype), rows(n, dtype)
    weight = rng.normal(1.0, 0.3, n) if affine else None
    bias = rng.normal(0.0, 0.5, n) if affine and centre else None
    exact = float_norm(q.dequantize(x), (1,), 1e-5, centre=centre)
    exact = exact * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
    peak = np.abs(exact[15:]).max()

    def lower(b: Builder, v: Value) -> Value:
        if centre:
            return fixed_point.layer_norm(b, v, q, (1,), weight, bias, 1e-5, out)
        return fixed_point.layer_norm(b, v, q, (1,), weight, None, 1e-5, out, centre=False)

    out = params(peak / 127, 5, I8)
    error = execute(lower, x, dtype) - out.quantize(exact)
    assert np.abs(error).max() <= 1
    assert np.mean(error == 0) > 0.97

    out = params(peak / 32767, 0, I16)
    actual = out.dequantize(execute(lower, x, dtype))
    inside = out.dequantize(out.quantize(exact))
    inside = np.where(np.abs(inside) < peak, exact, inside)
    assert sqnr(np.delete(inside, 14, 0), np.delete(actual, 14, 0)) > 70
    # In row 14 one element differs, by one step. The mean, 1 / n of a step, has few fractional bits.
    assert sqnr(inside, actual) > 45


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("eps", [1e-12, 1e-3, 1.0, 1e4, 1e12, 1e30])
def test_layer_norm_with_any_eps(eps: float, dtype: DType) -> None:
    q, x = spread(8.0, dtype), rows(64, dtype)
    exact = float_norm(q.dequantize(x), (1,), eps, centre=True)
    out = params(np.abs(exact[15:]).max() / 127, 0, I8)
    actual = execute(lambda b, v: fixed_point.layer_norm(b, v, q, (1,), None, None, eps, out), x, dtype)
    assert np.abs(actual - out.quantize(exact)).max() <= 1


def test_layer_norm_over_several_axes() -> None:
    rng = np.random.default_rng(0)
    q, out = spread(8.0, I8), params(8 / 255, 0, I8)
    x, weight, bias = rng.integers(-128, 128, (2, 3, 4, 5)), rng.normal(size=(4, 5)), rng.normal(size=(4, 5))
    expected = out.quantize(float_norm(q.dequantize(x), (2, 3), 1e-5, centre=True) * weight + bias)
    actual = execute(lambda b, v: fixed_point.layer_norm(b, v, q, (2, 3), weight, bias, 1e-5, out), x, I8)
    assert np.abs(actual - expected).max() <= 1


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(groups: int) -> None:
    rng = np.random.default_rng(0)
    q, out = spread(8.0, I8), params(8 / 255, 0, I8)
    x, weight, bias = rng.integers(-128, 128, (2, 6, 5, 4)), rng.normal(size=6), rng.normal(size=6)
    grouped = float_norm(q.dequantize(x).reshape(2, groups, -1), (2,), 1e-5, centre=True).reshape(x.shape)
    expected = out.quantize(grouped * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1))
    actual = execute(lambda b, v: fixed_point.group_norm(b, v, q, groups, weight, bias, 1e-5, out), x, I8)
    assert np.abs(actual - expected).max() <= 1


# -- sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("axes", [(1,), (2, 3), (0, 2), (3,), (0, 1, 2, 3)])
def test_mean_sum_var(axes: tuple[int, ...], dtype: DType) -> None:
    q = spread(8.0, dtype)
    x = np.random.default_rng(0).integers(*dtype.range, (2, 3, 8, 9))
    real = q.dequantize(x)
    reductions: list[tuple[Array, Callable[..., Value]]] = [
        (real.mean(axes, keepdims=True), lambda b, v, out: fixed_point.mean(b, v, q, axes, out)),
        (real.sum(axes, keepdims=True), lambda b, v, out: fixed_point.sum_(b, v, q, axes, out)),
        (real.var(axes, keepdims=True, ddof=1), lambda b, v, out: fixed_point.var(b, v, q, axes, 1, out)),
        (real.std(axes, keepdims=True, ddof=1), lambda b, v, out: fixed_point.std(b, v, q, axes, 1, out)),
    ]
    for exact, lower in reductions:
        out = params(np.abs(exact).max() / 127, 0, I8)
        actual = execute(partial(lower, out=out), x, dtype)
        assert actual.shape == exact.shape
        assert np.abs(out.dequantize(actual) - exact).max() <= 0.51 * float(out.scale)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_layer_norm_of_long_int16_rows_with_a_large_eps(factor: float) -> None:
    """Below and above the eps from which on the variance is negligible."""
    q, x = spread(8.0, I16), rows(4096, I16)
    eps = factor * 2.0**46 * float(q.scale) ** 2
    exact = float_norm(q.dequantize(x), (1,), eps, centre=True)
    out = params(np.abs(exact).max() / 32767, 0, I16)
    actual = execute(lambda b, v: fixed_point.layer_norm(b, v, q, (1,), None, None, eps, out), x, I16)
    assert np.abs(actual - out.quantize(exact)).max() <= 4


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("n", [4096, 65536, 98304])
def test_std_and_norms_of_long_int16_rows(n: int, centre: bool) -> None:
    """int32 holds the sum of squares, so that each square has few bits."""
    q, x = spread(8.0, I16), rows(n, I16)[15:]
    exact = q.dequantize(x).std(1, keepdims=True)
    out = params(exact.max() / 32767, 0, I16)
    actual = execute(lambda b, v: fixed_point.std(b, v, q, (1,), 0, out), x, I16)
    assert np.abs(actual - out.quantize(exact)).max() <= 2
    exact = float_norm(q.dequantize(x), (1,), 1e-5, centre=centre)
    out = params(np.abs(exact).max() / 32767, 0, I16)

    def lower(b: Builder, v: Value) -> Value:
        if centre:
            return fixed_point.layer_norm(b, v, q, (1,), None, None, 1e-5, out)
        return fixed_point.layer_norm(b, v, q, (1,), None, None, 1e-5, out, centre=False)

    assert sqnr(exact, out.dequantize(execute(lower, x, I16))) > 65


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("shape_and_axis", [((3, 7), 1), ((2, 64), -1), ((2, 5, 3), 1), ((4, 1), 1)])
def test_reduce_max(shape_and_axis: tuple[tuple[int, ...], int], dtype: DType) -> None:
    shape, axis = shape_and_axis
    x = np.random.default_rng(0).integers(*dtype.range, shape)
    actual = execute(lambda b, v: fixed_point.reduce_max(b, v, spread(1.0, dtype), axis), x, dtype)
    np.testing.assert_array_equal(actual, x.max(axis, keepdims=True))


def test_softmax_refuses_int32_and_too_long_rows() -> None:
    out = params(0.1, 0, I8)
    for message, shape, dtype, q in (
        ("must be int8 or int16", (4, 4), I32, params(0.1, 0, I32)),
        ("65537 elements", (1, 65537), I8, spread(1.0, I8)),
        ("64001 int16 elements", (1, 64001), I16, spread(1.0, I16)),
    ):
        with pytest.raises(Unsupported, match=message):
            build_flatbuffer(lambda b, v, q=q: fixed_point.softmax(b, v, q, 1, out), (shape, dtype))


def test_results_saturate_to_the_output_range() -> None:
    q, out = spread(8.0, I8), QParams(1 / 16, 0, I8, -100, 100)
    actual = execute(lambda b, v: fixed_point.sum_(b, v, q, (1,), out), rows(64, I8), I8)
    assert (actual.min(), actual.max()) == (-100, 100)


# -- legality and cost ---------------------------------------------------------------------------------------

_OUT = params(1 / 64, -128, I8)
_W = np.linspace(-1.0, 1.5, 64)
OPERATORS: dict[str, Callable[[Builder, Value, QParams], Value]] = {
    "softmax": lambda b, v, q: fixed_point.softmax(b, v, q, 2, _OUT),
    "softmax, precise": lambda b, v, q: fixed_point.softmax(b, v, q, 2, params(2.0**-15, 0, I16)),
    "log_softmax": lambda b, v, q: fixed_point.log_softmax(b, v, q, 1, _OUT),
    "layer_norm": lambda b, v, q: fixed_point.layer_norm(b, v, q, (2,), _W, _W, 1e-5, _OUT),
    "rms_norm": lambda b, v, q: fixed_point.layer_norm(b, v, q, (2,), _W, None, 1e-5, _OUT, centre=False),
    "group_norm": lambda b, v, q: fixed_point.group_norm(b, v, q, 8, _W[:32], _W[:32], 1e-5, _OUT),
    "mean": lambda b, v, q: fixed_point.mean(b, v, q, (1, 2), _OUT),
    "var": lambda b, v, q: fixed_point.var(b, v, q, (1,), 0, _OUT),
}


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("name", OPERATORS)
def test_lowerings_are_valid_tosa_and_compile_with_vela(name: str, dtype: DType) -> None:
    """Before and after the passes, which must not change a bit."""
    q = spread(8.0, dtype)
    shape = (2, 32, 64)
    x = np.random.default_rng(0).integers(*dtype.range, shape).astype(dtype.numpy)
    written = build_graph(lambda b, v: OPERATORS[name](b, v, q), (shape, dtype), target=U55)
    before = serialize(written)
    assert_valid(before, "TOSA-1.0+INT+int16")
    optimise(written, U55)
    after = serialize(written)
    assert_valid(after, "TOSA-1.0+INT+int16")
    np.testing.assert_array_equal(reference_model.run(before, [x])[0], reference_model.run(after, [x])[0])
    for name_of_family in ETHOS_U_FAMILIES:
        assert estimate_npu_cycles(name_of_family, after) > 0


def test_softmax_cycles_on_u55() -> None:
    """Ethos-U55-128 takes 4 cycles per element for [1, 4, 64, 64]; with int32 throughout it would take 20."""
    q = spread(16.0, I8)
    written = build_graph(lambda b, v: fixed_point.softmax(b, v, q, 3, _OUT), ((1, 4, 64, 64), I8), target=U55)
    optimise(written, U55)
    assert estimate_npu_cycles("ethos-u55", serialize(written)) < 5 * 4 * 64 * 64


@pytest.mark.parametrize("n", [1536, 249 * 64, 1031])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_split_reductions_of_long_rows_are_bit_equal(n: int, dtype: DType) -> None:
    """Only U85 splits the sums of long rows. A prime number of elements cannot be split."""
    q, out, u85 = spread(8.0, dtype), params(8 / 255, 0, I8), make_target("ethos-u85")
    x = np.random.default_rng(n).integers(*dtype.range, (3, n), endpoint=True).astype(dtype.numpy)
    x[1] = dtype.range[0]
    for lower in (
        lambda b, v: fixed_point.layer_norm(b, v, q, (1,), None, None, 1e-5, out),
        lambda b, v: fixed_point.var(b, v, q, (1,), 0, params(0.1, 0, I8)),
        lambda b, v: fixed_point.mean(b, v, q, (1,), out),
        lambda b, v: fixed_point.softmax(b, v, q, 1, _OUT),
    ):
        expected, got = (
            reference_model.run(build_flatbuffer(lower, (x.shape, dtype), target=target), [x])[0]
            for target in (U55, u85)
        )
        assert np.array_equal(expected, got)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_split_reductions_along_any_axis_are_bit_equal(
    axis: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along other axes than the last, softmax used the maximum of each part, not of the row: 9 dB instead of 39."""
    q, out = spread(8.0, dtype), params(8 / 255, 0, I8)
    shape = [3, 5, 2]
    shape[axis] = 24
    x = np.random.default_rng(axis).integers(*dtype.range, shape, endpoint=True).astype(dtype.numpy)
    lowerings = (
        lambda b, v: fixed_point.softmax(b, v, q, axis, _OUT),
        lambda b, v: fixed_point.log_softmax(b, v, q, axis, out),
        lambda b, v: fixed_point.layer_norm(b, v, q, (axis,), np.arange(24.0), np.arange(24.0), 1e-5, out),
        lambda b, v: fixed_point.mean(b, v, q, (axis,), out),
        lambda b, v: fixed_point.sum_(b, v, q, (axis,), params(1.0, 0, I8)),
        lambda b, v: fixed_point.var(b, v, q, (axis,), 0, params(0.1, 0, I8)),
        lambda b, v: fixed_point.std(b, v, q, (axis,), 0, params(0.05, 0, I8)),
        lambda b, v: b.reshape(fixed_point.reduce_max(b, v, q, axis), [s for s in shape if s != 24]),
    )
    expected = [execute(lower, x, dtype) for lower in lowerings]
    monkeypatch.setattr(reduction_view, "_count_parts", lambda *_: 4)
    for lower, result in zip(lowerings, expected, strict=True):
        np.testing.assert_array_equal(execute(lower, x, dtype), result)


def test_variance_cycles_on_u85() -> None:
    """Ethos-U85-256 takes 2 cycles per element for [1, 16384]; without the split it would take 6.5."""
    q, u85 = spread(8.0, I8), make_target("ethos-u85")
    written = build_graph(
        lambda b, v: fixed_point.var(b, v, q, (1,), 1, params(0.1, 0, I8)), ((1, 16384), I8), target=u85
    )
    optimise(written, u85)
    assert estimate_npu_cycles("ethos-u85", serialize(written)) < 2.5 * 16384


def test_int16_layer_norm_cycles_on_u55() -> None:
    """Ethos-U55-128 takes 11 cycles per element for [1, 32, 128], 12 with a separate operation that scales the sum.

    Vela 5.2, which counts all four bytes of an int32 element, estimates 11.75.
    """
    q, out = spread(8.0, I16), params(8 / 32767, 0, I16)
    weight, bias = np.random.default_rng(0).normal(size=(2, 128))

    def lower(b: Builder, v: Value) -> Value:
        return fixed_point.layer_norm(b, v, q, (2,), weight, bias, 1e-5, out)

    written = build_graph(lower, ((1, 32, 128), I16), target=U55)
    optimise(written, U55)
    most = 11 if vela.installed_release() == (5, 1) else 12
    assert estimate_npu_cycles("ethos-u55", serialize(written)) < most * 32 * 128
