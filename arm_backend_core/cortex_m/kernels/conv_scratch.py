"""Scratch memory of the convolutions, as CMSIS-NN's ``*_get_buffer_size`` functions compute it.

This module has the sizes for CMSIS-NN that is not compiled by Arm Compiler 6. With Arm Compiler 6, two sizes differ:
1x1 convolutions with stride 1 on processors with the DSP extension need 4 bytes per input channel; on MVE, depthwise
convolutions of one input channel with up to 8 output channels are not computed as convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arm_backend_core.targets.cortex_m import Isa

#: Channels that a depthwise convolution processes together on MVE (``CH_IN_BLOCK_MVE``).
DEPTHWISE_CHANNEL_BLOCK = 124
#: With more input channels than this, CMSIS-NN may compute a transposed convolution as a convolution of the upsampled
#: input (``REVERSE_TCOL_EFFICIENT_THRESHOLD``).
_UPSAMPLED_CHANNELS = 16


@dataclass(frozen=True)
class ConvGeometry:
    """Sizes and parameters of a convolution, as (height, width) or (vertical, horizontal).

    ``input_channels`` is the number of channels of the input. ``kernel_channels`` is the number of input channels that
    one output channel reads.
    """

    input: Sequence[int]
    kernel: Sequence[int]
    output: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    input_channels: int
    kernel_channels: int

    @property
    def has_one_group(self) -> bool:
        """Whether each output channel reads all input channels."""
        return self.input_channels == self.kernel_channels

    @property
    def is_pointwise(self) -> bool:
        """Whether CMSIS-NN treats the convolution as a 1x1 convolution (``arm_nn_is_convolve_1x1``)."""
        sizes = (*self.kernel, *self.dilation)
        return self.has_one_group and set(sizes) == {1} and not any(self.padding)

    @property
    def is_1_x_n(self) -> bool:
        """Whether CMSIS-NN treats the convolution as a convolution of one row (``arm_nn_is_convolve_1_x_n``)."""
        is_one_row = self.input[0] == self.kernel[0] == self.dilation[1] == 1
        return self.has_one_group and is_one_row and self.stride[1] * self.input_channels % 4 == 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _im2col_bytes(isa: Isa, kernel: Sequence[int], input_channels: int) -> int:
    """``arm_convolve_s8_get_buffer_size``: four im2col columns of int8 on MVE, otherwise two columns of int16."""
    column = kernel[0] * kernel[1] * input_channels
    return 4 * _round_up(column, 16) if isa is Isa.MVE else 4 * _round_up(column, 4)


def convolution_scratch_bytes(isa: Isa, geometry: ConvGeometry) -> int:
    """``arm_convolve_wrapper_s8_get_buffer_size``."""
    if geometry.is_pointwise:
        return 0
    general = _im2col_bytes(isa, geometry.kernel, geometry.input_channels)
    if isa is not Isa.MVE or not geometry.is_1_x_n:
        return general
    row = split_1_x_n(geometry)
    if row is None:
        return general
    left, right = geometry.padding[1], row.right_pixels if row.asymmetric_padding else geometry.padding[1]
    return max(geometry.kernel[1] + left, geometry.kernel[1] - 1 + right) * geometry.input_channels


@dataclass(frozen=True)
class Split1xN:
    """How MVE code splits the results of a one-row convolution by the padding that they read.

    ``arm_convolve_1_x_n_s8`` computes three ranges of results: those that read padding on the left, no padding, or
    padding on the right.

    Attributes:
        total_padding: sum of the padding on both sides, computed from the width of the result.
        asymmetric_padding: the remainder of ``total_padding`` / 2, with the sign of ``total_padding``: -1, 0 or 1.
        right_pixels: number of results that read padding on the right.
    """

    total_padding: int
    asymmetric_padding: int
    right_pixels: int


def split_1_x_n(geometry: ConvGeometry) -> Split1xN | None:
    """Split a one-row convolution; None if results may read padding on both sides: then, the general code is used."""
    output, stride, padding = geometry.output[1], geometry.stride[1], geometry.padding[1]
    total = (output - 1) * stride + geometry.kernel[1] - geometry.input[1]
    asymmetric_padding = total % 2 if total >= 0 else -(-total % 2)
    right = max(1, (padding + asymmetric_padding + stride - 1) // stride) if padding + asymmetric_padding else 0
    left = max(1, (padding + stride - 1) // stride) if padding else 0
    return Split1xN(total, asymmetric_padding, right) if left + right <= output else None


def depthwise_scratch_bytes(isa: Isa, geometry: ConvGeometry, batch: int, output_channels: int) -> int:
    """``arm_depthwise_conv_wrapper_s8_get_buffer_size``."""
    taps = geometry.kernel[0] * geometry.kernel[1]
    if isa is Isa.MVE and geometry.input_channels == 1 and output_channels > 1:
        # Computed as a convolution, after transposing the weights.
        return convolution_scratch_bytes(isa, geometry) + taps * output_channels
    if geometry.input_channels != output_channels or batch != 1 or tuple(geometry.dilation) != (1, 1):
        return 0
    if isa is Isa.MVE:
        return 4 * DEPTHWISE_CHANNEL_BLOCK * taps
    is_small = tuple(geometry.kernel) == (3, 3) and max(geometry.padding) <= 1
    return 0 if is_small or isa is Isa.SCALAR else 2 * geometry.input_channels * taps


def is_upsampled(geometry: ConvGeometry) -> bool:
    """Whether CMSIS-NN computes a transposed convolution as a convolution of the upsampled input."""
    return max(geometry.stride) <= 2 and geometry.input_channels > _UPSAMPLED_CHANNELS


def transpose_conv2d_scratch_bytes(isa: Isa, geometry: ConvGeometry, output_channels: int) -> tuple[int, int]:
    """``arm_transpose_conv_s8_get_buffer_size`` and ``arm_transpose_conv_s8_get_reverse_conv_buffer_size``."""
    height, width = geometry.kernel
    if is_upsampled(geometry):
        reversed_weights = height * width * geometry.input_channels * output_channels
        return _im2col_bytes(isa, geometry.kernel, geometry.input_channels), reversed_weights
    # CMSIS-NN's function computes the row length with the larger of the kernel's width and the vertical stride, but
    # CMSIS-NN's kernel needs the larger of the width and the horizontal stride. This function takes the maximum of all
    # three.
    row = (geometry.input[1] - 1) * geometry.stride[1] + max(width, *geometry.stride)
    return 4 * row * output_channels * max(height, geometry.stride[0]), 0
