"""Elementary functions by TABLE: 1 / v, 1 / sqrt(v), sqrt(v) and ln(v) of positive integers, and exp(v).

All functions except exp take v as a plain integer (its scale is ignored) and look up its mantissa in a TABLE. exp has
one TABLE for its whole range. Qn is a fixed-point format with n fractional bits.
"""

from __future__ import annotations

import math

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.fixed_point_value import Q15_MAX, FixedPoint
from arm_backend_core.qparams import QParams

I16, I32 = DType.INT16, DType.INT32
#: The inputs of the 513 entries of an int16 TABLE: every 128th value, and 32768.
TABLE_INPUTS = np.arange(-32768, 32769, 128, dtype=np.float64)


def reciprocal(v: FixedPoint) -> FixedPoint:
    """1 / v in Q30, int32, for int32 v in [1, 2**31).

    v is normalized to m * 2**30, 1 <= m < 2, by its leading zeros z. A 513-entry table gives 1 / m in Q15. Its index,
    entries and interpolation are each rounded; the relative error is at most 2**-14 in total. The result is the table's
    value * 2**(z - 16), rounded. The reciprocal of a v near 2**30 thus has few significant bits.
    """
    zeros, mantissa = _normalize(v)
    inverse = mantissa.apply_table((Q15_MAX + 1) / _MANTISSA, 2.0**-15)
    shifted = inverse.rescale(I32, 1.0).add_fraction_bits(15)
    peak = math.ceil((1 << 30) / v.low * (1 + 2.0**-13)) + 1
    return shifted.shift_right(zeros.full_like(31) - zeros).assume_range(0, peak).with_scale(2.0**-30)


def rsqrt(v: FixedPoint) -> FixedPoint:
    """1 / sqrt(v) in Q29, int32, for int32 v in [1, 2**30).

    v is normalized: v * 4**(h - 1) = m * 2**28 with 1 <= m < 4, where h is half the number of leading zeros, rounded
    down. A table gives 1 / sqrt(m) in Q15. Index, entries and interpolation are each rounded; the relative error is at
    most 2**-14 in total. The left shift by h - 1 is exact, so the relative error does not depend on v.
    """
    assert v.high < 1 << 30
    zeros_minus_one = v.leading_zeros() - 1
    # h - 1: the right shift rounds half up, so (z - 1) shifted by 1 is (z - 1 + 1) >> 1 = h.
    shift = zeros_minus_one.shift_right(zeros_minus_one.full_like(1)) - 1
    normalized = v.with_scale(1.0).shift_left(shift + shift, (1 << 30) - 1).assume_range(1 << 28, 1 << 30)
    index = (normalized - (5 << 27)).rescale(I16, 1 / (3 << 12), saturate=True)
    inverse_root = index.apply_table((Q15_MAX + 1) / np.sqrt(2.5 + TABLE_INPUTS * (3 / 65536)), 2.0**-15)
    peak = math.ceil((1 << 29) / math.sqrt(v.low) * (1 + 2.0**-13))
    return inverse_root.rescale(I32, 1.0).shift_left(shift, peak).with_scale(2.0**-29)


def sqrt(v: FixedPoint) -> FixedPoint:
    """Square root of v in Q14, int32, for int32 v in [0, 2**30), with the relative error of ``rsqrt``."""
    root = v.with_scale(1.0).mul(rsqrt(v.maximum(1)), 15, peak=math.isqrt(v.high << 28) + (1 << 16))
    return root.with_scale(2.0**-14)


def logarithm(v: FixedPoint) -> FixedPoint:
    """ln(v) in Q20, int32, for int32 v in [1, 2**31).

    A table gives ln(m) in Q15, with an error of 2**-15 from the rounding of entries and interpolation. The exponent
    adds (31 - z) * ln(2), where z is the number of leading zeros of v.
    """
    zeros, mantissa = _normalize(v)
    fraction = mantissa.apply_table(np.log(_MANTISSA) * (Q15_MAX + 1), 2.0**-15)
    exponent_term = (zeros.full_like(31) - zeros).mul(round(math.log(2) * (1 << 20)))
    return fraction.rescale(I32, 32.0) + exponent_term.with_scale(2.0**-20)


def exponential(v: FixedPoint, result_q: QParams) -> FixedPoint:
    """exp(v) as int16, for real v at any scale.

    If ``result_q`` is int16, the exponential has the scale of ``result_q``, and the later requantization does not round
    again. Linear interpolation between exact entries at a distance h would exceed a convex function f. The entries of
    the least-squares fit are f - h**2 / 12 * f''; for f = exp, this is exp * (1 - h**2 / 12).

    Args:
        v: the exponent.
        result_q: parameters to which the caller later requantizes the exponential. The table covers each v whose
            exponential neither rounds to 0 nor saturates at these parameters.
    """
    peak = float(result_q.scale) * max(result_q.qmax - result_q.zero_point, result_q.zero_point - result_q.qmin, 1)
    scale = float(result_q.scale) if result_q.dtype is I16 else peak / Q15_MAX
    # The last entry but one is the largest result. The last entry would exceed it, and saturates.
    low, high = math.log(float(result_q.scale) / 8), math.log(peak)
    half = (high - low) / (TABLE_INPUTS[-2] / Q15_MAX + 1)
    middle = low + half
    if v.scale < half * 2.0**-24:  # at the scale of v, round(middle / v.scale) would exceed INT32
        v = v.rescale(I32, v.scale / half * 2.0**24)
    index = (v - round(middle / v.scale)).rescale(I16, v.scale / half * Q15_MAX, saturate=True)
    distance = half * 128 / Q15_MAX
    return index.apply_table(np.exp(middle + TABLE_INPUTS / Q15_MAX * half) * (1 - distance**2 / 12) / scale, scale)


#: The mantissa m, in [1, 2], that each of the 513 inputs of a TABLE stands for.
_MANTISSA = 1.5 + TABLE_INPUTS / 65536


def _normalize(v: FixedPoint) -> tuple[FixedPoint, FixedPoint]:
    """Return the leading zeros of v, and the int16 table index of the mantissa v << (zeros - 1) (see ``_MANTISSA``)."""
    assert v.low >= 1
    zeros = v.leading_zeros()
    normalized = v.with_scale(1.0).shift_left(zeros - 1, (1 << 31) - 1).assume_range(1 << 30, 1 << 31)
    return zeros, (normalized - (3 << 29)).rescale(I16, 2.0**-14, saturate=True)
