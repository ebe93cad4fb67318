"""View of a quantized tensor for reductions over one or several axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point_value import Array, FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.transpose_swaps import MAX_EXTENT
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value, prod

I32 = DType.INT32
#: Maximum number of elements of a row. The magnitude of a sum of 2**22 int16 values is up to 2**37, which ``sum_of``
#: shifts right by 8 bits. Longer rows would lose more bits.
_MAX_ELEMENTS = 1 << 22

#: If a tensor has at most ``_FEW_ROWS`` rows, U85 sums rows of more than ``_SLOW_ROW`` elements faster in parts of
#: ``_FAST_PART`` elements: a variance of 16,384 int8 elements takes 24,426 instead of 107,136 cycles on U85-256. Rows
#: of ``_MAX_EXACT_ROW`` or more elements are not split for speed, because the sums of int16 parts would need a shift
#: (``ReductionView.sum_of``).
_FEW_ROWS, _SLOW_ROW, _FAST_PART, _MAX_EXACT_ROW = 8, 1024, 512, 1 << 15


@dataclass(frozen=True)
class ReductionView:
    """A quantized tensor that is reduced along one axis. A row is the ``n`` elements that are reduced to one.

    A single axis stays in place, because a RESHAPE may copy the tensor. Several axes are merged into one. If they are
    not adjacent, they are first moved to the end. A row that is longer than MAX_EXTENT, or that the NPU sums faster in
    parts, is split into ``parts`` of equal length: the axis before ``axis`` then has the parts, and ``axis`` has the
    elements of a part.

    Attributes:
        x: the stored integers. The zero point is not subtracted, because it cancels in differences between elements.
        zero_point: the integer that represents 0.
        axis: the axis of ``x`` that is reduced.
        shape: shape of the original tensor.
        order: permutation of the original axes that was applied before the reshape.
        parts: number of parts of a row.
    """

    x: FixedPoint
    zero_point: int
    axis: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    parts: int = 1

    @classmethod
    def from_tensor(cls, b: Builder, x: Value, q: QParams, axes: Sequence[int], operator: str) -> ReductionView:
        """View a tensor as rows along ``axes``; ``operator`` names the operator in messages.

        Raises:
            Unsupported: the tensor is neither int8 nor int16, has per-channel scales, has rows of more than
                ``_MAX_ELEMENTS`` elements, or has rows that cannot be split into equal parts of at most MAX_EXTENT
                elements.
        """
        if q.dtype not in (DType.INT8, DType.INT16) or np.ndim(q.scale):
            raise Unsupported(f"{operator} of {q.dtype.value}; its input must be int8 or int16 with one scale")
        axes = sorted(axis % x.rank for axis in axes)
        n = prod(x.shape[axis] for axis in axes)
        parts = _count_parts(n, _is_slow_sum(b, x, axes, n)) if n <= _MAX_ELEMENTS else None
        if parts is None:
            raise Unsupported(
                f"a reduction over {n} elements ({_MAX_ELEMENTS} at most, in equal parts of {MAX_EXTENT} at most)"
            )
        order = tuple(range(x.rank))
        fixed_point = FixedPoint(b, x, *x.dtype.range, float(q.scale))
        if len(axes) == parts == 1:
            return cls(fixed_point, q.zero_point, axes[0], x.shape, order)
        if axes != list(range(axes[0], axes[0] + len(axes))):
            order = (*(axis for axis in order if axis not in axes), *axes)
        permuted = b.transpose(x, order)
        start = order.index(axes[0])
        before, after = permuted.shape[:start], permuted.shape[start + len(axes) :]
        shape = (prod(before), *((parts,) if parts > 1 else ()), n // parts, *after)
        axis = len(shape) - len(after) - 1
        return cls(replace(fixed_point, value=b.reshape(permuted, shape)), q.zero_point, axis, x.shape, order, parts)

    @property
    def n(self) -> int:
        """Number of elements of a row."""
        return self.parts * self.x.shape[self.axis]

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axes of ``x`` to reduce: the elements of a part, then the parts if rows are split."""
        return (self.axis,) if self.parts == 1 else (self.axis, self.axis - 1)

    def restore(self, y: Value) -> Value:
        """Reshape and transpose ``y``, a tensor in the layout of the view, to the original tensor's shape."""
        y = self.x.b.reshape(y, [self.shape[axis] for axis in self.order])
        return self.x.b.transpose(y, [self.order.index(axis) for axis in range(len(self.order))])

    def broadcast_weights(self, weights: Array) -> Array:
        """Reshape ``weights``, which have the shape of the reduced axes, so that they broadcast against the view."""
        shape = [size if axis in self.row_axes else 1 for axis, size in enumerate(self.x.shape)]
        return np.asarray(weights, dtype=np.float64).reshape(shape)

    def max(self) -> FixedPoint:
        """Maximum of each row.

        Along the last dimension, ``maximum_along`` computes it, because REDUCE_MAX would take four times as long.
        """
        if self.axis == self.x.value.rank - 1:
            return self.max_of(self.x)
        value = self.x.value
        for axis in self.row_axes:
            value = self.x.b.reduce("REDUCE_MAX", value, axis)
        return replace(self.x, value=value)

    def max_of(self, x: FixedPoint) -> FixedPoint:
        """Maximum along the rows of ``x``, a tensor with the shape of the view."""
        for axis in self.row_axes:
            x = maximum_along(x, axis)
        return x

    def sum(self, zero_point: int = 0) -> FixedPoint:
        """Sum of (x - zero_point) along each row, int32."""
        return self.sum_of(self.x.sub_zero_point(zero_point))

    def mean(self, bits: int) -> FixedPoint:
        """Mean of the stored integers (zero point included) of each row, with ``bits`` fractional bits; int32."""
        total = self.sum()
        factor = 2.0**bits / self.n * (total.scale / self.x.scale)
        return total.rescale(I32, factor).with_scale(2.0**-bits)

    def sum_of(self, x: FixedPoint, peak: int | None = None) -> FixedPoint:
        """Sum along the rows of ``x``, a tensor with the shape of the view; int32. For ``peak`` see ``FixedPoint.mul``.

        On NPUs, ADD sums rows of two elements if ``peak`` is None. ADD has no size limit, and takes a fifth of the
        cycles of REDUCE_SUM on U55 and U65, and a fortieth on U85. If ``peak`` is None and the sum of all parts of a
        row could exceed 32 bits, the sums of the parts are shifted right before they are added.
        """
        if self.n != 2 or peak is not None or not x.b.target.hardware.is_ethos_u:
            total = x.to_int32().sum(self.axis, peak)
            if self.parts == 1:
                return total
            bits = 0 if peak is not None else (total.peak * self.parts).bit_length() - 30
            return (total.drop_fraction_bits(bits) if bits > 0 else total).sum(self.axis - 1, peak)
        first, second = (replace(x, value=x.b.narrow(x.value, self.axis, start, 1)).to_int32() for start in (0, 1))
        return first + second


def _count_parts(n: int, is_slow: bool) -> int | None:
    """The number of equal parts into which to split a row of ``n`` elements; None if parts would exceed MAX_EXTENT."""
    if is_slow:  # if n has a large prime factor, equal parts may be too short to be fast
        parts = next(parts for parts in range(-(-n // _FAST_PART), n + 1) if n % parts == 0)
        if n // parts >= _FAST_PART // 8:
            return parts
    return next((parts for parts in range(max(-(-n // MAX_EXTENT), 1), MAX_EXTENT + 1) if n % parts == 0), None)


def _is_slow_sum(b: Builder, x: Value, axes: Sequence[int], n: int) -> bool:
    """Whether ``axes`` are the last axes and the NPU (U85) sums their ``n`` elements faster in parts."""
    are_last = list(axes) == list(range(x.rank - len(axes), x.rank))
    return b.target.hardware.chains and are_last and x.size <= _FEW_ROWS * n and _SLOW_ROW < n < _MAX_EXACT_ROW


def maximum_along(x: FixedPoint, axis: int) -> FixedPoint:
    """Maximum along an axis by halving: take the elementwise maximum of both halves until one element is left.

    If the size is odd, the halves share an element. In total, this takes one elementwise maximum per element. No NPU
    has REDUCE_MAX on INT32.
    """
    while (n := x.shape[axis]) > 1:
        half = (n + 1) // 2
        first, second = (replace(x, value=x.b.narrow(x.value, axis, start, half)).to_int32() for start in (0, n - half))
        x = first.maximum(second) if x.dtype is I32 else first.maximum(second).rescale(x.dtype, 1.0)
    return x
