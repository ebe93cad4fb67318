"""Whole numbers of int16: where a function jumps, a TABLE draws a line over 128 steps of its operand."""

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
    """x / unit as INT32 ``value`` of 2**-bits of ``step``, which is 1 unless x / unit reaches 2**29."""

    value: FixedPoint
    fraction_bits: int
    step: float

    @classmethod
    def of(cls, x: FixedPoint, unit: float = 1.0) -> FixedPointQuotient:
        """x / unit, unit > 0, as finely as RESCALE takes it."""
        bits = min(29 - math.frexp(x.real_peak / unit)[1], 28)
        value = x.rescale(DType.INT32, x.scale / unit * 2.0**bits)
        return cls(value.with_scale(1.0), max(bits, 0), 2.0 ** max(-bits, 0))

    def floor(self, more: FixedPoint | int = 0) -> FixedPoint:
        """Rounded down after ``more`` value are added: RESCALE rounds halves up."""
        return self._nearest(self.value + more - (1 << self.fraction_bits >> 1))

    def ceil(self) -> FixedPoint:
        """Rounded up."""
        return self.floor((1 << self.fraction_bits) - 1)

    def trunc(self) -> FixedPoint:
        """Rounded towards zero: negative numbers up, others down."""
        negative = self.value.minimum(0).maximum(-1)
        return self.floor(negative.mul(1 - (1 << self.fraction_bits)).with_scale(1.0))

    def round(self) -> FixedPoint:
        """To the nearest, of two the even one: RESCALE gives the upper, of which 1 is taken if it is odd."""
        upper = self._nearest(self.value)
        odd = (upper.rescale(DType.INT32, 0.5).mul(2).with_scale(1.0) - upper).assume_range(0, 1)
        between = (self.remainder(upper) + ((1 << self.fraction_bits >> 1) - 1)).maximum(-1).minimum(0)
        return upper + between * odd

    def remainder(self, whole: FixedPoint) -> FixedPoint:
        """The value that remain beyond ``rounding_rule``."""
        most = 1 << self.fraction_bits
        return (self.value - whole.mul(most).with_scale(1.0)).assume_range(-most, most)

    def _nearest(self, value: FixedPoint) -> FixedPoint:
        return value.rescale(DType.INT32, 2.0**-self.fraction_bits).with_scale(1.0)


def rounding_rule(method: Callable[[FixedPointQuotient], FixedPoint]) -> Rule:
    """The rule of a function that rounds to multiples of 10**-decimals."""

    def rule(cx: Context, x: Tensor, *, decimals: int = 0) -> Value:
        fixed = FixedPointQuotient.of(cx.to_fixed_point(x), 10.0**-decimals)
        return method(fixed).with_scale(fixed.step * 10.0**-decimals).requantize(cx.q)

    return rule


def divide_by_constant(
    cx: Context, x: Tensor, y: float, method: Callable[[FixedPointQuotient], FixedPoint], *, rest: bool = False
) -> Value:
    """x / y, rounded, or what remains of x. Where y is negative, ``method`` rounds -x / y."""
    dividend, unit = cx.to_fixed_point(x), abs(y)
    if rest:  # beside a small x, what the result cannot hold is as much as y
        unit = min(unit, 2 * (dividend.real_peak + cx.q.real_peak))
    fixed = FixedPointQuotient.of(dividend, unit)
    result = method(fixed)
    if rest:
        return fixed.remainder(result).with_scale(fixed.step * unit * 2.0**-fixed.fraction_bits).requantize(cx.q)
    return (result if y > 0 else result.full_like(0) - result).with_scale(fixed.step).requantize(cx.q)
