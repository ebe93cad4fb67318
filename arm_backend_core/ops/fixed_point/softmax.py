"""Integer softmax and log-softmax with int16 exponentials and int32 sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point.elementary_functions import TABLE_INPUTS, logarithm, reciprocal
from arm_backend_core.ops.fixed_point.reduction_view import ReductionView
from arm_backend_core.ops.fixed_point_value import Q15_MAX, Array, FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

I16, I32 = DType.INT16, DType.INT32
#: Range of the exponential's argument: exp(-EXP_INPUT_RANGE) * Q15_MAX = 0.5, so the exponentials of elements further
#: below the maximum round to 0.
EXP_INPUT_RANGE = math.log(2 * Q15_MAX)
#: Longest row whose exponentials are summed from a single table (see ``_sum_exponentials``) for an int8 result. Each
#: exponential has an error of up to half a step, so the sum of n exponentials, which is at least Q15_MAX, has an error
#: of up to n / 2. Up to this row length, this error cannot change an int8 probability by a step.
MAX_PLAIN_ROW_LENGTH = 224
#: Factor by which a second table scales the small exponentials of a long sum.
TAIL_GAIN = 64


def softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """Softmax over ``axis``: exp(x - max) / sum(exp(x - max)).

    The result is the product of two int16: the exponential e, and r = k / sum(e). The constant k is chosen such that
    r <= Q15_MAX. The roundings of e and r each change a probability by at most 2**-16. See ``_sum_exponentials``
    for the error of the sum.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``; a row is too long; or the result's scale is
            below 2**-16.
    """
    rows = ReductionView.from_tensor(b, x, q, (axis,), "softmax")
    _require_min_scale(out, 2.0**-16, "softmax")
    if rows.n == 1:
        return rows.restore(_constant_result(rows, 1).requantize(out))
    table_index, exponentials, total = _exponentials(rows, precise=out.dtype is not DType.INT8)
    k = table_index.min_value_at_maximum * Q15_MAX
    r = reciprocal(total).rescale(I16, k / (1 << 30), saturate=True).with_scale(table_index.exp_zero_value / k)
    return rows.restore((exponentials * r).requantize(out))


def _constant_result(rows: ReductionView, number: int) -> FixedPoint:
    """Return ``number`` for every element, which is the softmax of rows of one element."""
    x = rows.x.rescale(I32, 1.0).with_scale(1.0)
    return x - x + number


def log_softmax(b: Builder, x: Value, q: QParams, axis: int, out: QParams) -> Value:
    """Log-softmax over ``axis``: x - max - ln(sum(exp(x - max))), added in int32 at a scale of 2**-20 or coarser.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``; a row is too long; or the result's scale is
            below 2**-15 or below the scale of the addition.
    """
    rows = ReductionView.from_tensor(b, x, q, (axis,), "log_softmax")
    if rows.n == 1:
        return rows.restore(_constant_result(rows, 0).requantize(out))
    table_index, _, total = _exponentials(rows, precise=out.dtype is not DType.INT8)
    scale = float(q.scale)
    inverse_scale = 2.0 ** min(20, 28 - math.ceil(math.log2(scale * (rows.x.high - rows.x.low))))
    _require_min_scale(out, max(2.0**-15, 1 / inverse_scale), "log_softmax")
    log_sum = logarithm(total)
    log_sum = log_sum - round(math.log(table_index.exp_zero_value) * (1 << 20))
    offset = _convert_scale(table_index.reference, scale, inverse_scale) + _convert_scale(
        log_sum, 2.0**-20, inverse_scale
    )
    return rows.restore((_convert_scale(rows.x, scale, inverse_scale) - offset).requantize(out))


def _require_min_scale(out: QParams, step: float, operator: str) -> None:
    if float(out.scale) < step * 0.99:
        raise Unsupported(
            f"{operator} with a result scale of {float(out.scale):.2g}, below the {step:.2g} of its sums; keep the "
            "result range that the quantizer sets"
        )


def _convert_scale(x: FixedPoint, scale: float, inverse_scale: float) -> FixedPoint:
    """Convert integers at ``scale`` to INT32 at scale 1 / ``inverse_scale``."""
    return x.rescale(I32, scale * inverse_scale).with_scale(1 / inverse_scale)


@dataclass(frozen=True)
class _ExpTableIndex:
    """Affine map from x - reference to a table index: (x - reference + distance) * factor.

    ``distance`` is the number of steps between the reference and the x at index 0 (0 for int8).

    Attributes:
        rows: the input.
        reference: the row's maximum, or one step of x above it; int32 at the scale of x.
        start: the x at index 0, reference - distance, in units of ``stride`` steps of x.
        stride: number of steps of x in one unit of ``start``.
        factor: number of table indices in one step of x.
        exp_zero_value: the table value that represents exp(0).
        min_value_at_maximum: lower bound of the table value of the row's maximum.
        exact_entries: exp_zero_value * exp(x - reference) at the table's 513 inputs, not rounded.
    """

    rows: ReductionView
    reference: FixedPoint
    start: FixedPoint
    stride: int
    factor: float
    exp_zero_value: float
    min_value_at_maximum: float
    exact_entries: Array

    def look_up(self, values: Array, variant: int) -> FixedPoint:
        """Look up ``values`` (513 entries) at the index. Each table of a row needs a different ``variant`` number.

        Vela fuses a SUB into the TABLE, and RESCALEs into the SUB, only if a single operator reads their results. So
        every table gets a separate SUB and separate RESCALEs. Variants differ in the zero point (int8) or in powers of
        two (int16), so that common subexpression elimination does not merge them.
        """
        is_int8 = self.rows.x.dtype is DType.INT8
        gain, zero_point = (1.0, variant) if is_int8 else (2.0**variant, 0)
        x = self.rows.x.sub_zero_point(zero_point).rescale(I32, gain)
        start = self.start.sub_zero_point(zero_point).rescale(I32, self.stride * gain)
        index = (x.with_scale(1.0) - start.with_scale(1.0)).rescale(I16, self.factor / gain, saturate=True)
        return index.apply_table(values, 1 / self.exp_zero_value)


def _exponentials(rows: ReductionView, *, precise: bool) -> tuple[_ExpTableIndex, FixedPoint, FixedPoint]:
    """Return the table index, exp(x - reference) as int16, and its sum along the rows.

    The sum of rows of more than ``MAX_PLAIN_ROW_LENGTH`` elements is split (see ``_sum_exponentials``). ``precise``
    reduces this limit to 8 elements, for results other than int8.
    """
    _require_row_length(65536, rows)
    split = rows.n > (8 if precise else MAX_PLAIN_ROW_LENGTH)
    table_index = (
        _table_index_int8(rows)
        if rows.x.dtype is DType.INT8
        else _table_index_int16(rows, EXP_INPUT_RANGE + split * math.log(TAIL_GAIN))
    )
    value = table_index.look_up(table_index.exact_entries, 0)
    # The sum is at least the exponential of the maximum; the factor 0.98 covers the rounding of entries.
    return (
        table_index,
        value,
        _sum_exponentials(table_index, value, split).assume_range(
            max(1, int(0.98 * table_index.min_value_at_maximum)), (1 << 31) - 1
        ),
    )


def _sum_exponentials(table_index: _ExpTableIndex, value: FixedPoint, split: bool) -> FixedPoint:
    """Sum of the exponentials.

    Rounding errors of up to half a step may add up to n / 2 steps, a relative error of the sum of n * 2**-16. With
    ``split``, more tables reduce this error. For int8, a second table has the rounding errors of the first table's
    entries in Q29, and their sum is added. For int16, interpolation makes the errors irregular. So two other tables are
    summed: one for exponentials of at least 1 / TAIL_GAIN, one for smaller exponentials. The latter is scaled by
    TAIL_GAIN, which divides the rounding errors of its elements by TAIL_GAIN.
    """
    rows, exact = table_index.rows, table_index.exact_entries
    if not split:
        return rows.sum_of(value)
    if rows.x.dtype is DType.INT8:
        remainder = rows.sum_of(table_index.look_up((exact - np.rint(exact)) * (1 << 14), 1))
        return rows.sum_of(value) + remainder.rescale(I32, 2.0**-14).with_scale(value.scale)
    _require_row_length(64000, rows)
    tail = exact < Q15_MAX / TAIL_GAIN
    upper = rows.sum_of(table_index.look_up(np.where(tail, 0, exact), 1))
    lower = rows.sum_of(table_index.look_up(np.where(tail, TAIL_GAIN * exact, 0), 2))
    return upper + lower.rescale(I32, 1 / TAIL_GAIN).with_scale(value.scale)


def _require_row_length(n: int, rows: ReductionView) -> None:
    """Refuse rows of more than ``n`` elements, whose sum of int16 exponentials may exceed 32 bits."""
    if rows.n > n:
        raise Unsupported(f"a softmax over {rows.n} {rows.x.dtype.value} elements ({n} at most)")


def _table_index_int8(rows: ReductionView) -> _ExpTableIndex:
    """Table index for int8: each of the 256 values of x - max has its own entry, so the error of e is only 2**-16."""
    maximum = rows.max()
    with np.errstate(over="ignore"):
        exact = np.minimum(np.exp(TABLE_INPUTS / 128 * rows.x.scale) * Q15_MAX, Q15_MAX)
    return _ExpTableIndex(rows, maximum.rescale(I32, 1.0), maximum, 1, 128.0, float(Q15_MAX), float(Q15_MAX), exact)


def _table_index_int16(rows: ReductionView, input_range: float) -> _ExpTableIndex:
    """Table index for int16: 512 intervals of h = ``input_range`` / 512; the row's maximum maps near 32767.

    Interpolation has a relative error of h * h / 8. If the sum is not split, h is 0.022, and the error is 2**-14.
    Multiplying the entries by 1 - h * h / 16 halves this error. The rounding of the index adds a relative error of at
    most 2**-13.5. SUB is one NPU operation only if ``start`` is int16, so ``start`` is halved to fit int16. If
    maximum - distance is odd, ``reference`` is then one step of x above the maximum, and all exponentials are smaller
    by the same factor. If a step of x is 1 / 16 or more, this factor would cost too much precision, so ``start`` stays
    int32.
    """
    scale = min(rows.x.scale, 2 * input_range)  # at this scale, one step below the maximum already gives 0
    top = rows.max().rescale(I32, 1.0)
    factor = min(max(1.0, scale * 65535 / input_range), float(Q15_MAX))
    distance = math.floor(Q15_MAX / factor)
    start, stride, reference = top - distance, 1, top
    one = least = Q15_MAX * math.exp((distance * factor - 32768) * scale / factor)
    if scale < 1 / 16:
        start, stride = start.rescale(I16, 0.5), 2
        reference = start.rescale(I32, 2.0) + distance
        least = one * math.exp(-scale)
    exact = np.minimum(np.exp((TABLE_INPUTS / factor - distance) * scale) * one, Q15_MAX)
    if factor < Q15_MAX:  # else the maximum and all elements whose exponential is not 0 fall on table inputs
        exact *= 1 - (128 * scale / factor) ** 2 / 16
    exact[0] *= factor == 1.0  # the index of all smaller elements saturates to entry 0
    return _ExpTableIndex(rows, reference, start, stride, factor, one, least, exact)
