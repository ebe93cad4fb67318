"""TOSA element types: sizes, ranges and largest numbers, as numpy, PyTorch and the TOSA serializer have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tosa_serializer as ts

from arm_backend_core.dtype import DType

_TORCH = {
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    DType.FP8E4M3: torch.float8_e4m3fn,
    DType.FP8E5M2: torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16, DType.INT32], ids=lambda dtype: dtype.value)
def test_integer_ranges_equal_numpys(dtype: DType) -> None:
    info = np.iinfo(dtype.numpy)
    assert dtype.range == (info.min, info.max)
    assert dtype.bytes == info.bits // 8
    assert not dtype.is_float


def test_integers_without_a_numpy_type() -> None:
    assert (DType.INT48.numpy, DType.INT48.bytes, DType.INT48.range) == (np.dtype("int64"), 6, (-(2**47), 2**47 - 1))
    assert DType.INT4.numpy == np.dtype("int8")


@pytest.mark.parametrize(("dtype", "torch_dtype"), _TORCH.items(), ids=str)
def test_floating_point_limits_equal_pytorchs(dtype: DType, torch_dtype: torch.dtype) -> None:
    info = torch.finfo(torch_dtype)
    assert dtype.max_finite == info.max
    assert dtype.bytes == info.bits // 8
    assert dtype.is_float
    assert dtype.is_fp8 == (info.bits == 8)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_type_has_a_numpy_type_and_the_serializers_name(dtype: DType) -> None:
    assert dtype.numpy.itemsize >= dtype.bytes
    assert hasattr(ts.DType, dtype.name)


def test_largest_of_an_integer_and_range_of_a_float_raise() -> None:
    with pytest.raises(KeyError):
        _ = DType.INT8.max_finite
    with pytest.raises(KeyError):
        _ = DType.FP32.range
