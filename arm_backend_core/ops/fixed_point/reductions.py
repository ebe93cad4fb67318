"""Integer sum, mean, maximum, variance and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point.elementary_functions import sqrt
from arm_backend_core.ops.fixed_point.norms import SumOfSquares, sum_squared_deviations_int8
from arm_backend_core.ops.fixed_point.reduction_view import ReductionView
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

I32 = DType.INT32


def mean(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value:
    """Mean over ``axes``, as with ``keepdim=True``.

    The only error is the rounding of the result. An int16 row whose sum could exceed 32 bits also loses low bits of the
    sum (``ReductionView.sum_of``).

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    rows = ReductionView.from_tensor(b, x, q, axes, "mean")
    total = rows.sum(q.zero_point)
    return _restore_axes(x, axes, total.with_scale(total.scale / rows.n), out)


def sum_(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value:
    """Sum over ``axes``, as with ``keepdim=True``. It has the same rounding errors as ``mean``.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    return _restore_axes(x, axes, ReductionView.from_tensor(b, x, q, axes, "sum").sum(q.zero_point), out)


def reduce_max(b: Builder, x: Value, q: QParams, axis: int) -> Value:
    """Maximum of int8 or int16 along one axis. See ``ReductionView.max`` for the cycles.

    The result has one element for each row of the ``ReductionView``. The caller reshapes the result: if the view
    splits rows into parts, the result does not have the shape of ``keepdim=True``.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    return ReductionView.from_tensor(b, x, q, (axis,), "amax").max().value


def var(b: Builder, x: Value, q: QParams, axes: Sequence[int], correction: float, out: QParams) -> Value:
    """Variance: the sum of (x - mean)**2 over ``axes``, divided by (count - correction), as with ``keepdim=True``.

    For int8, the error is at most 2**-6 squared steps. For int16, each square loses log2(n) low bits, so that the sum
    of the n largest possible squares fits INT32. This error is below one step of an int16 result, unless
    the range of the result is much smaller than the range of the input.

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``; or x is int16, and the result's scale is
            below the scale of the sum of squares.
    """
    rows = ReductionView.from_tensor(b, x, q, axes, "var")
    n = rows.n
    if q.dtype is DType.INT8:
        squares, bits = _sum_squared_deviations_in_30_bits(rows)
    else:
        x_q2 = rows.x.with_scale(1.0).to_int32_with_fraction_bits(2)
        deviation_q2 = x_q2 - rows.mean(2).with_scale(x_q2.scale)  # Q2, up to 2**18
        bits = 30 - 32 - max(0, math.ceil(math.log2(n)) - 2)  # sum <= n / 4 * 2**32
        squares = rows.sum_of(deviation_q2.mul(deviation_q2, 4 - bits), peak=1 << 30)
    squares = squares.with_scale(float(q.scale) ** 2 * 2.0**-bits / (n - correction))
    if squares.scale > float(out.scale) and q.dtype is DType.INT16:
        raise Unsupported(
            f"a variance at a scale of {float(out.scale):.2g}, below the {squares.scale:.2g} of its sums; "
            "subtract the mean first, or take the standard deviation"
        )
    return _restore_axes(x, axes, squares, out)


def std(b: Builder, x: Value, q: QParams, axes: Sequence[int], correction: float, out: QParams) -> Value:
    """Standard deviation over ``axes``, as with ``keepdim=True``.

    For int16, each row has its own exponent (``SumOfSquares``).

    Raises:
        Unsupported: under the conditions of ``ReductionView.from_tensor``.
    """
    rows = ReductionView.from_tensor(b, x, q, axes, "std")
    if q.dtype is DType.INT8:
        squares, bits = _sum_squared_deviations_in_30_bits(rows)
        root = sqrt(squares.maximum(0).with_scale(1.0))
        root = root.with_scale(root.scale * 2.0 ** (-bits / 2))
    else:
        root = SumOfSquares.from_rows(rows, centre=True).root()
    return _restore_axes(x, axes, root.with_scale(root.scale * float(q.scale) / math.sqrt(rows.n - correction)), out)


def _sum_squared_deviations_in_30_bits(rows: ReductionView) -> tuple[FixedPoint, int]:
    """Return the sum of (x - mean)**2 as integers below 2**30, and their number of fractional bits."""
    bits = min(14, math.floor(29.9 - math.log2(rows.n * (1 << 14))))
    return sum_squared_deviations_int8(rows, bits, centre=True)[0], bits


def _restore_axes(x: Value, axes: Sequence[int], y: FixedPoint, out: QParams) -> Value:
    """Requantize the result y of a reduction of x over ``axes``, and reshape it so that these axes have size 1."""
    axes = [axis % x.rank for axis in axes]
    return y.b.reshape(y.requantize(out), [1 if axis in axes else size for axis, size in enumerate(x.shape)])
