"""Integer softmax and log-softmax with int16 exponentials and int32 sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point.elementary_functions import TABLE_INPUTS, logarithm, reciprocal
from arm_backend_core.ops.fixed_point.reduction_view import ReductionView
from arm_backend_core.ops.integers import Q15_MAX, Array, FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

I16, I32 = DType.INT16, DType.INT32
#: exp(-NEPERS) * Q15_MAX < 0.5: elements further below the maximum round to 0.
NEPERS = math.log(2 * Q15_MAX)
#: The longest row whose rounding errors (at most n / 2 of Q15_MAX in total) cannot change an int8 probability by a
#: step.
PLAIN_ROW = 224
#: Gain of the table for the small terms of a long sum.
GAIN = 64


def softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """exp(x - max) / sum over ``axis``.

    The product of two int16: the exponential e, and r = K / sum(e) with K chosen so that r <= Q15_MAX. Each rounding
    changes a probability by at most 2**-16. ``_sum_exponentials`` bounds the error of the sum.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    rows = ReductionView.of(b, x, q, (axis,), "softmax")
    _require_step(out, 2.0**-16, "softmax")
    if rows.n == 1:
        return rows.restore(_constant_result(rows, 1).requantize(out))
    grid, e, total = _exponentials(rows, precise=out.dtype is not DType.INT8)
    k = grid.least * Q15_MAX
    r = reciprocal(total).rescale(I16, k / (1 << 30), saturate=True).with_scale(grid.one / k)
    return rows.restore((e * r).requantize(out))


def _constant_result(rows: ReductionView, number: int) -> FixedPoint:
    """``number`` for every element: softmax of rows of one element."""
    x = rows.x.rescale(I32, 1.0).with_scale(1.0)
    return x - x + number


def log_softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """x - max - ln(sum(exp(x - max))) over ``axis``, added in int32 in units of 2**-20 or coarser.

    Raises:
        Unsupported: x is neither int8 nor int16.
    """
    rows = ReductionView.of(b, x, q, (axis,), "log_softmax")
    if rows.n == 1:
        return rows.restore(_constant_result(rows, 0).requantize(out))
    grid, _, total = _exponentials(rows, precise=out.dtype is not DType.INT8)
    scale = float(q.scale)
    unit = 2.0 ** min(20, 28 - math.ceil(math.log2(scale * (rows.x.high - rows.x.low))))
    _require_step(out, max(2.0**-15, 1 / unit), "log_softmax")
    log_sum = logarithm(total)
    log_sum = log_sum - round(math.log(grid.one) * (1 << 20))
    offset = _to_unit(grid.reference, scale, unit) + _to_unit(log_sum, 2.0**-20, unit)
    return rows.restore((_to_unit(rows.x, scale, unit) - offset).requantize(out))


def _require_step(out: QParams, step: float, operator: str) -> None:
    if float(out.scale) < step * 0.99:
        raise Unsupported(
            f"{operator} with a result scale of {float(out.scale):.2g}, below the {step:.2g} of its sums; keep the "
            "result range that the quantizer sets"
        )


def _to_unit(x: FixedPoint, scale: float, unit: float) -> FixedPoint:
    """Integers at ``scale`` as INT32 at scale 1 / unit."""
    return x.rescale(I32, scale * unit).with_scale(1 / unit)


@dataclass(frozen=True)
class _ExpTableIndex:
    """Affine map from x - reference to a table index: (x - reference + distance) * factor.

    Attributes:
        rows: the input.
        reference: the row's maximum, or a value at most one step of x from it; int32 at the scale of x.
        start: reference - distance, in units of ``stride`` steps of x.
        stride: steps of x in a unit of ``start``.
        factor: table indices in a step of x.
        one: the table value that represents exp(0).
        least: the smallest table value that the row's maximum can have.
        exact: one * exp(x - reference) at the table's points, not rounded.
    """

    rows: ReductionView
    reference: FixedPoint
    start: FixedPoint
    stride: int
    factor: float
    one: float
    least: float
    exact: Array

    def table(self, values: Array, variant: int) -> FixedPoint:
        """Look up ``values`` instead of ``exact``, with index operators of its own for each ``variant``.

        A TABLE fuses with its SUB, and a SUB with its RESCALEs, only if each has a single reader. So every table gets
        its own SUB and RESCALEs. They differ in form, so that common subexpression elimination does not merge them:
            int8
        by another zero point, int16 by other powers of two.
        """
        is_int8 = self.rows.x.dtype is DType.INT8
        gain, zero_point = (1.0, variant) if is_int8 else (2.0**variant, 0)
        x = self.rows.x.sub_zero_point(zero_point).rescale(I32, gain)
        start = self.start.sub_zero_point(zero_point).rescale(I32, self.stride * gain)
        index = (x.with_scale(1.0) - start.with_scale(1.0)).rescale(I16, self.factor / gain, saturate=True)
        return index.apply_table(values, 1 / self.one)


def _exponentials(rows: ReductionView, *, precise: bool) -> tuple[_ExpTableIndex, FixedPoint, FixedPoint]:
    """The table index, exp(x - reference) as int16, and its sum along the rows."""
    _require_row_length(65536, rows)
    split = rows.n > (8 if precise else PLAIN_ROW)
    grid = (
        _table_index_int8(rows)
        if rows.x.dtype is DType.INT8
        else _table_index_int16(rows, NEPERS + split * math.log(GAIN))
    )
    value = grid.table(grid.exact, 0)
    # The sum includes the maximum's own exponential; the factor 0.98 covers the rounding of entries.
    return (
        grid,
        value,
        _sum_exponentials(grid, value, split).assume_range(max(1, int(0.98 * grid.least)), (1 << 31) - 1),
    )


def _sum_exponentials(grid: _ExpTableIndex, value: FixedPoint, split: bool) -> FixedPoint:
    """Sum of the exponentials.

    Rounding errors of up to half a step may add up to n / 2 steps, that is n * 2**-16 of the sum. Where that matters,
    further tables recover them (``split``). int8: a second table holds the remainders of the first one in Q29. int16:
    interpolation makes the remainders uneven, so the sum comes from two tables that split the range at e = 1 / GAIN.
    The lower table is scaled by GAIN, which leaves an error of at most 2**-12 of the sum.
    """
    rows, exact = grid.rows, grid.exact
    if not split:
        return rows.sum_of(value)
    if rows.x.dtype is DType.INT8:
        remainder = rows.sum_of(grid.table((exact - np.rint(exact)) * (1 << 14), 1))
        return rows.sum_of(value) + remainder.rescale(I32, 2.0**-14).with_scale(value.scale)
    _require_row_length(64000, rows)
    tail = exact < Q15_MAX / GAIN
    upper = rows.sum_of(grid.table(np.where(tail, 0, exact), 1))
    lower = rows.sum_of(grid.table(np.where(tail, GAIN * exact, 0), 2))
    return upper + lower.rescale(I32, 1 / GAIN).with_scale(value.scale)


def _require_row_length(n: int, rows: ReductionView) -> None:
    """Refuse rows of more than ``n`` elements, whose sum of int16 exponentials may exceed 32 bits."""
    if rows.n > n:
        raise Unsupported(f"a softmax over {rows.n} {rows.x.dtype.value} elements ({n} at most)")


def _table_index_int8(rows: ReductionView) -> _ExpTableIndex:
    """x - max has 256 values, each with its own table entry, so the error of e is only 2**-16."""
    maximum = rows.max()
    with np.errstate(over="ignore"):
        exact = np.minimum(np.exp(TABLE_INPUTS / 128 * rows.x.scale) * Q15_MAX, Q15_MAX)
    return _ExpTableIndex(rows, maximum.rescale(I32, 1.0), maximum, 1, 128.0, float(Q15_MAX), float(Q15_MAX), exact)


def _table_index_int16(rows: ReductionView, nepers: float) -> _ExpTableIndex:
    """512 intervals of h = 0.022 or so span ``nepers``; the maximum maps near the upper end of int16.

    Interpolation has a relative error of h * h / 8 = 2**-14 of e, which lowering the points halves. The index adds at
    most 2**-13.5 of e. SUB is one operation only if ``start`` is int16, so ``start`` is halved; for an odd maximum the
    row then starts one step of x lower. If a step of x is 1 / 16 or more, that would matter, and ``start`` stays int32.
    """
    scale = min(rows.x.scale, 2 * nepers)  # a larger scale changes nothing: one step below the maximum is 0 already
    top = rows.max().rescale(I32, 1.0)
    factor = min(max(1.0, scale * 65535 / nepers), float(Q15_MAX))
    distance = math.floor(Q15_MAX / factor)
    start, stride, reference = top - distance, 1, top
    one = least = Q15_MAX * math.exp((distance * factor - 32768) * scale / factor)
    if scale < 1 / 16:
        start, stride = start.rescale(I16, 0.5), 2
        reference = start.rescale(I32, 2.0) + distance
        least = one * math.exp(-scale)
    exact = np.minimum(np.exp((TABLE_INPUTS / factor - distance) * scale) * one, Q15_MAX)
    if factor < Q15_MAX:  # else the maximum and all relevant elements fall on points
        exact *= 1 - (128 * scale / factor) ** 2 / 16
    exact[0] *= factor == 1.0  # the index of smaller elements saturates there
    return _ExpTableIndex(rows, reference, start, stride, factor, one, least, exact)
