"""Fixed-point arithmetic of CMSIS-NN, on NumPy arrays. Computations use int64; results fit int32."""

from __future__ import annotations

import math

import numpy as np

from arm_backend_core.cortex_m.kernels.registry import Array

_Q31_ROUNDING = 1 << 30


def quantize_multiplier(real: float) -> tuple[int, int]:
    """Represent a factor as (multiplier, shift): real = multiplier * 2^(shift - 31).

    The multiplier has the sign of the factor, and |multiplier| is in [2^30, 2^31 - 1]. If |real| < 2^-32, the result is
    (0, 0). Positive shifts shift to the left.

    Raises:
        ValueError: the factor is not finite, or its magnitude is 2^30 or larger: the kernels' shift is at most 30.
    """
    if real == 0:
        return 0, 0
    if not math.isfinite(real):
        raise ValueError(f"the factor {real} is not finite")
    mantissa, shift = math.frexp(abs(real))
    multiplier = round(mantissa * (1 << 31))
    if multiplier == 1 << 31:
        multiplier, shift = multiplier // 2, shift + 1
    if shift < -31:
        return 0, 0
    if shift > 30:
        raise ValueError(f"the factor {real} is 2^30 or larger")
    return int(math.copysign(multiplier, real)), shift


def doubling_high_mult(x: Array, multiplier: Array | int) -> Array:
    """Rounded high half of 2 * x * multiplier: floor((x * multiplier + 2^30) / 2^31). Ties round up."""
    return (np.asarray(x, np.int64) * np.asarray(multiplier, np.int64) + _Q31_ROUNDING) >> 31


def divide_by_power_of_two(x: Array, exponent: Array | int) -> Array:
    """x / 2^exponent, rounded to nearest, ties away from zero."""
    x, exponent = np.asarray(x, np.int64), np.asarray(exponent, np.int64)
    mask = (np.int64(1) << exponent) - 1
    threshold = (mask >> 1) + (x < 0)
    return np.asarray((x >> exponent) + ((x & mask) > threshold))


def requantize(x: Array, multiplier: Array | int, shift: Array | int) -> Array:
    """x * multiplier * 2^(shift - 31), rounded as by ``arm_nn_requantize``: after the product, and after the shift.

    A left shift wraps at 32 bits, as in the kernel.
    """
    shift = np.asarray(shift, np.int64)
    scaled = (np.asarray(x, np.int64) << np.maximum(shift, 0)).astype(np.int32)
    return divide_by_power_of_two(doubling_high_mult(scaled, multiplier), np.maximum(-shift, 0))


def clamp_to_int8(x: Array, low: int = -128, high: int = 127) -> Array:
    """Saturate to [low, high], as int8."""
    return np.clip(x, low, high).astype(np.int8)


def requantize_to_int8(
    accumulator: Array, multiplier: Array | int, shift: Array | int, offset: int, low: int = -128, high: int = 127
) -> Array:
    """Requantize an accumulator, add the zero point ``offset`` and saturate to [low, high], as int8.

    Sums wrap at 32 bits, as in the kernels.
    """
    scaled = requantize(accumulator.astype(np.int32), multiplier, shift) + offset
    return clamp_to_int8(scaled.astype(np.int32), low, high)
