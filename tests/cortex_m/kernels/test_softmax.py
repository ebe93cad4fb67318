"""The softmax kernel in C++ equals its record; the record equals the real function to 0.51 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.kernels.softmax import (
    MAX_ROW,
    OUTPUT_SCALE,
    OUTPUT_ZERO_POINT,
    exp_of_negative,
    find_softmax_limitation,
    reciprocal_of_one_plus,
    softmax,
    softmax_parameters,
)
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.cases import Case
from tests.cortex_m.kernels.kernel_comparison import check_refusal, compare, compare_random_cases
from tests.runtime.kernel_library import KernelLibrary

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_ROWS = np.arange(-60, 60, dtype=np.int8).reshape(2, 3, 4, 5)
_VALID: dict[str, Any] = {
    "input": _ROWS,
    "dim": -1,
    "input_zero_point": 3,
    "output_zero_point": OUTPUT_ZERO_POINT,
    **dict(zip(("input_multiplier", "input_shift", "diff_min"), softmax_parameters(0.1), strict=True)),
}


def test_random_arguments(kernels: KernelLibrary, case_count: int) -> None:
    compare_random_cases(kernels, "softmax", case_count)


@pytest.mark.parametrize("size", [1, 511, 512, 1023, 1024, 2048, MAX_ROW])
def test_rows_of_equal_elements(size: int, kernels: KernelLibrary) -> None:
    """Their sum has the most bits."""
    case = Case((np.full((2, size), 5, np.int8), 1, 0, OUTPUT_ZERO_POINT, *softmax_parameters(0.1)))
    result = compare(kernels, "softmax", case)
    assert np.abs((result.astype(np.int64) - OUTPUT_ZERO_POINT) * OUTPUT_SCALE - 1 / size).max() <= OUTPUT_SCALE


@pytest.mark.parametrize("scale", [2.0**-27, 0.001, 0.05, 0.3, 2.0, 15.9])
def test_record_approximates_the_real_softmax(scale: float) -> None:
    x = np.random.default_rng(2).integers(-128, 128, (50, 40), np.int8)
    result = softmax(x, -1, 7, OUTPUT_ZERO_POINT, *softmax_parameters(scale))
    real = np.exp((x - x.max(-1, keepdims=True).astype(np.float64)) * scale)
    real /= real.sum(-1, keepdims=True)
    error = (result.astype(np.float64) - OUTPUT_ZERO_POINT) - np.minimum(real / OUTPUT_SCALE, 255)
    assert np.abs(error).max() < 0.51


def test_fixed_point_functions() -> None:
    x = np.linspace(-(1 << 31), 0, 100_001).astype(np.int64)
    assert np.abs(exp_of_negative(x) / 2.0**31 - np.exp(x / 2.0**26)).max() < 1e-6
    fraction = np.linspace(0, (1 << 31) - 1, 100_001).astype(np.int64)
    assert np.abs(reciprocal_of_one_plus(fraction) / 2.0**31 - 1 / (1 + fraction / 2.0**31)).max() < 1e-8


@pytest.mark.parametrize("scale", [0.0, 2.0**-28, 2.0**5])
def test_scales_without_parameters(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale|2\^30 or larger"):
        softmax_parameters(scale)


@pytest.mark.parametrize(
    ("isa", "size", "limitation"),
    [
        (Isa.SCALAR, 511, None),
        (Isa.SCALAR, 512, "one step too high"),
        (Isa.DSP, 4095, "one step too high"),
        (Isa.MVE, 4092, None),
        (Isa.MVE, 4093, "one step too high"),
        (Isa.MVE, 4096, "overflow"),
    ],
)
def test_row_sizes_that_cmsis_nn_computes_wrongly(isa: Isa, size: int, limitation: str | None) -> None:
    found = find_softmax_limitation(isa, (2, size), -1)
    assert found is None if limitation is None else found is not None and limitation in found


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("input", _ROWS.astype(np.int16), "input must be int8"),
        ("input", np.zeros((), np.int8), "input must have an axis"),
        ("input", np.zeros((0, 4), np.int8), "input must not be empty"),
        ("input", np.zeros((2, MAX_ROW + 1), np.int8), "size of the last axis must be from 1 to 4095"),
        ("input", _ROWS.transpose(0, 3, 1, 2), "out cannot have the shape of the input"),
        ("out", _ROWS.reshape(2, 3, 5, 4).transpose(0, 1, 3, 2), "out must have contiguous memory format"),
        ("dim", 2, "dim must be the last axis"),
        ("dim", -2, "dim must be the last axis"),
        ("output_zero_point", -127, "output_zero_point must be from -128 to -128"),
        ("input_zero_point", 128, "input_zero_point must be from -128 to 127"),
        ("input_multiplier", -1, "input_multiplier must be from 0"),
        ("input_shift", -1, "input_shift must be from 0"),
        ("input_shift", 31, "input_shift must be from 0"),
        ("diff_min", 1, "diff_min must be from "),
        ("diff_min", -(1 << 40), "diff_min must be from "),
    ],
)
def test_bad_arguments_are_refused(argument: str, value: Any, message: str, kernels: KernelLibrary) -> None:
    check_refusal(kernels, "softmax", _VALID, np.zeros_like(_ROWS), {argument: value}, message)


def test_differences_must_not_overflow(kernels: KernelLibrary) -> None:
    valid = {**_VALID, "input_shift": 24, "diff_min": -128}
    changes = {"diff_min": -129}
    check_refusal(kernels, "softmax", valid, np.zeros_like(_ROWS), changes, "diff_min is too low for input_shift")
    changes = {"input_shift": 25}
    check_refusal(kernels, "softmax", valid, np.zeros_like(_ROWS), changes, "diff_min is too low for input_shift")
