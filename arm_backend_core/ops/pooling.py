"""Pooling: TOSA 1.0 MAX_POOL2D and AVG_POOL2D, and depthwise convolutions for quantized means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import is_only_user_of_operand
from arm_backend_core.ops.image_layout import to_height_width, to_nchw, to_nhwc_image
from arm_backend_core.ops.indexing import gather_constant_indices
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.reduction import reduce_mean
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.ops.spatial_mean import spatial_mean, window_means
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.graph import Value, prod

aten = torch.ops.aten


@dataclass(frozen=True)
class _PoolingWindow:
    """Parameters of a pooling window, height before width.

    Attributes:
        kernel: size of the window.
        stride: distance between windows.
        pad: (top, bottom, left, right). The padded image ends where PyTorch's last window ends. A negative bottom or
            right means that no window reads that number of last rows or columns.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, ...]


def _make_window(
    cx: Context,
    image: Value,
    spatial: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: tuple[int, int] = (1, 1),
) -> _PoolingWindow:
    """Convert PyTorch's arguments. The padding at the end is computed from the result's shape."""
    kernel, strides = to_height_width(kernel_size, spatial, 1), to_height_width(stride or kernel_size, spatial, 1)
    pad_before = to_height_width(padding, spatial, 0)
    out = (1, *cx.shape[-spatial:])[-2:]
    padded_size = [(out[i] - 1) * strides[i] + dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    pad_after = [padded_size[i] - image.shape[1 + i] - pad_before[i] for i in (0, 1)]
    return _PoolingWindow(kernel, strides, (pad_before[0], pad_after[0], pad_before[1], pad_after[1]))


def _crop_unread_border(cx: Context, image: Value, window: _PoolingWindow) -> tuple[Value, _PoolingWindow]:
    """Remove the rows and columns that no window reads."""
    n, h, w, c = image.shape
    _, bottom, _, right = window.pad
    image = cx.b.slice(image, (0, 0, 0, 0), (n, h + min(bottom, 0), w + min(right, 0), c))
    return image, replace(window, pad=tuple(max(pad, 0) for pad in window.pad))


@op(aten.max_pool2d.default, aten.max_pool1d.default, kind=AnnotationKind.SHARED)
def max_pool(
    cx: Context,
    x: Operand,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Value:
    """Max pooling of x [N, C, (H,) W]."""
    spatial = 1 if "max_pool1d" in str(cx.node.target) else 2
    image, dilations = to_nhwc_image(cx.b, x.value, spatial + 2), to_height_width(dilation, spatial, 1)
    image, window = _crop_unread_border(
        cx, image, _make_window(cx, image, spatial, kernel_size, stride, padding, dilations)
    )
    if dilations == (1, 1):
        try:
            result = cx.b.max_pool2d(image, window.kernel, window.stride, window.pad)
        except Unsupported:  # the hardware does not support this padding: pad explicitly
            top, bottom, left, right = window.pad
            image = cx.b.pad(image, [(0, 0), (top, bottom), (left, right), (0, 0)], _lowest_value(image.dtype))
            result = cx.b.max_pool2d(image, window.kernel, window.stride, (0, 0, 0, 0))
    else:
        result = _dilated_max_pool(cx, image, window, dilations)
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _lowest_value(dtype: DType) -> float:
    if not dtype.is_float:
        return dtype.range[0]
    return -dtype.max_finite if dtype is DType.FP8E4M3 else -math.inf  # FP8E4M3 has no infinity


def _dilated_max_pool(cx: Context, image: Value, window: _PoolingWindow, dilation: tuple[int, int]) -> Value:
    """Dilated max pooling by space-to-batch.

    Each image of the batch consists of every dilation-th row and column. Its windows are dense.
    """
    b, (dy, dx), lowest = cx.b, dilation, _lowest_value(image.dtype)
    top, bottom, left, right = window.pad
    n, h, w, c = image.shape
    extra = [-(top + h + bottom) % dy, -(left + w + right) % dx]  # pads to multiples of the dilation
    image = b.pad(image, [(0, 0), (top, bottom + extra[0]), (left, right + extra[1]), (0, 0)], lowest)
    rows, columns = image.shape[1] // dy, image.shape[2] // dx
    phases = b.transpose(b.reshape(image, (n, rows, dy, columns, dx, c)), (0, 2, 4, 1, 3, 5))
    pooled_phases = b.max_pool2d(
        b.reshape(phases, (n * dy * dx, rows, columns, c)), window.kernel, (1, 1), (0, 0, 0, 0)
    )
    pooled_grid = b.reshape(pooled_phases, (n, dy, dx, *pooled_phases.shape[1:]))
    image = b.reshape(
        b.transpose(pooled_grid, (0, 3, 1, 4, 2, 5)), (n, pooled_phases.shape[1] * dy, pooled_phases.shape[2] * dx, c)
    )
    valid_size = (top + h + bottom - dy * (window.kernel[0] - 1), left + w + right - dx * (window.kernel[1] - 1))
    image = gather_constant_indices(b, image, 1, range(0, valid_size[0], window.stride[0]))
    return gather_constant_indices(b, image, 2, range(0, valid_size[1], window.stride[1]))


@op(aten.avg_pool2d.default, aten.avg_pool1d.default, kind=AnnotationKind.SHARED, is_average=True, error_bound=2.0**-14)
def avg_pool(
    cx: Context,
    x: Operand,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Average pooling.

    AVG_POOL2D does not count its padding in the divisor. Padding that PyTorch counts becomes a PAD with zeros.
    """
    spatial = 1 if "avg_pool1d" in str(cx.node.target) else 2
    image, q = to_nhwc_image(cx.b, x.value, spatial + 2), x.q
    window = _make_window(cx, image, spatial, kernel_size, stride, padding)
    if divisor_override is not None:
        explicit_pad = [max(pad, 0) for pad in window.pad]
    elif count_include_pad:  # PyTorch does not count the padding that ceil_mode adds
        rows, columns = to_height_width(padding, spatial, 0)
        limits = (rows, rows, columns, columns)
        explicit_pad = [min(max(pad, 0), limit) for pad, limit in zip(window.pad, limits, strict=True)]
    else:
        explicit_pad = [0, 0, 0, 0]
    sides = [(0, 0), *zip(explicit_pad[::2], explicit_pad[1::2], strict=True), (0, 0)]
    image = cx.b.pad(image, sides, q.zero_point if q else 0)
    implicit_pad = tuple(pad - amount for pad, amount in zip(window.pad, explicit_pad, strict=True))
    image, window = _crop_unread_border(cx, image, replace(window, pad=implicit_pad))
    factor = prod(window.kernel) / (divisor_override or prod(window.kernel))
    if divisor_override is None or q is None:
        result = _average_pool(cx, q, image, window)
        result = result if factor == 1 else cx.b.mul(result, cx.to_value(factor))
    elif factor < 0:
        raise Unsupported(f"a negative divisor_override={divisor_override}; use its magnitude and negate the result")
    else:  # scale the sum, so that it is rounded once
        scaled = replace(q, scale=float(q.scale) * factor)
        result = window_means(cx.b, image, scaled, window.kernel, window.stride, cx.q)
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _average_pool(cx: Context, q: QParams | None, image: Value, window: _PoolingWindow) -> Value:
    is_global = image.shape[1:3] == window.kernel and not any(window.pad)
    if is_global and q is not None and cx.target.hardware.averages_by_convolution:
        result = spatial_mean(cx.b, image, q, (1, 2), q, is_only_user=is_only_user_of_operand(cx.node))
        if result is not None:
            return result
    zero = q.zero_point if q else 0
    return cx.b.avg_pool2d(image, window.kernel, window.stride, window.pad, (zero, zero))


def adaptive_cell_ranges(size: int, out: int) -> list[tuple[int, int]]:
    """Input range [start, end) of each output cell of adaptive pooling along one axis."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


@op(
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool1d.default,
    error_bound=2.0**-14,
    compute_fp32=True,
)
def adaptive_avg_pool(cx: Context, x: Operand, output_size: Sequence[int]) -> Value:
    """Adaptive average pooling: each output cell is the mean of its input range (``adaptive_cell_ranges``)."""
    if all(size == 1 for size in cx.shape[-len(output_size) :]):
        axes = tuple(range(x.rank - len(output_size), x.rank))
        return cx.b.reshape(reduce_mean(cx, x, axes), cx.shape)
    return _adaptive_avg_pool(cx, x, len(output_size))


adaptive_avg_pool.integer_rule(adaptive_avg_pool.lower)


def _adaptive_avg_pool(cx: Context, x: Operand, spatial: int) -> Value:
    """Pool with one operator if all cells have equal size and stride, else with one operator for each cell.

    Quantized pooling with a stride above 3 also uses one operator for each cell.
    """
    image = to_nhwc_image(cx.b, x.value, spatial + 2)
    out = (1, *cx.shape)[-2:] if spatial == 2 else (1, cx.shape[-1])
    rows, columns = adaptive_cell_ranges(image.shape[1], out[0]), adaptive_cell_ranges(image.shape[2], out[1])
    n, _, _, c = image.shape

    def average_windows(part: Value, kernel: Sequence[int], stride: Sequence[int]) -> Value:
        if x.q is None:
            return cx.b.avg_pool2d(part, kernel, stride, (0, 0, 0, 0))
        return window_means(cx.b, part, x.q, kernel, stride, cx.q)

    def pool(row_range: tuple[int, int], column_range: tuple[int, int]) -> Value:
        kernel = (row_range[1] - row_range[0], column_range[1] - column_range[0])
        return average_windows(
            cx.b.slice(image, (0, row_range[0], column_range[0], 0), (n, *kernel, c)), kernel, (1, 1)
        )

    strides = [_uniform_stride(cells) for cells in (rows, columns)]
    # 3 is the largest stride of a depthwise convolution on Ethos-U55.
    fits_depthwise_stride = x.q is None or max(stride or 1 for stride in strides) <= 3
    if all(strides) and fits_depthwise_stride:
        covered_size = [cells[-1][1] for cells in (rows, columns)]
        part = cx.b.slice(image, (0, 0, 0, 0), (n, *covered_size, c))
        result = average_windows(part, (rows[0][1], columns[0][1]), [step or 1 for step in strides])
    else:
        result = cx.b.concat(
            [cx.b.concat([pool(row_range, column_range) for column_range in columns], 2) for row_range in rows], 1
        )
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _uniform_stride(cells: Sequence[tuple[int, int]]) -> int | None:
    """Return the common stride if all cells have the same size and stride, else None."""
    sizes = {end - start for start, end in cells}
    strides = {after[0] - before[0] for before, after in pairwise(cells)}
    if len(sizes) > 1 or len(strides) > 1:
        return None
    return strides.pop() if strides else sizes.pop()
