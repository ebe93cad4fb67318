"""Upsampling of images. TOSA 1.0, RESIZE; where hardware lacks it, copies or 1x1 convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.images import to_nchw, to_nhwc
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


@dataclass(frozen=True)
class _Axis:
    """Output element o is sampled at o * step + start of the input, both exact."""

    size: int
    out: int
    step: Fraction
    start: Fraction

    @property
    def unit(self) -> int:
        """Number of sampling positions in a pixel, TOSA's scale_n."""
        return math.lcm(self.step.denominator, self.start.denominator)

    @property
    def parameters(self) -> tuple[int, int, int, int]:
        """TOSA's scale_n, scale_d, offset, border; the border makes the output size come out (ERROR_IF in RESIZE)."""
        n = self.unit
        d, offset = int(self.step * n), int(self.start * n)
        return n, d, offset, (self.out - 1) * d - (self.size - 1) * n + offset

    @property
    def factor(self) -> int | None:
        """The whole number of times that each element is repeated, if that is what nearest sampling does."""
        return int(1 / self.step) if self.step.numerator == 1 and self.out * self.step == self.size else None

    def weights(self) -> np.ndarray:
        """[out, size]: how many of ``unit`` parts of each input element are in an output element (bilinear)."""
        matrix = np.zeros((self.out, self.size), np.int64)
        for o in range(self.out):
            position = int((o * self.step + self.start) * self.unit)
            below, part = divmod(position, self.unit)
            matrix[o, min(max(below, 0), self.size - 1)] += self.unit - part
            matrix[o, min(max(below + 1, 0), self.size - 1)] += part
        return matrix


def _step(size: int, out: int, factor: float | None) -> Fraction:
    """Input elements for each output element: what the user gave, else the ratio of the sizes."""
    return Fraction(size, out) if factor is None else 1 / Fraction(factor).limit_denominator(256)


def _nearest(size: int, out: int, factor: float | None) -> _Axis:
    """PyTorch takes floor(o * step); TOSA rounds half up, so it samples half an element earlier.

    For a whole factor the middle of that interval does as well, which is what Ethos-U has in hardware.
    """
    step = _step(size, out, factor)
    return _Axis(size, out, step, (step - 1) / 2 if step.numerator == 1 else Fraction(-1, 2))


def _linear(size: int, out: int, factor: float | None, align_corners: bool) -> _Axis:
    """Corners on corners, or the pixels' centres evenly spread."""
    if align_corners:
        return _Axis(size, out, Fraction(size - 1, out - 1) if size > 1 and out > 1 else Fraction(1), Fraction(0))
    step = _step(size, out, factor)
    return _Axis(size, out, step, (step - 1) / 2)


def _factors(values: Sequence[float] | None) -> tuple[float | None, float | None]:
    return (values[0], values[1]) if values else (None, None)


def _offence(cx: Context, image: Value, out: DType, axes: Sequence[_Axis], mode: str) -> str | None:
    """Why the target cannot run the RESIZE, hardware limits included."""
    (yn, yd, oy, by), (xn, xd, ox, bx) = (axis.parameters for axis in axes)
    attrs = {"scale": (yn, yd, xn, xd), "offset": (oy, ox), "border": (by, bx), "mode": mode}
    shape = (image.shape[0], *(axis.out for axis in axes), image.shape[3])
    return cx.b.refusal("RESIZE", (image,), shape, out, **attrs)


def _resize(cx: Context, image: Value, axes: Sequence[_Axis], mode: str) -> Value:
    (yn, yd, oy, by), (xn, xd, ox, bx) = (axis.parameters for axis in axes)
    return cx.b.resize(image, [axis.out for axis in axes], (yn, yd, xn, xd), (oy, ox), (by, bx), mode)


@op(aten.upsample_nearest2d.default, kind=Kind.SHARED)
def nearest(
    cx: Context, x: Tensor, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
) -> Value:
    """x [N, C, H, W]."""
    axes = [_nearest(x.shape[i], cx.shape[i], f) for i, f in ((2, scales_h), (3, scales_w))]
    image = to_nhwc(cx.b, x.value)
    reason = _offence(cx, image, image.dtype, axes, "NEAREST")
    if reason is None:
        return to_nchw(cx.b, _resize(cx, image, axes, "NEAREST"))
    if any(axis.factor is None for axis in axes):
        raise Unsupported(reason)
    return to_nchw(cx.b, _repeat(cx, image, [axis.factor or 1 for axis in axes]))


def _repeat(cx: Context, image: Value, factors: Sequence[int]) -> Value:
    """Every row, then every column, several times: copies laid side by side along a new dimension."""
    n, h, w, c = image.shape
    rows = cx.b.concat([cx.b.reshape(image, (n * h, 1, w * c))] * factors[0], 1)
    h *= factors[0]
    columns = cx.b.concat([cx.b.reshape(rows, (n * h * w, 1, c))] * factors[1], 1)
    return cx.b.reshape(columns, (n, h, w * factors[1], c))


@op(aten.upsample_nearest2d.vec, kind=Kind.SHARED)
def nearest_vec(
    cx: Context, x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None = None
) -> Value:
    """The form that torch.export writes."""
    return nearest.lower(cx, x, cx.shape[2:], *_factors(scale_factors))


@op(aten.upsample_bilinear2d.default, kind=Kind.SHARED)
def bilinear(
    cx: Context,
    x: Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """x [N, C, H, W]; on integers RESIZE counts in parts of a pixel, which a RESCALE divides away."""
    axes = [_linear(x.shape[i], cx.shape[i], f, align_corners) for i, f in ((2, scales_h), (3, scales_w))]
    kept = [1 if axis.out == 1 and align_corners else axis.size for axis in axes]  # corner 0 alone is sampled
    value = cx.b.slice(x.value, (0, 0, 0, 0), (*x.shape[:2], *kept))
    axes = [_Axis(size, axis.out, axis.step, axis.start) for size, axis in zip(kept, axes, strict=True)]
    image = to_nhwc(cx.b, value)
    wide = {DType.INT8: DType.INT32, DType.INT16: DType.INT48}.get(image.dtype, image.dtype)
    reason = _offence(cx, image, wide, axes, "BILINEAR")
    if reason is not None and (x.q is None or any(axis.unit > 127 for axis in axes)):
        raise Unsupported(reason)
    if reason is not None:
        return to_nchw(cx.b, _as_convolutions(cx, image, axes))
    result = _resize(cx, image, axes, "BILINEAR")
    if x.q is not None:
        result = cx.b.rescale(result, x.q.dtype, 1 / (axes[0].unit * axes[1].unit))
    return to_nchw(cx.b, result)


def _as_convolutions(cx: Context, image: Value, axes: Sequence[_Axis]) -> Value:
    """Interpolation along an axis is a matrix product with whole-number weights that sum to ``unit``.

    The axis becomes the channels of a 1x1 convolution. Between the two the value has 7 more bits (int8).
    """
    b, dtype = cx.b, image.dtype
    guard = 128 if dtype is DType.INT8 else 1
    rows = _mix(cx, b.transpose(image, (0, 3, 2, 1)), axes[0])  # [N, C, W, OH]
    rows = b.rescale(rows, DType.INT16, guard / axes[0].unit)
    columns = _mix(cx, b.transpose(rows, (0, 1, 3, 2)), axes[1])  # [N, C, OH, OW]
    result = b.rescale(columns, dtype, 1 / (axes[1].unit * guard))
    return b.transpose(result, (0, 2, 3, 1))


def _mix(cx: Context, x: Value, axis: _Axis) -> Value:
    wide = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
    weight = cx.b.const(axis.weights().reshape(axis.out, 1, 1, axis.size), DType.INT8)
    return cx.b.conv2d(x, weight, cx.b.const(np.zeros(axis.out), wide), pad=(0, 0, 0, 0))


@op(aten.upsample_bilinear2d.vec, kind=Kind.SHARED)
def bilinear_vec(
    cx: Context,
    x: Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Value:
    """The form that torch.export writes."""
    return bilinear.lower(cx, x, cx.shape[2:], align_corners, *_factors(scale_factors))
