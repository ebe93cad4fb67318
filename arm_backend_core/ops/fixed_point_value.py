"""Fixed-point arithmetic with interval tracking: an expression that could overflow raises at compile time.

``FixedPoint`` wraps a TOSA value together with its scale, its zero point and the interval of its integers. Each
method computes an interval that contains its result, in Python integers. ``requantize`` converts integers to the
result's quantization parameters with one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder, quantize_multipliers
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]
#: RESCALE by a factor below 2 accepts all values whose magnitude is below this bound.
RESCALE_SAFE_LIMIT = 1 << 29
#: The largest int16. It represents 1.0 in an int16 TABLE.
Q15_MAX = (1 << 15) - 1


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """A symbolic integer tensor with its scale and the interval of its elements. Methods emit TOSA operators.

    The real numbers are (value - zero_point) * scale. Every element satisfies low <= value - zero_point <= high.
    Arithmetic methods also take a Python integer. It counts steps of ``scale``, or is the factor of a product.

    Attributes:
        b: builder that receives the operators.
        value: the TOSA value.
        low: the smallest value - zero_point.
        high: the largest value - zero_point.
        scale: the real number that one integer step represents.
        zero_point: the integer that represents 0.

    Raises:
        OverflowError: from each method that returns a ``FixedPoint``, if the result could exceed its element type. This
            is a bug of the caller.
    """

    b: Builder
    value: Value
    low: int
    high: int
    scale: float = 1.0
    zero_point: int = 0

    def __post_init__(self) -> None:
        low, high = self.value.dtype.range
        if self.low + self.zero_point < low or self.high + self.zero_point > high:
            kind = self.value.producer.kind if self.value.producer is not None else "a constant"
            raise OverflowError(f"{kind} gives [{self.low}, {self.high}], which exceeds {self.value.dtype.value}")

    @classmethod
    def from_value(cls, b: Builder, value: Value, q: QParams) -> FixedPoint:
        """Wrap a tensor with per-tensor parameters ``q``. The interval of a constant spans its elements."""
        low, high = (q.qmin, q.qmax) if q.dtype is DType.INT32 else value.dtype.range
        if value.data is not None and value.data.size:
            low, high = int(value.data.min()), int(value.data.max())
        return cls(b, value, low - q.zero_point, high - q.zero_point, float(q.scale), q.zero_point)

    @classmethod
    def const(cls, b: Builder, numbers: Array | int, dtype: DType = DType.INT32, scale: float = 1.0) -> FixedPoint:
        """Make a constant from integers.

        Raises:
            OverflowError: a number exceeds ``dtype``.
        """
        numbers = np.asarray(numbers)
        low, high = int(numbers.min()), int(numbers.max())
        if low < dtype.range[0] or high > dtype.range[1]:
            raise OverflowError(f"a constant has values in [{low}, {high}], which exceeds {dtype.value}")
        return cls(b, b.const(numbers, dtype), low, high, scale)

    # -- properties and views ------------------------------------------------------------------------------------

    @property
    def dtype(self) -> DType:
        """Element type of the value."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the value."""
        return self.value.shape

    @property
    def peak(self) -> int:
        """The largest magnitude in integer steps, at least 1."""
        return max(abs(self.low), abs(self.high), 1)

    @property
    def max_abs(self) -> float:
        """The largest magnitude as a real number."""
        return self.peak * self.scale

    def assume_range(self, low: int, high: int) -> FixedPoint:
        """Tighten the interval to one that the caller guarantees and interval arithmetic cannot derive."""
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def with_scale(self, scale: float) -> FixedPoint:
        """Reinterpret the same integers at another scale. The real numbers change; emits nothing."""
        return replace(self, scale=scale)

    def sub_zero_point(self, zero_point: int) -> FixedPoint:
        """Subtract ``zero_point`` from the integers. Emits nothing: the RESCALE that reads the value subtracts it."""
        low, high = self.low - zero_point, self.high - zero_point
        return replace(self, low=low, high=high, zero_point=self.zero_point + zero_point)

    def reshape(self, shape: Sequence[int]) -> FixedPoint:
        """Reshape to ``shape``."""
        return replace(self, value=self.b.reshape(self.value, shape))

    def full_like(self, number: int) -> FixedPoint:
        """Make a one-element constant of the same rank, type and scale, which broadcasts against this value."""
        return FixedPoint.const(self.b, np.full((1,) * self.value.rank, number), self.dtype, self.scale)

    def to_int16(self) -> FixedPoint:
        """Convert int8 to int16 with zero point 0, at the same scale. Int16 is returned as it is."""
        return self if self.dtype is DType.INT16 else self.to_int16_at(self.scale)

    def to_int16_at(self, scale: float) -> FixedPoint:
        """Convert int8 to int16 with zero point 0 at ``scale``; a constant is converted at compile time and saturates.

        A computed int16 operand is returned as it is; ``scale`` must be its scale.
        """
        if self.value.data is not None:
            integers = np.clip(self._constant_integers_at(scale), *DType.INT16.range)
            return FixedPoint.const(self.b, integers, DType.INT16, scale)
        return self if self.dtype is DType.INT16 else self.rescale(DType.INT16, self.scale / scale)

    def to_int32(self) -> FixedPoint:
        """Convert to INT32 with zero point 0, at the same scale."""
        return self if self.dtype is DType.INT32 else self.to_int32_at(self.scale)

    def to_int32_at(self, scale: float) -> FixedPoint:
        """Convert to INT32 with zero point 0 at ``scale``.

        An int8 or int16 constant of several elements is converted by a RESCALE, which an NPU fuses into its user (see
        ``tosa/passes/constant_folding.py``). Other constants are converted at compile time.
        """
        if self.value.data is not None and (self.dtype is DType.INT32 or self.value.size == 1):
            return FixedPoint.const(self.b, self._constant_integers_at(scale), DType.INT32, scale)
        return self.rescale(DType.INT32, self.scale / scale).with_scale(scale)

    def _constant_integers_at(self, scale: float) -> Array:
        """The elements of a constant as integers with zero point 0 at ``scale``."""
        assert self.value.data is not None
        return np.rint((self.value.data.astype(np.float64) - self.zero_point) * (self.scale / scale)).astype(np.int64)

    # -- arithmetic, INT32 ---------------------------------------------------------------------------------------

    def _operand(self, x: FixedPoint | int) -> FixedPoint:
        x = x if isinstance(x, FixedPoint) else self.full_like(x)
        assert self.zero_point == x.zero_point == 0, "arithmetic needs operands without a zero point"
        return x

    def _emit_same_scale(
        self, x: FixedPoint | int, emit: Callable[[Value, Value], Value], ends: tuple[int, int]
    ) -> FixedPoint:
        x = self._operand(x)
        assert math.isclose(self.scale, x.scale, rel_tol=1e-6), (self.scale, x.scale)
        return FixedPoint(self.b, emit(self.value, x.value), ends[0], ends[1], self.scale)

    def __add__(self, x: FixedPoint | int) -> FixedPoint:
        return self.add(x)

    def add(self, x: FixedPoint | int, peak: int | None = None) -> FixedPoint:
        """The sum self + x; both operands must have the same scale. For ``peak`` see ``mul``."""
        low, high = _interval(x)
        return self._emit_same_scale(x, self.b.add, _limit_interval((self.low + low, self.high + high), peak))

    def __sub__(self, x: FixedPoint | int) -> FixedPoint:
        low, high = _interval(x)
        return self._emit_same_scale(x, self.b.sub, (self.low - high, self.high - low))

    def __mul__(self, x: FixedPoint | int) -> FixedPoint:
        return self.mul(x)

    def mul(self, x: FixedPoint | int, shift: int = 0, peak: int | None = None) -> FixedPoint:
        """The product self * x. Its integers are shifted right by ``shift`` and rounded half up.

        The scale of the result is multiplied by 2**shift, so that the real numbers stay the same up to rounding.
        MUL computes the product in 64 bits before it shifts. A Python integer ``x`` multiplies integers and
        real numbers; ``refine_scale`` multiplies the integers and keeps the real numbers.

        Args:
            x: the other factor.
            shift: number of low bits to round off.
            peak: bound of the result's magnitude, if the caller knows a tighter one than interval arithmetic.
        """
        scale = self.scale * x.scale if isinstance(x, FixedPoint) else self.scale
        ends = [a * b for a in (self.low, self.high) for b in _interval(x)]
        smallest = 0 if x is self else min(ends)
        low, high = _limit_interval((_round_shift_right(end, shift) for end in (smallest, max(ends))), peak)
        return FixedPoint(self.b, self.b.mul(self.value, self._operand(x).value, shift), low, high, scale * 2.0**shift)

    def maximum(self, x: FixedPoint | int) -> FixedPoint:
        """Elementwise maximum; both operands must have the same scale."""
        low, high = _interval(x)
        return self._emit_same_scale(x, self.b.maximum, (max(self.low, low), max(self.high, high)))

    def minimum(self, x: FixedPoint | int) -> FixedPoint:
        """Elementwise minimum; both operands must have the same scale."""
        low, high = _interval(x)
        return self._emit_same_scale(x, self.b.minimum, (min(self.low, low), min(self.high, high)))

    def __abs__(self) -> FixedPoint:
        low = 0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))
        return FixedPoint(self.b, self.b.unary("ABS", self.value), low, max(abs(self.low), abs(self.high)), self.scale)

    def sign(self) -> FixedPoint:
        """Signs as INT32 integers -1, 0 or 1; the scale is kept."""
        return self.to_int32().maximum(-1).minimum(1)

    def sum(self, axis: int, peak: int | None = None) -> FixedPoint:
        """Sum along one axis, which keeps size 1; for ``peak`` see ``mul``."""
        low, high = _limit_interval((self.shape[axis] * end for end in (self.low, self.high)), peak)
        return FixedPoint(self.b, self.b.reduce("REDUCE_SUM", self.value, axis), low, high, self.scale)

    # -- bits ----------------------------------------------------------------------------------------------------

    def leading_zeros(self) -> FixedPoint:
        """CLZ (count leading zeros) of non-negative integers."""
        assert self.low >= 0, "CLZ needs non-negative integers"
        ends = (32 - self.high.bit_length(), 32 - self.low.bit_length())
        return FixedPoint(self.b, self.b.unary("CLZ", self.value), *ends)

    def shift_left(self, bits: FixedPoint, peak: int | None = None) -> FixedPoint:
        """value << bits at the same scale; for ``peak`` see ``mul``."""
        low, high = _limit_interval((min(self.low, 0) << bits.high, max(self.high, 0) << bits.high), peak)
        value = self.b.logical_left_shift(self.value, self._operand(bits).value)
        return FixedPoint(self.b, value, low, high, self.scale)

    def shift_right(self, bits: FixedPoint) -> FixedPoint:
        """value >> bits at the same scale, rounded half up, 0 <= bits < 32."""
        assert 0 <= bits.low <= bits.high < 32
        low = min(_round_shift_right(self.low, shift) for shift in (bits.low, bits.high))
        high = max(_round_shift_right(self.high, shift) for shift in (bits.low, bits.high))
        value = self.b.arithmetic_right_shift(self.value, self._operand(bits).value, round=True)
        return FixedPoint(self.b, value, low, high, self.scale)

    def add_fraction_bits(self, bits: int) -> FixedPoint:
        """Shift the integers left and divide the scale by 2**bits. The real numbers stay the same."""
        return self.shift_left(self.full_like(bits)).with_scale(self.scale * 2.0**-bits)

    def drop_fraction_bits(self, bits: int) -> FixedPoint:
        """Shift the integers right and multiply the scale by 2**bits. The real numbers stay the same up to rounding."""
        return self.shift_right(self.full_like(bits)).with_scale(self.scale * 2.0**bits)

    # -- scale ---------------------------------------------------------------------------------------------------

    def refine_scale(self, factor: int) -> FixedPoint:
        """Multiply the integers by ``factor`` > 0 and divide the scale by it. The real numbers stay the same."""
        return self.mul(factor).with_scale(self.scale / factor)

    def rescale(self, dtype: DType, factor: float, *, saturate: bool = False) -> FixedPoint:
        """RESCALE to the integers round((value - zero_point) * factor), at the scale divided by ``factor``.

        The real numbers stay the same, except for the rounding.

        Args:
            dtype: the result's element type.
            factor: the ratio of the old scale to the new one.
            saturate: whether results beyond the range of ``dtype`` saturate; otherwise they raise OverflowError.
        """
        span = dtype.range[1] - dtype.range[0]
        x = self._saturate_for_rescale(factor, span) if saturate else self
        low, high = x._rescaled_interval(factor)
        if saturate:
            low, high = max(low, dtype.range[0]), min(high, dtype.range[1])
        value = x.b.rescale(x.value, dtype, factor, x.zero_point)
        return FixedPoint(x.b, value, low, high, x.scale / factor if factor else x.scale)

    def to_int32_with_fraction_bits(self, bits: int) -> FixedPoint:
        """Convert int8 or int16 to INT32 with ``bits`` more fraction bits.

        If ``bits`` is negative, the lowest -``bits`` bits are rounded off. Otherwise, the real numbers stay the same,
        and a MUL converts in one NPU operation. A RESCALE would take two.
        """
        if bits < 0:
            return self.rescale(DType.INT32, 2.0**bits)
        return self.refine_scale(1 << bits)

    def requantize(self, out: QParams) -> Value:
        """Convert to quantization parameters ``out`` with one rounding and saturation.

        Raises:
            Unsupported: under the conditions of the function ``requantize``.
        """
        return requantize(self.b, self.value, float(self.peak), np.array([self.scale]), out, self.zero_point)

    def _saturate_for_rescale(self, factor: float, span: int) -> FixedPoint:
        """Clip inputs whose results saturate, if RESCALE needs it. ``span`` is the width of the output range."""
        if self.peak <= _rescale_input_limit(np.array([factor]))[0]:
            return self
        bound = math.ceil(2 * span / factor)
        return self.maximum(-bound).minimum(bound)

    def _rescaled_interval(self, factor: float) -> tuple[int, int]:
        """Interval after RESCALE. Raises OverflowError if a value may exceed RESCALE's input limit."""
        limit = _rescale_input_limit(np.array([factor]))[0]
        if not -(limit + 1) <= self.low <= self.high <= limit:
            raise OverflowError(f"RESCALE by {factor:g} does not accept inputs in [{self.low}, {self.high}]")
        multiplier, shift = (int(x[0]) for x in quantize_multipliers(np.array([factor]), 32))
        low, high = (_round_shift_right(end * multiplier, shift) for end in (self.low, self.high))
        return low, high

    # -- tables --------------------------------------------------------------------------------------------------

    def apply_table(self, values: Array, scale: float) -> FixedPoint:
        """Apply a function from int16 to int16 by a TABLE with 513 entries and linear interpolation.

        On Ethos-U55, a TABLE and the RESCALE that follows it are one operation. If other operators also read the
        INT32 result of the TABLE, it takes six operations.

        Args:
            values: the function's values at the table's inputs, divided by ``scale``.
            scale: the scale of the result.
        """
        entries = np.clip(np.rint(values), -Q15_MAX - 1, Q15_MAX)
        y = self.b.rescale(self.b.table(self.value, entries), DType.INT16, 1 / 128)
        return FixedPoint(self.b, y, int(entries.min()), int(entries.max()), scale)


def _rescale_input_limit(factors: Array) -> Array:
    """The largest input of RESCALE for each factor; the smallest is -(limit + 1) (REQUIRE in apply_scale_32)."""
    _, shifts = quantize_multipliers(factors, 32)
    return (np.int64(1) << (shifts.astype(np.int64) - 1)) - 1


def _interval(x: FixedPoint | int) -> tuple[int, int]:
    return (x.low, x.high) if isinstance(x, FixedPoint) else (x, x)


def _limit_interval(ends: Iterable[int], peak: int | None) -> tuple[int, int]:
    """Limit the ends of an interval to magnitudes of at most ``peak``; None for no limit."""
    low, high = ends if peak is None else (min(max(end, -peak), peak) for end in ends)
    return low, high


def _round_shift_right(x: int, shift: int) -> int:
    return (x + (1 << shift - 1)) >> shift if shift else x


def requantize(b: Builder, x: Value, peaks: Array | float, scales: Array, out: QParams, zero_point: int = 0) -> Value:
    """Convert (x - zero_point) * scales to quantization parameters ``out`` with one rounding and saturation.

    If one step of x exceeds the whole range of ``out``, any nonzero x saturates. The rescale factor is therefore capped
    at twice the number of steps in that range, which gives the same result. If x can exceed the input limit of RESCALE,
    it is first clipped to values that still saturate.

    Args:
        b: builder that receives the operators.
        x: the integers.
        peaks: upper bound of abs(x - zero_point), one number or an array of the shape of ``scales``.
        scales: scale of x, [1] or one for each channel (the last dimension).
        out: the result's parameters.
        zero_point: zero point of x.

    Raises:
        Unsupported: x is INT48, and x * scales / out.scale may exceed int32, the range of RESCALE's result before
            saturation. INT48 cannot be clipped before, because TOSA has no other operator on it.
    """
    span = out.dtype.range[1] - out.dtype.range[0]
    factors = np.minimum(scales / np.asarray(out.scale, dtype=np.float64), 2.0 * span)
    if x.dtype is DType.INT48 and float((peaks * factors).max()) >= 1 << 31:
        raise Unsupported(
            "its accumulator can exceed the calibrated range of its result "
            f"{float((peaks * factors).max()) / span:.0e} times, more than RESCALE can saturate; "
            "calibrate with samples in which the result is not constant"
        )
    if x.dtype is not DType.INT48 and np.any(peaks > _rescale_input_limit(factors) + 1):
        bounds = np.minimum(np.ceil(2 * span / np.maximum(factors, 2.0**-20)), 2.0**31 - 1)
        shape = (*(1,) * (x.rank - 1), bounds.size)[: x.rank]
        if x.dtype is not DType.INT32:
            x, zero_point = b.rescale(x, DType.INT32, 1.0, zero_point), 0
        x = b.minimum(b.maximum(x, b.const(-bounds.reshape(shape), x.dtype)), b.const(bounds.reshape(shape), x.dtype))
    y = b.rescale(x, out.dtype, factors, zero_point, out.zero_point)
    return y if (out.qmin, out.qmax) == out.dtype.range else b.clamp(y, out.qmin, out.qmax)
