"""Integer rules of rounding functions on int16: floor, ceil, trunc, round, and division by a constant.

These functions have jumps. An int16 TABLE has an entry every 128 values and would interpolate across a jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from arm_backend_core.dtype import DType
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import Rule
from arm_backend_core.tosa.graph import Value


@dataclass(frozen=True, eq=False)
class FixedPointQuotient:
    """The quotient x / divisor in fixed point: value * 2**-fraction_bits * step.

    Attributes:
        value: INT32.
        fraction_bits: number of fractional bits, at most 28.
        step: 1; a larger power of two if x / divisor can reach 2**29, so that ``value`` fits INT32.
    """

    value: FixedPoint
    fraction_bits: int
    step: float

    @classmethod
    def from_division(cls, x: FixedPoint, divisor: float = 1.0) -> FixedPointQuotient:
        """Divide x by ``divisor`` > 0, with as many fractional bits as RESCALE allows."""
        bits = min(29 - math.frexp(x.max_abs / divisor)[1], 28)
        value = x.rescale(DType.INT32, x.scale / divisor * 2.0**bits)
        return cls(value.with_scale(1.0), max(bits, 0), 2.0 ** max(-bits, 0))

    def floor(self, offset: FixedPoint | int = 0) -> FixedPoint:
        """x / divisor + offset * 2**-fraction_bits, rounded down.

        RESCALE rounds half up, so half of 2**fraction_bits is subtracted first.
        """
        return self._nearest(self.value + offset - (1 << self.fraction_bits >> 1))

    def ceil(self) -> FixedPoint:
        """x / divisor rounded up."""
        return self.floor((1 << self.fraction_bits) - 1)

    def trunc(self) -> FixedPoint:
        """x / divisor rounded towards zero: negative numbers up, positive numbers down."""
        negative = self.value.minimum(0).maximum(-1)
        return self.floor(negative.mul(1 - (1 << self.fraction_bits)).with_scale(1.0))

    def round(self) -> FixedPoint:
        """x / divisor rounded half to even: RESCALE rounds half up, and 1 is subtracted if this rounds a tie to odd."""
        rounded_half_up = self._nearest(self.value)
        is_odd = (rounded_half_up.rescale(DType.INT32, 0.5).refine_scale(2) - rounded_half_up).assume_range(0, 1)
        minus_one_at_tie = (
            (self.remainder(rounded_half_up) + ((1 << self.fraction_bits >> 1) - 1)).maximum(-1).minimum(0)
        )
        return rounded_half_up + minus_one_at_tie * is_odd

    def remainder(self, quotient: FixedPoint) -> FixedPoint:
        """x / divisor - quotient, with ``fraction_bits`` fractional bits."""
        one = 1 << self.fraction_bits
        return (self.value - quotient.mul(one).with_scale(1.0)).assume_range(-one, one)

    def _nearest(self, value: FixedPoint) -> FixedPoint:
        return value.rescale(DType.INT32, 2.0**-self.fraction_bits).with_scale(1.0)


def rounding_rule(method: Callable[[FixedPointQuotient], FixedPoint]) -> Rule:
    """Build the integer rule of a function that rounds to multiples of 10**-decimals by ``method``."""

    def rule(cx: Context, x: Operand, *, decimals: int = 0) -> Value:
        fixed = FixedPointQuotient.from_division(cx.to_fixed_point(x), 10.0**-decimals)
        return method(fixed).with_scale(fixed.step * 10.0**-decimals).requantize(cx.q)

    return rule


def divide_by_constant(
    cx: Context,
    x: Operand,
    y: float,
    method: Callable[[FixedPointQuotient], FixedPoint],
    *,
    return_remainder: bool = False,
) -> Value:
    """x / y rounded by ``method``; with ``return_remainder``, the remainder of this division instead.

    ``method`` rounds x / abs(y). If y is negative, the rounded quotient is then negated.
    """
    dividend, divisor = cx.to_fixed_point(x), abs(y)
    if return_remainder:  # all divisors above this limit give the same result after saturation
        divisor = min(divisor, 2 * (dividend.max_abs + cx.q.max_abs))
    fixed = FixedPointQuotient.from_division(dividend, divisor)
    result = method(fixed)
    if return_remainder:
        return fixed.remainder(result).with_scale(fixed.step * divisor * 2.0**-fixed.fraction_bits).requantize(cx.q)
    return (result if y > 0 else result.full_like(0) - result).with_scale(fixed.step).requantize(cx.q)
