"""TABLE lowering of functions with poles or a limited domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.lookup import apply_by_table
from arm_backend_core.ops.operands import Operand
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa import reference_model
from tests.tosa_graphs import build_flatbuffer

Array = np.ndarray[Any, Any]
I8, I16 = DType.INT8, DType.INT16


def params(span: float, dtype: DType) -> QParams:
    """Return the parameters of the range [-span, span]."""
    low, high = dtype.range
    return QParams(2 * span / (high - low), 0, dtype, low, high)


def execute(function: Callable[[Array], Array], x: Array, q: QParams, out: QParams) -> Array:
    def lower(b: Any, value: Any) -> Any:
        with np.errstate(all="ignore"):
            return apply_by_table(b, Operand(value, q), function, out)

    (y,) = reference_model.run(build_flatbuffer(lower, (x.shape, q.dtype)), [q.quantize(x).astype(q.dtype.numpy)])
    return out.dequantize(y)


@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("result", [I8, I16])
def test_operands_beyond_the_domain_get_the_value_at_its_end(dtype: DType, result: DType) -> None:
    """Rounding may move operands one step outside: they give asin(1) and acosh(1), not 0 or NaN."""
    q = params(1.1, dtype)
    step = float(q.scale)
    x = np.array([-1 - step, 1 + step])
    asin = execute(np.arcsin, x, q, params(1.6, result))
    np.testing.assert_allclose(asin, [-np.pi / 2, np.pi / 2], atol=0.03)
    q = params(300.0, dtype)
    step = float(q.scale)
    acosh = execute(np.arccosh, np.array([1 - 2 * step, 300.0]), q, params(7.0, result))
    np.testing.assert_allclose(acosh, [0, np.arccosh(300)], atol=0.2)


def test_interpolation_up_to_the_end_of_the_domain() -> None:
    """No entry of the int16 TABLE is at 1.0. Between the last entry inside and 1.0, asin is accurate to 0.04."""
    q = params(1.1, I16)
    inside = np.arange(int(1 / float(q.scale)) - 100, int(1 / float(q.scale))) * float(q.scale)
    np.testing.assert_allclose(execute(np.arcsin, inside, q, params(1.6, I16)), np.arcsin(inside), atol=0.04)


def test_table_changes_sign_within_the_interval_of_a_pole() -> None:
    """tan changes from one limit to the other within one interval of the TABLE, which is 0.007 wide."""
    q, out = params(1.8, I16), params(60.0, I16)
    inside = np.array([1.54, 1.55, 1.56, 1.567])
    for side in (1, -1):
        assert np.all(side * execute(np.tan, side * inside, q, out) >= np.minimum(np.tan(inside), 60) * 0.9)
        assert np.all(side * execute(np.tan, side * np.array([1.5755, 1.58, 1.7]), q, out) < -7)


_INDEX = np.arange(-32768, 32768)


@pytest.mark.parametrize("result", [I8, I16])
@pytest.mark.parametrize(
    ("function", "span", "operands", "worst"),
    [
        (np.log, 1.0, slice(32769, None), 12.0),  # all operands above 0
        (np.sqrt, 1.0, slice(32768, None), 1.0),
        (lambda x: 1 / x, 1.0, slice(0, 32700), 400.0),
        (lambda x: np.log(x / (1 - x)), 1.0, slice(32769, 65530), 11.0),  # at both ends
    ],
)
def test_functions_with_poles_use_a_second_table(
    function: Callable[[Array], Array], span: float, operands: slice, worst: float, result: DType
) -> None:
    """Over all int16 operands. With one TABLE of 513 entries, the error is 500 steps of int16 or more, 3 of int8."""
    q, out = params(span, I16), params(worst, result)
    x = q.dequantize(_INDEX[operands])
    with np.errstate(all="ignore"):
        exact = np.clip(function(x), -worst, worst)
    steps = np.abs(execute(function, x, q, out) - exact) / float(out.scale)
    assert np.sqrt((steps**2).mean()) < (0.4 if result is I8 else 2)
    assert steps.max() < (0.6 if result is I8 else 20)


@pytest.mark.parametrize("result", [I8, I16])
@pytest.mark.parametrize(
    ("function", "span"),
    [(np.cos, 60.0), (np.sin, 3000.0), (lambda x: 2.5 * np.cos(x * -20000 + 1), 1.0), (np.sin, 65536 * 2.0)],
)
def test_sines_of_many_periods(function: Callable[[Array], Array], span: float, result: DType) -> None:
    """Over all int16 operands, although 513 entries are few per period, or less than one."""
    q, out = params(span, I16), params(2.5, result)
    x = q.dequantize(_INDEX[:-1])
    steps = np.abs(execute(function, x, q, out) - function(x)) / float(out.scale)
    assert steps.max() < (0.7 if result is I8 else 6)


def test_functions_that_are_not_sines_use_one_table() -> None:
    """A damped cosine, constants and a line must not be detected as sines."""
    q, out = params(1.0, I16), params(1.0, I16)
    x = q.dequantize(_INDEX[32768::64])
    np.testing.assert_allclose(execute(lambda x: np.exp(-x) * np.cos(x), x, q, out), np.exp(-x) * np.cos(x), atol=1e-3)
    for function in (np.zeros_like, np.ones_like, lambda x: 0.5 * x):
        np.testing.assert_allclose(execute(function, x, q, out), function(x), atol=1e-4)


def test_functions_that_change_between_two_operands_use_one_table() -> None:
    """All relevant values of exp2 lie between two neighbouring int16 operands."""
    q = params(10000.0, I16)
    x = np.array([-10000.0, -13.0, 0.0])
    assert np.all(execute(np.exp2, x, q, params(1e-4, I16)) <= 1e-4)


def test_values_far_beyond_an_int8_result_do_not_make_its_table_coarse() -> None:
    q, out = params(12.0, I16), params(1.0, I8)
    x = np.array([-1.0, -0.5, 0.0, 12.0])
    np.testing.assert_allclose(execute(np.exp, x, q, out), np.minimum(np.exp(x), 1.0), atol=0.01)


def test_infinite_values_saturate() -> None:
    q = params(1.0, I8)
    y = execute(lambda x: np.log(np.abs(x)), np.array([0.0, 1.0]), q, params(8.0, I8))
    np.testing.assert_allclose(y, [-8.0, 0.0], atol=0.1)


def test_a_function_without_a_defined_value_is_refused() -> None:
    with pytest.raises(Unsupported, match="no value anywhere in its calibrated range"):
        execute(lambda x: np.full_like(x, np.nan), np.zeros(1), params(1.0, I8), params(1.0, I8))


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (np.tanh, -4.0, 4.0),
        (lambda x: -1 / (np.abs(x) + 0.5), -3.0, 3.0),
        (np.arctan, -20.0, 20.0),
    ],
)
def test_entries_are_fitted_to_the_function(function: Callable[[Array], Array], low: float, high: float) -> None:
    """Over all int16 operands, linear interpolation between exact values has more than 1.3 times the error."""
    q, out = params(2 * max(-low, high), I16), params(2 * float(np.abs(function(np.array([low, 0, high]))).max()), I16)
    x = q.dequantize(_INDEX)
    inside = (x >= low) & (x <= high)
    interpolated = np.interp(_INDEX, _INDEX[::128], function(q.dequantize(_INDEX[::128])))
    exact = function(x)[inside]
    plain = np.abs(out.dequantize(out.quantize(interpolated[inside])) - exact)
    fitted = np.abs(execute(function, x, q, out)[inside] - exact)
    assert np.sqrt((fitted**2).mean()) < np.sqrt((plain**2).mean()) / 1.3
    assert fitted.max() <= plain.max()


def test_fitted_tables_keep_zeros_limits_and_kinks() -> None:
    q, out = params(8.0, I16), params(8.0, I16)
    x = q.dequantize(_INDEX)
    for function in (lambda x: x / (1 + np.exp(-x)), np.tanh, np.square):
        assert execute(function, np.zeros(1), q, out)[0] == 0
    assert execute(np.square, x, q, out).min() == 0
    odd = execute(np.tanh, x[1:], q, out)
    np.testing.assert_allclose(odd, -odd[::-1], atol=1.01 * float(out.scale))
    relu = execute(lambda x: np.where(x > 0, x, 0.1 * x), x, q, out)
    np.testing.assert_allclose(relu, np.where(x > 0, x, 0.1 * x), atol=float(out.scale))
