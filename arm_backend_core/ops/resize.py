"""Resizing of images by TOSA 1.0 RESIZE.

If the target cannot run the RESIZE, rows and columns are gathered (nearest), or interpolated by matrix products or
convolutions (bilinear). Rows and columns are also gathered if RESIZE would read other pixels than PyTorch. Convolutions
also replace a bilinear RESIZE that takes more cycles than the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops.image_layout import to_nchw, to_nhwc
from arm_backend_core.ops.indexing import gather_constant_indices
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value, prod

aten = torch.ops.aten
#: Cycles that a separate RESCALE takes for each int32 result of RESIZE. Vela fuses a RESCALE into RESIZE only if the
#: RESCALE divides by a power of two.
_UNFUSED_RESCALE_CYCLES = 2.0
_MAX_INT8_WEIGHT = 127


@dataclass(frozen=True)
class _AxisSampling:
    """Sampling positions along one axis: output element o reads the input at o * step + start (exact fractions).

    Attributes:
        size: number of input elements.
        out: number of output elements.
        step: distance between sampling positions, in input elements.
        start: position of the first output element.
    """

    size: int
    out: int
    step: Fraction
    start: Fraction

    @property
    def scale_n(self) -> int:
        """TOSA's scale_n: each sampling position is a multiple of 1 / scale_n of a pixel."""
        return math.lcm(self.step.denominator, self.start.denominator)

    @property
    def tosa_parameters(self) -> tuple[int, int, int, int]:
        """(scale_n, scale_d, offset, border) of RESIZE. TOSA requires this border for the output size."""
        n = self.scale_n
        d, offset = int(self.step * n), int(self.start * n)
        return n, d, offset, (self.out - 1) * d - (self.size - 1) * n + offset

    def nearest_indices(self) -> list[int]:
        """Input indices that RESIZE reads in mode NEAREST: the positions, rounded half up."""
        half = Fraction(1, 2)
        return [min(max(math.floor(o * self.step + self.start + half), 0), self.size - 1) for o in range(self.out)]

    def interpolation_weights(self, row_sum: int) -> np.ndarray:
        """Bilinear interpolation matrix [out, size], whose rows sum to ``row_sum``."""
        matrix = np.zeros((self.out, self.size))
        for o in range(self.out):
            position = o * self.step + self.start
            below = math.floor(position)
            weight_above = float((position - below) * row_sum)
            matrix[o, min(max(below, 0), self.size - 1)] += row_sum - weight_above
            matrix[o, min(max(below + 1, 0), self.size - 1)] += weight_above
        return matrix


def _sampling_step(size: int, out: int, factor: float | None) -> Fraction:
    """Input elements per output element: 1 / ``factor``, or ``size`` / ``out`` if ``factor`` is None.

    A float cannot represent a factor such as 1.6 exactly. The nearest fraction with a denominator of at most 256
    replaces the float if no sampling position moves by more than 2**-16 of a pixel.
    """
    if factor is None:
        return Fraction(size, out)
    exact, simple = 1 / Fraction(factor), 1 / Fraction(factor).limit_denominator(256)
    return simple if abs(simple - exact) * out < Fraction(1, 1 << 16) else exact


def _resize_attributes(samplings: Sequence[_AxisSampling]) -> dict[str, tuple[int, ...]]:
    (yn, yd, oy, by), (xn, xd, ox, bx) = (sampling.tosa_parameters for sampling in samplings)
    return {"scale": (yn, yd, xn, xd), "offset": (oy, ox), "border": (by, bx)}


def _resize_refusal(cx: Context, image: Value, out: DType, samplings: Sequence[_AxisSampling], mode: str) -> str | None:
    """Return why the target cannot run this RESIZE, for example a hardware limit; None if it can."""
    return cx.b.refusal("RESIZE", (image,), out, mode=mode, **_resize_attributes(samplings))


def _resize(cx: Context, image: Value, samplings: Sequence[_AxisSampling], mode: str) -> Value:
    return cx.b.resize(image, mode=mode, **_resize_attributes(samplings))


# -- nearest ------------------------------------------------------------------------------------------------------


def _nearest_indices(size: int, out: int, factor: float | None, shift: float) -> list[int]:
    """Input index that PyTorch reads for each output element o: floor((o + shift) * step), computed in float32."""
    step = np.float32(size) / np.float32(out) if factor is None else np.float32(1.0 / factor)
    positions = (np.arange(out, dtype=np.float32) + np.float32(shift)) * step
    return [int(position) for position in np.minimum(np.floor(positions), size - 1)]


def _nearest_sampling(size: int, out: int, factor: float | None, shift: float) -> _AxisSampling:
    """Sampling for mode NEAREST. It starts half an element before PyTorch's position (o + shift) * step.

    TOSA rounds half up, and PyTorch rounds down. For an integer factor and a ``shift`` of 0, all starts in a range give
    the same indices. The function takes the middle of this range as the start, because Ethos-U supports this start.
    """
    step = _sampling_step(size, out, factor)
    centred = shift or step.numerator == 1
    return _AxisSampling(size, out, step, (step - 1) / 2 if centred else Fraction(-1, 2))


def _resize_nearest(cx: Context, x: Operand, factors: Sequence[float | None], shift: float) -> Value:
    """Resize by RESIZE if it reads the same pixels as PyTorch, else by gathering rows and columns."""
    axes = list(zip(x.shape[2:], cx.shape[2:], factors, strict=True))
    indices = [_nearest_indices(*side, shift) for side in axes]
    if indices == [list(range(size)) for size in x.shape[2:]]:
        return x.value
    samplings = [_nearest_sampling(*side, shift) for side in axes]
    image = to_nhwc(cx.b, x.value)
    is_exact = all(
        sampling.nearest_indices() == expected for sampling, expected in zip(samplings, indices, strict=True)
    )
    if is_exact and _resize_refusal(cx, image, image.dtype, samplings, "NEAREST") is None:
        return to_nchw(cx.b, _resize(cx, image, samplings, "NEAREST"))
    return to_nchw(
        cx.b, gather_constant_indices(cx.b, gather_constant_indices(cx.b, image, 1, indices[0]), 2, indices[1])
    )


def _split_scale_factors(values: Sequence[float] | None) -> tuple[float | None, float | None]:
    return (values[0], values[1]) if values else (None, None)


@op(aten.upsample_nearest2d.default, kind=AnnotationKind.SHARED)
def nearest(
    cx: Context, x: Operand, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
) -> Value:
    """Nearest-neighbour upsampling of x [N, C, H, W]."""
    return _resize_nearest(cx, x, (scales_h, scales_w), 0.0)


def _resize_nearest_vec(
    cx: Context, x: Operand, output_size: Sequence[int] | None, scale_factors: Any = None, *, shift: float
) -> Value:
    """Nearest-neighbour upsampling, by the overloads that torch.export emits.

    The "exact" overload (``shift`` 0.5) reads the input at the centre of the output element.
    """
    return _resize_nearest(cx, x, _split_scale_factors(scale_factors), shift)


op(aten.upsample_nearest2d.vec, kind=AnnotationKind.SHARED)(partial(_resize_nearest_vec, shift=0.0))
op(aten._upsample_nearest_exact2d.vec, kind=AnnotationKind.SHARED)(partial(_resize_nearest_vec, shift=0.5))


# -- bilinear -----------------------------------------------------------------------------------------------------


def _linear_sampling(size: int, out: int, factor: float | None, align_corners: bool) -> _AxisSampling:
    """Sampling with aligned corners or aligned pixel centres.

    If all outputs equal the first input element, return the sampling of this single element. ``bilinear`` then repeats
    the element to the output size (TILE).
    """
    if size == 1 or (out == 1 and align_corners):
        return _AxisSampling(1, 1, Fraction(1), Fraction(0))
    if align_corners:
        return _AxisSampling(size, out, Fraction(size - 1, out - 1), Fraction(0))
    step = _sampling_step(size, out, factor)
    return _AxisSampling(size, out, step, (step - 1) / 2)


@op(aten.upsample_bilinear2d.default, kind=AnnotationKind.SHARED, is_average=True)
def bilinear(
    cx: Context,
    x: Operand,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """Bilinear upsampling of x [N, C, H, W].

    On integers, RESIZE multiplies the result by scale_n of both axes. A RESCALE divides by the product of both.
    """
    b = cx.b
    factors = ((2, scales_h), (3, scales_w))
    samplings = [_linear_sampling(x.shape[i], cx.shape[i], f, align_corners) for i, f in factors]
    image = to_nhwc(b, b.slice(x.value, (0, 0, 0, 0), (*x.shape[:2], *(sampling.size for sampling in samplings))))
    accumulator_dtype = {DType.INT8: DType.INT32, DType.INT16: DType.INT48}.get(image.dtype, image.dtype)
    reason = _resize_refusal(cx, image, accumulator_dtype, samplings, "BILINEAR")
    if all(sampling.tosa_parameters == (1, 1, 0, 0) for sampling in samplings):
        result = image  # works around a bug in Vela: identity_resize in docs/contributors/vela.md
    elif reason is None and not _is_cheaper_by_conv(cx, image, samplings):
        result = _resize(cx, image, samplings, "BILINEAR")
        if x.q is not None:
            result = b.rescale(result, x.q.dtype, 1 / (samplings[0].scale_n * samplings[1].scale_n))
    elif x.q is None:
        result = _bilinear_by_matmul(cx, image, samplings)
    else:
        result = _bilinear_by_conv(cx, image, samplings)
    result = to_nchw(b, result)
    return b.expand(result, cx.shape)


def _is_cheaper_by_conv(cx: Context, image: Value, samplings: Sequence[_AxisSampling]) -> bool:
    """Whether two convolutions with interpolation weights take fewer cycles than RESIZE and RESCALE.

    Cycles of both for 48x64x16 to 96x128 on U85-256:

    - int8: convolutions 121,256, RESIZE 179,937; with aligned corners 121,568 and 575,877,
    - int16: convolutions 126,760, RESIZE 333,662; with aligned corners 127,072 and 1,122,696.
    """
    cycles_per_result = cx.target.hardware.bilinear_cycles_per_result
    if not cycles_per_result or not cx.target.macs or image.dtype.is_float:
        return False
    (height, out_height), (width, out_width) = ((sampling.size, sampling.out) for sampling in samplings)
    planes = image.shape[0] * image.shape[3]
    macs = planes * width * out_height * (height + out_width)
    results = planes * out_height * out_width
    divisor = samplings[0].scale_n * samplings[1].scale_n
    if divisor & (divisor - 1):
        cycles_per_result += _UNFUSED_RESCALE_CYCLES
    if image.dtype is DType.INT16:
        cycles_per_result *= 2
    # The factor 2: TRANSPOSEs and idle multipliers double the cycles of the convolutions.
    return 2 * macs / cx.target.macs < cycles_per_result * results


def _bilinear_by_matmul(cx: Context, image: Value, samplings: Sequence[_AxisSampling]) -> Value:
    """Interpolate along each axis by a matrix product with its interpolation weights; supports any factor."""
    b = cx.b
    for sampling in samplings:  # rotate H, then W to the end; a third rotation restores the order
        image = b.transpose(image, (0, 2, 3, 1))
        weights = b.const(sampling.interpolation_weights(1).T[None], image.dtype)
        rows = b.matmul(b.reshape(image, (1, prod(image.shape[:3]), sampling.size)), weights)
        image = b.reshape(rows, (*image.shape[:3], sampling.out))
    return b.transpose(image, (0, 2, 3, 1))


def _bilinear_by_conv(cx: Context, image: Value, samplings: Sequence[_AxisSampling]) -> Value:
    """Interpolate along each axis by a 1x1 convolution with integer weights; the axis becomes the input channels.

    Between the two convolutions, values are int16. The values of an int8 image have 7 fractional bits there.
    """
    b, dtype = cx.b, image.dtype
    guard_factor = 128 if dtype is DType.INT8 else 1
    rows, weight_sum = _interpolate_by_conv(cx, b.transpose(image, (0, 3, 2, 1)), samplings[0])  # [N, C, W, OH]
    rows = b.rescale(rows, DType.INT16, guard_factor / weight_sum)
    columns, weight_sum = _interpolate_by_conv(cx, b.transpose(rows, (0, 1, 3, 2)), samplings[1])  # [N, C, OH, OW]
    result = b.rescale(columns, dtype, 1 / (weight_sum * guard_factor))
    return b.transpose(result, (0, 2, 3, 1))


def _interpolate_by_conv(cx: Context, x: Value, sampling: _AxisSampling) -> tuple[Value, int]:
    """Interpolate along the channels of ``x``; return the weighted sums, and the sum of the weights of each output.

    The caller divides by the sum of the weights. Weights that exceed int8 are split into two digits in base 127.
    """
    b, accumulator_dtype = cx.b, DType.INT48 if x.dtype is DType.INT16 else DType.INT32

    def product(weights: np.ndarray) -> Value:
        kernel = b.const(weights.reshape(sampling.out, 1, 1, sampling.size), DType.INT8)
        return b.conv2d(x, kernel, b.const(np.zeros(sampling.out), accumulator_dtype), pad=(0, 0, 0, 0))

    if sampling.scale_n <= _MAX_INT8_WEIGHT:
        return product(sampling.interpolation_weights(sampling.scale_n)), sampling.scale_n
    weights = np.rint(sampling.interpolation_weights(_MAX_INT8_WEIGHT**2))
    high = np.rint(weights / _MAX_INT8_WEIGHT)
    first, second = (b.rescale(product(part), DType.INT32, 1.0) for part in (high, weights - _MAX_INT8_WEIGHT * high))
    return b.add(b.mul(first, b.const(_MAX_INT8_WEIGHT, DType.INT32)), second), _MAX_INT8_WEIGHT**2


@op(aten.upsample_bilinear2d.vec, kind=AnnotationKind.SHARED, is_average=True)
def bilinear_vec(
    cx: Context, x: Operand, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Any = None
) -> Value:
    """The bilinear overload that torch.export emits."""
    return bilinear.lower(cx, x, cx.shape[2:], align_corners, *_split_scale_factors(scale_factors))
