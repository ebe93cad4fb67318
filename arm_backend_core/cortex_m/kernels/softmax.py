"""Softmax of int8 tensors in fixed point.

The exponential is computed as in gemmlowp: a number is split into a multiple of 1/4, whose exponential is a product of
constants, and a remainder, whose exponential is a polynomial of degree 4. Three steps of Newton's method compute the
reciprocal of the sum. Numbers with n integer bits, "Qn", are int32 in units of 2^(n - 31).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.fixed_point import (
    clamp_to_int8,
    divide_by_power_of_two,
    doubling_high_mult,
    quantize_multiplier,
)
from arm_backend_core.cortex_m.kernels.registry import Array, Shape, kernel
from arm_backend_core.targets.cortex_m import Isa

#: Quantization of the result, which the kernel requires.
OUTPUT_SCALE, OUTPUT_ZERO_POINT = 1 / 256, -128

#: Integer bits of x in exp(x): the kernel computes exp(x) for x > -32.
INPUT_INTEGER_BITS = 5

#: Integer bits of the sum of exponentials. Each exponential is at most 1, so the sum over a row of at most ``MAX_ROW``
#: elements cannot overflow.
SUM_INTEGER_BITS = 12
MAX_ROW = (1 << SUM_INTEGER_BITS) - 1

#: Maximum number of elements of a row for which CMSIS-NN's C code is correct. In longer rows, the sum of exponentials
#: can reach 512. CMSIS-NN then shifts an integer by 32 bits or more. The right result of this shift is 0, and
#: ``softmax``, our own C++ kernels and CMSIS-NN's MVE code compute 0. In CMSIS-NN's C code, the shift is undefined
#: behavior; on Cortex-M, its result is 1 (one quantization step). The C code runs in three cases: the processor has no
#: MVE, GCC 12.2 or older compiled the kernel, or an element is one of the last elements of a row whose size is not a
#: multiple of 4.
MAX_EXACT_ROW = 511

_Q0_ONE = 1 << 31
_INT32_MAX = _Q0_ONE - 1
_QUARTER = 1 << (31 - INPUT_INTEGER_BITS - 2)
_EXP_MINUS_EIGHTH = round(math.exp(-1 / 8) * _Q0_ONE)
_THIRD = round(_Q0_ONE / 3)
#: exp(-2^k) for k = -2, ..., 4
_EXP_OF_POWERS = tuple(round(math.exp(-(2.0**k)) * _Q0_ONE) for k in range(-2, INPUT_INTEGER_BITS))
_NEWTON_CONSTANT, _NEWTON_SLOPE = round(48 / 17 * (1 << 29)), round(-32 / 17 * (1 << 29))


def softmax_parameters(scale: float) -> tuple[int, int, int]:
    """Multiplier, shift and ``diff_min`` of the kernel for the input's scale.

    The argument of exp is the difference of the input from the row's maximum, times the scale. If a difference is below
    ``diff_min``, this argument is below -15.5, and the result is 0.

    Raises:
        ValueError: the kernel does not support the scale: below 2^-27, or 16 and above.
    """
    multiplier, shift = quantize_multiplier(scale * (1 << (31 - INPUT_INTEGER_BITS)))
    if shift < 0 or multiplier <= 0:
        raise ValueError(f"softmax does not support the scale {scale}: it is too small")
    largest = (1 << INPUT_INTEGER_BITS) - 1
    return multiplier, shift, -math.floor(largest * 2.0 ** (31 - INPUT_INTEGER_BITS - shift))


def exp_of_negative(x: Array) -> Array:
    """exp(x) as Q0 for x <= 0 as Q5 (``arm_nn_exp_on_negative_values``)."""
    rest = (x & (_QUARTER - 1)) - _QUARTER
    quarters = rest - x
    # Taylor series around -1/8
    t = (rest << INPUT_INTEGER_BITS) + (1 << 28)
    t2 = doubling_high_mult(t, t)
    t3, t4 = doubling_high_mult(t2, t), doubling_high_mult(t2, t2)
    high = doubling_high_mult(divide_by_power_of_two(t4, 2) + t3, _THIRD)
    series = t + divide_by_power_of_two(high + t2, 1)
    result = _EXP_MINUS_EIGHTH + doubling_high_mult(series, _EXP_MINUS_EIGHTH)
    for k, factor in enumerate(_EXP_OF_POWERS):
        result = np.where(quarters & (_QUARTER << k), doubling_high_mult(result, factor), result)
    return np.where(x == 0, _INT32_MAX, result)


def reciprocal_of_one_plus(x: Array) -> Array:
    """1 / (1 + x) as Q0 for x in [0, 1) as Q0 (``arm_nn_one_over_one_plus_x_for_x_in_0_1``)."""
    half = (x + _Q0_ONE) >> 1
    result = _NEWTON_CONSTANT + doubling_high_mult(half, _NEWTON_SLOPE)
    for _ in range(3):
        error = (1 << 29) - doubling_high_mult(half, result)
        result = result + (doubling_high_mult(result, error) << 2)
    return np.minimum(result << 1, _INT32_MAX)


def find_softmax_limitation(isa: Isa, shape: Shape, *rest: Any) -> str | None:
    """Why results of ``arm_softmax_s8`` may be wrong; None if all are right.

    In rows of up to ``MAX_ROW`` elements, results are wrong only if the row is nearly uniform. They are then one
    quantization step too high (see ``MAX_EXACT_ROW``). With MVE, rows whose size is a multiple of 4 are right if the
    compiler is newer than GCC 12.2.
    """
    size = shape[-1]
    if size > MAX_ROW:
        return f"the sum of {size} exponentials can overflow: rows have at most {MAX_ROW} elements"
    if size > MAX_EXACT_ROW and not (isa is Isa.MVE and size % 4 == 0):
        return f"nearly uniform rows of {size} elements are one step too high: rows up to {MAX_EXACT_ROW} are exact"
    return None


@kernel(
    "softmax",
    "Tensor input, int dim, int input_zero_point, int output_zero_point, "
    "int input_multiplier, int input_shift, int diff_min",
    find_limitation=find_softmax_limitation,
)
def softmax(
    x: Array,
    dim: int,
    input_zero_point: int,
    output_zero_point: int,
    input_multiplier: int,
    input_shift: int,
    diff_min: int,
) -> Array:
    """Softmax over the last axis of an int8 tensor with contiguous memory format (``arm_softmax_s8``).

    Args:
        x: int8, rank 1 or more, not empty, with at most ``MAX_ROW`` elements on the last axis.
        dim: the last axis.
        input_zero_point: has no effect.
        output_zero_point: ``OUTPUT_ZERO_POINT``; the result's scale is ``OUTPUT_SCALE``.
        input_multiplier: see ``softmax_parameters``.
        input_shift: see ``softmax_parameters``; not negative.
        diff_min: see ``softmax_parameters``; not positive.

    Raises:
        ValueError: the size of the last axis, or an argument other than ``input_zero_point`` and ``input_multiplier``,
            is not as above.
    """
    if dim % x.ndim != x.ndim - 1 or not 1 <= x.shape[-1] <= MAX_ROW:
        raise ValueError(f"no softmax over axis {dim} of {x.shape}")
    if output_zero_point != OUTPUT_ZERO_POINT or input_shift < 0 or diff_min > 0:
        raise ValueError(f"softmax needs output_zero_point {OUTPUT_ZERO_POINT}, input_shift >= 0 and diff_min <= 0")
    wide = x.astype(np.int64)
    difference = wide - wide.max(axis=-1, keepdims=True)
    exponential = exp_of_negative(doubling_high_mult(difference << input_shift, input_multiplier))
    exponential = np.where(difference >= diff_min, exponential, 0)
    total = divide_by_power_of_two(exponential, SUM_INTEGER_BITS).sum(axis=-1, keepdims=True)
    # Leading zeros of the sum as int32: frexp's exponent is the number of bits.
    headroom = 32 - np.frexp(total.astype(np.float64))[1].astype(np.int64)
    reciprocal = reciprocal_of_one_plus((total << headroom) - _Q0_ONE)
    product = doubling_high_mult(exponential, reciprocal)
    quotient = divide_by_power_of_two(product, SUM_INTEGER_BITS + 23 - headroom)
    return clamp_to_int8(np.where(difference >= diff_min, quotient, 0) + OUTPUT_ZERO_POINT)
