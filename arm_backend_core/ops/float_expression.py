"""Floating-point expressions: Python operators on ``FloatExpr`` emit TOSA operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value


@dataclass(frozen=True, eq=False)
class FloatExpr:
    """A floating-point value with arithmetic. The other operand may be a Python number.

    Attributes:
        b: builder that appends the operators to the graph.
        value: FP32, FP16 or BF16; BOOL for the result of a comparison. ``clamp`` and comparisons also take integers.
        result_dtype: element type to which the formula's result is rounded, if that is narrower than ``value``'s type.
    """

    b: Builder
    value: Value
    result_dtype: DType | None = None

    def _operand(self, x: FloatExpr | float) -> Value:
        return x.value if isinstance(x, FloatExpr) else self.b.const(np.full((), x), self.value.dtype)

    def _wrap(self, value: Value) -> FloatExpr:
        return FloatExpr(self.b, value)

    def __add__(self, x: FloatExpr | float) -> FloatExpr:
        return self._wrap(self.b.add(self.value, self._operand(x)))

    __radd__ = __add__

    def __sub__(self, x: FloatExpr | float) -> FloatExpr:
        return self._wrap(self.b.sub(self.value, self._operand(x)))

    def __rsub__(self, x: float) -> FloatExpr:
        return self._wrap(self.b.sub(self._operand(x), self.value))

    def __mul__(self, x: FloatExpr | float) -> FloatExpr:
        return self._wrap(self.b.mul(self.value, self._operand(x)))

    __rmul__ = __mul__

    def __truediv__(self, x: FloatExpr | float) -> FloatExpr:
        return self * (x.unary("RECIPROCAL") if isinstance(x, FloatExpr) else 1.0 / x)

    def __rtruediv__(self, x: float) -> FloatExpr:
        return self.unary("RECIPROCAL") * x if x != 1 else self.unary("RECIPROCAL")

    def __neg__(self) -> FloatExpr:
        return self._wrap(self.b.negate(self.value))

    def __abs__(self) -> FloatExpr:
        return self.unary("ABS")

    def __pow__(self, x: FloatExpr | float) -> FloatExpr:
        """self**x as exp(x * ln(abs(self))), with the sign that C's pow returns.

        POW is not used, because TOSA defines it only for finite positive bases. The absolute rounding error of exp's
        argument becomes the relative error of the result. Unless the result overflows, the argument is below 89, so
        this error is at most 1e-5. For -0.0 and negative bases, the result is as in C's pow.
        """
        y = x if isinstance(x, FloatExpr) else self.full_like(x)
        base = abs(self)
        magnitude = base.equal(1.0).where(1.0, y.equal(0.0).where(1.0, (y * base.unary("LOG")).unary("EXP")))
        half = y * 0.5
        is_integer, is_even = y.unary("FLOOR").equal(y), half.unary("FLOOR").equal(half)
        non_integer_power = base.equal(0.0).where(magnitude, base.equal(math.inf).where(magnitude, math.nan))
        negative_base_power = is_integer.where(is_even.where(magnitude, -magnitude), non_integer_power)
        is_negative = self.minimum(1 / self).less(0.0)  # minus zero too
        return is_negative.where(negative_base_power, magnitude)

    def __rpow__(self, x: float) -> FloatExpr:
        return (self * math.log(x)).unary("EXP") if x > 0 and x != 1 else self.full_like(x) ** self

    def unary(self, kind: str) -> FloatExpr:
        """Apply a unary TOSA operator, for example "EXP"."""
        return self._wrap(self.b.unary(kind, self.value))

    def sqrt(self) -> FloatExpr:
        """Square root as 1 / RSQRT(x), as TOSA has no SQRT; correct at 0 and infinity too."""
        return 1 / self.unary("RSQRT")

    def trunc(self) -> FloatExpr:
        """Round towards zero."""
        return self.greater(0.0).where(self.unary("FLOOR"), self.unary("CEIL"))

    def polynomial(self, coefficients: Sequence[float]) -> FloatExpr:
        """c[0] + c[1] * x + c[2] * x**2 + ... by Horner's rule."""
        *rest, last = coefficients
        total: FloatExpr | float = last
        for coefficient in reversed(rest):
            total = self * total + coefficient
        assert isinstance(total, FloatExpr), "a polynomial needs at least two coefficients"
        return total

    def clamp(self, low: float | None, high: float | None) -> FloatExpr:
        """min(max(x, low), high); None means no bound. Integers are supported too."""
        bounds = -math.inf if low is None else low, math.inf if high is None else high
        dtype = self.value.dtype
        if dtype.is_float:
            return self._wrap(self.b.clamp(self.value, *bounds))
        lowest, highest = (int(max(dtype.range[0], min(bound, dtype.range[1]))) for bound in bounds)
        return self.maximum(lowest).minimum(highest)  # CLAMP does not accept INT32

    def maximum(self, x: FloatExpr | float) -> FloatExpr:
        """Elementwise maximum."""
        return self._wrap(self.b.maximum(self.value, self._operand(x)))

    def minimum(self, x: FloatExpr | float) -> FloatExpr:
        """Elementwise minimum."""
        return self._wrap(self.b.minimum(self.value, self._operand(x)))

    def _compare(self, kind: str, a: FloatExpr | float, b: FloatExpr | float) -> FloatExpr:
        return self._wrap(self.b.compare(kind, self._operand(a), self._operand(b)))

    def greater(self, x: FloatExpr | float) -> FloatExpr:
        """self > x as BOOL, for ``where``. Every comparison with NaN is false."""
        return self._compare("GREATER", self, x)

    def less(self, x: FloatExpr | float) -> FloatExpr:
        """self < x as BOOL, for ``where``."""
        return self._compare("GREATER", x, self)

    def less_equal(self, x: FloatExpr | float) -> FloatExpr:
        """self <= x as BOOL, for ``where``."""
        return self._compare("GREATER_EQUAL", x, self)

    def equal(self, x: FloatExpr | float) -> FloatExpr:
        """self == x as BOOL, for ``where``."""
        return self._compare("EQUAL", self, x)

    @property
    def max_finite(self) -> float:
        """Largest finite number of ``result_dtype`` if that is set, else of the type of ``value``."""
        return (self.result_dtype or self.value.dtype).max_finite

    def where(self, a: FloatExpr | float, b: FloatExpr | float) -> FloatExpr:
        """Select elementwise: a if ``self`` (BOOL) is true, else b; at least one of them must be a FloatExpr."""
        like = a if isinstance(a, FloatExpr) else b
        assert isinstance(like, FloatExpr), "two Python numbers have no element type: use full_like()"
        return self._wrap(self.b.select(self.value, like._operand(a), like._operand(b)))

    def full_like(self, number: float) -> FloatExpr:
        """A scalar constant in the element type of ``self``."""
        return self._wrap(self._operand(number))
