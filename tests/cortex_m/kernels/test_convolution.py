"""The convolutions in C++ equal their records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.random_arguments import (
    add_scratch,
    draw_activation,
    draw_bias,
    draw_factors,
    draw_int8,
    draw_zero_point,
    make_generators,
)
from tests.runtime.kernel_library import KernelError, KernelLibrary, to_channels_last

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_KINDS = ["quantized_conv2d", "quantized_depthwise_conv2d", "quantized_transpose_conv2d"]


def _draw_pair(random: np.random.Generator, low: int, high: int) -> list[int]:
    return [int(value) for value in random.integers(low, high + 1, 2)]


def _draw_tail(random: np.random.Generator, channels: int, taps: int) -> tuple[Any, ...]:
    """Offsets, factors of each channel, limits."""
    factors = draw_factors(random, channels, 70 * 70 * taps**0.5)
    multipliers, shifts = (np.array(values, np.int32) for values in zip(*factors, strict=True))
    return (-draw_zero_point(random), draw_zero_point(random), multipliers, shifts, *draw_activation(random))


def draw_conv2d(random: np.random.Generator) -> list[Any]:
    """Arguments of ``quantized_conv2d_nhwc`` without ``scratch``."""
    groups = int(random.choice([1, 1, 2, 3]))
    depth, per_group = int(random.integers(1, 20)), int(random.integers(1, 6))
    kernel = [1, 1] if random.random() < 0.2 else _draw_pair(random, 1, 5)
    stride, dilation = _draw_pair(random, 1, 3), [1, 1] if random.random() < 0.6 else _draw_pair(random, 1, 3)
    padding = [0, 0] if random.random() < 0.3 else _draw_pair(random, 0, 4)
    is_row = random.random() < 0.2
    if is_row:  # CMSIS-NN has code of its own for images of one row and a multiple of four channels
        kernel[0], dilation[1], depth, groups = 1, 1, 4 * (depth // 4 + 1), 1
    image, weight = _draw_operands(
        random, kernel, padding, dilation, (groups * per_group, *kernel, depth), groups * depth
    )
    return [
        *(image[:, :1].copy() if is_row else image, weight),
        draw_bias(random, groups * per_group),
        *(stride, padding, dilation),
        *_draw_tail(random, groups * per_group, depth * kernel[0] * kernel[1]),
    ]


def _draw_operands(
    random: np.random.Generator,
    kernel: list[int],
    padding: list[int],
    dilation: list[int],
    weight: tuple[int, ...],
    channels: int,
    batch: int = 0,
) -> tuple[Array, Array]:
    windows = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    size = [max(1, window) + int(random.integers(0, 6)) for window in windows]
    batch = batch or int(random.integers(1, 3))
    return draw_int8(random, (batch, *size, channels)), draw_int8(random, weight)


def draw_depthwise_conv2d(random: np.random.Generator) -> list[Any]:
    """Arguments of ``quantized_depthwise_conv2d_nhwc`` without ``scratch``."""
    multiplier = int(random.choice([1, 1, 2, 3, 4, 8]))
    channels = int(random.integers(1, 200 if multiplier == 1 and random.random() < 0.2 else 12))
    kernel = [3, 3] if random.random() < 0.3 else _draw_pair(random, 1, 5)
    stride, dilation = _draw_pair(random, 1, 3), [1, 1] if random.random() < 0.6 else _draw_pair(random, 1, 3)
    padding = [1, 1] if random.random() < 0.3 else _draw_pair(random, 0, 4)
    weight = (1, *kernel, channels * multiplier)
    return [
        *_draw_operands(random, kernel, padding, dilation, weight, channels, batch=1),
        draw_bias(random, channels * multiplier),
        *(stride, padding, dilation, multiplier),
        *_draw_tail(random, channels * multiplier, kernel[0] * kernel[1]),
    ]


def draw_transpose_conv2d(random: np.random.Generator) -> list[Any]:
    """Arguments of ``quantized_transpose_conv2d_nhwc`` without ``scratch`` and ``output_scratch``."""
    channels, out_channels = int(random.integers(1, 24)), int(random.integers(1, 7))
    kernel, stride, size = _draw_pair(random, 1, 5), _draw_pair(random, 1, 3), _draw_pair(random, 1, 6)
    output_padding = [int(random.integers(0, step)) for step in stride]
    limits = zip(size, stride, kernel, output_padding, strict=True)
    # The result has at least one element on each axis.
    padding = [int(random.integers(0, ((n - 1) * s + k + more - 1) // 2 + 1)) for n, s, k, more in limits]
    image = draw_int8(random, (int(random.integers(1, 3)), *size, channels))
    weight = draw_int8(random, (out_channels, *kernel, channels))
    return [
        *(image, weight, draw_bias(random, out_channels), stride, padding, output_padding, [1, 1]),
        *_draw_tail(random, out_channels, channels * kernel[0] * kernel[1]),
    ]


_DRAW: dict[str, Callable[[np.random.Generator], list[Any]]] = {
    "quantized_conv2d": draw_conv2d,
    "quantized_depthwise_conv2d": draw_depthwise_conv2d,
    "quantized_transpose_conv2d": draw_transpose_conv2d,
}


@pytest.mark.parametrize("name", _KINDS)
def test_random_arguments(name: str, kernels: KernelLibrary, case_count: int) -> None:
    for number, random in enumerate(make_generators(name, case_count)):
        arguments = add_scratch(f"{name}_nhwc", _DRAW[name](random), list(Isa)[number % len(Isa)])
        expected = find_kernel(f"{name}_nhwc").compute(*arguments)
        np.testing.assert_array_equal(kernels.run(f"{name}_nhwc", *arguments), expected, f"case {number}")
        image = arguments[0].transpose(0, 3, 1, 2)
        result = kernels.run(name, image, *arguments[1:], channels_last=True)
        np.testing.assert_array_equal(result.transpose(0, 2, 3, 1), expected, f"case {number}, channels_last")
        np.testing.assert_array_equal(find_kernel(name).compute(image, *arguments[1:]), result, f"case {number}")
        shapes = [argument.shape if isinstance(argument, np.ndarray) else argument for argument in arguments]
        assert tuple(find_kernel(f"{name}_nhwc").result_shape(*shapes)) == expected.shape


def _valid(name: str) -> dict[str, Any]:
    """Valid arguments by their names in the schema."""
    arguments = add_scratch(f"{name}_nhwc", _DRAW[name](np.random.default_rng(3)), Isa.MVE)
    names = [text.split()[-1] for text in find_kernel(f"{name}_nhwc").arguments.split(",")]
    return dict(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("input", np.zeros((1, 4, 4), np.int8)),
        ("input", np.zeros((1, 4, 4, 2), np.int16)),
        ("input", np.zeros((1, 1, 2, 3), np.int8)),
        ("weight", np.zeros((2, 2, 2), np.int8)),
        ("weight", np.zeros((2, 2, 2, 1000), np.int8)),
        ("weight", np.zeros((0, 2, 2, 2), np.int8)),
        ("bias", np.zeros(1000, np.int32)),
        ("bias", np.zeros(1, np.int16)),
        *(("stride", value) for value in ([1], [0, 1], [1, 1 << 40], [-1, 1])),
        *(("padding", value) for value in ([1, 1, 1], [-1, 0], [1 << 16, 0], [60_000, 0])),
        *(("dilation", value) for value in ([], [0, 1], [1, 60_000])),
        *(("input_offset", value) for value in (-128, 129)),
        *(("output_offset", value) for value in (-129, 128)),
        ("requantize_multipliers", np.full(1000, 1 << 30, np.int32)),
        ("requantize_shifts", np.zeros(1000, np.int32)),
        ("activation_min", -129),
        ("activation_max", 128),
    ],
)
def test_bad_arguments_are_refused(name: str, argument: str, value: Any, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    result = np.zeros_like(find_kernel(f"{name}_nhwc").compute(*valid.values()))
    kernels.call(f"{name}_nhwc", *valid.values(), result)
    with pytest.raises(KernelError, match=rf"cortex_m::{name}_nhwc\.out: \w+ \w+"):
        kernels.call(f"{name}_nhwc", *{**valid, argument: value}.values(), result)


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize(("argument", "value"), [("multipliers", -(2**31)), ("shifts", 31), ("shifts", -32)])
def test_factors_are_checked(name: str, argument: str, value: int, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    result = np.zeros_like(find_kernel(f"{name}_nhwc").compute(*valid.values()))
    values = valid[f"requantize_{argument}"].copy()
    values[-1] = value
    with pytest.raises(KernelError, match=f"requantize_{argument} must be from"):
        kernels.call(f"{name}_nhwc", *{**valid, f"requantize_{argument}": values}.values(), result)


@pytest.mark.parametrize("name", _KINDS)
def test_the_result_has_the_right_shape_and_layout(name: str, kernels: KernelLibrary) -> None:
    valid = _valid(name)
    right = find_kernel(f"{name}_nhwc").compute(*valid.values()).shape
    for wrong in ((*right[:3], right[3] + 1), (right[0], right[1] + 1, *right[2:]), right[:3]):
        with pytest.raises(KernelError, match=r"out (cannot have the shape of the result|must have rank 4)"):
            kernels.call(f"{name}_nhwc", *valid.values(), np.zeros(wrong, np.int8))
    image = np.zeros((1, 2, 5, 5), np.int8)
    with pytest.raises(KernelError, match="input must have channels_last memory format"):
        kernels.call(name, *{**valid, "input": image}.values(), to_channels_last(image))


def test_a_transposed_convolution_has_no_dilation(kernels: KernelLibrary) -> None:
    valid = _valid("quantized_transpose_conv2d")
    result = np.zeros_like(find_kernel("quantized_transpose_conv2d_nhwc").compute(*valid.values()))
    with pytest.raises(KernelError, match="dilation must be from 1 to 1, and is 2"):
        kernels.call("quantized_transpose_conv2d_nhwc", *{**valid, "dilation": [1, 2]}.values(), result)


def test_negative_padding_raises() -> None:
    with pytest.raises(ValueError, match="negative"):
        find_kernel("quantized_conv2d_nhwc").result_shape(
            (1, 4, 4, 1), (1, 1, 1, 1), None, [1, 1], [0, -1], [1, 1], 0, 0, (1,), (1,), -128, 127
        )
