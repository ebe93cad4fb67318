"""Decompositions of window operators: im2col, col2im, pooling with indices, 3D pooling, transposed convolution."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.composites.scatter import scatter
from arm_backend_core.ops.pooling import adaptive_cell_ranges
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.im2col.default)
def im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """F.unfold: x [N, C, H, W] -> [N, C * KH * KW, windows], by one strided slice for each element of the window.

    Windows that tile the image (stride = kernel size, no dilation) need only a reshape and a permutation.
    """
    if x.dim() == 3:
        return im2col(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    batch, channels, height, width = x.shape
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((size - spans[i]) // stride[i] + 1 for i, size in enumerate((height, width)))
    if list(kernel) == list(stride) and list(dilation) == [1, 1]:  # windows that tile the image
        x = x[:, :, : rows * kernel[0], : columns * kernel[1]].reshape(
            batch, channels, rows, kernel[0], columns, kernel[1]
        )
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)
    slices = []
    for i, j in product(range(kernel[0]), range(kernel[1])):
        rows_of_slice = x[:, :, i * dilation[0] : i * dilation[0] + (rows - 1) * stride[0] + 1 : stride[0]]
        slices.append(rows_of_slice[..., j * dilation[1] : j * dilation[1] + (columns - 1) * stride[1] + 1 : stride[1]])
    return torch.stack(slices, 2).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)


#: Largest one-row window (kernel height 1) for which a quantized ``col2im`` is a transposed convolution. For larger
#: windows, ``overlap_add`` is faster. Windows of 512 elements with a hop of 128 take 74,775 cycles on U55-128 by
#: transposed convolution, and 112,472 by ``overlap_add``. Windows of 1024 elements with a hop of 256 take 148,455
#: cycles by transposed convolution, and 109,804 by ``overlap_add``.
_MAX_COL2IM_WINDOW = 512


def overlap_add(x: Tensor, hop: int) -> Tensor:
    """Overlap-add: x [.., frames, n] -> [.., samples]. Each frame starts ``hop`` samples after the previous one.

    A frame is split into pieces of ``hop`` samples; piece k of frame t is added to piece t + k of the result.
    """
    frames, n = x.shape[-2:]
    count = -(-n // hop)
    pieces = F.pad(x, (0, count * hop - n)).unflatten(-1, (count, hop))
    shifted = (F.pad(pieces[..., k, :], (0, 0, k, count - 1 - k)) for k in range(count))
    return functools.reduce(torch.add, shifted).flatten(-2)[..., : n + (frames - 1) * hop]


@decomposition(aten.col2im.default, takes_quantized=True)
def col2im(
    x: Tensor,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    *,
    quantized: bool = False,
) -> Tensor:
    """F.fold: x [N, C * KH * KW, windows] -> [N, C, H, W], where overlapping windows are summed.

    Windows that tile the image need only a permutation. A quantized program uses a transposed convolution, which rounds
    once. A floating-point program adds shifted windows, because 0 * inf is NaN in a convolution. A quantized program
    also adds shifted windows if a window is one row of more than ``_MAX_COL2IM_WINDOW`` elements, because the
    transposed convolution of n-element windows would have n * n weights.
    """
    if x.dim() == 2:
        return col2im(x.unsqueeze(0), output_size, kernel, dilation, padding, stride, quantized=quantized).squeeze(0)
    batch, area = x.shape[0], kernel[0] * kernel[1]
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((output_size[i] + 2 * padding[i] - spans[i]) // stride[i] + 1 for i in (0, 1))
    if list(kernel) == list(stride) and list(dilation) == [1, 1] and not any(padding):
        grid = x.reshape(batch, -1, kernel[0], kernel[1], rows, columns).permute(0, 1, 4, 2, 5, 3)
        image = grid.reshape(batch, -1, rows * kernel[0], columns * kernel[1])
        return F.pad(image, (0, output_size[1] - image.shape[3], 0, output_size[0] - image.shape[2]))
    is_one_row = list(kernel) == [1, area] and stride[0] == dilation[1] == 1 and not any(padding)
    if is_one_row and (not quantized or area > _MAX_COL2IM_WINDOW):
        image = overlap_add(x.reshape(batch, -1, area, rows, columns).permute(0, 1, 3, 4, 2), stride[1])
        return F.pad(image, (0, output_size[1] - image.shape[3]))
    if not quantized:
        slices = x.reshape(batch, -1, area, rows, columns)
        height, width = rows * stride[0], columns * stride[1]
        terms = []
        for element in range(area):
            part = slices[:, :, element].reshape(batch, -1, rows, 1, columns, 1)
            dilated = F.pad(part, (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
            top, left = (offset * dilation[i] - padding[i] for i, offset in enumerate(divmod(element, kernel[1])))
            edges = left, output_size[1] - left - width, top, output_size[0] - top - height
            terms.append(F.pad(dilated.reshape(batch, -1, height, width), edges))
        return functools.reduce(torch.add, terms)
    output_padding = [
        size - (count - 1) * stride[i] - spans[i] + 2 * padding[i]
        for i, (size, count) in enumerate(zip(output_size, (rows, columns), strict=True))
    ]
    one_hot_kernels = torch.eye(area, dtype=x.dtype).reshape(area, 1, *kernel)
    slices = x.reshape(-1, area, rows, columns)
    image = F.conv_transpose2d(slices, one_hot_kernels, None, stride, padding, output_padding, 1, dilation)
    return image.reshape(batch, -1, *output_size)


# -- pooling -----------------------------------------------------------------------------------------


def broadcast_sizes(values: Sequence[int], count: int) -> list[int]:
    """Repeat a single value for ``count`` dimensions. Other lists, also empty ones, are returned unchanged."""
    return list(values) * count if len(values) == 1 else list(values)


def compute_window_indices(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int
) -> list[list[int]]:
    """For each window element, compute its input index for every output of one dimension.

    An index in the padding is replaced by the nearest index inside the input that the same window reads. Example:
    kernel 2 and stride 2 on 4 elements give [[0, 2], [1, 3]].
    """
    starts = [i * stride - padding for i in range(out)]
    last = [start + (size - 1 - start) // dilation * dilation for start in starts]
    indices = [[max(start + k * dilation, start % dilation) for start in starts] for k in range(kernel)]
    return [
        [max(min(index, end), 0) for index, end in zip(element_indices, last, strict=True)]
        for element_indices in indices
    ]


def _compute_adaptive_window_indices(size: int, out: int) -> list[list[int]]:
    parts = adaptive_cell_ranges(size, out)
    return [[min(start + k, end - 1) for start, end in parts] for k in range(max(end - start for start, end in parts))]


def iterate_window_elements(
    x: Tensor, position: Tensor, window_indices: Sequence[list[list[int]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each window element for all outputs, with its flat index in the image or volume.

    The function recurses over the spatial dimensions. ``window_indices`` has the result of ``compute_window_indices``
    for each dimension that remains. ``position`` is the flat index in the dimensions that are already processed.
    """
    if not window_indices:
        yield x, position
        return
    axis = x.dim() - len(window_indices)
    for indices in window_indices[0]:
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        if step > 0 and indices == list(range(indices[0], indices[-1] + 1, step)):
            element = aten.slice(x, axis, indices[0], indices[-1] + 1, step)
        else:
            element = torch.index_select(x, axis, torch.tensor(indices))
        yield from iterate_window_elements(
            element, (position * x.shape[axis]).unsqueeze(-1) + torch.tensor(indices), window_indices[1:]
        )


def _argmax_positions(x: Tensor, window_indices: Sequence[list[list[int]]], quantized: bool) -> Tensor:
    """Flat index of the largest element of each window. As in PyTorch: the first of equal maxima, and the last NaN.

    If nothing reads the indices, dead code elimination removes the comparisons. Positions are float32, because the FP
    profile has no SELECT on INT32. This is exact for images of up to 2**24 pixels. In a program that will be quantized,
    positions are int32, so that they are not quantized.
    """
    best: Tensor | None = None
    for element, element_position in iterate_window_elements(x, torch.tensor(0), window_indices):
        position = element_position.to(torch.int32 if quantized else torch.float32)
        if best is None:
            best, index = element, position.expand(element.shape)
        else:
            better = (element > best) | (element != element)
            best, index = torch.where(better, element, best), torch.where(better, position, index)
    return index.to(torch.int32).to(torch.int64)


def _max_pool(
    spatial: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    quantized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Max pooling of x [..., (D,) H, W]: return the maxima, and their indices in the flattened image or volume."""
    kernel, padding, dilation = (broadcast_sizes(values, spatial) for values in (kernel, padding, dilation))
    stride = broadcast_sizes(stride, spatial) or kernel
    pool = partial(F.max_pool2d, ceil_mode=ceil_mode)
    pool_all = pool if spatial == 2 else partial(_pool_planes_then_depth, pool=pool)
    maxima = pool_all(x, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)
    axes = zip(x.shape[-spatial:], maxima.shape[-spatial:], kernel, stride, padding, dilation, strict=True)
    return maxima, _argmax_positions(x, [compute_window_indices(*sizes) for sizes in axes], quantized)


decomposition(aten.max_pool2d_with_indices.default, takes_quantized=True)(partial(_max_pool, 2))
decomposition(aten.max_pool3d_with_indices.default, takes_quantized=True)(partial(_max_pool, 3))


@decomposition(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, takes_quantized=True)
def adaptive_max_pool(x: Tensor, output_size: Sequence[int], *, quantized: bool = False) -> tuple[Tensor, Tensor]:
    """Adaptive max pooling of x [..., (D,) H, W]: return the maximum of each output cell, and its flat input index."""
    spatial, maxima = len(output_size), x
    if not any(size % out for size, out in zip(x.shape[-spatial:], output_size, strict=True)):
        pool = aten.max_pool2d_with_indices if spatial == 2 else aten.max_pool3d_with_indices
        return pool(x, [size // out for size, out in zip(x.shape[-spatial:], output_size, strict=True)])
    for axis, out in enumerate(output_size, x.dim() - spatial):
        parts = [maxima.narrow(axis, start, end - start) for start, end in adaptive_cell_ranges(x.shape[axis], out)]
        maxima = torch.cat([part.amax(axis, keepdim=True) for part in parts], axis)
    window_indices = [
        _compute_adaptive_window_indices(*sizes) for sizes in zip(x.shape[-spatial:], output_size, strict=True)
    ]
    return maxima, _argmax_positions(x, window_indices, quantized)


#: Maximum number of comparisons in max_unpool, which compares each output element with all indices of its channel.
_MAX_COMPARISONS = 1 << 24


@decomposition(aten.max_unpool2d.default, aten.max_unpool3d.default, takes_quantized=True)
def max_unpool(x: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any, quantized: bool = False) -> Tensor:
    """Scatter the elements of x [..., (D,) H, W] to their flat indices in images or volumes of zeros."""
    spatial, output_elements = len(output_size), math.prod(output_size)
    if x.numel() * output_elements > _MAX_COMPARISONS:
        limit = f"{_MAX_COMPARISONS} comparisons at most"
        raise Unsupported(f"max_unpool of {x.numel()} elements to images of {output_elements} ({limit})")
    image = torch.zeros((*x.shape[:-spatial], output_elements), dtype=x.dtype)
    placed = scatter(image, -1, indices.flatten(-spatial), x.flatten(-spatial), quantized=quantized)
    return placed.unflatten(-1, tuple(output_size))


def _pool_planes_then_depth(x: Tensor, pool: Callable[..., Tensor], **window: Sequence[int]) -> Tensor:
    """Pool x [..., D, H, W] over (H, W), then over D. ``window``: arguments of ``pool``, each (D, H, W)."""
    flat = pool(x.flatten(0, -4), **{name: sizes[1:] for name, sizes in window.items()})
    deep = flat.reshape(-1, x.shape[-3], flat.shape[-2] * flat.shape[-1])
    neutral_sizes = {"output_size": deep.shape[-1], "padding": 0}
    result = pool(deep, **{name: (sizes[0], neutral_sizes.get(name, 1)) for name, sizes in window.items()})
    return result.reshape(*x.shape[:-3], result.shape[-2], *flat.shape[-2:])


@decomposition(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling of x [..., D, H, W] over planes, then over depth."""
    return _pool_planes_then_depth(x, F.adaptive_avg_pool2d, output_size=output_size)


@decomposition(aten.avg_pool3d.default)
def avg_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average pooling of x [..., D, H, W] over planes, then over depth.

    Each step divides its sums by the number of elements that PyTorch counts in the window, along the axes of this step.
    The product of both numbers is the divisor of the 3D pooling. With ``divisor_override``, x is padded with zeros
    first, so both steps divide by the size of whole windows, and the result is corrected by a factor.
    """
    kernel, padding = broadcast_sizes(kernel, 3), broadcast_sizes(padding, 3)
    strides = broadcast_sizes(stride, 3) or kernel
    if divisor_override is not None:
        pads: list[int] = []
        for size, window, step, pad in zip(x.shape[-3:], kernel, strides, padding, strict=True):
            # start of the last window with ceil_mode
            last = -(-(size + 2 * pad - window) // step) * step if ceil_mode else 0
            pads = [pad, max(last + window - size - pad, pad) if last < size + pad else pad, *pads]
        x, padding, ceil_mode = F.pad(x, pads), [0, 0, 0], False
    pool = partial(F.avg_pool2d, ceil_mode=ceil_mode, count_include_pad=count_include_pad)
    result = _pool_planes_then_depth(x, pool, kernel_size=kernel, stride=strides, padding=padding)
    return result if divisor_override is None else result * (math.prod(kernel) / divisor_override)


@decomposition(aten.conv_transpose3d.input)
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """Transposed convolution of x [(N,) IC, ...] with the weight [IC, OC / groups, ...].

    Zeros are inserted between the elements of x, and the result is convolved with the flipped weight.
    """
    spatial = weight.dim() - 2
    stride, padding, extra, dilation = (
        broadcast_sizes(v, spatial) for v in (stride, padding, output_padding, dilation)
    )
    pads: list[int] = []
    for i, step in enumerate(stride):
        axis = x.dim() - spatial + i
        if step > 1:
            dilated = F.pad(x.unsqueeze(axis + 1), [0, 0] * (spatial - 1 - i) + [0, step - 1])
            x = dilated.flatten(axis, axis + 1)
        reach = dilation[i] * (weight.shape[2 + i] - 1) - padding[i]
        pads = [reach, reach + extra[i] - (step - 1), *pads]
    mirrored = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(*range(2, spatial + 2))
    conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return conv(F.pad(x, pads), mirrored, bias, 1, 0, dilation, groups)
