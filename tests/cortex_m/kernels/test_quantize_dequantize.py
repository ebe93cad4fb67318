"""The quantize and dequantize kernels in C++ equal their records, and these equal PyTorch's operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir.dialects._ops import ops as _load_operators  # noqa: F401

from arm_backend_core.cortex_m.kernels.registry import KERNELS
from tests.cortex_m.kernels.cases import DRAW
from tests.cortex_m.kernels.kernel_comparison import compare_random_cases
from tests.runtime.kernel_library import KernelLibrary

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_NAMES = ["quantize_per_tensor", "dequantize_per_tensor"]


@pytest.mark.parametrize("name", _NAMES)
def test_random_arguments(name: str, kernels: KernelLibrary, case_count: int) -> None:
    compare_random_cases(kernels, name, case_count)


@pytest.mark.parametrize("name", _NAMES)
def test_records_equal_pytorchs_operators(name: str) -> None:
    random = np.random.default_rng(5)
    operator = getattr(torch.ops.quantized_decomposed, name).default
    for _ in range(200):
        x, *rest, dtype = DRAW[name](random).arguments
        expected = operator(torch.from_numpy(x), *rest, torch.int8 if dtype == 1 else torch.int16).numpy()
        result = KERNELS[name].compute(x, *rest, dtype)
        is_number = ~np.isnan(x)  # PyTorch converts NaN to any integer
        assert np.array_equal(result[is_number], expected[is_number])


@pytest.mark.parametrize("shape", [(1, 1, 5, 3), (1, 4, 1, 1)])
def test_tensors_of_ambiguous_memory_format(shape: tuple[int, ...], kernels: KernelLibrary) -> None:
    # Exported programs describe such a tensor as contiguous before a cast and as channels_last after it.
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    parameters = (0.05, 3, -128, 127, 1)
    out = np.zeros(shape, np.int8)
    kernels.call("quantize_per_tensor", x, *parameters, _as_channels_last(out))
    assert np.array_equal(out, KERNELS["quantize_per_tensor"].compute(x, *parameters))


def _as_channels_last(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view with the same elements that is described as channels_last, in a shape where both formats are one."""
    batch, channels, height, width = x.shape
    return x.reshape(batch, height, width, channels).transpose(0, 3, 1, 2)
