"""Integer rules of rounding functions on int16: floor, ceil, trunc, round, and division by a constant.

These functions have jumps. An int16 TABLE would interpolate across a jump over 128 steps of its operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from arm_backend_core.dtype import DType
from arm_backend_core.ops.integers import FixedPoint
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Rule
from arm_backend_core.tosa.graph import Value


@dataclass(frozen=True, eq=False)
class FixedPointQuotient:
    """x / unit in fixed point: value * 2**-fraction_bits * step.

    Attributes:
        value: INT32.
        fraction_bits: number of fractional bits, at most 28.
        step: 1, or a larger power of two if x / unit reaches 2**29.
    """

    value: FixedPoint
    fraction_bits: int
    step: float

    @classmethod
    def of(cls, x: FixedPoint, unit: float = 1.0) -> FixedPointQuotient:
        """x / unit, unit > 0, with as many fractional bits as RESCALE allows."""
        bits = min(29 - math.frexp(x.real_peak / unit)[1], 28)
        value = x.rescale(DType.INT32, x.scale / unit * 2.0**bits)
        return cls(value.with_scale(1.0), max(bits, 0), 2.0 ** max(-bits, 0))

    def floor(self, more: FixedPoint | int = 0) -> FixedPoint:
        """x / unit + more * 2**-fraction_bits, rounded down. RESCALE rounds half up, so half a unit is subtracted
        first.
        """
        return self._nearest(self.value + more - (1 << self.fraction_bits >> 1))

    def ceil(self) -> FixedPoint:
        """x / unit rounded up."""
        return self.floor((1 << self.fraction_bits) - 1)

    def trunc(self) -> FixedPoint:
        """x / unit rounded towards zero: negative numbers up, others down."""
        negative = self.value.minimum(0).maximum(-1)
        return self.floor(negative.mul(1 - (1 << self.fraction_bits)).with_scale(1.0))

    def round(self) -> FixedPoint:
        """Round half to even. RESCALE rounds half up; where that gives an odd number at a tie, 1 is subtracted."""
        upper = self._nearest(self.value)
        odd = (upper.rescale(DType.INT32, 0.5).mul(2).with_scale(1.0) - upper).assume_range(0, 1)
        between = (self.remainder(upper) + ((1 << self.fraction_bits >> 1) - 1)).maximum(-1).minimum(0)
        return upper + between * odd

    def remainder(self, quotient: FixedPoint) -> FixedPoint:
        """x / unit - quotient, with ``fraction_bits`` fractional bits."""
        one = 1 << self.fraction_bits
        return (self.value - quotient.mul(one).with_scale(1.0)).assume_range(-one, one)

    def _nearest(self, value: FixedPoint) -> FixedPoint:
        return value.rescale(DType.INT32, 2.0**-self.fraction_bits).with_scale(1.0)


def rounding_rule(method: Callable[[FixedPointQuotient], FixedPoint]) -> Rule:
    """The integer rule of a function that rounds to multiples of 10**-decimals."""

    def rule(cx: Context, x: Tensor, *, decimals: int = 0) -> Value:
        fixed = FixedPointQuotient.of(cx.to_fixed_point(x), 10.0**-decimals)
        return method(fixed).with_scale(fixed.step * 10.0**-decimals).requantize(cx.q)

    return rule


def divide_by_constant(
    cx: Context, x: Tensor, y: float, method: Callable[[FixedPointQuotient], FixedPoint], *, rest: bool = False
) -> Value:
    """x / y rounded by ``method``, or with ``rest`` the remainder of x. If y is negative, ``method`` rounds -x / y."""
    dividend, unit = cx.to_fixed_point(x), abs(y)
    if rest:  # a divisor beyond the range of x and result gives the same remainder as one just beyond it
        unit = min(unit, 2 * (dividend.real_peak + cx.q.real_peak))
    fixed = FixedPointQuotient.of(dividend, unit)
    result = method(fixed)
    if rest:
        return fixed.remainder(result).with_scale(fixed.step * unit * 2.0**-fixed.fraction_bits).requantize(cx.q)
    return (result if y > 0 else result.full_like(0) - result).with_scale(fixed.step).requantize(cx.q)
