"""Indexing operators (embedding, index, index_select, gather, one_hot) by GATHER, slices or one-hot products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.permutation import inverse
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value, prod

aten = torch.ops.aten
#: Limits of a gather by one-hot convolution, for constant int8 and int16 tables on targets without GATHER: maximum
#: number of rows of the table, and maximum number of multiplications (indices times elements of the table). Example: 16
#: indices into a table of 1000 x 64 elements take 1,024,000 multiplications. Vela estimates 75,248 cycles for the two
#: convolutions (``one_hot_rows`` and ``_gather_by_conv``) on U55-128. Beyond the limits, the CPU gathers: in tiny BERT,
#: 32 indices into a table of 1000 x 128 elements would take 150,528 cycles, 13% of the model, for a copy of 4 KB.
_MAX_ONE_HOT_ROWS, _MAX_ONE_HOT_PRODUCTS = 1024, 1 << 21
#: Limit of a gather by one-hot rows for all other tables, for example tables that are computed at run time: number of
#: indices times bytes of the table. int8 tables are multiplied by MATMUL. Other tables are converted to int32, and the
#: elementwise products are stored in memory.
_MAX_ONE_HOT_BYTES = 1 << 16
_MAX_ONE_HOT_COUNT = DType.INT16.range[1]  #: limit of columns of a one-hot matrix, whose indices are int16
ONE_HOT_ZERO_POINT = -128  #: int8 that represents 0 in a one-hot matrix; the next integer represents 1
#: Maximum number of rows of a gather with constant indices that differ between rows. Each row takes a slice and a
#: gather.
_MAX_UNROLLED_ROWS = 64
_MAX_CHEAP_SLICES = 8  #: up to this many slices are assumed to be cheaper than a GATHER
_MAX_SLICES = 1024  #: for more slices, Vela takes minutes, and the CPU is faster (example: 12,544 slices in RAFT)


def gather_constant_indices(b: Builder, x: Value, axis: int, indices: Sequence[int]) -> Value:
    """x[indices] along one axis for constant indices: by repetition, slices of runs, a strided slice or GATHER.

    A run is a sequence of indices that increase by 1.

    Raises:
        Unsupported: the target has no GATHER of this type, and there are more than ``_MAX_SLICES`` runs.
    """
    leading_size, size, trailing_size = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    shape = (*x.shape[:axis], len(indices), *x.shape[axis + 1 :])
    repeats = len(indices) // size
    if repeats > 1 and list(indices) == [i // repeats for i in range(repeats * size)]:  # repeat each element
        return b.reshape(b.concat([b.reshape(x, (leading_size * size, 1, trailing_size))] * repeats, 1), shape)
    run_starts = [0, *(i + 1 for i, (a, c) in enumerate(pairwise(indices)) if c != a + 1), len(indices)]
    runs = len(run_starts) - 1
    if runs > _MAX_CHEAP_SLICES:
        arithmetic_sequence = range(indices[0], indices[-1] + 1, max(indices[1] - indices[0], 1))
        if list(indices) == list(arithmetic_sequence):
            return strided_slice(b, x, axis, arithmetic_sequence)
        values, tiled = (
            b.reshape(x, (leading_size, size, trailing_size)),
            b.const(np.tile(indices, (leading_size, 1)), DType.INT32),
        )
        if b.refusal("GATHER", (values, tiled), x.dtype) is None:
            return b.reshape(b.gather(values, tiled), shape)
    if runs > _MAX_SLICES:
        raise Unsupported(f"{runs} runs of elements (at most {_MAX_SLICES} without GATHER); leave it to the CPU")
    return b.concat([b.narrow(x, axis, indices[i], j - i) for i, j in pairwise(run_starts)], axis)


def strided_slice(b: Builder, x: Value, axis: int, indices: range) -> Value:
    """x[indices] along one axis for a range with a step.

    The axis is split into groups of ``step`` elements, and a slice takes one element of each group. An incomplete last
    group is padded.
    """
    before, after, count = x.shape[:axis], x.shape[axis + 1 :], len(indices)
    if indices.step == 1:
        return b.narrow(x, axis, indices.start, count)
    excess = max(indices.start + count * indices.step - x.shape[axis], 0)
    # If the last group would exceed the axis, all groups start `offset` elements earlier, which needs less padding. The
    # slice then takes element `offset` of each group.
    offset = min(indices.start, excess)
    padded = b.pad(x, [(0, excess - offset if i == axis else 0) for i in range(x.rank)], 0)
    span = b.narrow(padded, axis, indices.start - offset, count * indices.step)
    grouped = b.reshape(span, (*before, count, indices.step, *after))
    return b.reshape(b.narrow(grouped, axis + 1, offset, 1), (*before, count, *after))


def _gather_along_axis(cx: Context, x: Value, axis: int, indices: Value) -> Value:
    """x[indices] along one axis for indices that are computed at run time.

    The result has a dimension of size ``indices.size`` in place of the axis.
    """
    b = cx.b
    order = [axis, *(i for i in range(x.rank) if i != axis)]
    axis_first = b.transpose(x, order)
    is_small = axis_first.shape[0] <= _MAX_ONE_HOT_ROWS and indices.size * axis_first.size <= _MAX_ONE_HOT_PRODUCTS
    is_weight = axis_first.data is not None and axis_first.dtype in (DType.INT8, DType.INT16)
    if "GATHER" in cx.target.hardware.unsupported and is_weight and is_small:
        gathered = _gather_by_conv(b, axis_first, b.cast(indices, DType.INT32))
    else:
        flat = reshape_indices(cx, b.cast(indices, DType.INT32), (1, indices.size))
        gathered = _gather_rows(cx, b.reshape(axis_first, (1, axis_first.shape[0], prod(axis_first.shape[1:]))), flat)
    reshaped = b.reshape(gathered, (indices.size, *axis_first.shape[1:]))
    return b.transpose(reshaped, [order.index(i) for i in range(x.rank)])


def _gather_rows(cx: Context, values: Value, indices: Value) -> Value:
    """Gather values [N, K, C] at indices [N, W] -> [N, W, C], by GATHER or by a product with one-hot rows."""
    b, dtype, (n, w) = cx.b, values.dtype, indices.shape
    product_dtype = DType.INT8 if dtype is DType.INT8 else DType.INT32
    is_integer = dtype in (DType.INT8, DType.INT16, DType.INT32)
    is_small = w * values.size * product_dtype.bytes <= _MAX_ONE_HOT_BYTES and values.shape[1] <= _MAX_ONE_HOT_COUNT
    if "GATHER" not in cx.target.hardware.unsupported or not (is_integer and is_small):
        return b.gather(values, indices)
    hot = one_hot_rows(b, b.reshape(indices, (n, w, 1)), values.shape[1])
    if product_dtype is DType.INT8:
        return b.rescale(b.matmul(hot, values, (ONE_HOT_ZERO_POINT, 0)), dtype, 1.0)
    hot = b.reshape(b.rescale(hot, product_dtype, 1.0, ONE_HOT_ZERO_POINT), (*hot.shape, 1))
    products = b.mul(hot, b.reshape(b.cast(values, product_dtype), (n, 1, *values.shape[1:])))
    return b.cast(b.reshape(b.reduce("REDUCE_SUM", products, 2), (n, w, values.shape[2])), dtype)


def one_hot_rows(b: Builder, indices: Value, count: int) -> Value:
    """One-hot rows of int32 indices [..., 1]: int8 [..., count] with zero point ``ONE_HOT_ZERO_POINT``.

    A 1x1 convolution computes index - k for each k: all weights are 1, and the bias of output channel k is -k. The
    difference saturates to int8, and a TABLE maps 0 to 1 and all other numbers to 0. Vela fuses the TABLE into the
    convolution. Arithmetic that broadcasts the indices and the numbers k would take 18 times the cycles: 320 indices
    and 96 numbers take 31,699 cycles on U55-128 instead of 560,640. An index that is out of range gives a row of zeros
    if its magnitude is below 2**29.
    """
    column = b.rescale(b.reshape(indices, (1, 1, indices.size, 1)), DType.INT16, 1.0)
    ones = b.const(np.ones((count, 1, 1, 1)), DType.INT8)
    bias = b.const(-np.arange(count), DType.INT48)
    difference = b.rescale(b.conv2d(column, ones, bias, pad=(0, 0, 0, 0)), DType.INT8, 1.0)
    table = np.full(256, ONE_HOT_ZERO_POINT)
    table[128] += 1
    return b.reshape(b.table(difference, table), (*indices.shape[:-1], count))


def _gather_by_conv(b: Builder, rows: Value, indices: Value) -> Value:
    """rows[indices] for constant ``rows``: a 1x1 convolution of the one-hot indices with ``rows`` as the weights.

    int16 elements are split into two bytes. The low byte minus 128 fits an int8 weight, and the bias adds 128.
    """
    count, hot = rows.shape[0], one_hot_rows(b, b.reshape(indices, (1, 1, indices.size, 1)), rows.shape[0])
    assert rows.data is not None
    columns = rows.data.reshape(count, -1).T
    parts = [columns] if rows.dtype is DType.INT8 else [(columns & 255) - 128, columns >> 8]
    weights = b.const(np.concatenate(parts).reshape(-1, 1, 1, count), DType.INT8)
    bias = b.const(np.repeat([128, 0] if len(parts) > 1 else [0], len(columns)), DType.INT32)
    sums = b.conv2d(hot, weights, bias, pad=(0, 0, 0, 0), zps=(ONE_HOT_ZERO_POINT, 0))
    if len(parts) > 1:
        low, high = (b.narrow(sums, 3, i * len(columns), len(columns)) for i in range(2))
        sums = b.add(low, b.mul(high, b.const(np.full((1,) * 4, 256), DType.INT32)))
    return b.rescale(sums, rows.dtype, 1.0)


def _wrap_negative_indices(cx: Context, indices: Value, size: int) -> Value:
    """Convert negative indices, which count from the end, to positive ones."""
    b, dtype = cx.b, DType.INT32 if cx.target.has_int_profile else DType.FP32  # the FP profile compares no integers
    number = b.cast(indices, dtype)
    negative = b.compare("GREATER", b.const(0, dtype), number)
    return b.cast(b.select(negative, b.add(number, b.const(size, dtype)), number), DType.INT32)


def reshape_indices(cx: Context, indices: Value, shape: Sequence[int]) -> Value:
    """Reshape indices. The FP profile has no RESHAPE of INT32, so it casts indices to FP32 and back.

    The casts are exact for indices below 2**24.
    """
    if cx.target.has_int_profile or indices.data is not None or indices.shape == tuple(shape):
        return cx.b.reshape(indices, shape)
    return cx.b.cast(cx.b.reshape(cx.b.cast(indices, DType.FP32), shape), DType.INT32)


@op(aten.embedding.default, kind=AnnotationKind.SHARED, is_gather=True)
def embedding(cx: Context, table: Operand, indices: Operand, *_: Any, **__: Any) -> Value:
    """Gather rows of table [rows, width] at indices of any shape -> [*indices.shape, width]."""
    return cx.b.reshape(_gather_along_axis(cx, table.value, 0, indices.value), cx.shape)


@op(aten.index.Tensor, aten._unsafe_index.Tensor, kind=AnnotationKind.SHARED, is_gather=True)
def index(cx: Context, x: Operand, indices: Sequence[Operand | None]) -> Value:
    """Indexing by integer tensors: x[:, i], x[:, i, j] and so on.

    The indexed axes are flattened to one, and the index tensors are combined to one row-major index. Axes that are not
    adjacent are moved to the front first, as in PyTorch.
    """
    axes = [axis for axis, tensor in enumerate(indices) if tensor is not None]
    index_values = [tensor.value for tensor in indices if tensor is not None]
    value, sizes, first = x.value, [x.shape[axis] for axis in axes], axes[0]
    if axes != list(range(axes[0], axes[-1] + 1)):
        value, first = cx.b.transpose(value, [*axes, *(i for i in range(x.rank) if i not in axes)]), 0
    value = cx.b.reshape(value, (*value.shape[:first], prod(sizes), *value.shape[first + len(axes) :]))
    if all(index.data is not None for index in index_values):
        pairs = zip(index_values, sizes, strict=True)
        arrays = np.broadcast_arrays(*(np.asarray(index.data) % size for index, size in pairs))
        flat = np.ravel_multi_index(arrays, sizes).reshape(-1)
        return cx.b.reshape(gather_constant_indices(cx.b, value, first, flat.tolist()), cx.shape)
    combined = _wrap_negative_indices(cx, index_values[0], sizes[0])
    for index_value, size in zip(index_values[1:], sizes[1:], strict=True):
        combined = cx.b.mul(combined, cx.b.const(np.full((), size), DType.INT32))
        combined = cx.b.add(combined, _wrap_negative_indices(cx, index_value, size))
    return cx.b.reshape(_gather_along_axis(cx, value, first, combined), cx.shape)


def _gather_constant_indices_per_row(b: Builder, x: Value, axis: int, indices: np.ndarray[Any, Any]) -> Value:
    """torch.gather along one axis for constant indices. For descending indices, the axis is reversed first."""
    for other, size in enumerate(indices.shape):
        rows = [indices.take([i], other) for i in range(size)]
        if other != axis and any(not np.array_equal(row, rows[0]) for row in rows):
            if size > _MAX_UNROLLED_ROWS:
                limit = f"at most {_MAX_UNROLLED_ROWS} without GATHER"
                raise Unsupported(f"gather with different indices in each of {size} rows ({limit})")
            return b.concat(
                [
                    _gather_constant_indices_per_row(b, b.narrow(x, other, i, 1), axis, row)
                    for i, row in enumerate(rows)
                ],
                other,
            )
    row_indices = np.moveaxis(indices, axis, -1).reshape(-1, indices.shape[axis])[0]
    if row_indices[0] > row_indices[-1]:
        x, row_indices = b.reverse(x, axis), x.shape[axis] - 1 - row_indices
    return gather_constant_indices(b, x, axis, row_indices.tolist())


@op(aten.gather.default, kind=AnnotationKind.SHARED, is_gather=True)
def gather(cx: Context, x: Operand, dim: int, indices: Operand, *, sparse_grad: bool = False) -> Value:
    """torch.gather: out[i, j, k] = x[i, indices[i, j, k], k] for ``dim=1``.

    ``dim`` is moved to the last axis. The other axes become the batch of one TOSA GATHER with one channel.
    """
    if not x.rank:
        return cx.b.reshape(x.value, cx.shape)
    axis = dim % x.rank
    index_value = indices.value if indices.rank else cx.b.reshape(indices.value, (1,))
    cropped = cx.b.slice(
        x.value, (0,) * x.rank, [n if i == axis else index_value.shape[i] for i, n in enumerate(x.shape)]
    )
    if cropped.data is not None and cropped.size and cropped.data.min() == cropped.data.max():  # all elements are equal
        return cx.b.const(np.full(cx.shape, cropped.data.flat[0]), cropped.dtype)
    if index_value.data is not None and "GATHER" in cx.target.hardware.unsupported:
        return cx.b.reshape(
            _gather_constant_indices_per_row(cx.b, cropped, axis, np.asarray(index_value.data)), cx.shape
        )
    order = [*(i for i in range(x.rank) if i != axis), axis]
    axis_last = [cx.b.transpose(value, order) for value in (cropped, cx.b.cast(index_value, DType.INT32))]
    values, row_indices = (cx.b.reshape(value, (value.size // value.shape[-1], value.shape[-1])) for value in axis_last)
    elements = _gather_rows(cx, cx.b.reshape(values, (*values.shape, 1)), row_indices)
    return cx.b.reshape(cx.b.transpose(cx.b.reshape(elements, axis_last[1].shape), inverse(tuple(order))), cx.shape)


@op(aten.index_select.default, kind=AnnotationKind.SHARED, is_gather=True)
def index_select(cx: Context, x: Operand, dim: int, indices: Operand) -> Value:
    """x[indices] along dimension ``dim``."""
    if x.rank == 0:
        return x.value
    return index.lower(cx, x, [*[None] * (dim % x.rank), indices])


@op(aten.one_hot.default, kind=AnnotationKind.PASSTHROUGH, interval=lambda node, interval_of: (0, 1))
def one_hot(cx: Context, x: Operand, num_classes: int) -> Value:
    """One-hot encoding of the classes x along a new last dimension: [*x.shape, num_classes]."""
    if "GATHER" in cx.target.hardware.unsupported and num_classes <= _MAX_ONE_HOT_COUNT:
        hot = one_hot_rows(cx.b, cx.b.reshape(cx.b.cast(x.value, DType.INT32), (*x.shape, 1)), num_classes)
        return cx.b.rescale(hot, DType.INT32, 1.0, ONE_HOT_ZERO_POINT)
    dtype = DType.INT32 if cx.target.has_int_profile else DType.FP32  # the FP profile compares and reshapes no integers
    column = cx.b.reshape(cx.b.cast(x.value, dtype), (*x.shape, 1))
    hot = cx.b.compare("EQUAL", column, cx.b.const(np.arange(num_classes), dtype))
    return cx.b.cast(cx.b.cast(hot, dtype), DType.INT32)
