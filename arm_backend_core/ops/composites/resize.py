"""Decompositions of resizing (1D, 3D, bicubic, antialiased) and of grid sampling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


# -- one and three dimensions, and core ATen overloads -----------------------------------------------------------


def _resize_row(images: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        *corners, factors = rest
        size, factors = size and [1, *size], factors and [1.0, *factors]
        result: Tensor = images(x.unsqueeze(2), size, *corners, factors).squeeze(2)
        return result

    return upsample


def _resize_volume(images: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        *corners, factors = rest
        planes = images(x.flatten(1, 2), size and size[1:], *corners, factors and factors[1:])
        height, width = planes.shape[2:]
        flattened = planes.reshape(*x.shape[:3], height * width)
        size, factors = size and [size[0], height * width], factors and [factors[0], 1.0]
        return images(flattened, size, *corners, factors).unflatten(-1, (height, width))

    return upsample


def _with_sizes_or_factors(form: OpOverload, rank: int) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int], *rest: Any, **named: Any) -> Tensor:
        factors = [value for value in (*rest, *named.values()) if isinstance(value, float)]
        corners = [value for value in rest if isinstance(value, bool)]
        if len(factors) not in (0, rank):
            raise Unsupported("resizing with a factor for some dimensions only; give one for each dimension, or sizes")
        result: Tensor = form(x, None, *corners, factors) if factors else form(x, size, *corners, None)
        return result

    return upsample


for _images, _row, _depth in (
    (aten.upsample_bilinear2d, aten.upsample_linear1d, aten.upsample_trilinear3d),
    (aten.upsample_nearest2d, aten.upsample_nearest1d, aten.upsample_nearest3d),
    (aten._upsample_nearest_exact2d, aten._upsample_nearest_exact1d, aten._upsample_nearest_exact3d),
):
    decomposition(_row.vec)(_resize_row(_images.vec))  # x [N, C, L] as an image of one row
    decomposition(_depth.vec)(_resize_volume(_images.vec))  # x [N, C, D, H, W]: each slice, then along the depth
    decomposition(_row.default)(_with_sizes_or_factors(_row.vec, 1))
    decomposition(_depth.default)(_with_sizes_or_factors(_depth.vec, 3))
decomposition(aten._upsample_nearest_exact2d.default)(_with_sizes_or_factors(aten._upsample_nearest_exact2d.vec, 2))


# -- weights that PyTorch computes -------------------------------------------------------------------------------


def _interpolation_weights(
    images: OpOverload, size: int, out: int, align_corners: bool, factor: float | None
) -> Tensor:
    """Interpolation matrix [out, size]: the result of resizing the unit vectors along one axis."""
    square = torch.eye(size).reshape(1, 1, size, size)
    weights: Tensor = images(square, [out, size], align_corners, factor, None)
    return weights.reshape(out, size)


def _resize_separably(images: OpOverload) -> Callable[..., Tensor]:
    def upsample(
        x: Tensor,
        size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        """x [N, C, H, W]: a linear layer with constant weights along each axis, which targets run as convolution."""
        for axis, factor in ((2, scales_h), (3, scales_w)):
            if x.shape[axis] != size[axis - 2] or factor not in (None, 1.0):
                weights = _interpolation_weights(images, x.shape[axis], size[axis - 2], align_corners, factor).to(
                    x.dtype
                )
                x = F.linear(x.transpose(axis, 3), weights).transpose(axis, 3)
        return x.clone()

    return upsample


for _form in (
    aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
    aten._upsample_lanczos2d_aa,
):
    decomposition(_form.default)(_resize_separably(_form.default))


@decomposition(aten.upsample_bicubic2d.vec)
def bicubic_vec(
    x: Tensor, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None = None
) -> Tensor:
    """The overload that torch.export emits."""
    sizes = size or [int(n * factor) for n, factor in zip(x.shape[2:], factors or (), strict=True)]
    return aten.upsample_bicubic2d(x, sizes, align_corners, *(factors or ()))


# -- sampling ----------------------------------------------------------------------------------------------------


@decomposition(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, takes_quantized=True)
def grid_sampler(
    x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool, *, quantized: bool = False
) -> Tensor:
    """Sample x [N, C, (D,) H, W] at the positions ``grid`` [N, ..., 2 or 3], (x, y, z) from -1 to 1 (F.grid_sample).

    Modes have PyTorch's numbers: bilinear, nearest, bicubic; zeros, border, reflection.
    """
    if interpolation == 2:
        raise Unsupported("grid_sample with bicubic interpolation; use bilinear")
    batch, channels, *sizes = x.shape
    pixels = x.flatten(2).transpose(1, 2).reshape(-1, channels)
    dtype = torch.int32 if quantized else torch.float32
    images = torch.arange(batch, dtype=dtype).reshape(-1, *[1] * len(sizes)) * math.prod(sizes)
    coordinates = [_grid_to_pixel(grid[..., -1 - i], size, padding, align_corners) for i, size in enumerate(sizes)]

    def read_pixels(places: Sequence[Tensor]) -> Tensor:
        """The pixels at integer coordinates, 0 outside the image: [N, ..., C]."""
        # A quantized integer is only approximately one, and 8 bits cannot represent the flat index of a pixel.
        inside = [(place > -0.5) & (place < size - 0.5) for place, size in zip(places, sizes, strict=True)]
        index = torch.zeros((), dtype=dtype)
        for place, size in zip(places, sizes, strict=True):
            near = place.clamp(0, size - 1)
            index = index * size + ((near + 0.5).to(torch.int32).clamp(max=size - 1) if quantized else near)
        picked = torch.index_select(pixels, 0, (index + images).reshape(-1).to(torch.int32))
        hits = functools.reduce(torch.logical_and, inside).unsqueeze(-1).to(x.dtype)
        return picked.reshape(*places[0].shape, channels) * hits

    def interpolate(places: list[Tensor]) -> Tensor:
        """Interpolate linearly over the dimensions for which ``places`` has no coordinate."""
        if len(places) == len(sizes):
            return read_pixels(places)
        low = coordinates[len(places)].floor()
        fraction = (coordinates[len(places)] - low).unsqueeze(-1)
        return interpolate([*places, low]) * (1 - fraction) + interpolate([*places, low + 1]) * fraction

    return (read_pixels([place.round() for place in coordinates]) if interpolation == 1 else interpolate([])).movedim(
        -1, 1
    )


def _grid_to_pixel(x: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """Map -1..1 to pixels: from centre to centre of the outer pixels (align_corners), or from border to border."""
    place = (x + 1) * ((size - 1) / 2) if align_corners else ((x + 1) * size - 1) / 2
    if padding == 2:  # reflection: a triangle wave with the period of twice the image size
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        beyond = torch.remainder((place - low).abs(), 2 * span) if span else torch.zeros_like(place)
        place = torch.minimum(beyond, 2 * span - beyond) + low
    return place if padding == 0 else place.clamp(0, size - 1)
