"""Random cases of the kernels that have no weights, many of them at the ends of their ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.kernels.elementwise import find_broadcast_limitation
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.kernels.softmax import OUTPUT_ZERO_POINT, softmax_parameters
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.random_arguments import draw_activation, draw_int8, draw_zero_point
from tests.runtime.kernel_library import to_channels_last

Random = np.random.Generator


@dataclass(frozen=True)
class Case:
    """Arguments of a kernel, without the result, and whether the result has channels_last memory format."""

    arguments: tuple[Any, ...]
    channels_last: bool = False


def _one_of(random: Random, *values: Any) -> Any:
    return values[random.integers(len(values))]


def draw_shape(random: Random, rank: int, largest: int = 7) -> tuple[int, ...]:
    """Sizes of which many are 1."""
    return tuple(int(random.integers(1, _one_of(random, 1, largest, largest) + 1)) for _ in range(rank))


def draw_multiplier(random: Random) -> int:
    """Mostly a factor in [0.5, 1), which may be negative; sometimes another int32."""
    usual = int(random.integers(1 << 30, 1 << 31))
    return int(_one_of(random, usual, usual, -usual, 0, (1 << 31) - 1, random.integers(-(1 << 31) + 1, 1 << 31)))


def draw_shift(random: Random, usual: tuple[int, int]) -> int:
    """Mostly within the limits ``usual``."""
    low, high = _one_of(random, usual, usual, usual, (-31, 30))
    return int(random.integers(low, high + 1))


def _draw_operands(random: Random) -> tuple[Array, Array, bool]:
    """Two operands of a sum or product: of one shape, or one of them with a number per channel."""
    shape = draw_shape(random, int(random.integers(0, 6)))
    if len(shape) != 4 or random.integers(2):
        first, second = draw_int8(random, shape), draw_int8(random, shape)
        is_channels_last = len(shape) == 4 and bool(random.integers(2))
        if is_channels_last:
            first, second = to_channels_last(first), to_channels_last(second)
        return first, second, is_channels_last
    operands = [draw_int8(random, shape), draw_int8(random, (1, shape[1], 1, 1))]
    random.shuffle(operands)
    return to_channels_last(operands[0]), to_channels_last(operands[1]), True


def _draw_add(random: Random) -> Case:
    first, second, channels_last = _draw_operands(random)
    scales = [(draw_zero_point(random), draw_multiplier(random), draw_shift(random, (-6, 2))) for _ in range(2)]
    output = draw_zero_point(random), draw_multiplier(random), draw_shift(random, (-24, -12)), *draw_activation(random)
    return Case((first, *scales[0], second, *scales[1], *output), channels_last)


def _draw_mul(random: Random) -> Case:
    first, second, channels_last = _draw_operands(random)
    zero_points = [_one_of(random, draw_zero_point(random), int(random.integers(-600, 600))) for _ in range(2)]
    output = draw_zero_point(random), draw_multiplier(random), draw_shift(random, (-10, 2))
    return Case((first, zero_points[0], second, zero_points[1], *output), channels_last)


def _draw_div(random: Random) -> Case:
    shape = draw_shape(random, int(random.integers(0, 5)))
    dtype = _one_of(random, np.int8, np.int16)
    limits = np.iinfo(dtype)
    low, high = _one_of(random, (limits.min, limits.max + 1), (-5, 6))
    first, second = (random.integers(low, high, shape, dtype) for _ in range(2))
    zero_points = [int(_one_of(random, limits.min, limits.max, 0, random.integers(-5, 6))) for _ in range(3)]
    # Powers of two make ties.
    scale = float(_one_of(random, 2.0 ** random.integers(-3, 8), 10 ** random.uniform(-4, 4), 3e38, -1.5, 0.0))
    return Case((first, zero_points[0], second, zero_points[1], zero_points[2], scale))


def _draw_minimum(random: Random) -> Case:
    shape = draw_shape(random, int(random.integers(0, 5)))
    while True:
        shapes = []
        for _ in range(2):
            sizes = tuple(int(_one_of(random, size, size, 1)) for size in shape)
            shapes.append(sizes[int(_one_of(random, 0, 0, random.integers(0, len(sizes) + 1))) :])
        if find_broadcast_limitation(Isa.MVE, *shapes) is None:
            break
    first, second = (draw_int8(random, sizes) for sizes in shapes)
    is_channels_last = shapes[0] == shapes[1] and first.ndim == 4 and bool(random.integers(2))
    if is_channels_last:
        return Case((to_channels_last(first), to_channels_last(second)), True)
    return Case((first, second))


def _draw_activation_table(random: Random) -> Case:
    shape = draw_shape(random, int(random.integers(0, 6)))
    return Case((draw_int8(random, shape), random.integers(-128, 128, 256, np.int8)))


def _draw_windows(random: Random) -> tuple[tuple[int, ...], list[list[int]]]:
    """Shape (N, H, W, C), kernel sizes, strides and paddings."""
    batch, height, width, channels = draw_shape(random, 4, 9)
    windows: list[list[int]] = [[], [], []]
    for size in (height, width):
        kernel_size = int(random.integers(1, 6))
        least = max(0, -(-(kernel_size - size) // 2))
        if least > kernel_size - 1:
            kernel_size, least = 1, 0
        padding = int(_one_of(random, least, random.integers(least, kernel_size)))
        for values, value in zip(windows, (kernel_size, int(random.integers(1, 5)), padding), strict=True):
            values.append(value)
    return (batch, height, width, channels * int(_one_of(random, 1, 1, 17))), windows


def _draw_average(random: Random, is_nhwc: bool) -> Case:
    shape, windows = _draw_windows(random)
    x = draw_int8(random, shape)
    quantization = draw_zero_point(random), draw_multiplier(random), draw_shift(random, (-10, 2))
    arguments = (*windows, bool(random.integers(2)), *quantization, np.zeros(0, np.int8))
    return Case((x if is_nhwc else x.transpose(0, 3, 1, 2), *arguments), not is_nhwc)


def _draw_maximum(random: Random, is_nhwc: bool) -> Case:
    shape, windows = _draw_windows(random)
    x = draw_int8(random, shape)
    zero_point = draw_zero_point(random)
    arguments = (*windows, [1, 1], False, zero_point, zero_point, *draw_activation(random))
    return Case((x if is_nhwc else x.transpose(0, 3, 1, 2), *arguments), not is_nhwc)


def _draw_softmax(random: Random) -> Case:
    shape = draw_shape(random, int(random.integers(1, 5)))
    shape = (*shape[:-1], int(_one_of(random, shape[-1], random.integers(1, 60), random.integers(1, 600))))
    x = draw_int8(random, shape)
    parameters = softmax_parameters(float(10 ** random.uniform(-8, 1)))
    dim = int(_one_of(random, -1, len(shape) - 1))
    return Case((x, dim, draw_zero_point(random), OUTPUT_ZERO_POINT, *parameters))


def _draw_transpose(random: Random) -> Case:
    rank = int(random.integers(1, 5))
    shape = draw_shape(random, rank, 9)
    order = [1, 0] if rank == 2 else [int(axis) for axis in random.permutation(rank)]
    return Case((draw_int8(random, shape), order))


def _draw_pad(random: Random) -> Case:
    rank = int(random.integers(1, 5))
    x = draw_int8(random, draw_shape(random, rank))
    is_channels_last = rank == 4 and bool(random.integers(2) or x.shape[1] == 1 or x.shape[2] == x.shape[3] == 1)
    if is_channels_last:
        x = to_channels_last(x)
    before, after = (
        [0 if axis < 4 - rank else int(_one_of(random, 0, random.integers(0, 4))) for axis in range(4)]
        for _ in range(2)
    )
    return Case((x, before, after, draw_zero_point(random)), is_channels_last)


def _draw_quantization(random: Random) -> tuple[float, int, int, int, int]:
    """Scale, zero point, limits and number of the type."""
    dtype = int(random.integers(1, 3))
    limits = np.iinfo(np.int8 if dtype == 1 else np.int16)
    scale = float(_one_of(random, 2.0 ** random.integers(-8, 4), 10 ** random.uniform(-6, 3), 1e-38, 3e38))
    zero_point = int(_one_of(random, limits.min, limits.max, 0, random.integers(limits.min, limits.max + 1)))
    low, high = _one_of(random, (limits.min, limits.max), (limits.min + 1, limits.max), (-5, 9), (3, 3))
    return scale, zero_point, int(low), int(high), dtype


def _draw_quantize(random: Random) -> Case:
    scale, *rest = _draw_quantization(random)
    shape = draw_shape(random, int(random.integers(0, 5)))
    # Multiples of half a step make ties.
    half_steps = np.minimum(scale, 1e30) * 0.5
    ties = random.integers(-600, 600, shape) * half_steps
    noise = random.normal(size=shape) * 10 ** random.uniform(-3, 6) * half_steps
    x = np.asarray(_one_of(random, ties, noise)).astype(np.float32)
    if random.integers(2):
        x[...] = np.where(random.random(shape) < 0.1, _one_of(random, np.nan, np.inf, -np.inf, 3.4e38, -0.0), x)
    return Case((x, scale, *rest))


def _draw_dequantize(random: Random) -> Case:
    quantization = _draw_quantization(random)
    dtype = np.int8 if quantization[-1] == 1 else np.int16
    limits = np.iinfo(dtype)
    shape = draw_shape(random, int(random.integers(0, 5)))
    return Case((random.integers(limits.min, limits.max + 1, shape, dtype), *quantization))


#: Kernel -> function that draws a case.
DRAW: dict[str, Callable[[Random], Case]] = {
    "quantized_add": _draw_add,
    "quantized_mul": _draw_mul,
    "quantized_div": _draw_div,
    "minimum": _draw_minimum,
    "maximum": _draw_minimum,
    "quantized_activation": _draw_activation_table,
    "quantized_avg_pool2d": lambda random: _draw_average(random, is_nhwc=False),
    "quantized_avg_pool2d_nhwc": lambda random: _draw_average(random, is_nhwc=True),
    "quantized_max_pool2d": lambda random: _draw_maximum(random, is_nhwc=False),
    "quantized_max_pool2d_nhwc": lambda random: _draw_maximum(random, is_nhwc=True),
    "softmax": _draw_softmax,
    "transpose": _draw_transpose,
    "pad": _draw_pad,
    "quantize_per_tensor": _draw_quantize,
    "dequantize_per_tensor": _draw_dequantize,
}
