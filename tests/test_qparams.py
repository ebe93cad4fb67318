"""Quantization parameters: PyTorch's quantize and dequantize operators are the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401, registers the operators

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.qparams import QParams

_Q = torch.ops.quantized_decomposed
_INT8 = QParams(0.25, 3, DType.INT8, -128, 127)
#: Ties of rounding, and values beyond both ends of the range.
_REAL = np.array([[-40.0, -0.375, -0.125, 0.125], [0.0, 0.375, 0.625, 40.0]])


def test_per_tensor_quantization_equals_pytorchs() -> None:
    integers = _INT8.quantize(_REAL)
    x = torch.from_numpy(_REAL).float()
    expected = _Q.quantize_per_tensor(x, 0.25, 3, -128, 127, torch.int8)
    assert integers.dtype == np.int64
    assert integers.tolist() == expected.tolist()
    real = _Q.dequantize_per_tensor(expected, 0.25, 3, -128, 127, torch.int8)
    assert _INT8.dequantize(integers).tolist() == real.tolist()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_quantization_equals_pytorchs(axis: int) -> None:
    scale = 2.0 ** -np.arange(1, _REAL.shape[axis] + 1)
    params = QParams(scale, 0, DType.INT8, -127, 127, axis)
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    x = torch.from_numpy(_REAL).float()
    expected = _Q.quantize_per_channel(x, torch.from_numpy(scale), zeros, axis % 2, -127, 127, torch.int8)
    integers = params.quantize(_REAL)
    assert integers.tolist() == expected.tolist()
    assert np.array_equal(params.dequantize(integers), integers * np.expand_dims(scale, 1 - axis % 2))


def test_nan_is_refused() -> None:
    with pytest.raises(Unsupported, match=re.escape("not a number (nan), which integers cannot hold")):
        _INT8.quantize(np.array([0.0, np.nan]))


def test_max_abs_is_at_the_end_farther_from_the_zero_point() -> None:
    assert _INT8.max_abs == 131 * 0.25
    assert QParams(0.5, -100, DType.INT8, -128, 127).max_abs == 227 * 0.5


@pytest.mark.parametrize(
    ("other", "is_equivalent"),
    [
        (QParams(0.25 * (1 + 1e-7), 3, DType.INT8, -128, 127), True),
        (QParams(0.25 * (1 + 1e-5), 3, DType.INT8, -128, 127), False),
        (QParams(0.25, 2, DType.INT8, -128, 127), False),
        (QParams(0.25, 3, DType.INT16, -128, 127), False),
        (QParams(0.25, 3, DType.INT8, -127, 127), False),
        (QParams(np.array([0.25]), 3, DType.INT8, -128, 127, 0), False),
        (None, False),
    ],
)
def test_equivalence(other: QParams | None, is_equivalent: bool) -> None:
    assert _INT8.is_equivalent(other) == is_equivalent
