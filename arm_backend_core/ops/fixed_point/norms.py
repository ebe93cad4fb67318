"""Integer layer, RMS, group and instance normalization: (x - mean) / sqrt(variance + eps)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.fixed_point.elementary_functions import rsqrt, sqrt
from arm_backend_core.ops.fixed_point.reduction_view import ReductionView
from arm_backend_core.ops.fixed_point_value import Array, FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

I32 = DType.INT32
_MAX_SHORT_ROW = 1024  # up to this length, rounded squares give a sum with a relative error of 2**-9 at most


def layer_norm(
    b: Builder,
    x: Value,
    q: QParams,
    axes: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float,
    out: QParams,
    *,
    centre: bool = True,
) -> Value:
    """Layer norm over ``axes``: (x - mean) / sqrt(variance + eps) * weight + bias.

    Without ``centre``, the mean is replaced by 0 (RMS norm). ``weight`` and ``bias`` are real numbers in the shape of
    the axes.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    rows = ReductionView.from_tensor(b, x, q, axes, "layer_norm" if centre else "rms_norm")
    gain, offset = (None if p is None else rows.broadcast_weights(p) for p in (weight, bias))
    return rows.restore(_apply_affine(_standardize(rows, eps, out, centre=centre), gain, offset, out))


def group_norm(
    b: Builder, x: Value, q: QParams, groups: int, weight: Array | None, bias: Array | None, eps: float, out: QParams
) -> Value:
    """Group norm of x [N, C, ...] over C / groups channels and all positions. ``weight`` and ``bias`` are [C].

    It is an instance norm if ``groups`` = C.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    batch, channels = x.shape[:2]
    grouped = (batch * groups, x.size // (batch * groups))
    rows = ReductionView.from_tensor(b, b.reshape(x, grouped), q, (1,), "group_norm")
    standardized = _standardize(rows, eps, out, centre=True).reshape((batch, channels, x.size // (batch * channels)))
    gain, offset = (None if p is None else p.reshape(1, channels, 1) for p in (weight, bias))
    return b.reshape(_apply_affine(standardized, gain, offset, out), x.shape)


def _apply_affine(x: FixedPoint, weight: Array | None, bias: Array | None, out: QParams) -> Value:
    """x * weight + bias in int32, converted to the result's parameters.

    MUL shifts the product right by 31 bits. With a shift of 38 bits, NPUs round some products differently from TOSA.
    The bias is rounded to the product's scale. If there is a bias and the result is int16, the product's scale is at
    least the result's scale: a finer scale is not needed. If both scales are equal, Ethos-U55 narrows the sum to int16
    for free. With different scales, the RESCALE takes 1.25 cycles an element on U55-128.
    """
    if weight is None and bias is None:
        return x.requantize(out)
    factors = np.ones((1,) * x.value.rank) if weight is None else weight
    peak = max(float(np.abs(factors).max()), 1e-30)
    if bias is not None:  # a bias that exceeds the range of x * weight needs a coarser scale
        peak = max(peak, float(np.abs(bias).max()) / (x.scale * (1 << 30)))
    step = max(2.0 * peak * x.scale, float(out.scale) if bias is not None and out.dtype is DType.INT16 else 0.0)
    unit = step / x.scale * 2.0**-31
    y = x.mul(FixedPoint.const(x.b, np.rint(factors / unit).astype(np.int64), I32, unit), 31)
    if bias is not None:
        y = y + FixedPoint.const(x.b, np.rint(bias / y.scale).astype(np.int64), I32, y.scale)
    return y.requantize(out)


def _standardize(rows: ReductionView, eps: float, out: QParams, *, centre: bool) -> FixedPoint:
    """(x - mean) / sqrt(variance + eps) as int32; without ``centre``, x / sqrt(mean(x * x) + eps)."""
    eps_in_squared_steps = eps / rows.x.scale**2
    if eps_in_squared_steps > rows.x.peak**2 * (1 << (8 if out.dtype is DType.INT8 else 16)):
        return _divide_by_sqrt_eps(rows, eps, centre=centre)
    if rows.x.dtype is DType.INT8:
        return _standardize_int8(rows, eps_in_squared_steps, centre=centre)
    sum_of_squares = SumOfSquares.from_rows(rows, centre=centre, eps_in_squared_steps=eps_in_squared_steps)
    sum_with_eps = (sum_of_squares.squares + sum_of_squares.scaled_eps(eps_in_squared_steps)).maximum(1)
    # abs(deviation) / sqrt(sum of squared deviations) is at most 1.
    y = sum_of_squares.shifted.mul(rsqrt(sum_with_eps.with_scale(1.0)), 14, peak=1 << 30)
    return y.with_scale(math.sqrt(rows.n) * 2.0 ** (14 - 29 - sum_of_squares.drop / 2))


def _divide_by_sqrt_eps(rows: ReductionView, eps: float, *, centre: bool) -> FixedPoint:
    """(x - mean) / sqrt(eps), for an eps that far exceeds every possible variance.

    This occurs if the scale of x is tiny, for example if all calibration samples were zeros.
    """
    bits = 6 if rows.x.dtype is DType.INT8 else 2
    x = rows.x.with_scale(1.0).to_int32_with_fraction_bits(bits)
    if centre:
        x = x - rows.mean(bits).with_scale(x.scale)
    elif rows.zero_point:
        x = x - (rows.zero_point << bits)
    return x.with_scale(rows.x.scale * 2.0**-bits / math.sqrt(eps))


# -- int8 ----------------------------------------------------------------------------------------------------


def sum_squared_deviations_int8(rows: ReductionView, bits: int, *, centre: bool) -> tuple[FixedPoint, FixedPoint]:
    """Return the sum of (x - mean)**2 with ``bits`` fractional bits, and the sum of x.

    Without ``centre``, the first result is the sum of (x - zero point)**2. With ``centre``, it is Q - S * S / n, with
    the integers Q = sum(x * x) <= n * 2**14 and S = sum(x). MUL computes S * S / n as S times the mean in Q22, with a
    64-bit product. The rounding of the mean changes the result by at most n * 2**-16, so the result is also accurate
    for rows of nearly equal elements. Without this rounding, the result would never be negative (Cauchy-Schwarz).
    """
    x, n = rows.x.with_scale(1.0), rows.n
    squares, total = rows.sum_of(x * x), rows.sum_of(x)
    shift = bits + round(math.log2(squares.scale))  # the sum of a row that is split into parts may have a larger scale
    scaled = squares.add_fraction_bits(shift) if shift > 0 else squares.drop_fraction_bits(-shift) if shift else squares
    if centre:
        mean22 = total.rescale(I32, (1 << 22) / n).with_scale(2.0**-22)
        difference = scaled - total.mul(mean22, 22 - bits)
        return difference.assume_range(-n - 1, math.ceil(n * 2.0 ** (14 + bits)) + n), total
    unit = 2.0**-bits
    factor = -2 * rows.zero_point
    cross = (total.mul(factor << bits) if bits >= 0 else total.rescale(I32, factor * 2.0**bits)).with_scale(unit)
    square = scaled + cross + round(n * rows.zero_point**2 * 2.0**bits)
    return square.assume_range(0, math.ceil(n * 2.0 ** (16 + bits))), total


def _standardize_int8(rows: ReductionView, eps_in_squared_steps: float, *, centre: bool) -> FixedPoint:
    """Standardize int8: x * g - mean * g, with g = rsqrt(V) and V = n * (variance + eps) * 2**bits < 2**30.

    V >= 2**(bits - 1) unless a row is constant, so x * g < 2**(37 - bits / 2). The products are shifted right to at
    most 30 bits. Their difference represents the result y as y * 2**(29 - shift) / sqrt(n * 2**bits). For n = 1024,
    this format has 16 fractional bits.
    """
    n, x = rows.n, rows.x.with_scale(1.0)
    max_square = 1 << 14 if centre else 1 << 16
    bits = min(14, math.floor(29.9 - math.log2(n * (max_square + eps_in_squared_steps))))
    squares, total = sum_squared_deviations_int8(rows, bits, centre=centre)
    v = (squares + round(n * eps_in_squared_steps * 2.0**bits)).maximum(1 << max(bits - 1, 0))
    g = rsqrt(v)
    shift = max(0, 7 - bits // 2)
    product = x.to_int32_with_fraction_bits(6).mul(g, shift + 6)
    if centre:
        mean = total.with_scale(n).rescale(I32, (1 << 13) / n)
        product = product - mean.mul(g, shift + 13).with_scale(product.scale)
    elif rows.zero_point:
        product = product - g.full_like(rows.zero_point << 6).mul(g, shift + 6).with_scale(product.scale)
    scale = math.sqrt(n * 2.0**bits) * 2.0 ** (shift - 29)
    peak = math.ceil(1.01 * math.sqrt(n) / scale) + (1 << 16)  # |x - mean| <= sqrt(n) * deviation, plus rounding
    return product.assume_range(-peak, peak).with_scale(scale)


# -- int16 ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SumOfSquares:
    """Sum of squares along rows of int16 in block floating point: each row has its own exponent.

    The exact sum would exceed int32. Let c = x - mean with ``bits`` fractional bits, and A = sum(abs(c)) <= 2**29. Each
    row is shifted left by ``shift`` bits, so that A << shift is in [2**28, 2**29). With B = A << shift, the sum of the
    shifted squares is in [B * B / n, B * B / 2]. Each square is rounded to a multiple of 2**drop. In rows of more than
    _MAX_SHORT_ROW elements, each square would be too small for this rounding, so these rows have a larger ``shift``.
    It is chosen such that (M << shift) * (A << shift), with M = max(abs(c)), is below 2**57. This product is an upper
    bound of the sum of the shifted squares. If ``bits`` is negative, A and M are computed from the rounded c, and
    c << shift from the unrounded c.

    Attributes:
        shifted: c << shift.
        shift: left shift of each row.
        squares: sum(shifted**2) >> drop. It is at most 2**29 + n, where n covers the rounding of each element.
        bits: number of fractional bits of c.
        drop: number of bits that are dropped from each square.
        n: number of elements of a row.
    """

    shifted: FixedPoint
    shift: FixedPoint
    squares: FixedPoint
    bits: int
    drop: int
    n: int

    @classmethod
    def from_rows(cls, rows: ReductionView, *, centre: bool, eps_in_squared_steps: float = 0.0) -> SumOfSquares:
        """Sum the squared deviations from the mean (``centre``), or from zero.

        The sum leaves room in int32 for ``scaled_eps(eps_in_squared_steps)``, which the caller adds. ``_standardize``
        passes an eps of at most 2**46 squared steps. With this eps and rows of 2**16 elements, ``bits`` is -4
        (-3 without ``centre``).
        """
        n, x = rows.n, rows.x.with_scale(1.0)
        drop = 28 if centre else 29
        exponent, _ = _exponent_and_mantissa(n, eps_in_squared_steps)
        bits = min(10, (14 if centre else 13) - math.ceil(math.log2(n)), (drop - exponent) // 2)
        max_shift = min(28, -(exponent + 2 * bits - drop) // 2)
        # Number of fractional bits of ``fine`` beyond those of c
        extra_bits = 2 - bits if bits < 0 and max_shift >= 2 - bits else 0
        fine = x.to_int32_with_fraction_bits(bits + extra_bits)
        if centre and bits < 0:
            fine = fine - rows.mean(bits + extra_bits)
        elif centre:
            total = rows.sum_of(fine)
            fine = fine - total.rescale(I32, 1 / n).with_scale(fine.scale)
        c = fine.drop_fraction_bits(extra_bits) if extra_bits else fine
        shift = _normalizing_shift(abs(c), rows, bool(extra_bits)).minimum(max_shift).maximum(extra_bits)
        shifted = fine.with_scale(1.0).shift_left(shift - extra_bits, 1 << 29)
        squares = rows.sum_of(shifted.mul(shifted, drop), peak=(1 << 29) + n)
        return cls(shifted, shift, squares, bits, drop, n)

    def scaled_eps(self, eps_in_squared_steps: float) -> FixedPoint:
        """n * eps at the scale of ``squares``, where eps is ``eps_in_squared_steps`` (squared steps of x).

        For each row, a constant mantissa is shifted right by a number of bits that depends on the row's ``shift``.
        """
        exponent, mantissa = _exponent_and_mantissa(self.n, eps_in_squared_steps)
        exponent += 2 * self.bits - self.drop
        right_shift = self.shift.full_like(-exponent) - (self.shift + self.shift)
        right_shift = right_shift.minimum(31).maximum(0)
        mantissas = FixedPoint.const(self.shift.b, np.full(self.shift.shape, mantissa), I32)
        return mantissas.shift_right(right_shift).with_scale(self.squares.scale)

    def root(self) -> FixedPoint:
        """sqrt(sum(c * c)) in steps of x."""
        root = sqrt(self.squares.with_scale(1.0))  # at the scale of c, times 2**shift
        return root.shift_right(self.shift).with_scale(2.0 ** (-self.bits + self.drop / 2 - 14))


def _normalizing_shift(magnitude: FixedPoint, rows: ReductionView, is_rounded: bool) -> FixedPoint:
    """Left shift of each row, from ``magnitude`` = abs(c). If ``is_rounded``, the exact abs(c) may be larger by 1."""
    total = rows.sum_of(magnitude, peak=1 << 29)
    zeros = (total + rows.n if is_rounded else total).leading_zeros()
    if rows.n <= _MAX_SHORT_ROW:
        return zeros - 3
    peak = rows.max_of(magnitude)
    zeros_of_product = zeros + (peak + 1 if is_rounded else peak).leading_zeros()
    # (zeros_of_product - 7) // 2, so that M * A is below 2**57
    return (zeros_of_product - 8).maximum(0).shift_right(zeros_of_product.full_like(1))


def _exponent_and_mantissa(n: int, eps: float) -> tuple[int, int]:
    """Exponent and mantissa of n * eps = mantissa * 2**exponent, mantissa < 2**28."""
    product = max(n * eps, 2.0**-60)
    exponent = math.floor(math.log2(product)) - 27
    return exponent, math.floor(product * 2.0**-exponent)
