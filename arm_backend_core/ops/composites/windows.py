"""Windows over images and volumes: unfolding, pooling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.pooling import cells
from arm_backend_core.ops.registry import made_of

aten = torch.ops.aten


@made_of(aten.im2col.default)
def unfold(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """x [N, C, H, W] -> [N, C * KH * KW, windows]: one strided picture for each place in the window."""
    if x.dim() == 3:
        return unfold(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    batch, channels, height, width = x.shape
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((size - spans[i]) // stride[i] + 1 for i, size in enumerate((height, width)))
    if list(kernel) == list(stride) and list(dilation) == [1, 1]:  # windows beside each other
        x = x[:, :, : rows * kernel[0], : columns * kernel[1]].reshape(
            batch, channels, rows, kernel[0], columns, kernel[1]
        )
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)
    pictures = []
    for i, j in product(range(kernel[0]), range(kernel[1])):
        down = x[:, :, i * dilation[0] : i * dilation[0] + (rows - 1) * stride[0] + 1 : stride[0]]
        pictures.append(down[..., j * dilation[1] : j * dilation[1] + (columns - 1) * stride[1] + 1 : stride[1]])
    return torch.stack(pictures, 2).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)


@made_of(aten.col2im.default, tell_quantized=True)
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
    """x [N, C * KH * KW, windows] -> [N, C, H, W]: the sum of what the places in a window hold.

    Windows that lie beside each other are moved alone. Quantized, a transposed convolution, which rounds once; else
    sums, as 0 * inf is no number.
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
        pictures = x.reshape(batch, -1, area, rows, columns)
        height, width = rows * stride[0], columns * stride[1]
        parts = []
        for place in range(area):
            picture = pictures[:, :, place].reshape(batch, -1, rows, 1, columns, 1)
            apart = F.pad(picture, (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
            top, left = (at * dilation[i] - padding[i] for i, at in enumerate(divmod(place, kernel[1])))
            edges = left, output_size[1] - left - width, top, output_size[0] - top - height
            parts.append(F.pad(apart.reshape(batch, -1, height, width), edges))
        return functools.reduce(torch.add, parts)
    ends = [
        size - (count - 1) * stride[i] - spans[i] + 2 * padding[i]
        for i, (size, count) in enumerate(zip(output_size, (rows, columns), strict=True))
    ]
    places = torch.eye(area, dtype=x.dtype).reshape(area, 1, *kernel)
    pictures = x.reshape(-1, area, rows, columns)
    image = F.conv_transpose2d(pictures, places, None, stride, padding, ends, 1, dilation)
    return image.reshape(batch, -1, *output_size)


# -- pooling -----------------------------------------------------------------------------------------


def _sizes(values: Sequence[int], count: int) -> list[int]:
    """One for each of ``count`` dimensions, or none at all."""
    return list(values) * count if len(values) == 1 else list(values)


@made_of(aten.max_pool2d_with_indices.default, tell_quantized=True)
def max_pool2d_with_indices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    quantized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Maxima, and where in the input's image they are: the windows' elements are compared in turn, as PyTorch does.

    Where the indices are not used, nothing is left of the comparisons.
    """
    kernel, padding, dilation = (_sizes(values, 2) for values in (kernel, padding, dilation))
    stride = _sizes(stride, 2) or kernel
    maxima = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    (height, width), (rows, columns) = x.shape[-2:], maxima.shape[-2:]
    ends = [
        max((out - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - padding[i] - size, 0)
        for i, (out, size) in enumerate(((rows, height), (columns, width)))
    ]
    padded = F.pad(x, (padding[1], ends[1], padding[0], ends[0]), value=-math.inf)
    corner_y, corner_x = torch.arange(rows) * stride[0] - padding[0], torch.arange(columns) * stride[1] - padding[1]
    # Positions are counted in float32, which every target selects from: exact, images are below 2**24 pixels. In a
    # program that is going to be quantized they are no real numbers.
    corner = (corner_y.reshape(-1, 1) * width + corner_x).to(torch.int32 if quantized else torch.float32)
    best: Tensor | None = None
    for i, j in product(range(kernel[0]), range(kernel[1])):
        y, z = i * dilation[0], j * dilation[1]
        down = padded[..., y : y + (rows - 1) * stride[0] + 1 : stride[0], :]
        element = down[..., z : z + (columns - 1) * stride[1] + 1 : stride[1]]
        position = corner + (y * width + z)
        if best is None:
            best, index = element, position.expand(maxima.shape)
        else:
            better = (element > best) | (element != element)
            best, index = torch.where(better, element, best), torch.where(better, position, index)
    return maxima, index.to(torch.int32).to(torch.int64)


@made_of(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Every output cell is the largest of its part of the input; indices where the parts are of one size alone."""
    height, width = x.shape[-2:]
    if height % output_size[0] == 0 and width % output_size[1] == 0:
        return aten.max_pool2d_with_indices(x, [height // output_size[0], width // output_size[1]])
    columns = [x[..., start:end].amax(-1, keepdim=True) for start, end in cells(width, output_size[1])]
    narrow = torch.cat(columns, -1)
    rows = [narrow[..., start:end, :].amax(-2, keepdim=True) for start, end in cells(height, output_size[0])]
    return torch.cat(rows, -2), None


def _by_planes(x: Tensor, pool: Callable[..., Tensor], **window: Sequence[int]) -> Tensor:
    """Over height and width, then over depth; x [..., D, H, W], three sizes for each argument of ``pool``."""
    flat = pool(x.flatten(0, -4), **{name: sizes[1:] for name, sizes in window.items()})
    deep = flat.reshape(-1, x.shape[-3], flat.shape[-2] * flat.shape[-1])
    whole = {"output_size": deep.shape[-1], "padding": 0}
    result = pool(deep, **{name: (sizes[0], whole.get(name, 1)) for name, sizes in window.items()})
    return result.reshape(*x.shape[:-3], result.shape[-2], *flat.shape[-2:])


@made_of(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """x [..., D, H, W]."""
    return _by_planes(x, F.adaptive_avg_pool2d, output_size=output_size)


@made_of(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, None]:
    """x [..., D, H, W]; without indices."""
    return _by_planes(x, F.adaptive_max_pool2d, output_size=output_size), None


@made_of(aten.max_pool3d_with_indices.default)
def max_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, None]:
    """x [..., D, H, W]; without indices."""
    pool = partial(F.max_pool2d, ceil_mode=ceil_mode)
    kernel, padding, dilation = (_sizes(values, 3) for values in (kernel, padding, dilation))
    steps = _sizes(stride, 3) or kernel
    return _by_planes(x, pool, kernel_size=kernel, stride=steps, padding=padding, dilation=dilation), None


@made_of(aten.avg_pool3d.default)
def avg_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """x [..., D, H, W]: what the windows divide by is a product too."""
    if divisor_override is not None and ceil_mode:
        raise Unsupported("avg_pool3d with divisor_override and ceil_mode; pad the input instead")
    counted = count_include_pad or divisor_override is not None
    pool = partial(F.avg_pool2d, ceil_mode=ceil_mode, count_include_pad=counted)
    kernel, padding = _sizes(kernel, 3), _sizes(padding, 3)
    result = _by_planes(x, pool, kernel_size=kernel, stride=_sizes(stride, 3) or kernel, padding=padding)
    return result if divisor_override is None else result * (math.prod(kernel) / divisor_override)


@made_of(aten.conv_transpose3d.input)
def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """x [(N,) IC, D, H, W], zeros between its elements, convolved with the mirrored weight [IC, OC / groups, ...]."""
    stride, padding, extra, dilation = (_sizes(v, 3) for v in (stride, padding, output_padding, dilation))
    pads: list[int] = []
    for i, step in enumerate(stride):
        axis = x.dim() - 3 + i
        if step > 1:
            apart = F.pad(x.unsqueeze(axis + 1), [0, 0] * (2 - i) + [0, step - 1])
            x = apart.flatten(axis, axis + 1)
        reach = dilation[i] * (weight.shape[2 + i] - 1) - padding[i]
        pads = [reach, reach + extra[i] - (step - 1), *pads]
    mirrored = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3, 4)
    return F.conv3d(F.pad(x, pads), mirrored, bias, 1, 0, dilation, groups)
