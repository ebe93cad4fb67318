"""Spatial mean (global average pooling) of a quantized tensor, by depthwise convolutions with all weights 1.

The accumulator is rescaled directly to the quantization parameters of the result. AVG_POOL2D, in contrast, keeps the
parameters of the input. Each convolution sums rows. The elements of a row are viewed as more positions with fewer
channels each, because an Ethos-U stores ten bytes of scale for each channel and processes several positions at once.

Estimates of Vela 5.1 for 7x7x1280 between two 1x1 convolutions. The three numbers are cycles on U55-128, cycles on
U85-256 and bytes of the program for U55-128:

- this implementation: 114,295, 25,376, 80,896
- a convolution for the rows and one for the columns: 117,682, 26,481, 81,216
- the same, without the view as fewer channels: 133,094, 44,010, 108,928
- AVG_POOL2D: 140,466, 39,580, 80,576
- REDUCE_SUM: 184,954, 1,821,092, 81,168
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.fixed_point_value import FixedPoint, requantize
from arm_backend_core.ops.image_layout import is_stored_as_nhwc, to_nchw, to_nhwc
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value, prod

_PARALLEL_CHANNELS = 16
"""Number of channels that an Ethos-U processes in parallel."""

_MAX_ERROR = 2.0**-10
"""Maximum rounding error of the partial sums, relative to the result's range; 2**-10 is a quarter of an int8 step."""


def spatial_mean(
    b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams, *, is_only_user: bool
) -> Value | None:
    """Mean of int8 or int16 ``x`` over one or two adjacent ``axes``, as with ``keepdim=True``, quantized with ``out``.

    Between the convolutions, the partial sums are int16. They are exact if they fit int16. Otherwise each is rounded.
    The rounding error of the mean is then up to 2**-9 of a step of an int8 ``x``, or half a step of an int16 ``x``.
    This error is too large if the result's range is only a few steps of ``x``, for example if means of many elements
    are close to 0. Example: [1, 32, 112, 112] with zero mean in A16W8 has an SQNR of 38 dB by convolutions, and of
    78 dB by REDUCE_SUM.

    Args:
        is_only_user: whether no other operator reads ``x``. On an Ethos-U, a RESHAPE of a tensor that other operators
            read may be a copy. A RESHAPE of a SLICE is a copy too, while a convolution reads a SLICE in place.

    Returns:
        The mean. None if the convolutions do not apply: the axes are not adjacent, are more than two, are all axes, or
        are only the last axis (except under the condition of ``_is_mean_over_spatial_axis``); ``x`` has more than four
        dimensions; or the rounding error exceeds ``_MAX_ERROR``.
    """
    axes = sorted(axes)
    if len(axes) == x.rank or len(axes) > 2 or axes != list(range(axes[0], axes[-1] + 1)) or x.rank > 4:
        return None
    if _is_mean_over_spatial_axis(b, x, axes):
        kernel = (1, x.shape[3]) if axes == [3] else (x.shape[2], 1)
        return to_nchw(b, window_means(b, to_nhwc(b, x), q, kernel, (1, 1), out))
    lead, reduced, trail = x.shape[: axes[0]], [x.shape[i] for i in axes], x.shape[axes[-1] + 1 :]
    if axes[-1] == x.rank - 1 and len(axes) == 1:
        return None
    if axes[-1] == x.rank - 1:  # [N, C, H, W]: move the channels to the end
        batch, channels = prod(lead[:-1]), lead[-1]
        image = b.transpose(b.reshape(x, (batch, channels, *reduced)), (0, 2, 3, 1))
    else:
        batch, channels = prod(lead), prod(trail)
        image = b.reshape(x, (batch, *reduced, *(1,) * (2 - len(axes)), channels))
    is_slice = x.producer is not None and x.producer.kind == "SLICE"
    result = _mean_by_convolutions(b, image, q, out, is_only_user and not is_slice)
    if result is None:
        return None
    kept_shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
    return b.reshape(result, kept_shape)  # the reduced axes have size 1, so a RESHAPE restores the order of axes


def _is_mean_over_spatial_axis(b: Builder, x: Value, axes: Sequence[int]) -> bool:
    """Whether the mean is over the height or the width of an image stored as [N, H, W, C], and one kernel covers it.

    BC-ResNet and coordinate attention compute such means. The image stays in its layout, without TRANSPOSEs. Cycles
    of x + conv(mean(x)), x of shape [1, 32, 20, 48], in the stored layout and with TRANSPOSEs (Vela 5.2):

    - mean over the height: 154,758 and 221,754 on U55-128, 53,470 and 97,680 on U85-256,
    - mean over the width: 151,730 and 157,734 on U55-128, 54,236 and 70,626 on U85-256.
    """
    if x.rank != 4 or len(axes) != 1 or axes[0] < 2 or x.shape[axes[0]] > b.target.hardware.max_kernel:
        return False
    return is_stored_as_nhwc(x)


def window_means(
    b: Builder, image: Value, q: QParams, kernel: Sequence[int], stride: Sequence[int], out: QParams
) -> Value:
    """Average pooling: mean of each window of int8 or int16 ``image`` [N, H, W, C], quantized once with ``out``.

    Raises:
        Unsupported: the target does not support the depthwise convolution.
    """
    x, area, channels = FixedPoint.from_value(b, image, q), prod(kernel), image.shape[3]
    ones = b.const(np.ones((*kernel, channels, 1)), DType.INT8)
    zeros = b.const(np.zeros(channels), DType.INT48 if x.dtype is DType.INT16 else DType.INT32)
    sums = b.depthwise_conv2d(image, ones, zeros, pad=(0, 0, 0, 0), stride=stride, zps=(x.zero_point, 0))
    return requantize(b, sums, float(x.peak * area), np.array([x.scale / area]), out)


def _split_length(size: int, max_length: int) -> list[int]:
    """Split ``size`` into kernel lengths of at most ``max_length`` that differ by at most one, the largest first."""
    count = -(-size // max_length)
    return [(size + i) // count for i in reversed(range(count))]


def _mean_by_convolutions(b: Builder, image: Value, q: QParams, out: QParams, is_only_user: bool) -> Value | None:
    """Mean of an image [N, H, W, C] over rows, then over columns, or over both at once if one kernel covers them.

    None if the rounding error of the partial sums exceeds ``_MAX_ERROR``.

    If an axis is longer than the longest kernel, kernels sum its parts, and further kernels sum these sums. The parts
    are contiguous in memory, so slicing them costs nothing. A RESHAPE of a tensor that other operators read costs
    cycles: a squeeze-and-excitation block of 112x112x32 takes 877,246 cycles without the RESHAPE, and 1,279,638 with it
    (Vela 5.1, U55-128).
    """
    batch, height, width, channels = image.shape
    max_kernel = b.target.hardware.max_kernel
    x = FixedPoint.from_value(b, image, q)
    x = x.with_scale(x.scale / (height * width))
    error, max_error = 0.0, _MAX_ERROR * float(out.scale) * (out.qmax - out.qmin)
    # Whether a RESHAPE of the image needs no copy and loses no speed: the NPU processes groups of 16 channels.
    reshape_is_free = is_only_user and channels % _PARALLEL_CHANNELS == 0 and height <= max_kernel
    lengths = (
        [height * width] if reshape_is_free and height * width <= max_kernel else [n for n in (height, width) if n > 1]
    )
    for length in lengths:
        if reshape_is_free or x.value is not image:
            x = replace(
                x, value=b.reshape(x.value, (batch, length, *_group_channels(prod(x.shape[1:]) // length, channels)))
            )
        elif height == 1:
            x = replace(x, value=b.reshape(x.value, (batch, width, 1, channels)))
        while x.shape[1] > 1:
            parts = _split_length(x.shape[1], max_kernel)
            sums = _sum_row_parts(x, parts)
            peak = x.peak * parts[0]
            if len(sums) == 1 and prod(sums[0].shape[1:]) == channels:
                return requantize(b, sums[0], float(peak), np.array([x.scale]), out)
            step = min(1.0, 32767 / peak)  # exact if int16 holds the sum
            partial_sums = b.concat([b.rescale(total, DType.INT16, step) for total in sums], 1)
            bound = 32767 if step < 1 else math.ceil(peak)  # peak * step may round up
            x = FixedPoint(b, partial_sums, -bound, bound, x.scale / step)
            if step < 1:  # the rounding errors of all partial sums of a mean add up
                error += 0.5 * x.scale * (x.value.size // (batch * channels))
                if error > max_error:
                    return None
    return x.requantize(out)


def _group_channels(row_size: int, channels: int) -> tuple[int, int]:
    """Split ``row_size`` elements into (positions, channels), with the fewest channels that run at full speed."""
    group = next((group for group in range(_PARALLEL_CHANNELS, channels, 8) if row_size % group == 0), channels)
    return row_size // group, group


def _sum_row_parts(x: FixedPoint, parts: Sequence[int]) -> list[Value]:
    """Split the rows of x [N, rows, W, C] into parts of these lengths; return each part's sum in INT32 or INT48."""
    b, channels = x.b, x.shape[3]
    zeros = b.const(np.zeros(channels), DType.INT48 if x.dtype is DType.INT16 else DType.INT32)
    sums, start = [], 0
    for length in parts:
        ones = b.const(np.ones((length, 1, channels, 1)), DType.INT8)
        piece = b.narrow(x.value, 1, start, length)
        sums.append(b.depthwise_conv2d(piece, ones, zeros, pad=(0, 0, 0, 0), zps=(x.zero_point, 0)))
        start += length
    return sums
