"""Quotients of two quantized tensors: the integer rule of ``aten.div``.

The range of the divisor (``value_ranges``) decides how its reciprocal is computed. If the divisor is a function of an
int8 tensor, such as 1 + abs(z), a TABLE on that tensor has the exact reciprocals. If the range of the divisor excludes
0 and is not too wide, a TABLE on the divisor interpolates the reciprocals. Otherwise, the divisor is normalized by its
leading zeros. An INT8 quotient is the product of two int16 tensors. An INT16 quotient needs reciprocals of more than 16
bits.

The INT8 division of 32 x 32 x 32 elements by 1 + abs(z) takes 58,000 cycles on U55-128 with the TABLE on z. With
normalization, it would take 945,000 cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops import fixed_point
from arm_backend_core.ops.fixed_point.elementary_functions import TABLE_INPUTS
from arm_backend_core.ops.fixed_point_value import Q15_MAX, Array, FixedPoint
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.value_ranges import Int8Function, find_int8_function, find_range
from arm_backend_core.tosa.graph import Value

I16, I32 = DType.INT16, DType.INT32
#: Largest error of an INT8 quotient, in steps, from the rounding of reciprocals with a common scale.
_MAX_ROUNDING_ERROR = 1 / 4
#: Minimum number of TABLE intervals (each between two neighbouring entries) from 0 to the smallest divisor. With this
#: many intervals, the relative error of interpolation is at most 2**-10.
_MIN_CELLS = 16


@dataclass(frozen=True)
class _Division:
    """A division of integers.

    Attributes:
        cx: the context.
        x: the dividend.
        y: the divisor.
        divisor_function: the divisor as a function of an int8 tensor; None if it is no such function, and for
            ``_divide_precisely``.
    """

    cx: Context
    x: FixedPoint
    y: FixedPoint
    divisor_function: Int8Function | None

    @property
    def scale_ratio(self) -> float:
        """Steps of the result that one unit of the integer quotient x / y represents."""
        return self.x.scale / self.y.scale / float(self.cx.q.scale)

    @property
    def divisors(self) -> Array | None:
        """All integers that the divisor can have, if it is constant or a function of an int8 tensor; else None."""
        values = self.divisor_function.values if self.divisor_function is not None else self.y.value.data
        return None if values is None else values.astype(np.int64) - self.y.zero_point

    @property
    def smallest_divisor(self) -> int:
        """The smallest magnitude of the divisor, 0 if it may be 0."""
        if self.divisors is not None:
            return int(np.abs(self.divisors).min())
        return max(self.y.low, -self.y.high, 0)

    def requantize(self, quotient: FixedPoint, scale: float) -> Value:
        """Convert ``quotient``, whose unit is ``scale`` steps of the result, to the result's parameters."""
        q = self.cx.q
        return quotient.with_scale(scale * float(q.scale)).requantize(q)


def divide(cx: Context, x: Operand | float, y: Operand) -> Value:
    """x / y on quantized operands.

    x / 0 saturates, as infinity does in PyTorch's quantized graph, and 0 / 0 is 0.
    """
    assert isinstance(x, Operand)  # a number divided by a tensor is univariate and has a TABLE
    dividend, divisor = (_tighten_range(cx.to_fixed_point(z)) for z in (x, y))
    if cx.q.dtype is DType.INT8 and I32 not in (dividend.dtype, divisor.dtype):
        return _divide_to_int8(_Division(cx, dividend, divisor, find_int8_function(y.value)))
    return _divide_precisely(_Division(cx, dividend, divisor, None))


def _tighten_range(x: FixedPoint) -> FixedPoint:
    low, high = find_range(x.value)
    return x.assume_range(low - x.zero_point, high - x.zero_point)


def _to_int32(y: FixedPoint) -> FixedPoint:
    """Convert the integers of a divisor to INT32.

    A MUL converts int16: if several operators read the result, a RESCALE would be duplicated for each of them.
    """
    return (y.to_int32_with_fraction_bits(0) if y.dtype is I16 else y.to_int32()).with_scale(1.0)


# -- INT8 results -----------------------------------------------------------------------------------------------------


def _divide_to_int8(division: _Division) -> Value:
    """x * (1 / y) with int16 reciprocals.

    The reciprocals have a common scale if the scale of the largest reciprocal is precise enough for all others.
    Otherwise, each reciprocal is a mantissa with an exponent, and the product is shifted by the exponent.

    A bias is added to the exponents, so that one unit of the shifted products is 1/32 to 1/16 step of the result.
    Exponents are clipped to at least 0, and are 0 for a divisor of 0. If the exponent was clipped or the divisor is 0,
    a nonzero product is at least 2**14 units, so the result saturates. The exact quotient would saturate too.
    """
    dividend = division.x.to_int16().with_scale(1.0)
    reciprocal = _reciprocals_with_common_scale(division)
    if reciprocal is not None:
        return division.requantize(dividend * reciprocal, reciprocal.scale * division.scale_ratio)
    bias = math.floor(11 - math.log2(division.scale_ratio))
    if division.divisor_function is not None:
        mantissa, exponent = _tabulate_mantissas(division.cx, division.divisor_function, division.y.zero_point, bias)
    else:
        mantissa, exponent = _compute_mantissas(_to_int32(division.y), bias)
    quotient = (dividend * mantissa).shift_right(exponent)
    return division.requantize(quotient, division.scale_ratio * 2.0 ** (bias - 15))


def _reciprocals_with_common_scale(division: _Division) -> FixedPoint | None:
    """1 / y as int16; None if the divisor may be 0, or if a common scale or a TABLE is not precise enough."""
    smallest, y = division.smallest_divisor, division.y
    scale = 1 / max(smallest, 1) / Q15_MAX
    # Largest error of the quotients in steps of the result. A rounded reciprocal has an error of half its scale.
    coarseness = division.x.peak * division.scale_ratio * scale / 2
    if not smallest or coarseness > _MAX_ROUNDING_ERROR:
        return None
    if division.divisors is not None:
        reciprocals = np.rint(1 / division.divisors / scale).astype(np.int64)
        if division.divisor_function is not None:
            return _apply_to_base(division.cx, division.divisor_function, reciprocals).with_scale(scale)
        return FixedPoint.const(y.b, reciprocals, I16, scale)
    return _reciprocal_table(y, smallest) if coarseness <= _MAX_ROUNDING_ERROR / 2 else None


def _reciprocal_table(y: FixedPoint, smallest: int) -> FixedPoint | None:
    """1 / y as int16, by a TABLE; None if y is not int16, or its range is too wide for the interpolation.

    The scale is a power of two, so that a MUL can convert the result to INT32.
    """
    factor = Q15_MAX / y.peak
    if y.dtype is not I16 or smallest * factor < _MIN_CELLS * 128:
        return None
    index = y.rescale(I16, factor) if factor >= 2 else y
    ratio = y.scale / index.scale
    first = int(smallest * ratio) // 128 * 128  # the index of the last entry up to the smallest divisor
    scale = 2.0 ** math.ceil(math.log2(ratio / first / Q15_MAX))
    points = np.where(np.abs(TABLE_INPUTS) < first, np.inf, TABLE_INPUTS)
    # For entries at a distance h, the least-squares fit of a function f has the entries f - h**2 / 12 * f''.
    return index.apply_table((1 / points - 128**2 / 6 / points**3) * (ratio / scale), scale)


def _apply_to_base(cx: Context, base: Int8Function, numbers: Array) -> FixedPoint:
    """Look up 256 int16 ``numbers`` by an int8 tensor x, with an int16 TABLE.

    The index of the TABLE has 7 fractional bits, so 256 * x addresses every other of its 513 entries exactly. No
    operand reads the entries between them.
    """
    index = FixedPoint(cx.b, cx.b.rescale(base.base, I16, 256.0), -32768, 32512)
    return index.apply_table(np.interp(np.arange(513) / 2, np.arange(256), numbers), 1.0)


def _tabulate_mantissas(cx: Context, base: Int8Function, zero_point: int, bias: int) -> tuple[FixedPoint, FixedPoint]:
    """Mantissas of 1 / y in Q15, which have the sign of y, and exponents, by TABLEs on the int8 tensor."""
    divisors = base.values - zero_point
    magnitudes = np.maximum(np.abs(divisors), 1)
    exponents = np.floor(np.log2(magnitudes))
    mantissas = np.minimum(np.rint(np.exp2(15 + exponents) / magnitudes), Q15_MAX) * np.where(divisors < 0, -1, 1)
    shifts = np.where(divisors == 0, 0, np.clip(exponents + bias, 0, 31)).astype(np.int64)
    shift = FixedPoint(cx.b, cx.b.table(base.base, shifts), int(shifts.min()), int(shifts.max()))
    return _apply_to_base(cx, base, mantissas), shift.to_int32()


def _compute_mantissas(y: FixedPoint, bias: int) -> tuple[FixedPoint, FixedPoint]:
    """As ``_tabulate_mantissas``, for an INT32 divisor whose magnitude is at most 2**15, by normalization.

    With z leading zeros of abs(y), y << (z - 2) is m * 2**29 with 1 <= abs(m) < 2. The exponent is 31 - z. A SUB in
    front of the RESCALE to int16 makes the RESCALE round the index down. The SUB also saves cycles: on U85, a SUB with
    a fused RESCALE takes half the cycles of a RESCALE alone.
    """
    zeros = (y if y.low >= 0 else abs(y)).leading_zeros()
    normalized = y.shift_left(zeros - 2, 1 << 30)
    index = (normalized - (1 << 14)).rescale(I16, 2.0**-15, saturate=True)
    points = TABLE_INPUTS + 0.5
    entries = np.where(np.abs(points) > (1 << 14) - 1, (1 << 29) / points, 0.0).clip(-Q15_MAX, Q15_MAX)
    entries[255:257] = Q15_MAX  # the mantissa of 1 / 0
    mantissa = index.apply_table(entries, 1.0)
    shift = zeros.full_like(31 + bias) - zeros
    # The bound (32 - zeros) * bias is 0 for y = 0, which has 32 leading zeros. For abs(y) = 1, the bound and the shift
    # are both ``bias``. For a larger abs(y), the bound is at least as large as the shift.
    if y.low <= 0 <= y.high and bias > 0:
        shift = shift.minimum((zeros.full_like(32) - zeros).mul(bias).with_scale(1.0))
    shift = shift.maximum(0) if shift.low < 0 else shift
    return mantissa, shift.minimum(31) if shift.high > 31 else shift


# -- INT16 results ----------------------------------------------------------------------------------------------------


def _divide_precisely(division: _Division) -> Value:
    """x * sign(y) * (2**30 / abs(y)) in integers. The reciprocal is accurate to 14 bits, 16 for an int16 result.

    If y is 0, the product is 0, because sign(0) = 0. Then sign(x) * 2**29 is added, so that the result saturates. For
    this, all products are shifted right so far that 2**29 exceeds the result's range.
    """
    cx = division.cx
    dividend, divisor = division.x.to_int32().with_scale(1.0), _to_int32(division.y)
    magnitude = divisor if divisor.low >= 0 else abs(divisor)
    may_be_zero = not division.smallest_divisor
    # The smallest integer quotient at which the result saturates, and the largest quotient that can occur.
    span = cx.q.dtype.range[1] - cx.q.dtype.range[0]
    saturating_quotient = math.ceil(2 * span / division.scale_ratio)
    peak_quotient = dividend.peak // max(division.smallest_divisor, 1) + 1
    bits = min(max(saturating_quotient * may_be_zero, peak_quotient).bit_length() + 1, 62)
    # If the quotient would be too coarse, clip dividends whose quotient saturates, so that fewer bits are dropped.
    if division.scale_ratio * 2.0 ** (bits - 30) > 1 / 8 and saturating_quotient < peak_quotient:
        bits, peak_quotient = saturating_quotient.bit_length() + 1, saturating_quotient
        dividend = dividend.minimum(magnitude.mul(saturating_quotient).with_scale(1.0)).maximum(
            magnitude.mul(-saturating_quotient).with_scale(1.0)
        )
    peak = min(max(saturating_quotient, peak_quotient) << 30 >> bits, 1 << 29) + (1 << 17)
    reciprocal = _precise_reciprocal(division, magnitude)
    if divisor.low < 1:
        reciprocal = (divisor.sign() * reciprocal).with_scale(reciprocal.scale)
    quotient = dividend.mul(reciprocal, bits, peak)
    if may_be_zero:
        signs = division.x.to_int32().sign().with_scale(1.0)
        saturation = (magnitude.maximum(1) - magnitude).assume_range(0, 1).mul(1 << 29).with_scale(1.0) * signs
        quotient = quotient + saturation.with_scale(quotient.scale)
    # At most 62 bits can be dropped. If that is too few, all finite quotients round to 0.
    scale = max(division.scale_ratio, 4 * span * 2.0**-bits * may_be_zero) * 2.0 ** (bits - 30)
    return division.requantize(quotient, scale)


def _precise_reciprocal(division: _Division, magnitude: FixedPoint) -> FixedPoint:
    """r = 2**30 / v, v = max(magnitude, 1). One Newton step for an int16 result: r + r * (1 - v * r / 2**30)."""
    v = magnitude.maximum(1) if magnitude.low < 1 else magnitude
    if division.cx.q.dtype is not I16:
        return fixed_point.reciprocal(v)
    table = _reciprocal_table(division.y, division.y.low) if division.y.low > 0 else None
    if table is not None and 2.0**-30 <= table.scale <= 2.0**-16:
        inverse, error = table.to_int32_with_fraction_bits(round(math.log2(table.scale)) + 30), 1 << 22
    else:
        inverse, error = fixed_point.reciprocal(v), 1 << 17
    product = inverse.mul(v, peak=(1 << 30) + error).assume_range(0, (1 << 30) + error).with_scale(inverse.scale)
    residual = inverse.full_like(1 << 30) - product
    return inverse + inverse.mul(residual.assume_range(-error, error), 30).with_scale(inverse.scale)
