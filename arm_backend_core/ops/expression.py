"""Floating-point formulas, written as they are in a book."""

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
    """A floating-point value with arithmetic; Python numbers mix in.

    Attributes:
        b: where the operators are appended.
        value: FP32, FP16 or BF16; BOOL is what comparisons give.
        result: the type that the formula's result is rounded to, where that is narrower than ``value``'s.
    """

    b: Builder
    value: Value
    result: DType | None = None

    def _of(self, x: FloatExpr | float) -> Value:
        return x.value if isinstance(x, FloatExpr) else self.b.const(np.full((), x), self.value.dtype)

    def _new(self, value: Value) -> FloatExpr:
        return FloatExpr(self.b, value)

    def __add__(self, x: FloatExpr | float) -> FloatExpr:
        return self._new(self.b.add(self.value, self._of(x)))

    __radd__ = __add__

    def __sub__(self, x: FloatExpr | float) -> FloatExpr:
        return self._new(self.b.sub(self.value, self._of(x)))

    def __rsub__(self, x: float) -> FloatExpr:
        return self._new(self.b.sub(self._of(x), self.value))

    def __mul__(self, x: FloatExpr | float) -> FloatExpr:
        return self._new(self.b.mul(self.value, self._of(x)))

    __rmul__ = __mul__

    def __truediv__(self, x: FloatExpr | float) -> FloatExpr:
        return self * (x.unary("RECIPROCAL") if isinstance(x, FloatExpr) else 1.0 / x)

    def __rtruediv__(self, x: float) -> FloatExpr:
        return self.unary("RECIPROCAL") * x if x != 1 else self.unary("RECIPROCAL")

    def __neg__(self) -> FloatExpr:
        return self._new(self.b.negate(self.value))

    def __abs__(self) -> FloatExpr:
        return self.unary("ABS")

    def __pow__(self, x: FloatExpr | float) -> FloatExpr:
        """exp(y * ln(abs(x))) with its sign, 1e-5 of the result at most (exponents are below 89).

        TOSA's POW is defined for finite, positive bases alone. The powers of -0.0 and of negative bases follow C's pow.
        """
        y = x if isinstance(x, FloatExpr) else self.like(x)
        base = abs(self)
        magnitude = base.equal(1.0).where(1.0, y.equal(0.0).where(1.0, (y * base.unary("LOG")).unary("EXP")))
        half = y * 0.5
        whole, even = y.unary("FLOOR").equal(y), half.unary("FLOOR").equal(half)
        limit = base.equal(0.0).where(magnitude, base.equal(math.inf).where(magnitude, math.nan))
        below = whole.where(even.where(magnitude, -magnitude), limit)
        negative = self.minimum(1 / self).less(0.0)  # minus zero too
        return negative.where(below, magnitude)

    def __rpow__(self, x: float) -> FloatExpr:
        return (self * math.log(x)).unary("EXP") if x > 0 and x != 1 else self.like(x) ** self

    def unary(self, kind: str) -> FloatExpr:
        """A TOSA operator of one operand, for example "EXP"."""
        return self._new(self.b.unary(kind, self.value))

    def sqrt(self) -> FloatExpr:
        """The reciprocal of RSQRT, all that TOSA has; right at 0 and infinity too."""
        return 1 / self.unary("RSQRT")

    def truncated(self) -> FloatExpr:
        """Rounded towards zero."""
        return self.greater(0.0).where(self.unary("FLOOR"), self.unary("CEIL"))

    def polynomial(self, coefficients: Sequence[float]) -> FloatExpr:
        """Sum of the powers of x, each times its coefficient, the constant first (Horner's rule)."""
        *rest, last = coefficients
        total: FloatExpr | float = last
        for coefficient in reversed(rest):
            total = self * total + coefficient
        assert isinstance(total, FloatExpr), "a polynomial has two coefficients at least"
        return total

    def clamp(self, low: float | None, high: float | None) -> FloatExpr:
        """min(max(x, low), high); None is no bound. Integers are clamped too."""
        bounds = -math.inf if low is None else low, math.inf if high is None else high
        dtype = self.value.dtype
        if dtype.is_float:
            return self._new(self.b.clamp(self.value, *bounds))
        lowest, highest = (int(max(dtype.range[0], min(bound, dtype.range[1]))) for bound in bounds)
        return self.maximum(lowest).minimum(highest)  # int32, which CLAMP does not take

    def maximum(self, x: FloatExpr | float) -> FloatExpr:
        """Elementwise."""
        return self._new(self.b.maximum(self.value, self._of(x)))

    def minimum(self, x: FloatExpr | float) -> FloatExpr:
        """Elementwise."""
        return self._new(self.b.minimum(self.value, self._of(x)))

    def _compare(self, kind: str, a: FloatExpr | float, b: FloatExpr | float) -> FloatExpr:
        return self._new(self.b.compare(kind, self._of(a), self._of(b)))

    def greater(self, x: FloatExpr | float) -> FloatExpr:
        """BOOL, for ``where``; not a number compares as false, here and below."""
        return self._compare("GREATER", self, x)

    def less(self, x: FloatExpr | float) -> FloatExpr:
        """BOOL, for ``where``."""
        return self._compare("GREATER", x, self)

    def less_equal(self, x: FloatExpr | float) -> FloatExpr:
        """BOOL, for ``where``."""
        return self._compare("GREATER_EQUAL", x, self)

    def equal(self, x: FloatExpr | float) -> FloatExpr:
        """BOOL, for ``where``."""
        return self._compare("EQUAL", self, x)

    @property
    def largest(self) -> float:
        """Largest finite number of the formula's result."""
        return (self.result or self.value.dtype).largest

    def where(self, a: FloatExpr | float, b: FloatExpr | float) -> FloatExpr:
        """``self`` is BOOL: a where it holds, else b; at least one of them is a Float."""
        like = a if isinstance(a, FloatExpr) else b
        assert isinstance(like, FloatExpr), "numbers alone have no element type: see like()"
        return self._new(self.b.select(self.value, like._of(a), like._of(b)))

    def like(self, number: float) -> FloatExpr:
        """A number in the element type of ``self``."""
        return self._new(self._of(number))
