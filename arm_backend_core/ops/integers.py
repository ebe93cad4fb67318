"""Integer arithmetic that carries its range: formulas in fixed point that cannot overflow unnoticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder, quantized_multipliers
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]
#: What a value shifted to the left may reach, so that RESCALE takes it.
RESCALE_SAFE_LIMIT = 1 << 29
#: 1.0 of a table of int16 entries; the largest int16.
Q15_MAX = (1 << 15) - 1


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """(value - zero_point) * scale are real numbers; low <= value - zero_point <= high for every element.

    Python integers mix in. Operators compute the interval of their result, in Python's integers.

    Raises:
        OverflowError: from every operator, when its result could leave its type. The rule that is being built is wrong.
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
            raise OverflowError(f"{kind} in [{self.low}, {self.high}] as {self.value.dtype.value}")

    @classmethod
    def of(cls, b: Builder, value: Value, q: QParams) -> FixedPoint:
        """A quantized tensor with one scale; of a constant the interval is what its elements are."""
        low, high = (q.qmin, q.qmax) if q.dtype is DType.INT32 else value.dtype.range
        if value.data is not None and value.data.size:
            low, high = int(value.data.min()), int(value.data.max())
        return cls(b, value, low - q.zero_point, high - q.zero_point, float(q.scale), q.zero_point)

    @classmethod
    def const(cls, b: Builder, numbers: Array | int, dtype: DType = DType.INT32, scale: float = 1.0) -> FixedPoint:
        """Whole numbers known at compile time."""
        numbers = np.asarray(numbers)
        low, high = int(numbers.min()), int(numbers.max())
        if low < dtype.range[0] or high > dtype.range[1]:
            raise OverflowError(f"a constant in [{low}, {high}] as {dtype.value}")
        return cls(b, b.const(numbers, dtype), low, high, scale)

    # -- facts ---------------------------------------------------------------------------------------------------

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
        """The largest magnitude, at least 1."""
        return max(abs(self.low), abs(self.high), 1)

    @property
    def real_peak(self) -> float:
        """The largest magnitude as a real number."""
        return self.peak * self.scale

    def within(self, low: int, high: int) -> FixedPoint:
        """The same, where more is known of its range than arithmetic on intervals tells."""
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def with_scale(self, scale: float) -> FixedPoint:
        """The same integers, standing for other real numbers."""
        return replace(self, scale=scale)

    def sub_zero_point(self, zero_point: int) -> FixedPoint:
        """The integers minus a number, which RESCALE takes away."""
        low, high = self.low - zero_point, self.high - zero_point
        return replace(self, low=low, high=high, zero_point=self.zero_point + zero_point)

    def reshape(self, shape: Sequence[int]) -> FixedPoint:
        """The same elements in another shape."""
        return replace(self, value=self.b.reshape(self.value, shape))

    def like(self, number: int) -> FixedPoint:
        """A constant that broadcasts against this."""
        return FixedPoint.const(self.b, np.full((1,) * self.value.rank, number), self.dtype, self.scale)

    def in_int16(self) -> FixedPoint:
        """int8 or int16 without zero point as int16, in the same steps."""
        if self.dtype is DType.INT16:
            return self
        if self.value.data is not None:
            return FixedPoint.const(self.b, self.value.data.astype(np.int64) - self.zero_point, DType.INT16, self.scale)
        return self.rescale(DType.INT16, 1.0)

    def in_steps(self) -> FixedPoint:
        """INT32 without zero point, in the same steps."""
        if self.dtype is DType.INT32:
            return self
        if self.value.data is not None:
            return _to_int32_scale(self, self.scale)
        return self.rescale(DType.INT32, 1.0)

    # -- arithmetic, INT32 ---------------------------------------------------------------------------------------

    def _of(self, x: FixedPoint | int) -> FixedPoint:
        x = x if isinstance(x, FixedPoint) else self.like(x)
        assert self.zero_point == x.zero_point == 0, "a zero point is taken away before arithmetic"
        return x

    def _like_terms(
        self, x: FixedPoint | int, emit: Callable[[Value, Value], Value], ends: tuple[int, int]
    ) -> FixedPoint:
        x = self._of(x)
        assert math.isclose(self.scale, x.scale, rel_tol=1e-6), (self.scale, x.scale)
        return FixedPoint(self.b, emit(self.value, x.value), ends[0], ends[1], self.scale)

    def __add__(self, x: FixedPoint | int) -> FixedPoint:
        low, high = _interval(x)
        return self._like_terms(x, self.b.add, (self.low + low, self.high + high))

    def __sub__(self, x: FixedPoint | int) -> FixedPoint:
        low, high = _interval(x)
        return self._like_terms(x, self.b.sub, (self.low - high, self.high - low))

    def __mul__(self, x: FixedPoint | int) -> FixedPoint:
        return self.times(x)

    def times(self, x: FixedPoint | int, shift: int = 0, peak: int | None = None) -> FixedPoint:
        """The product, rounded to a multiple of 2**shift; inside MUL it has 64 bits. A number only makes steps smaller.

        Args:
            peak: the largest magnitude, where more is known of it than intervals tell.
        """
        scale = self.scale * x.scale if isinstance(x, FixedPoint) else self.scale / (abs(x) or 1)
        ends = [a * b for a in (self.low, self.high) for b in _interval(x)]
        least = 0 if x is self else min(ends)
        low, high = (_round_shift_right(end, shift) for end in (least, max(ends)))
        if peak is not None:
            low, high = max(low, -peak), min(high, peak)
        return FixedPoint(self.b, self.b.mul(self.value, self._of(x).value, shift), low, high, scale * 2.0**shift)

    def maximum(self, x: FixedPoint | int) -> FixedPoint:
        """Elementwise."""
        low, high = _interval(x)
        return self._like_terms(x, self.b.maximum, (max(self.low, low), max(self.high, high)))

    def minimum(self, x: FixedPoint | int) -> FixedPoint:
        """Elementwise."""
        low, high = _interval(x)
        return self._like_terms(x, self.b.minimum, (min(self.low, low), min(self.high, high)))

    def __abs__(self) -> FixedPoint:
        low = 0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))
        return FixedPoint(self.b, self.b.unary("ABS", self.value), low, max(abs(self.low), abs(self.high)), self.scale)

    def sign(self) -> FixedPoint:
        """-1, 0 or 1, in the same steps; INT32."""
        return self.in_steps().maximum(-1).minimum(1)

    def sum(self, axis: int, peak: int | None = None) -> FixedPoint:
        """Along one axis, which stays with size 1; for ``peak`` see ``times``."""
        ends = (self.shape[axis] * end for end in (self.low, self.high))
        low, high = ends if peak is None else (min(max(end, -peak), peak) for end in ends)
        return FixedPoint(self.b, self.b.reduce("REDUCE_SUM", self.value, axis), low, high, self.scale)

    # -- bits ----------------------------------------------------------------------------------------------------

    def leading_zeros(self) -> FixedPoint:
        """CLZ of integers that are not negative."""
        assert self.low >= 0, "leading zeros of negative numbers"
        ends = (32 - self.high.bit_length(), 32 - self.low.bit_length())
        return FixedPoint(self.b, self.b.unary("CLZ", self.value), *ends)

    def shifted_left(self, bits: FixedPoint | int, peak: int | None = None) -> FixedPoint:
        """value << bits; for ``peak`` see ``times``. Only a number of bits keeps the real numbers: scale / 2**bits."""
        _, most = _interval(bits)
        low, high = (min(self.low, 0) << most, max(self.high, 0) << most)
        if peak is not None:
            low, high = max(low, -peak), min(high, peak)
        scale = self.scale if isinstance(bits, FixedPoint) else self.scale * 2.0**-bits
        return FixedPoint(self.b, self.b.logical_left_shift(self.value, self._of(bits).value), low, high, scale)

    def shifted_right(self, bits: FixedPoint | int) -> FixedPoint:
        """value >> bits, 0 <= bits < 32, rounded half up; for the scale see ``shifted_left``."""
        shifts = _interval(bits)
        assert 0 <= shifts[0] <= shifts[1] < 32
        low, high = (
            min(_round_shift_right(self.low, s) for s in shifts),
            max(_round_shift_right(self.high, s) for s in shifts),
        )
        value = self.b.arithmetic_right_shift(self.value, self._of(bits).value, round=True)
        return FixedPoint(
            self.b, value, low, high, self.scale if isinstance(bits, FixedPoint) else self.scale * 2.0**bits
        )

    # -- scale ---------------------------------------------------------------------------------------------------

    def rescale(self, dtype: DType, factor: float, *, saturate: bool = False) -> FixedPoint:
        """round(value * factor) without zero point: the same real numbers in steps of scale / factor.

        Args:
            saturate: results beyond ``dtype`` become its ends; otherwise they are an error.
        """
        span = dtype.range[1] - dtype.range[0]
        x = self._bounded(factor, span) if saturate else self
        low, high = x._scaled_ends(factor)
        if saturate:
            low, high = max(low, dtype.range[0]), min(high, dtype.range[1])
        value = x.b.rescale(x.value, dtype, factor, x.zero_point)
        return FixedPoint(x.b, value, low, high, x.scale / factor if factor else x.scale)

    def widened(self, power: int) -> FixedPoint:
        """int8 or int16 times 2**power as INT32, by MUL: one operation where a RESCALE is two."""
        if power < 0:
            return self.rescale(DType.INT32, 2.0**power)
        return self.times(1 << power)

    def to(self, out: QParams) -> Value:
        """In parameters ``out``: rounded once and saturated.

        Raises:
            Unsupported: see ``requantize``.
        """
        return requantize(self.b, self.value, float(self.peak), np.array([self.scale]), out, self.zero_point)

    def _bounded(self, factor: float, span: int) -> FixedPoint:
        """Values that saturate ``span`` anyway are made small enough for RESCALE."""
        if self.peak <= _rescale_input_limit(np.array([factor]))[0]:
            return self
        bound = math.ceil(2 * span / factor)
        return self.maximum(-bound).minimum(bound)

    def _scaled_ends(self, factor: float) -> tuple[int, int]:
        """Interval after RESCALE. Raises OverflowError where it may not have such a value."""
        if (
            not -(_rescale_input_limit(np.array([factor]))[0] + 1)
            <= self.low
            <= self.high
            <= _rescale_input_limit(np.array([factor]))[0]
        ):
            raise OverflowError(f"RESCALE of [{self.low}, {self.high}] by {factor:g}")
        multiplier, shift = (int(x[0]) for x in quantized_multipliers(np.array([factor]), 32))
        low, high = (_round_shift_right(end * multiplier, shift) for end in (self.low, self.high))
        return low, high

    # -- tables --------------------------------------------------------------------------------------------------

    def tabulated(self, values: Array, scale: float) -> FixedPoint:
        """int16 -> int16 through a table of 513 points, interpolated; results in steps of ``scale``.

        TABLE followed by this RESCALE is one operation on Ethos-U55; a TABLE whose INT32 result is used otherwise is
        six.
        """
        entries = np.clip(np.rint(values), -Q15_MAX - 1, Q15_MAX)
        y = self.b.rescale(self.b.table(self.value, entries), DType.INT16, 1 / 128)
        return FixedPoint(self.b, y, int(entries.min()), int(entries.max()), scale)


def _rescale_input_limit(factors: Array) -> Array:
    """The largest values that RESCALE takes; the smallest are one further from 0 (REQUIRE in apply_scale_32)."""
    _, shifts = quantized_multipliers(factors, 32)
    return (np.int64(1) << (shifts.astype(np.int64) - 1)) - 1


def _interval(x: FixedPoint | int) -> tuple[int, int]:
    return (x.low, x.high) if isinstance(x, FixedPoint) else (x, x)


def _round_shift_right(x: int, shift: int) -> int:
    return (x + (1 << shift - 1)) >> shift if shift else x


def requantize(b: Builder, x: Value, peaks: Array | float, scales: Array, out: QParams, zero_point: int = 0) -> Value:
    """(x - zero_point) * scales in parameters ``out``: rounded once and saturated.

    One step of x that is beyond all that ``out`` can hold saturates whatever its size, so it may be taken for less; and
    x may be cut where it saturates, so that RESCALE can take it.

    Args:
        peaks: what abs(x - zero_point) may reach, one number or of the shape of ``scales``.
        scales: real numbers in a step of x, [1] or one for each channel, the last dimension.

    Raises:
        Unsupported: x is INT48, which TOSA can only rescale, and too large for it.
    """
    span = out.dtype.range[1] - out.dtype.range[0]
    factors = np.minimum(scales / np.asarray(out.scale, dtype=np.float64), 2.0 * span)
    if x.dtype is DType.INT48 and float((peaks * factors).max()) >= 1 << 31:
        raise Unsupported(
            f"its result was calibrated to a range {float((peaks * factors).max()) / span:.0e} times smaller than what "
            "it can reach, more than RESCALE can saturate; calibrate with samples in which it is not constant"
        )
    if x.dtype is not DType.INT48 and np.any(peaks > _rescale_input_limit(factors) + 1):
        bounds = np.minimum(np.ceil(2 * span / np.maximum(factors, 2.0**-20)), 2.0**31 - 1)
        shape = (*(1,) * (x.rank - 1), bounds.size)[: x.rank]
        if x.dtype is not DType.INT32:
            x, zero_point = b.rescale(x, DType.INT32, 1.0, zero_point), 0
        x = b.minimum(b.maximum(x, b.const(-bounds.reshape(shape), x.dtype)), b.const(bounds.reshape(shape), x.dtype))
    y = b.rescale(x, out.dtype, factors, zero_point, out.zero_point)
    return y if (out.qmin, out.qmax) == out.dtype.range else b.clamp(y, out.qmin, out.qmax)


@dataclass(frozen=True)
class Accumulator:
    """What an operator with constant weights sums up for each output channel, and how the sums are finished.

    Attributes:
        weights: [out_channels, ...], integers or floats.
        offsets: the bias in the sums' steps, [out_channels].
        dtype: element type of sums and offsets.
        scales: real numbers in a step of the sums, [1] or [out_channels]; None for floats, which are ready.
        peaks: what the sums may come to, [out_channels].
        residual_bias: what of the real bias the offsets leave, [out_channels].
    """

    weights: Array
    offsets: Array
    dtype: DType
    scales: Array | None = None
    peaks: Array | None = None
    residual_bias: Array | None = None

    @classmethod
    def of(cls, x: FixedPoint, weights: Array, zero_point: int, scales: Array, bias: Array) -> Accumulator:
        """Sums of x times (``weights`` - zero_point), plus a real ``bias``.

        The bias is rounded to the sums' steps; where these are so small that the sums cannot hold it, all of it is left
        for later.

        Raises:
            Unsupported: sums might leave their type.
        """
        dtype = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
        top = dtype.range[1]
        flat = np.subtract(weights.reshape(len(weights), -1), zero_point, dtype=np.int32)
        sums = np.abs(flat, out=flat).sum(1, dtype=np.float64) * x.peak
        if np.any(sums > top):
            raise Unsupported(f"a sum of {flat.shape[1]} products, which {dtype.value} might not hold; split channels")
        if np.any(np.abs(bias) > (top - sums) * scales):
            return cls(weights, np.zeros(len(weights)), dtype, scales, sums, bias)
        offsets = np.rint(bias / scales)
        return cls(weights, offsets, dtype, scales, sums + np.abs(offsets), bias - offsets * scales)

    def requantize(self, b: Builder, value: Value, out: QParams) -> Value:
        """The operator's sums in parameters ``out``, and what is left of the bias where it exceeds a quarter of a step.

        Raises:
            Unsupported: see ``requantize``; or 32 bits cannot hold sums and bias in steps that are fine enough.
        """
        assert self.scales is not None
        assert self.peaks is not None
        assert self.residual_bias is not None
        if float(np.abs(self.residual_bias).max()) <= float(out.scale) / 4:
            peaks = self.peaks if self.scales.size > 1 else float(self.peaks.max())
            return requantize(b, value, peaks, self.scales, out)
        most = max(float((self.peaks * self.scales).max()), float(np.abs(self.residual_bias).max()))
        step = max(float(out.scale) * 2.0**-12, most * 2.0**-28)
        if step > float(out.scale) / 4:
            raise Unsupported(
                f"its bias has no place in {self.dtype.value} sums that count in steps of {self.scales.min():.2g}, its "
                f"result in steps of {float(out.scale):.2g}; calibrate with samples in which neither is constant"
            )
        fine = b.rescale(value, DType.INT32, np.where(self.peaks > 0, self.scales / step, 0.0))
        bias = FixedPoint.const(b, np.rint(self.residual_bias / step).astype(np.int64), DType.INT32, step)
        return (FixedPoint(b, fine, -(1 << 28) - 1, (1 << 28) + 1, step) + bias).to(out)


def to_common_scale(x: FixedPoint, y: FixedPoint, out: QParams | None = None) -> tuple[FixedPoint, FixedPoint]:
    """Operands of an addition or a comparison as INT32 in one step, fine enough for the result.

    The coarser operand is multiplied by 2**g, g = 19 for int8 and 14 for int16, so that sums stay below 2**30; the
    other by less. Rounding is then 2**-g of the coarser operand's step. What is compared is shifted by all that RESCALE
    takes of int8, 21: nearer real numbers are equal, as 1 in scales that lie apart by 2**-22 or less is.

    Args:
        out: the result's parameters, None of a comparison.

    Raises:
        Unsupported: the result's step is finer than this.
    """
    x, y = _saturate_negligible(*to_common_rank(x, y), out)
    step = max(z.scale * 2.0 ** -_guard_bits(z, 21 if out is None else 19) for z in (x, y))
    exact = all(math.isclose(round(z.scale / step), z.scale / step, rel_tol=1e-9) for z in (x, y))
    if out is not None and not exact and step > float(out.scale):
        raise Unsupported(
            f"its operands count in steps of {x.scale:.2g} and {y.scale:.2g}, its result in steps of "
            f"{float(out.scale):.2g}, too fine for 32 bits; calibrate with samples in which it is not constant"
        )
    for narrow, other in ((x, y), (y, x)):
        computed = narrow.value.data is other.value.data is None
        if computed and (narrow.dtype, other.dtype) == (DType.INT16, DType.INT32) and narrow.scale >= step:
            times = int(narrow.scale / step)  # by MUL, which Ethos-U does in one operation: a RESCALE takes 700 cycles
            pair = narrow.times(times), _to_int32_scale(other, narrow.scale / times)
            return pair if narrow is x else pair[::-1]
    return _to_int32_scale(x, step), _to_int32_scale(y, step)


def to_common_int16(x: FixedPoint, y: FixedPoint, out: QParams) -> tuple[FixedPoint, FixedPoint] | None:
    """Operands of an addition, an int8 among them, as int16 in one step, which an NPU adds and scales in one operation.

    One is rounded to the other's step, which is no coarser than the result's, or both to the result's own: it is off by
    a step at most. Two passes over INT32 are saved for each (8.0 -> 2.6 cycles for an element of int8 and one of int16
    on U55-128, 2.6 -> 0.8 on U85-256). None where that cannot be; two int16 are one operation.
    """
    pair, kinds = to_common_rank(x, y), [x.dtype, y.dtype, out.dtype]
    step = max((z.scale for z in pair if z.dtype is DType.INT16), default=float(out.scale))
    mixed = set(kinds) == {DType.INT8, DType.INT16} and DType.INT8 in kinds[:2]
    held = all(z.value.data is None and z.real_peak <= 2.0**15 * step for z in pair)
    if not (x.b.target.hardware.npu and mixed and held and step <= float(out.scale)):
        return None
    short = (z if z.dtype is DType.INT16 else z.rescale(DType.INT16, z.scale / step) for z in pair)
    left, right = (z.rescale(DType.INT32, 1.0).with_scale(step) for z in short)
    return left, right


def to_common_rank(x: FixedPoint, y: FixedPoint) -> tuple[FixedPoint, FixedPoint]:
    """Operands that broadcast, a constant among them with as many dimensions as the other has."""
    rank = max(x.value.rank, y.value.rank)
    left, right = (z if z.value.data is None else z.reshape((1,) * (rank - z.value.rank) + z.shape) for z in (x, y))
    return left, right


def _saturate_negligible(x: FixedPoint, y: FixedPoint, out: QParams | None) -> tuple[FixedPoint, FixedPoint]:
    """The operands with less extreme scales, where that cannot change the result.

    Where one step of an operand exceeds all of the other, and all that ``out`` can hold beyond it, its sign is enough.
    """
    if x.scale > y.scale:
        return _saturate_negligible(y, x, out)[::-1]
    if y.scale <= 2 * x.real_peak or x.low == x.high == 0:
        return x, y
    room = 0.0 if out is None else out.real_peak
    if 0 < 2 * room < x.scale:
        x = x.sign().with_scale(2 * room)
    most = 2 * (x.real_peak + room)
    return x, y.sign().with_scale(most) if y.scale > most else y


def _guard_bits(x: FixedPoint, most: int) -> int:
    """Bits that an operand is shifted to the left by; constants are not shifted but written in fine steps.

    RESCALE takes any int16 by 2**14 at most.
    """
    room = RESCALE_SAFE_LIMIT.bit_length() - 1 - max(x.high, -x.low - 1, 0).bit_length()
    return room if x.value.data is not None else min(14 if x.dtype is DType.INT16 else most, room)


def _to_int32_scale(x: FixedPoint, step: float) -> FixedPoint:
    """INT32 in steps of ``step``. A narrow constant is brought to them while the program runs: see ``fold``."""
    if x.value.data is not None and (x.dtype is DType.INT32 or x.value.size == 1):
        steps = np.rint((x.value.data.astype(np.float64) - x.zero_point) * (x.scale / step))
        return FixedPoint.const(x.b, steps.astype(np.int64), DType.INT32, step)
    return x.rescale(DType.INT32, x.scale / step).with_scale(step)
