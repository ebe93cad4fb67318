"""Functions of int16 that oscillate too fast for the interpolation of a TABLE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arm_backend_core import compilation_log
from arm_backend_core.dtype import DType
from arm_backend_core.ops.separable_functions import factorize
from tests.ops.test_lookup import execute, params

Array = np.ndarray[Any, Any]
_OPERANDS = np.arange(-32768, 32768)


@pytest.mark.parametrize("result", [DType.INT8, DType.INT16])
@pytest.mark.parametrize(
    ("function", "largest"),
    [
        (lambda x: (np.cos(x) + 2) * (np.abs(x) + 0.1), 3000.0),
        (lambda x: np.exp(-x / 500) * np.sin(x), 8.0),
        (lambda x: np.cos(x) ** 2 + np.sin(3 * x), 2.0),
    ],
)
def test_products_of_tables_are_exact_to_two_steps(
    function: Callable[[Array], Array], largest: float, result: DType
) -> None:
    """Over all int16 operands. One TABLE of 513 entries for 318 periods is thousands of int16 steps off."""
    q, out = params(1000.0, DType.INT16), params(largest, result)
    x = q.dequantize(_OPERANDS)
    steps = np.abs(execute(function, x, q, out) - np.clip(function(x), -largest, largest)) / float(out.scale)
    assert steps.max() < (0.7 if result is DType.INT8 else 2)


def test_a_function_of_high_rank_adds_a_note() -> None:
    """The logarithm has many harmonics."""
    q, out = params(3000.0, DType.INT16), params(1.0, DType.INT16)
    with compilation_log.open_log() as log:
        execute(lambda x: np.log(np.cos(x * x / 20) + 1.01), q.dequantize(_OPERANDS), q, out)
    (note,) = log.notes
    assert "oscillates too fast for a look-up table" in note


def test_a_jump_adds_no_note() -> None:
    q, out = params(1000.0, DType.INT16), params(1.0, DType.INT16)
    with compilation_log.open_log() as log:
        execute(lambda x: np.sign(x - 3), q.dequantize(_OPERANDS), q, out)
    assert not log.notes


def test_infinite_values_have_no_factors() -> None:
    samples = np.zeros(65537)
    samples[5] = np.inf
    assert factorize(samples.tobytes(), 1.0, 1.0) is None
