"""Random arguments of the int8 kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.fixed_point import quantize_multiplier
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.targets.cortex_m import Isa

#: Smallest and largest multipliers that the kernels support, with shifts.
_EXTREME_FACTORS = [
    *((multiplier, shift) for multiplier in (-(2**31) + 1, 2**31 - 1) for shift in (-31, -30, -8, -1, 0, 1, 4)),
    *((0, 0), (1, 0), (-1, 0), (2**30, 0), (-(2**30), 0), (2**30, -31), (1, 30), (2**30, 30), (2**31 - 1, 30)),
]


def make_generators(name: str, count: int) -> Iterator[np.random.Generator]:
    """Random generators, one per case of a test."""
    for seed in range(count):
        yield np.random.default_rng([seed, *name.encode()])


def draw_int8(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Integers of the whole range, or only -128 and 127, which give the largest sums."""
    if random.random() < 0.1:
        return random.choice(np.array([-128, 127], np.int8), shape)
    return random.integers(-128, 128, shape, np.int8)


def draw_zero_point(random: np.random.Generator) -> int:
    """A zero point of int8, often one of the ends of the range."""
    return int(random.choice([-128, 127, 0, int(random.integers(-128, 128))]))


def draw_activation(random: np.random.Generator) -> tuple[int, int]:
    """Limits of the result, mostly those of int8."""
    if random.random() < 0.6:
        return -128, 127
    low, high = sorted(int(value) for value in random.integers(-128, 128, 2))
    return low, high


def draw_bias(random: np.random.Generator, channels: int) -> Array | None:
    """A bias of int32, small, large or absent."""
    if random.random() < 0.3:
        return None
    limit = int(random.choice([100, 10_000, 1 << 20]))
    return random.integers(-limit, limit + 1, channels, np.int32)


def draw_factors(random: np.random.Generator, count: int, largest: float) -> list[tuple[int, int]]:
    """Multipliers and shifts.

    Args:
        random: source of the numbers.
        count: number of factors.
        largest: magnitude of the numbers to be scaled. Most of them are scaled into the range of int8 or a few times
            farther.
    """
    if random.random() < 0.15:
        return [_EXTREME_FACTORS[i] for i in random.integers(0, len(_EXTREME_FACTORS), count)]
    sign = -1 if random.random() < 0.1 else 1
    reals = 2.0 ** random.uniform(4, 10, count) / max(largest, 1.0)
    return [quantize_multiplier(sign * float(real)) for real in reals]


def add_scratch(name: str, arguments: list[Any], isa: Isa) -> list[Any]:
    """Append the scratch tensors that the record of a kernel asks for."""
    shapes = [argument.shape if isinstance(argument, np.ndarray) else argument for argument in arguments]
    return [*arguments, *(np.zeros(size, np.int8) for size in find_kernel(name).scratch_bytes(isa, *shapes))]
