"""Fixed-point arithmetic of the ``cortex_m`` records, against its definition on integers of any size."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from arm_backend_core.cortex_m.fixed_point import (
    divide_by_power_of_two,
    doubling_high_mult,
    quantize_multiplier,
    requantize,
    requantize_to_int8,
)

_EDGES = [-(2**31), -(2**31) + 1, -(2**30), -129, -1, 0, 1, 127, 2**30 - 1, 2**31 - 1]


def _round_away(value: Fraction) -> int:
    return (1 if value > 0 else -1) * int(abs(value) + Fraction(1, 2))


@pytest.mark.parametrize("multiplier", _EDGES[1:])
def test_doubling_high_mult(multiplier: int) -> None:
    expected = [(x * multiplier + 2**30) // 2**31 for x in _EDGES]
    assert doubling_high_mult(np.array(_EDGES), multiplier).tolist() == expected


@pytest.mark.parametrize("exponent", [0, 1, 2, 7, 30, 31])
def test_divide_by_power_of_two(exponent: int) -> None:
    values = [*_EDGES, *range(-20, 21)]
    expected = [_round_away(Fraction(x, 2**exponent)) for x in values]
    assert divide_by_power_of_two(np.array(values), exponent).tolist() == expected


@pytest.mark.parametrize("real", [1.0, 0.3, -0.3, 1e-3, 1023.9, 2.0**-31, 1 - 2.0**-40])
def test_multipliers_represent_factors(real: float) -> None:
    multiplier, shift = quantize_multiplier(real)
    assert 2**30 <= abs(multiplier) < 2**31
    assert multiplier * 2.0 ** (shift - 31) == pytest.approx(real, rel=2.0**-30)
    assert abs(int(requantize(np.array(100_000), multiplier, shift)) - 100_000 * real) <= 1


def test_factors_without_a_multiplier() -> None:
    assert quantize_multiplier(0.0) == quantize_multiplier(2.0**-33) == (0, 0)
    for real in (2.0**30, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="factor"):
            quantize_multiplier(real)


def test_overflow_wraps() -> None:
    assert requantize(np.array(2**30), 2**30, 2) == 0
    assert requantize_to_int8(np.array([2**31 + 5, 2**31 - 1]), 2**31 - 1, 0, 3).tolist() == [-128, -128]
