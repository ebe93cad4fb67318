"""Softmax, normalization and reductions in integers, with int16 and int32 intermediates.

Every function appends TOSA 1.0 operators (PRO-INT, EXT-INT16) that all Ethos-U families have. The notes on
cost come from Vela's estimates: an elementwise pass over int8 or int16 operands that ends in a RESCALE is one
operation, over int32 it is two; a RESCALE of an operand merges into SUB and REDUCE_SUM where a CAST does not;
REDUCE_MAX along the last dimension costs four cycles an element, so ``_Rows.max`` goes another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value, prod

Array = np.ndarray[Any, Any]
I16, I32 = DType.INT16, DType.INT32
#: 1.0 of an exponential or a table; the largest int16.
ONE = (1 << 15) - 1
#: exp(-NEPERS) * ONE < 0.5, so nothing further below the maximum counts.
NEPERS = math.log(2 * ONE)
#: The longest row whose lost halves (at most n / 2 of ONE) cannot move an int8 probability by a step.
PLAIN_ROW = 224
#: Gain of the table for the small terms of a long sum.
GAIN = 64


# -- positive numbers: 1 / v, 1 / sqrt(v), ln(v) -------------------------------------------------------------


def reciprocal(b: Builder, v: Value) -> Value:
    """2**30 / v, int32, for int32 v in [1, 2**31).

    v is normalized to m * 2**30, 1 <= m < 2, by its leading zeros z. 1 / m in Q15 comes from a 513-entry
    table; its index, entries and interpolation are each rounded, together 2**-14 of the result at most. The
    result is the table's value * 2**(z - 16), rounded, so a v near 2**30 leaves few bits. v = 0 gives 2**30.
    """
    zeros, mantissa = _normalized(b, v)
    inverse = _lookup(b, mantissa, lambda m: (ONE + 1) / m, _octave)
    wide = b.logical_left_shift(b.rescale(inverse, I32, 1.0), _like(b, v, 15))
    return b.arithmetic_right_shift(wide, b.sub(_like(b, v, 31), zeros), round=True)


def rsqrt(b: Builder, v: Value) -> Value:
    """2**29 / sqrt(v), int32, for int32 v in [1, 2**30).

    v * 4**(h - 1) = m * 2**28 with 1 <= m < 4 and h half the leading zeros, rounded down. 1 / sqrt(m) in Q15
    comes from a table; index, entries and interpolation are each rounded, together 2**-14 of the result at
    most. The shift to the left by h - 1 is exact, so small and large v come out alike.
    """
    one = _like(b, v, 1)
    half = b.arithmetic_right_shift(b.sub(b.unary("CLZ", v), one), one, round=True)  # (z - 1 + 1) >> 1
    steps = b.sub(half, one)
    normalized = b.logical_left_shift(v, b.add(steps, steps))
    centred = b.sub(normalized, _like(b, v, 5 << 27))  # [2**28, 2**30) -> +-3 * 2**27
    index = b.rescale(centred, I16, 1 / (3 << 12))
    root = _lookup(b, index, lambda m: (ONE + 1) / np.sqrt(m), lambda i: 2.5 + i * (3 / 65536))
    return b.logical_left_shift(b.rescale(root, I32, 1.0), steps)


def logarithm(b: Builder, v: Value) -> Value:
    """ln(v) in units of 2**-20, int32, for int32 v in [1, 2**31).

    ln(m) from a table in Q15, its entries and interpolation rounded (2**-15 together), plus (31 - z) * ln(2).
    """
    zeros, mantissa = _normalized(b, v)
    fraction = _lookup(b, mantissa, lambda m: np.log(m) * (ONE + 1), _octave)
    octaves = b.mul(b.sub(_like(b, v, 31), zeros), _like(b, v, round(math.log(2) * (1 << 20))))
    return b.add(b.rescale(fraction, I32, 32.0), octaves)


def _normalized(b: Builder, v: Value) -> tuple[Value, Value]:
    """Leading zeros, and the int16 index of v << (zeros - 1) in [2**30, 2**31); see ``_octave``."""
    zeros = b.unary("CLZ", v)
    normalized = b.logical_left_shift(v, b.sub(zeros, _like(b, v, 1)))
    return zeros, b.rescale(b.sub(normalized, _like(b, v, 3 << 29)), I16, 2.0**-14)


def _octave(index: Array) -> Array:
    return 1.5 + index / 65536


def _lookup(b: Builder, x: Value, f: Callable[[Array], Array], argument: Callable[[Array], Array]) -> Value:
    """int16 -> int16: f(argument(x)) by interpolation between 513 points.

    The last point lies one beyond int16. TABLE followed by this RESCALE is one operation on Ethos-U55; a
    TABLE whose int32 result is used otherwise is six.
    """
    points = np.arange(-32768, 32769, 128, dtype=np.float64)
    return _tabulate(b, x, f(argument(points)))


def _tabulate(b: Builder, x: Value, values: Array) -> Value:
    entries = np.clip(np.rint(values), -ONE - 1, ONE)
    return b.rescale(b.table(x, entries), I16, 1 / 128)


def _like(b: Builder, v: Value, number: int) -> Value:
    """A constant that broadcasts against ``v``."""
    return b.const(np.full((1,) * v.rank, number), I32)


def _scaled(b: Builder, x: Value, power: int) -> Value:
    """int8 or int16 times 2**power, int32, by MUL: one operation where a RESCALE to int32 is two."""
    if power < 0:
        return b.rescale(x, I32, 2.0**power)
    return b.mul(x, b.const(np.full((1,) * x.rank, 1 << power), x.dtype))


# -- rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """A tensor of which one axis, of size ``n``, is reduced.

    A single axis stays where it is: a RESHAPE may cost a copy of the tensor. Several become one; axes that
    are not neighbours are moved to the end.
    """

    value: Value
    axis: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.value.shape[self.axis]

    def restore(self, b: Builder, y: Value) -> Value:
        """Undo the view for a result of the same size."""
        y = b.reshape(y, [self.shape[axis] for axis in self.order])
        return b.transpose(y, [self.order.index(axis) for axis in range(len(self.order))])

    def along(self, weights: Array) -> Array:
        """Weights of the reduced axes in a shape that broadcasts against the view."""
        after = self.value.rank - self.axis - 1
        return np.asarray(weights, dtype=np.float64).reshape((1,) * self.axis + (self.n,) + (1,) * after)

    def max(self, b: Builder) -> Value:
        """Maximum of each row of int8 or int16.

        Along the last dimension it takes the maximum of both halves of the rows, which share an element if
        their length is odd, until one element is left: n operations an element in all, a quarter of
        REDUCE_MAX's cycles.
        """
        x, n = self.value, self.n
        if self.axis != x.rank - 1:
            return b.reduce("REDUCE_MAX", x, self.axis)
        lead = (0,) * self.axis
        while n > 1:
            half = (n + 1) // 2
            parts = (b.slice(x, (*lead, start), (*x.shape[:-1], half)) for start in (0, n - half))
            x, n = b.rescale(b.maximum(*(b.rescale(part, I32, 1.0) for part in parts)), x.dtype, 1.0), half
        return x

    def sum(self, b: Builder, x: Value | None = None, zero_point: int = 0) -> Value:
        """Sum of each row of ``x`` (by default the tensor itself) less the zero point, int32."""
        x = self.value if x is None else x
        return b.reduce("REDUCE_SUM", x if x.dtype is I32 else b.rescale(x, I32, 1.0, zero_point), self.axis)


def _rows(b: Builder, x: Value, axes: Sequence[int]) -> _Rows:
    axes = sorted(axis % x.rank for axis in axes)
    order = tuple(range(x.rank))
    n = prod(x.shape[axis] for axis in axes)
    if n > 65536:
        raise Unsupported(f"a reduction over {n} elements (65536 at most)")
    if len(axes) == 1:
        return _Rows(x, axes[0], x.shape, order)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        order = (*(axis for axis in order if axis not in axes), *axes)
    moved = b.transpose(x, order)
    start = order.index(axes[0])
    before, after = moved.shape[:start], moved.shape[start + len(axes) :]
    return _Rows(b.reshape(moved, (prod(before), n, *after)), 1, x.shape, order)


def _to(b: Builder, x: Value, scale: float, out: QParams) -> Value:
    """Integers in steps of ``scale`` to the result's parameters."""
    y = b.rescale(x, out.dtype, scale / float(out.scale), 0, out.zero_point)
    return y if (out.qmin, out.qmax) == out.dtype.range else b.clamp(y, out.qmin, out.qmax)


def _narrow(q: QParams, operator: str) -> float:
    """The scale of an int8 or int16 tensor."""
    if q.dtype not in (DType.INT8, I16) or np.ndim(q.scale):
        raise Unsupported(f"{operator} of {q.dtype.value}; its input must be int8 or int16 with one scale")
    return float(q.scale)


# -- softmax -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exponential:
    """One = exp(0).

    Attributes:
        value: one * exp(x - reference), int16.
        total: its sum along the rows, int32; at least ``least``.
        reference: the row's maximum, or up to one step of x from it; int32 in steps of x.
        one: what 1.0 is.
        least: the smallest value that the row's maximum takes.
    """

    value: Value
    total: Value
    reference: Value
    one: float
    least: float


def softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """exp(x - max) / sum over ``axis``.

    The product of two int16: the exponential e, and r = K / sum(e) with K such that r <= ONE. Each rounding
    moves a probability by at most 2**-16; what the sum may lack is told in ``_exponential``.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    rows = _rows(b, x, (axis,))
    e = _exponential(b, rows, q, precise=out.dtype is not DType.INT8)
    k = e.least * ONE
    r = b.rescale(reciprocal(b, e.total), I16, k / (1 << 30))
    return rows.restore(b, _to(b, b.mul(e.value, r), 1 / k, out))


def log_softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """x - max - ln(sum(exp(x - max))) over ``axis``, added in int32 in units of 2**-20 or coarser.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    rows = _rows(b, x, (axis,))
    e = _exponential(b, rows, q, precise=out.dtype is not DType.INT8)
    scale = _narrow(q, "log_softmax")
    low, high = q.dtype.range
    bits = min(20, 28 - math.ceil(math.log2(scale * (high - low))))
    unit = 2.0**bits
    log_sum = b.sub(logarithm(b, e.total), _like(b, e.total, round(math.log(e.one) * (1 << 20))))
    offset = b.add(b.rescale(e.reference, I32, scale * unit), b.rescale(log_sum, I32, unit / (1 << 20)))
    shifted = b.sub(b.rescale(rows.value, I32, scale * unit), offset)
    return rows.restore(b, _to(b, shifted, 1 / unit, out))


def _exponential(b: Builder, rows: _Rows, q: QParams, *, precise: bool) -> _Exponential:
    """exp(x - max) by table.

    int8: x - max has 256 values, each with its own table entry, so e errs by 2**-16 only. int16: the table
    spans NEPERS in 512 intervals of h = 0.022; interpolation errs by h * h / 8 = 2**-14 of e, halved by
    lowering the points, and the index by 2**-13.5 of e at most.

    The halves that rounding drops may add up to n / 2, that is n * 2**-16 of the sum. Where that matters they
    come back from further tables. int8: the remainders of the first one, in Q29. int16, where interpolation
    makes remainders uneven: the sum is taken from two tables that share the range at e = 1 / GAIN, the lower
    one times GAIN, which leaves 2**-12 of the sum to lose.
    """
    scale = _narrow(q, "softmax")
    narrow = q.dtype is DType.INT8
    split = rows.n > (8 if precise else PLAIN_ROW)
    maximum = rows.max(b)
    top = b.rescale(maximum, I32, 1.0)
    if narrow:
        factor, distance = 128.0, 0
        low = maximum
        one = least = float(ONE)
    else:
        # index = (x - reference) * factor puts the maximum near the upper end of int16. The operand must be
        # int16 for SUB to be one operation, so it is halved; where the maximum is odd the row starts one step
        # of x lower.
        factor = max(1.0, scale * 65535 / (NEPERS + (math.log(GAIN) if split else 0.0)))
        distance = math.floor(ONE / factor)
        low = b.rescale(b.sub(top, _like(b, top, distance)), I16, 0.5)
        one = ONE * math.exp((distance * factor - 32768) * scale / factor)
        least = one * math.exp(-scale)

    def tabulated(values: Array, variant: int) -> Value:
        # A SUB that one TABLE alone reads is one operation with it, and so are the RESCALEs that one SUB
        # alone reads. So each table gets its own, written in another way lest they be merged as equal: int8
        # with another zero point, int16 with other powers of two.
        gain, zero_point = (1.0, variant) if narrow else (2.0**variant, 0)
        x = b.rescale(rows.value, I32, gain, zero_point)
        y = b.rescale(low, I32, gain if narrow else 2 * gain, zero_point)
        return _tabulate(b, b.rescale(b.sub(x, y), I16, factor / gain), values)

    points = np.arange(-32768, 32769, 128, dtype=np.float64)
    exact = np.minimum(np.exp((points / factor - distance) * scale) * one, ONE)
    if not narrow:
        exact *= 1 - (128 * scale / factor) ** 2 / 16
        exact[0] *= factor == 1.0  # where anything smaller saturates
    value = tabulated(exact, 0)
    if not split:
        total = rows.sum(b, value)
    elif narrow:
        remainder = rows.sum(b, tabulated((exact - np.rint(exact)) * (1 << 14), 1))
        total = b.add(rows.sum(b, value), b.rescale(remainder, I32, 2.0**-14))
    else:
        tail = exact < ONE / GAIN
        upper = rows.sum(b, tabulated(np.where(tail, 0, exact), 1))
        lower = rows.sum(b, tabulated(np.where(tail, GAIN * exact, 0), 2))
        total = b.add(upper, b.rescale(lower, I32, 1 / GAIN))
    reference = top if narrow else b.add(b.rescale(low, I32, 2.0), _like(b, low, distance))
    return _Exponential(value, total, reference, one, least)


# -- normalization -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Standard:
    """(x - mean) / sqrt(variance + eps) as int32 in steps of ``scale``; at most 2**30."""

    value: Value
    scale: float


def layer_norm(
    b: Builder,
    x: Value,
    q: QParams,
    axes: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float,
    out: QParams,
) -> Value:
    """(x - mean) / sqrt(variance + eps) * weight + bias over ``axes``.

    ``weight`` and ``bias`` are real, of the shape of these axes.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    return _norm(b, x, q, axes, weight, bias, eps, out, centre=True)


def rms_norm(
    b: Builder, x: Value, q: QParams, axes: Sequence[int], weight: Array | None, eps: float, out: QParams
) -> Value:
    """x / sqrt(mean(x * x) + eps) * weight over ``axes``; ``weight`` is real, of the shape of these axes.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    return _norm(b, x, q, axes, weight, None, eps, out, centre=False)


def group_norm(
    b: Builder,
    x: Value,
    q: QParams,
    groups: int,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    out: QParams,
) -> Value:
    """x [N, C, ...] normalized over C / groups channels and all positions; ``weight`` and ``bias`` [C].

    Instance normalization is ``groups`` = C.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    batch, channels = x.shape[:2]
    grouped = (batch * groups, x.size // (batch * groups))
    standard = _standardize(b, _rows(b, b.reshape(x, grouped), (1,)), q, eps, centre=True)
    spread = b.reshape(standard.value, (batch, channels, -(-x.size // (batch * channels))))
    gain, offset = (None if p is None else p.reshape(1, channels, 1) for p in (weight, bias))
    return b.reshape(_affine(b, _Standard(spread, standard.scale), gain, offset, out), x.shape)


def _norm(
    b: Builder,
    x: Value,
    q: QParams,
    axes: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float,
    out: QParams,
    *,
    centre: bool,
) -> Value:
    rows = _rows(b, x, axes)
    standard = _standardize(b, rows, q, eps, centre=centre)
    gain, offset = (None if p is None else rows.along(p) for p in (weight, bias))
    return rows.restore(b, _affine(b, standard, gain, offset, out))


def _affine(b: Builder, x: _Standard, weight: Array | None, bias: Array | None, out: QParams) -> Value:
    """x * weight + bias in int32, then the result's parameters.

    The product keeps 29 bits: |x| <= 2**30, weights are scaled to 2**30 at most and the product is shifted by
    31. The bias is rounded to the product's step.
    """
    value, scale = x.value, x.scale
    if weight is None and bias is None:
        return _to(b, value, scale, out)
    factors = np.ones((1,) * value.rank) if weight is None else weight
    peak = max(float(np.abs(factors).max()), 1e-30)
    if bias is not None:  # a bias beyond what x * weight can reach coarsens the step
        peak = max(peak, float(np.abs(bias).max()) / (scale * (1 << 30)))
    value = b.mul(value, b.const(np.rint(factors / peak * (1 << 30)), I32), 31)
    scale *= 2 * peak
    if bias is not None:
        value = b.add(value, b.const(np.rint(bias / scale), I32))
    return _to(b, value, scale, out)


def _standardize(b: Builder, rows: _Rows, q: QParams, eps: float, *, centre: bool) -> _Standard:
    scale = _narrow(q, "normalization")
    floor = eps / scale**2  # eps in squared steps of x
    if q.dtype is DType.INT8:
        return _standardize_int8(b, rows, q, floor, centre=centre)
    return _standardize_int16(b, rows, q, floor, centre=centre)


def _sum_of_squares_int8(b: Builder, rows: _Rows, q: QParams, bits: int, *, centre: bool) -> tuple[Value, Value]:
    """Sum of (x - mean)**2 (or of (x - zero point)**2) in units of 2**-bits, and the sum of x.

    From whole numbers: Q = sum(x * x) <= n * 2**14 and S = sum(x). S * S / n is S times the mean in Q22, a
    64-bit product inside MUL; the mean's rounding moves the result by n * 2**-16 at most, so flat rows come
    out right too.
    """
    squares = rows.sum(b, b.mul(rows.value, rows.value))
    total = rows.sum(b)
    scaled = b.logical_left_shift(squares, _like(b, squares, bits)) if bits else squares
    if centre:
        mean22 = b.rescale(total, I32, (1 << 22) / rows.n)
        return b.sub(scaled, b.mul(total, mean22, 22 - bits)), total
    cross = b.mul(total, _like(b, total, -2 * q.zero_point * (1 << bits)))
    return b.add(b.add(scaled, cross), _like(b, total, rows.n * q.zero_point**2 * (1 << bits))), total


def _standardize_int8(b: Builder, rows: _Rows, q: QParams, floor: float, *, centre: bool) -> _Standard:
    """x * g - mean * g with g = rsqrt(V) and V = n * (variance + eps) * 2**bits, exact, below 2**30.

    V >= 2**(bits - 1) wherever a row is not constant, so x * g < 2**(37 - bits / 2); the products are shifted
    to 30 bits. Their difference is result * 2**(29 - shift) / sqrt(n * 2**bits), which leaves 16 bits below
    one for n = 1024.
    """
    peak = rows.n * ((1 << 14 if centre else 1 << 16) + floor)
    bits = min(14, math.floor(29.9 - math.log2(peak)))
    if bits < 0:
        raise Unsupported(f"normalization over {rows.n} elements with eps {floor:.3g} squared steps of its input")
    squares, total = _sum_of_squares_int8(b, rows, q, bits, centre=centre)
    v = b.add(squares, _like(b, squares, round(rows.n * floor * (1 << bits))))
    v = b.maximum(v, _like(b, v, 1 << max(bits - 1, 0)))
    g = rsqrt(b, v)
    shift = max(0, 7 - bits // 2)
    product = b.mul(_scaled(b, rows.value, 6), g, shift + 6)
    if centre:
        product = b.sub(product, b.mul(b.rescale(total, I32, (1 << 13) / rows.n), g, shift + 13))
    elif q.zero_point:
        product = b.sub(product, b.mul(_like(b, g, q.zero_point << 6), g, shift + 6))
    return _Standard(product, math.sqrt(rows.n * 2.0**bits) * 2.0 ** (shift - 29))


def _standardize_int16(b: Builder, rows: _Rows, q: QParams, floor: float, *, centre: bool) -> _Standard:
    """The same for int16, whose squares would not fit: each row is first shifted to full scale.

    c = x - mean with ``bits`` fractional bits; A = sum(abs(c)) <= 2**29; k shifts A into [2**28, 2**29). Then
    sum((c << k)**2) lies in [A * A / n, A * A / 2], its terms are rounded to multiples of 2**drop, and eps
    follows it by a shift of 2 * k.
    """
    n = rows.n
    drop = 28 if centre else 29
    # n * eps in the units of the sum is mantissa * 2**(exponent + 2 * (bits + k) - drop), and stays below
    # 2**28.
    amount = max(n * floor, 2.0**-60)
    exponent = math.floor(math.log2(amount)) - 27
    mantissa = math.floor(amount * 2.0**-exponent)
    bits = min(10, (14 if centre else 13) - math.ceil(math.log2(n)), (drop - exponent) // 2)
    if bits < -8:
        raise Unsupported(f"normalization over {n} elements with eps {floor:.3g} squared steps of its input")
    exponent += 2 * bits - drop
    c = _scaled(b, rows.value, bits)
    if centre:
        c = b.sub(c, b.rescale(rows.sum(b), I32, 2.0**bits / n))
    size = rows.sum(b, b.unary("ABS", c))
    k = b.sub(b.unary("CLZ", size), _like(b, size, 3))
    k = b.minimum(k, _like(b, size, min(28, -exponent // 2)))
    k = b.maximum(k, _like(b, size, 0))
    shifted = b.logical_left_shift(c, k)
    squares = rows.sum(b, b.mul(shifted, shifted, drop))
    falls = b.sub(_like(b, k, -exponent), b.add(k, k))
    falls = b.maximum(b.minimum(falls, _like(b, k, 31)), _like(b, k, 0))
    smallest = b.arithmetic_right_shift(b.const(np.full(k.shape, mantissa), I32), falls, round=True)
    v = b.maximum(b.add(squares, smallest), _like(b, k, 1))
    shift = 14
    return _Standard(b.mul(shifted, rsqrt(b, v), shift), math.sqrt(n) * 2.0 ** (shift - 29 - drop / 2))


# -- sums ----------------------------------------------------------------------------------------------------


def mean(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value:
    """Mean over ``axes``, kept with size 1. Exact up to the result's rounding.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    count = prod(x.shape[axis] for axis in axes)
    return _total(b, x, q, axes, out, 1.0 / count)


def sum_(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value:
    """Sum over ``axes``, kept with size 1. Exact up to the result's rounding.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    return _total(b, x, q, axes, out, 1.0)


def largest(b: Builder, x: Value, axis: int) -> Value:
    """Maximum of int8 or int16 along one axis, kept with size 1, in fewer cycles than one REDUCE_MAX."""
    return _rows(b, x, (axis,)).max(b)


def _total(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams, factor: float) -> Value:
    scale = _narrow(q, "reduction")
    axes = sorted(axis % x.rank for axis in axes)
    rows = _rows(b, x, axes)
    total = rows.sum(b, zero_point=q.zero_point)
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return b.reshape(_to(b, total, scale * factor, out), kept)


def var(b: Builder, x: Value, q: QParams, axes: Sequence[int], correction: float, out: QParams) -> Value:
    """Sum of (x - mean)**2 over ``axes`` divided by (count - correction); axes kept with size 1.

    int8 is exact up to 2**-6 squared steps. int16 squares lose log2(n) bits below the largest possible
    square, which is below an int16 result's step unless its range is a small part of the input's.

    Raises:
        Unsupported: x is neither int8 nor int16, or there are no more elements than ``correction``.
    """
    scale = _narrow(q, "var")
    axes = sorted(axis % x.rank for axis in axes)
    rows = _rows(b, x, axes)
    if rows.n <= correction:
        raise Unsupported(f"var of {rows.n} elements with correction {correction}")
    if q.dtype is DType.INT8:
        bits = max(0, min(14, math.floor(29.9 - math.log2(rows.n * (1 << 14)))))
        squares, _ = _sum_of_squares_int8(b, rows, q, bits, centre=True)
    else:
        centre = b.rescale(rows.sum(b), I32, 4.0 / rows.n)
        c = b.sub(_scaled(b, rows.value, 2), centre)  # Q2, up to 2**18
        bits = 30 - 32 - max(0, math.ceil(math.log2(rows.n)) - 2)  # sum <= n / 4 * 2**32
        squares = rows.sum(b, b.mul(c, c, 4 - bits))
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return b.reshape(_to(b, squares, scale**2 * 2.0**-bits / (rows.n - correction), out), kept)
