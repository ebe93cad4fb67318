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
def unfold(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """x [N, C, H, W] -> [N, C * KH * KW, windows]: one strided slice for each position in the window."""
    if x.dim() == 3:
        return unfold(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    batch, channels, height, width = x.shape
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((size - spans[i]) // stride[i] + 1 for i, size in enumerate((height, width)))
    if list(kernel) == list(stride) and list(dilation) == [1, 1]:  # adjacent windows
        x = x[:, :, : rows * kernel[0], : columns * kernel[1]].reshape(
            batch, channels, rows, kernel[0], columns, kernel[1]
        )
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)
    slices = []
    for i, j in product(range(kernel[0]), range(kernel[1])):
        rows_of_slice = x[:, :, i * dilation[0] : i * dilation[0] + (rows - 1) * stride[0] + 1 : stride[0]]
        slices.append(rows_of_slice[..., j * dilation[1] : j * dilation[1] + (columns - 1) * stride[1] + 1 : stride[1]])
    return torch.stack(slices, 2).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)


@decomposition(aten.col2im.default, takes_quantized=True)
def fold(
    x: Tensor,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    *,
    quantized: bool = False,
) -> Tensor:
    """x [N, C * KH * KW, windows] -> [N, C, H, W]: the sum of overlapping windows.

    Adjacent windows only need a permutation. Quantized: a transposed convolution, which rounds once. Else sums, as
    0 * inf is NaN in a convolution.
    """
    if x.dim() == 2:
        return fold(x.unsqueeze(0), output_size, kernel, dilation, padding, stride, quantized=quantized).squeeze(0)
    batch, area = x.shape[0], kernel[0] * kernel[1]
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((output_size[i] + 2 * padding[i] - spans[i]) // stride[i] + 1 for i in (0, 1))
    if list(kernel) == list(stride) and list(dilation) == [1, 1] and not any(padding):
        grid = x.reshape(batch, -1, kernel[0], kernel[1], rows, columns).permute(0, 1, 4, 2, 5, 3)
        image = grid.reshape(batch, -1, rows * kernel[0], columns * kernel[1])
        return F.pad(image, (0, output_size[1] - image.shape[3], 0, output_size[0] - image.shape[2]))
    if not quantized:
        slices = x.reshape(batch, -1, area, rows, columns)
        height, width = rows * stride[0], columns * stride[1]
        terms = []
        for place in range(area):
            part = slices[:, :, place].reshape(batch, -1, rows, 1, columns, 1)
            dilated = F.pad(part, (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
            top, left = (at * dilation[i] - padding[i] for i, at in enumerate(divmod(place, kernel[1])))
            edges = left, output_size[1] - left - width, top, output_size[0] - top - height
            terms.append(F.pad(dilated.reshape(batch, -1, height, width), edges))
        return functools.reduce(torch.add, terms)
    ends = [
        size - (count - 1) * stride[i] - spans[i] + 2 * padding[i]
        for i, (size, count) in enumerate(zip(output_size, (rows, columns), strict=True))
    ]
    places = torch.eye(area, dtype=x.dtype).reshape(area, 1, *kernel)
    slices = x.reshape(-1, area, rows, columns)
    image = F.conv_transpose2d(slices, places, None, stride, padding, ends, 1, dilation)
    return image.reshape(batch, -1, *output_size)


# -- pooling -----------------------------------------------------------------------------------------


def broadcast_sizes(values: Sequence[int], count: int) -> list[int]:
    """Repeat one value for ``count`` dimensions; other lists (also an empty one) as they are."""
    return list(values) * count if len(values) == 1 else list(values)


def window_taps(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> list[list[int]]:
    """For each window element, its input index for every output; beyond an edge, the nearest index in the window."""
    starts = [i * stride - padding for i in range(out)]
    last = [start + (size - 1 - start) // dilation * dilation for start in starts]
    places = [[max(start + k * dilation, start % dilation) for start in starts] for k in range(kernel)]
    return [[max(min(at, end), 0) for at, end in zip(tap, last, strict=True)] for tap in places]


def _adaptive_taps(size: int, out: int) -> list[list[int]]:
    parts = adaptive_cell_ranges(size, out)
    return [[min(start + k, end - 1) for start, end in parts] for k in range(max(end - start for start, end in parts))]


def iterate_window_elements(
    x: Tensor, position: Tensor, taps: Sequence[list[list[int]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each window element for all outputs, with its flat index in the image or volume."""
    if not taps:
        yield x, position
        return
    axis = x.dim() - len(taps)
    for places in taps[0]:
        step = places[1] - places[0] if len(places) > 1 else 1
        if step > 0 and places == list(range(places[0], places[-1] + 1, step)):
            picked = aten.slice(x, axis, places[0], places[-1] + 1, step)
        else:
            picked = torch.index_select(x, axis, torch.tensor(places))
        yield from iterate_window_elements(
            picked, (position * x.shape[axis]).unsqueeze(-1) + torch.tensor(places), taps[1:]
        )


def _argmax_positions(x: Tensor, taps: Sequence[list[list[int]]], quantized: bool) -> Tensor:
    """Flat indices of the largest elements of windows, compared one after the other as in PyTorch.

    If nothing reads the indices, dead code elimination removes the comparisons. Positions are float32, on which every
    target has SELECT; this is exact, as images have fewer than 2**24 pixels. In a program that will be quantized they
    are int32, so that they are not quantized.
    """
    best: Tensor | None = None
    for element, place in iterate_window_elements(x, torch.tensor(0), taps):
        position = place.to(torch.int32 if quantized else torch.float32)
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
    """x [..., (D,) H, W]: maxima, and their indices in the flattened image or volume."""
    kernel, padding, dilation = (broadcast_sizes(values, spatial) for values in (kernel, padding, dilation))
    stride = broadcast_sizes(stride, spatial) or kernel
    pool = partial(F.max_pool2d, ceil_mode=ceil_mode)
    pool_all = pool if spatial == 2 else partial(_pool_planes_then_depth, pool=pool)
    maxima = pool_all(x, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)
    axes = zip(x.shape[-spatial:], maxima.shape[-spatial:], kernel, stride, padding, dilation, strict=True)
    return maxima, _argmax_positions(x, [window_taps(*of) for of in axes], quantized)


decomposition(aten.max_pool2d_with_indices.default, takes_quantized=True)(partial(_max_pool, 2))
decomposition(aten.max_pool3d_with_indices.default, takes_quantized=True)(partial(_max_pool, 3))


@decomposition(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, takes_quantized=True)
def adaptive_max_pool(x: Tensor, output_size: Sequence[int], *, quantized: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., (D,) H, W]: each output cell is the maximum of its part of the input; also its flat index."""
    spatial, maxima = len(output_size), x
    if not any(size % out for size, out in zip(x.shape[-spatial:], output_size, strict=True)):
        pool = aten.max_pool2d_with_indices if spatial == 2 else aten.max_pool3d_with_indices
        return pool(x, [size // out for size, out in zip(x.shape[-spatial:], output_size, strict=True)])
    for axis, out in enumerate(output_size, x.dim() - spatial):
        parts = [maxima.narrow(axis, start, end - start) for start, end in adaptive_cell_ranges(x.shape[axis], out)]
        maxima = torch.cat([part.amax(axis, keepdim=True) for part in parts], axis)
    taps = [_adaptive_taps(*of) for of in zip(x.shape[-spatial:], output_size, strict=True)]
    return maxima, _argmax_positions(x, taps, quantized)


#: Limit of max_unpool, which compares each output element with all indices of its channel.
_MAX_COMPARISONS = 1 << 24


@decomposition(aten.max_unpool2d.default, aten.max_unpool3d.default, takes_quantized=True)
def max_unpool(x: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any, quantized: bool = False) -> Tensor:
    """Scatter the elements of x [..., (D,) H, W] to their flat indices in images or volumes of zeros."""
    spatial, places = len(output_size), math.prod(output_size)
    if x.numel() * places > _MAX_COMPARISONS:
        limit = f"{_MAX_COMPARISONS} comparisons at most"
        raise Unsupported(f"max_unpool of {x.numel()} elements to images of {places} ({limit})")
    image = torch.zeros((*x.shape[:-spatial], places), dtype=x.dtype)
    placed = scatter(image, -1, indices.flatten(-spatial), x.flatten(-spatial), quantized=quantized)
    return placed.unflatten(-1, tuple(output_size))


def _pool_planes_then_depth(x: Tensor, pool: Callable[..., Tensor], **window: Sequence[int]) -> Tensor:
    """Pool x [..., D, H, W] over height and width, then over depth; each argument of ``pool`` has three sizes."""
    flat = pool(x.flatten(0, -4), **{name: sizes[1:] for name, sizes in window.items()})
    deep = flat.reshape(-1, x.shape[-3], flat.shape[-2] * flat.shape[-1])
    neutral = {"output_size": deep.shape[-1], "padding": 0}
    result = pool(deep, **{name: (sizes[0], neutral.get(name, 1)) for name, sizes in window.items()})
    return result.reshape(*x.shape[:-3], result.shape[-2], *flat.shape[-2:])


@decomposition(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """x [..., D, H, W]: mean over planes, then over depth."""
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
    """x [..., D, H, W]. The divisor is separable too; with ``divisor_override`` zeros are padded explicitly."""
    kernel, padding = broadcast_sizes(kernel, 3), broadcast_sizes(padding, 3)
    steps = broadcast_sizes(stride, 3) or kernel
    if divisor_override is not None:
        pads: list[int] = []
        for size, window, step, pad in zip(x.shape[-3:], kernel, steps, padding, strict=True):
            last = -(-(size + 2 * pad - window) // step) * step if ceil_mode else 0  # start of ceil_mode's last window
            pads = [pad, max(last + window - size - pad, pad) if last < size + pad else pad, *pads]
        x, padding, ceil_mode = F.pad(x, pads), [0, 0, 0], False
    pool = partial(F.avg_pool2d, ceil_mode=ceil_mode, count_include_pad=count_include_pad)
    result = _pool_planes_then_depth(x, pool, kernel_size=kernel, stride=steps, padding=padding)
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
    """Convolve x [(N,) IC, ...], with zeros between its elements, with the flipped weight [IC, OC / groups, ...]."""
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
