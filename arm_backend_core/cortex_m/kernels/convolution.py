"""Convolutions, depthwise convolutions and transposed convolutions of int8 images.

Operators whose name ends in ``_nhwc`` take and return contiguous tensors of shape [N, H, W, C]. Operators without this
suffix take and return tensors of shape [N, C, H, W] in channels_last memory format. Weights are int8. Biases,
multipliers and shifts are int32, one per output channel. Sums wrap at 32 bits. Padded elements have the input's zero
point, so they add 0 to the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.fixed_point import requantize_to_int8
from arm_backend_core.cortex_m.kernels.cmsis_nn_limitations import (
    find_convolution_limitation,
    find_depthwise_limitation,
    find_transpose_conv2d_limitation,
)
from arm_backend_core.cortex_m.kernels.conv_scratch import (
    ConvGeometry,
    convolution_scratch_bytes,
    depthwise_scratch_bytes,
    transpose_conv2d_scratch_bytes,
)
from arm_backend_core.cortex_m.kernels.registry import Array, Shape, kernel
from arm_backend_core.targets.cortex_m import Isa

_BEGIN = "Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
_END = (
    "int input_offset, int output_offset, Tensor requantize_multipliers, Tensor requantize_shifts, "
    "int activation_min, int activation_max, Tensor scratch"
)
_CONV2D = f"{_BEGIN}int[] dilation, {_END}"
_DEPTHWISE = f"{_BEGIN}int[] dilation, int depth_multiplier, {_END}"
_TRANSPOSE = f"{_BEGIN}int[] output_padding, int[] dilation, {_END}, Tensor output_scratch"

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


def _output_size(size: int, window: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def _convolved_size(
    size: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    if min(padding) < 0:
        raise ValueError(f"the padding {list(padding)} is negative")
    return [_output_size(*axis) for axis in zip(size, window, stride, padding, dilation, strict=True)]


def _conv2d_shape(
    image: Shape, weight: Shape, bias: Any, stride: Shape, padding: Shape, dilation: Shape, *rest: Any
) -> Shape:
    return (image[0], *_convolved_size(image[1:3], weight[1:3], stride, padding, dilation), weight[0])


def _depthwise_shape(
    image: Shape, weight: Shape, bias: Any, stride: Shape, padding: Shape, dilation: Shape, *rest: Any
) -> Shape:
    return (image[0], *_convolved_size(image[1:3], weight[1:3], stride, padding, dilation), weight[3])


def _transpose_conv2d_shape(
    image: Shape, weight: Shape, bias: Any, stride: Shape, padding: Shape, output_padding: Shape, *rest: Any
) -> Shape:
    sizes = zip(image[1:3], weight[1:3], stride, padding, output_padding, strict=True)
    return (image[0], *((size - 1) * step + k - 2 * pad + more for size, k, step, pad, more in sizes), weight[0])


def _geometry(
    shape: Callable[..., Shape], image: Shape, weight: Shape, bias: Any, stride: Shape, padding: Shape, *rest: Any
) -> ConvGeometry:
    output = shape(image, weight, bias, stride, padding, *rest)[1:3]
    dilation = (1, 1) if shape is _transpose_conv2d_shape else rest[0]
    kernel_channels = image[3] if shape is _depthwise_shape and image[3] == 1 else weight[3]
    return ConvGeometry(image[1:3], weight[1:3], output, stride, padding, dilation, image[3], kernel_channels)


def _conv2d_scratch(isa: Isa, *arguments: Any) -> tuple[int, ...]:
    return (convolution_scratch_bytes(isa, _geometry(_conv2d_shape, *arguments)),)


def _depthwise_scratch(isa: Isa, image: Shape, weight: Shape, *rest: Any) -> tuple[int, ...]:
    return (depthwise_scratch_bytes(isa, _geometry(_depthwise_shape, image, weight, *rest), image[0], weight[3]),)


def _transpose_conv2d_scratch(isa: Isa, image: Shape, weight: Shape, *rest: Any) -> tuple[int, ...]:
    return transpose_conv2d_scratch_bytes(isa, _geometry(_transpose_conv2d_shape, image, weight, *rest), weight[0])


def _conv2d_limitation(isa: Isa, image: Shape, weight: Shape, bias: Shape | None, *rest: Any) -> str | None:
    return find_convolution_limitation(isa, _geometry(_conv2d_shape, image, weight, bias, *rest), bias is not None)


def _depthwise_limitation(isa: Isa, image: Shape, weight: Shape, bias: Shape | None, *rest: Any) -> str | None:
    if image[0] != 1:
        return f"the depthwise kernel takes a batch of 1, not {image[0]}"
    geometry = _geometry(_depthwise_shape, image, weight, bias, *rest)
    return find_depthwise_limitation(isa, geometry, weight[3], bias is not None)


def _transpose_conv2d_limitation(
    isa: Isa, image: Shape, weight: Shape, bias: Any, stride: Shape, padding: Shape, output_padding: Shape, *rest: Any
) -> str | None:
    geometry = _geometry(_transpose_conv2d_shape, image, weight, bias, stride, padding, output_padding)
    return find_transpose_conv2d_limitation(geometry, output_padding)


def _permute_shape(shape: Shape, permutation: Sequence[int]) -> Shape:
    return tuple(shape[axis] for axis in permutation)


def _both_layouts(
    name: str,
    arguments: str,
    result_shape: Callable[..., Shape],
    scratch_bytes: Callable[..., tuple[int, ...]],
    find_limitation: Callable[..., str | None],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Decorator: from a function that computes on [N, H, W, C], register two kernels, one for each layout."""

    def register(compute: Callable[..., Array]) -> Callable[..., Array]:
        def compute_nchw(image: Array, *rest: Any) -> Array:
            return compute(image.transpose(_TO_NHWC), *rest).transpose(_TO_NCHW)

        def shape_nchw(image: Shape, *rest: Any) -> Shape:
            return _permute_shape(result_shape(_permute_shape(image, _TO_NHWC), *rest), _TO_NCHW)

        def scratch_nchw(isa: Isa, image: Shape, *rest: Any) -> tuple[int, ...]:
            return scratch_bytes(isa, _permute_shape(image, _TO_NHWC), *rest)

        def find_limitation_nchw(isa: Isa, image: Shape, *rest: Any) -> str | None:
            return find_limitation(isa, _permute_shape(image, _TO_NHWC), *rest)

        compute_nchw.__doc__ = compute.__doc__
        kernel(
            name, arguments, result_shape=shape_nchw, scratch_bytes=scratch_nchw, find_limitation=find_limitation_nchw
        )(compute_nchw)
        return kernel(
            f"{name}_nhwc",
            arguments,
            result_shape=result_shape,
            scratch_bytes=scratch_bytes,
            find_limitation=find_limitation,
        )(compute)

    return register


def _convolve(
    image: Array, weight: Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Array:
    """Convolve an image with grouped weights, without bias and requantization.

    Args:
        image: [N, H, W, C], the zero point already subtracted.
        weight: [O, KH, KW, C / groups].
        stride: (vertical, horizontal).
        padding: number of zeros on each side of an axis, in the order of ``stride``.
        dilation: distance of the kernel's taps, in the order of ``stride``.

    Returns:
        [N, OH, OW, O] int64. The sums are computed in float64, which is exact here and has a fast matrix product.
    """
    batch, *size, channels = image.shape
    out_channels, *window, depth = weight.shape
    height, width = _convolved_size(size, window, stride, padding, dilation)
    groups = channels // depth
    padded = np.pad(image.astype(np.float64), ((0, 0), *((p, p) for p in padding), (0, 0)))
    kernels = weight.reshape(groups, out_channels // groups, *window, depth).astype(np.float64)
    total = np.zeros((batch, height, width, groups, 1, out_channels // groups))
    for y, x in np.ndindex(*window):
        top, left = y * dilation[0], x * dilation[1]
        taps = padded[:, top:, left:][:, : stride[0] * height : stride[0], : stride[1] * width : stride[1]]
        total += taps.reshape(batch, height, width, groups, 1, depth) @ kernels[:, :, y, x].swapaxes(1, 2)
    return total.reshape(batch, height, width, out_channels).astype(np.int64)


@_both_layouts("quantized_conv2d", _CONV2D, _conv2d_shape, _conv2d_scratch, _conv2d_limitation)
def quantized_conv2d(
    image: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    input_offset: int,
    output_offset: int,
    multipliers: Array,
    shifts: Array,
    activation_min: int,
    activation_max: int,
    scratch: Array | None = None,
) -> Array:
    """2D convolution with groups (``arm_convolve_wrapper_s8``); the weights have shape [O, KH, KW, C / groups]."""
    total = _convolve(image.astype(np.int64) + input_offset, weight, stride, padding, dilation)
    if bias is not None:
        total = total + bias
    return requantize_to_int8(total, multipliers, shifts, output_offset, activation_min, activation_max)


@_both_layouts("quantized_depthwise_conv2d", _DEPTHWISE, _depthwise_shape, _depthwise_scratch, _depthwise_limitation)
def quantized_depthwise_conv2d(
    image: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    depth_multiplier: int,
    input_offset: int,
    output_offset: int,
    multipliers: Array,
    shifts: Array,
    activation_min: int,
    activation_max: int,
    scratch: Array | None = None,
) -> Array:
    """Depthwise 2D convolution of a batch of 1 (``arm_depthwise_conv_wrapper_s8``).

    The weights have shape [1, KH, KW, C * depth_multiplier]. Output channel o reads channel o // depth_multiplier.
    """
    # It equals a convolution with one input channel per group.
    windows = (weight.transpose(3, 1, 2, 0), bias, stride, padding, dilation)
    requantization = (output_offset, multipliers, shifts, activation_min, activation_max)
    return quantized_conv2d(image, *windows, input_offset, *requantization)


@_both_layouts(
    "quantized_transpose_conv2d",
    _TRANSPOSE,
    _transpose_conv2d_shape,
    _transpose_conv2d_scratch,
    _transpose_conv2d_limitation,
)
def quantized_transpose_conv2d(
    image: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    input_offset: int,
    output_offset: int,
    multipliers: Array,
    shifts: Array,
    activation_min: int,
    activation_max: int,
    scratch: Array | None = None,
    output_scratch: Array | None = None,
) -> Array:
    """Transposed 2D convolution without groups (``arm_transpose_conv_wrapper_s8``).

    The weights have shape [O, KH, KW, C]. The kernel does not support dilation: ``dilation`` must be (1, 1).
    """
    batch, *size, _ = image.shape
    out_channels, *window, _ = weight.shape
    shape = _transpose_conv2d_shape(image.shape, weight.shape, bias, stride, padding, output_padding)
    # The canvas is the output before padding is cropped. Because of output padding, the output may extend beyond the
    # last product; because of padding, it may end before the last product.
    extents = [
        max((n - 1) * s + k, p + out) for n, s, k, p, out in zip(size, stride, window, padding, shape[1:3], strict=True)
    ]
    canvas = np.zeros((batch, *extents, out_channels))
    pixels = image.astype(np.float64) + input_offset
    for y, x in np.ndindex(*window):
        target = canvas[:, y:, x:][:, : stride[0] * size[0] : stride[0], : stride[1] * size[1] : stride[1]]
        target += pixels @ weight[:, y, x].T.astype(np.float64)
    rows, columns = (slice(pad, pad + out) for pad, out in zip(padding, shape[1:3], strict=True))
    total = canvas[:, rows, columns].astype(np.int64)
    if bias is not None:
        total = total + bias
    return requantize_to_int8(total, multipliers, shifts, output_offset, activation_min, activation_max)
