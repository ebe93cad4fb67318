"""Pooling. TOSA 1.0, MAX_POOL2D and AVG_POOL2D."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.images import as_image, pair, to_nchw, to_nhwc
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.reduction import mean_over
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.ops.spatial_mean import spatial_mean
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


def _windows(
    cx: Context, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], spatial: int
) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) padding after which the windows end exactly where PyTorch's last one does.

    A floor-mode pool leaves rows over: less padding, or negative padding (a cut). A ceil-mode pool needs more.
    """
    out = (1, *cx.shape[-spatial:])[-2:]
    ends = [(out[i] - 1) * stride[i] + kernel[i] - size[i] - pad[i] for i in (0, 1)]
    return pad[0], ends[0], pad[1], ends[1]


def _fit(cx: Context, image: Value, pads: tuple[int, int, int, int]) -> tuple[Value, tuple[int, int, int, int]]:
    """Cut rows and columns for negative padding."""
    n, h, w, c = image.shape
    cut_h, cut_w = max(-pads[1], 0), max(-pads[3], 0)
    image = cx.b.slice(image, (0, 0, 0, 0), (n, h - cut_h, w - cut_w, c))
    return image, (pads[0], max(pads[1], 0), pads[2], max(pads[3], 0))


def _image(cx: Context, x: Tensor, spatial: int) -> Value:
    batched = x.value if x.rank == spatial + 2 else cx.b.reshape(x.value, (1, *x.shape))
    return to_nhwc(cx.b, as_image(cx.b, batched))


@op(aten.max_pool2d.default, aten.max_pool1d.default, kind=Kind.SHARED)
def max_pool(
    cx: Context,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Value:
    """x [N, C, (H,) W]."""
    spatial = 1 if "max_pool1d" in str(cx.node.target) else 2
    if pair(dilation, spatial, 1) != (1, 1):
        raise Unsupported("max pooling with dilation: TOSA's MAX_POOL2D has none")
    kernel = pair(kernel_size, spatial, 1)
    steps = pair(stride or kernel_size, spatial, 1)
    image = _image(cx, x, spatial)
    pads = _windows(cx, image.shape[1:3], kernel, steps, pair(padding, spatial, 0), spatial)
    image, pads = _fit(cx, image, pads)
    return cx.b.reshape(to_nchw(cx.b, cx.b.max_pool2d(image, kernel, steps, pads)), cx.shape)


@op(aten.avg_pool2d.default, aten.avg_pool1d.default, kind=Kind.SHARED)
def avg_pool(
    cx: Context,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """TOSA leaves padding out of the divisor; where PyTorch counts it, the zeros are written out."""
    spatial = 1 if "avg_pool1d" in str(cx.node.target) else 2
    if divisor_override is not None:
        raise Unsupported("average pooling with divisor_override")
    kernel = pair(kernel_size, spatial, 1)
    steps = pair(stride or kernel_size, spatial, 1)
    amount = pair(padding, spatial, 0)
    image = _image(cx, x, spatial)
    zero = x.q.zero_point if x.q else 0
    pads = _windows(cx, image.shape[1:3], kernel, steps, amount, spatial)
    if count_include_pad and any(amount):
        # ceil_mode may reach beyond the padding; what lies there never counts.
        inside = (amount[0], min(max(pads[1], 0), amount[0]), amount[1], min(max(pads[3], 0), amount[1]))
        image = cx.b.pad(image, [(0, 0), inside[:2], inside[2:], (0, 0)], zero)
        pads = (0, pads[1] - inside[1], 0, pads[3] - inside[3])
    image, pads = _fit(cx, image, pads)
    whole = image.shape[1:3] == kernel and not any(pads)
    result = None
    if whole and x.q is not None and cx.target.hardware.averages_by_convolution:
        result = spatial_mean(cx.b, image, x.q, (1, 2), x.q)
    if result is None:
        result = cx.b.avg_pool2d(image, kernel, steps, pads, (zero, zero))
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _cells(size: int, out: int) -> list[tuple[int, int]]:
    """[start, end) of every output cell of an adaptive pool."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


@op(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool1d.default, wide=True)
def adaptive_avg_pool(cx: Context, x: Tensor, output_size: Sequence[int]) -> Value:
    """Every output cell is the mean of its part of the input."""
    if all(size == 1 for size in cx.shape[-len(output_size) :]):
        axes = tuple(range(x.rank - len(output_size), x.rank))
        return cx.b.reshape(mean_over(cx, x, axes), cx.shape)
    return _adaptive_cells(cx, x, len(output_size))


adaptive_avg_pool.integer(adaptive_avg_pool.lower)


def _adaptive_cells(cx: Context, x: Tensor, spatial: int) -> Value:
    image = _image(cx, x, spatial)
    out = (1, *cx.shape)[-2:] if spatial == 2 else (1, cx.shape[-1])
    rows, columns = _cells(image.shape[1], out[0]), _cells(image.shape[2], out[1])
    zero = x.q.zero_point if x.q else 0
    n, _, _, c = image.shape

    def pool(y: tuple[int, int], z: tuple[int, int]) -> Value:
        part = cx.b.slice(image, (0, y[0], z[0], 0), (n, y[1] - y[0], z[1] - z[0], c))
        kernel = (y[1] - y[0], z[1] - z[0])
        return cx.b.avg_pool2d(part, kernel, kernel, (0, 0, 0, 0), (zero, zero))

    steps = [_uniform(cells) for cells in (rows, columns)]
    if all(steps):
        kernel = (rows[0][1], columns[0][1])
        strides = [step or 1 for step in steps]
        used = [cells[-1][1] for cells in (rows, columns)]
        part = cx.b.slice(image, (0, 0, 0, 0), (n, *used, c))
        result = cx.b.avg_pool2d(part, kernel, strides, (0, 0, 0, 0), (zero, zero))
    else:
        result = cx.b.concat([cx.b.concat([pool(y, z) for z in columns], 2) for y in rows], 1)
    moved = cx.b.reshape(to_nchw(cx.b, result), cx.shape)
    return moved if x.q is None else cx.requantize(Tensor(moved, x.q), cx.q)


def _uniform(cells: Sequence[tuple[int, int]]) -> int | None:
    """The stride of cells that have one size and one stride, else None."""
    sizes = {end - start for start, end in cells}
    strides = {after[0] - before[0] for before, after in pairwise(cells)}
    if len(sizes) > 1 or len(strides) > 1:
        return None
    return strides.pop() if strides else sizes.pop()
