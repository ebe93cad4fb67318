"""The pooling kernels in C++ equal their records, and these equal PyTorch's operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.registry import KERNELS
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.cases import DRAW
from tests.cortex_m.kernels.kernel_comparison import check_refusal, compare_random_cases
from tests.runtime.kernel_library import KernelLibrary, to_channels_last

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_AVERAGE, _MAXIMUM = (
    ("quantized_avg_pool2d", "quantized_avg_pool2d_nhwc"),
    (
        "quantized_max_pool2d",
        "quantized_max_pool2d_nhwc",
    ),
)
_IMAGE = np.arange(-60, 60, dtype=np.int8).reshape(2, 3, 4, 5)
_WINDOWS = {"kernel_size": [3, 2], "stride": [2, 1], "padding": [1, 0]}


def _valid(name: str) -> dict[str, Any]:
    x = _IMAGE if name.endswith("nhwc") else to_channels_last(_IMAGE)
    if name in _AVERAGE:
        scratch = np.zeros(0, np.int8)
        rest = {"ceil_mode": False, "zero_point": 3, "multiplier": 1, "shift": 0, "scratch": scratch}
        return {"input": x, **_WINDOWS, **rest}
    limits = {"activation_min": -50, "activation_max": 50}
    rest = {"ceil_mode": False, "input_zero_point": 3, "output_zero_point": 3, **limits}
    return {"input": x, **_WINDOWS, "dilation": [1, 1], **rest}


@pytest.mark.parametrize("name", _AVERAGE + _MAXIMUM)
def test_random_arguments(name: str, kernels: KernelLibrary, case_count: int) -> None:
    compare_random_cases(kernels, name, case_count)


def test_average_windows_and_counts_equal_pytorchs() -> None:
    random = np.random.default_rng(1)
    for _ in range(100):
        x, kernel_size, stride, padding, ceil_mode, *rest = DRAW["quantized_avg_pool2d"](random).arguments
        if any(2 * pad > size for pad, size in zip(padding, kernel_size, strict=True)):
            continue  # PyTorch has no such padding
        options: dict[str, Any] = {"ceil_mode": ceil_mode, "count_include_pad": False}
        image = torch.from_numpy(x.astype(np.float32))
        expected = torch.nn.functional.avg_pool2d(image, kernel_size, stride, padding, **options).numpy()
        result = KERNELS["quantized_avg_pool2d"].compute(x, kernel_size, stride, padding, ceil_mode, *rest)
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() < 0.5001


def test_maximum_equals_pytorchs() -> None:
    random = np.random.default_rng(1)
    for _ in range(100):
        x, kernel_size, stride, padding, *rest, low, high = DRAW["quantized_max_pool2d"](random).arguments
        if any(2 * pad > size for pad, size in zip(padding, kernel_size, strict=True)):
            continue
        image = torch.from_numpy(x.astype(np.float32))
        expected = torch.nn.functional.max_pool2d(image, kernel_size, stride, padding).numpy().clip(low, high)
        result = KERNELS["quantized_max_pool2d"].compute(x, kernel_size, stride, padding, *rest, low, high)
        assert np.array_equal(result, expected)


def test_the_largest_window_does_not_overflow(kernels: KernelLibrary) -> None:
    x = np.full((1, 4095, 4095, 1), -128, np.int8)
    arguments = [[4095, 4095], [1, 1], [0, 0], False, 0, 1, 0, np.zeros(0, np.int8)]
    result = kernels.run("quantized_avg_pool2d_nhwc", x, *arguments)
    assert result.item() == -128


def test_scratch_memory() -> None:
    arguments = [_WINDOWS["kernel_size"], _WINDOWS["stride"], _WINDOWS["padding"], False, 0, 1, 0, (0,)]
    assert find_kernel("quantized_avg_pool2d").scratch_bytes(Isa.DSP, (1, 6, 7, 8), *arguments) == (24,)
    assert find_kernel("quantized_avg_pool2d_nhwc").scratch_bytes(Isa.DSP, (1, 7, 8, 6), *arguments) == (24,)
    for isa in (Isa.MVE, Isa.SCALAR):
        assert find_kernel("quantized_avg_pool2d").scratch_bytes(isa, (1, 6, 7, 8), *arguments) == (0,)


@pytest.mark.parametrize("name", _AVERAGE + _MAXIMUM)
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("input", np.zeros((4, 5, 3), np.int8), "input must have rank 4, and has rank 3"),
        ("input", np.zeros((2, 4, 5, 3), np.int16), "input must be int8"),
        ("input", np.zeros((0, 4, 5, 3), np.int8), "input must not be empty"),
        ("kernel_size", [3], "kernel_size must have 2 elements"),
        ("kernel_size", [0, 2], "kernel_size must be from 1"),
        ("kernel_size", [3, 9], "kernel_size must not exceed the padded input"),
        ("stride", [0, 1], "stride must be from 1"),
        ("stride", [1, 1 << 40], "stride must be from 1"),
        ("padding", [-1, 0], "padding must be from 0 to 2, and is -1"),
        ("padding", [3, 0], "padding must be from 0 to 2, and is 3"),
        ("padding", [1, 1, 1], "padding must have 2 elements"),
        ("out", np.zeros((2, 3, 2, 3), np.int8), "out cannot have the shape of the result"),
        ("dilation", [1, 2], "dilation must be from 1 to 1"),
        ("output_zero_point", 4, "output_zero_point must equal input_zero_point"),
        ("input_zero_point", 128, "input_zero_point must be from -128 to 127"),
        ("activation_min", 51, "activation_max must be from 51"),
        ("activation_max", 128, "activation_max must be from -50 to 127"),
    ],
)
def test_bad_arguments_are_refused(name: str, argument: str, value: Any, message: str, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    if argument in valid or argument == "out":
        out = find_kernel(name).compute(*valid.values())
        check_refusal(kernels, name, valid, out, {argument: value}, f".*{message}")


@pytest.mark.parametrize("name", _MAXIMUM)
def test_a_maximum_has_no_ceil_mode(name: str, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    out = find_kernel(name).compute(*valid.values())
    check_refusal(kernels, name, valid, out, {"ceil_mode": True}, "ceil_mode must be false")
    shapes = {**valid, "input": valid["input"].shape, "ceil_mode": True}
    with pytest.raises(ValueError, match="ceil_mode"):
        find_kernel(name).result_shape(*shapes.values())


@pytest.mark.parametrize("name", _AVERAGE + _MAXIMUM)
def test_other_memory_formats_are_refused(name: str, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    out = find_kernel(name).compute(*valid.values())
    other = to_channels_last(_IMAGE) if name.endswith("nhwc") else _IMAGE
    message = "input must have (contiguous|channels_last) memory format"
    check_refusal(kernels, name, valid, out, {"input": other}, message)


def test_a_window_of_padding_alone_raises() -> None:
    with pytest.raises(ValueError, match="invalid windows: kernel 2"):
        find_kernel("quantized_avg_pool2d").result_shape((1, 1, 4, 4), [2, 2], [1, 1], [2, 0], False)
