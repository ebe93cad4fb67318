"""Decompositions of resizing operators (1D, 3D, bicubic, antialiased) and of grid sampling."""

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


def _build_1d_resize(resize_2d: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        """Resize x [N, C, L] as an image of one row.

        ``rest`` is (align_corners, scale_factors) for linear resizing, and (scale_factors,) for nearest.
        """
        *align_corners, scale_factors = rest
        size, scale_factors = size and [1, *size], scale_factors and [1.0, *scale_factors]
        result: Tensor = resize_2d(x.unsqueeze(2), size, *align_corners, scale_factors).squeeze(2)
        return result

    return upsample


def _build_3d_resize(resize_2d: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        """Resize x [N, C, D, H, W] plane by plane, then along the depth. ``rest`` is as in the 1D resize."""
        *align_corners, scale_factors = rest
        planes = resize_2d(x.flatten(1, 2), size and size[1:], *align_corners, scale_factors and scale_factors[1:])
        height, width = planes.shape[2:]
        flattened = planes.reshape(*x.shape[:3], height * width)
        size, scale_factors = size and [size[0], height * width], scale_factors and [scale_factors[0], 1.0]
        return resize_2d(flattened, size, *align_corners, scale_factors).unflatten(-1, (height, width))

    return upsample


def _build_call_of_vec(overload: OpOverload, rank: int) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int], *rest: Any, **keywords: Any) -> Tensor:
        """Call the ``vec`` overload with the scale_factors if they are given, else with the sizes."""
        scale_factors = [value for value in (*rest, *keywords.values()) if isinstance(value, float)]
        align_corners = [value for value in rest if isinstance(value, bool)]
        if len(scale_factors) not in (0, rank):
            raise Unsupported("resizing with a factor for some dimensions only; give one for each dimension, or sizes")
        result: Tensor = (
            overload(x, None, *align_corners, scale_factors)
            if scale_factors
            else overload(x, size, *align_corners, None)
        )
        return result

    return upsample


for _resize_2d, _resize_1d, _resize_3d in (
    (aten.upsample_bilinear2d, aten.upsample_linear1d, aten.upsample_trilinear3d),
    (aten.upsample_nearest2d, aten.upsample_nearest1d, aten.upsample_nearest3d),
    (aten._upsample_nearest_exact2d, aten._upsample_nearest_exact1d, aten._upsample_nearest_exact3d),
):
    decomposition(_resize_1d.vec)(_build_1d_resize(_resize_2d.vec))
    decomposition(_resize_3d.vec)(_build_3d_resize(_resize_2d.vec))
    decomposition(_resize_1d.default)(_build_call_of_vec(_resize_1d.vec, 1))
    decomposition(_resize_3d.default)(_build_call_of_vec(_resize_3d.vec, 3))
decomposition(aten._upsample_nearest_exact2d.default)(_build_call_of_vec(aten._upsample_nearest_exact2d.vec, 2))


# -- weights that PyTorch computes -------------------------------------------------------------------------------


def _interpolation_weights(
    resize_2d: OpOverload, in_size: int, out_size: int, align_corners: bool, factor: float | None
) -> Tensor:
    """Interpolation matrix [out_size, in_size], computed by resizing the unit vectors along one axis."""
    square = torch.eye(in_size).reshape(1, 1, in_size, in_size)
    weights: Tensor = resize_2d(square, [out_size, in_size], align_corners, factor, None)
    return weights.reshape(out_size, in_size)


def _build_separable_resize(resize_2d: OpOverload) -> Callable[..., Tensor]:
    def upsample(
        x: Tensor,
        size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        """Resize x [N, C, H, W] by a linear layer with constant weights along each axis."""
        for axis, factor in ((2, scales_h), (3, scales_w)):
            if x.shape[axis] != size[axis - 2] or factor not in (None, 1.0):
                weights = _interpolation_weights(resize_2d, x.shape[axis], size[axis - 2], align_corners, factor).to(
                    x.dtype
                )
                x = F.linear(x.transpose(axis, 3), weights).transpose(axis, 3)
        return x.clone()

    return upsample


for _overload_packet in (
    aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
    aten._upsample_lanczos2d_aa,
):
    decomposition(_overload_packet.default)(_build_separable_resize(_overload_packet.default))


@decomposition(aten.upsample_bicubic2d.vec)
def bicubic_vec(
    x: Tensor, size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None = None
) -> Tensor:
    """The bicubic overload that torch.export emits."""
    sizes = size or [int(n * factor) for n, factor in zip(x.shape[2:], scale_factors or (), strict=True)]
    return aten.upsample_bicubic2d(x, sizes, align_corners, *(scale_factors or ()))


# -- sampling ----------------------------------------------------------------------------------------------------


@decomposition(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, takes_quantized=True)
def grid_sampler(
    x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool, *, quantized: bool = False
) -> Tensor:
    """F.grid_sample: sample x [N, C, (D,) H, W] at the positions ``grid`` [N, ..., 2 or 3].

    A position is (x, y) or (x, y, z), with coordinates from -1 to 1.
    ``interpolation`` is 0 (bilinear), 1 (nearest) or 2 (bicubic). ``padding`` is 0 (zeros), 1 (border) or 2
    (reflection).
    """
    if interpolation == 2:
        raise Unsupported("grid_sample with bicubic interpolation; use bilinear")
    batch, channels, *sizes = x.shape
    pixels = x.flatten(2).transpose(1, 2).reshape(-1, channels)
    dtype = torch.int32 if quantized else torch.float32
    image_offsets = torch.arange(batch, dtype=dtype).reshape(-1, *[1] * len(sizes)) * math.prod(sizes)
    coordinates = [_grid_to_pixel(grid[..., -1 - i], size, padding, align_corners) for i, size in enumerate(sizes)]

    def read_pixels(pixel_coordinates: Sequence[Tensor]) -> Tensor:
        """Read the pixels [N, ..., C] at integer coordinates; 0 outside the image."""
        inside_by_axis = [
            (coordinate > -0.5) & (coordinate < size - 0.5)
            for coordinate, size in zip(pixel_coordinates, sizes, strict=True)
        ]
        # Quantized coordinates are rounded to int32: they are only near integers, and 8 bits cannot hold a flat index.
        index = torch.zeros((), dtype=dtype)
        for coordinate, size in zip(pixel_coordinates, sizes, strict=True):
            clamped = coordinate.clamp(0, size - 1)
            index = index * size + ((clamped + 0.5).to(torch.int32).clamp(max=size - 1) if quantized else clamped)
        gathered = torch.index_select(pixels, 0, (index + image_offsets).reshape(-1).to(torch.int32))
        is_inside = functools.reduce(torch.logical_and, inside_by_axis).unsqueeze(-1).to(x.dtype)
        return gathered.reshape(*pixel_coordinates[0].shape, channels) * is_inside

    def interpolate(pixel_coordinates: list[Tensor]) -> Tensor:
        """Interpolate linearly over the dimensions for which ``pixel_coordinates`` has no coordinate yet."""
        if len(pixel_coordinates) == len(sizes):
            return read_pixels(pixel_coordinates)
        low = coordinates[len(pixel_coordinates)].floor()
        fraction = (coordinates[len(pixel_coordinates)] - low).unsqueeze(-1)
        return (
            interpolate([*pixel_coordinates, low]) * (1 - fraction)
            + interpolate([*pixel_coordinates, low + 1]) * fraction
        )

    return (
        read_pixels([coordinate.round() for coordinate in coordinates]) if interpolation == 1 else interpolate([])
    ).movedim(-1, 1)


def _grid_to_pixel(x: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """Convert grid coordinates from -1 to 1 to pixel coordinates.

    With ``align_corners``, -1 and 1 are the centres of the outer pixels. Otherwise, they are the borders of the image.
    """
    coordinate = (x + 1) * ((size - 1) / 2) if align_corners else ((x + 1) * size - 1) / 2
    if padding == 2:  # reflection at both ends of the span: a triangle wave with the period 2 * span
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        reflected = torch.remainder((coordinate - low).abs(), 2 * span) if span else torch.zeros_like(coordinate)
        coordinate = torch.minimum(reflected, 2 * span - reflected) + low
    return coordinate if padding == 0 else coordinate.clamp(0, size - 1)
