"""Arguments for which CMSIS-NN's convolutions fail, compute wrong results or write outside of their result.

Each function returns the reason, or None if CMSIS-NN computes the same results as the NumPy functions of the kernel
records (``kernels.registry``). We found the limitations by comparing CMSIS-NN, on a Cortex-M55 and on a PC, with the
NumPy functions, and by reading the sources of CMSIS-NN.
"""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.cortex_m.kernels.conv_scratch import (
    DEPTHWISE_CHANNEL_BLOCK,
    ConvGeometry,
    depthwise_scratch_bytes,
    is_upsampled,
    split_1_x_n,
)
from arm_backend_core.targets.cortex_m import Isa

#: Maximum number of products per result: code without MVE counts them in 16 bits.
_MAX_PRODUCTS = 65_535


def find_convolution_limitation(isa: Isa, geometry: ConvGeometry, has_bias: bool) -> str | None:
    """Limitations of ``arm_convolve_wrapper_s8``."""
    if not geometry.has_one_group and not has_bias:
        # From the second group on, arm_convolve_s8 reads a bias at the null pointer plus an offset.
        return "a convolution with groups needs a bias, which may be zero"
    if geometry.is_pointwise:
        return None
    if isa is Isa.MVE:
        return _find_1_x_n_limitation(geometry) if geometry.is_1_x_n else None
    products = geometry.kernel[0] * geometry.kernel[1] * geometry.kernel_channels
    return f"{products} products per result exceed {_MAX_PRODUCTS}" if products > _MAX_PRODUCTS else None


def _find_1_x_n_limitation(geometry: ConvGeometry) -> str | None:
    """Limitations of ``arm_convolve_1_x_n_s8``, which only MVE code uses."""
    padding, stride = geometry.padding[1], geometry.stride[1]
    if 2 * padding != (geometry.output[1] - 1) * stride + geometry.kernel[1] - geometry.input[1]:
        return "the windows of a convolution of one row must end at the end of the padded row"
    if split_1_x_n(geometry) is None:
        return None
    if geometry.padding[0]:
        return "a convolution of one row must have no vertical padding"
    if padding and (padding - 1) % stride:
        # The code assumes that the first window that reaches the padding on the right reads one padded pixel.
        return f"the padding {padding} of a convolution of one row must be 1 plus a multiple of the stride {stride}"
    return None


def find_depthwise_limitation(isa: Isa, geometry: ConvGeometry, output_channels: int, has_bias: bool) -> str | None:
    """Limitations of ``arm_depthwise_conv_wrapper_s8``."""
    if isa is Isa.SCALAR:
        return None
    if isa is Isa.DSP:
        is_optimized = depthwise_scratch_bytes(isa, geometry, 1, output_channels) > 0
        if is_optimized and geometry.padding[0] > geometry.kernel[0]:
            # arm_depthwise_conv_s8_opt clears a row of its buffer, which has kernel[0] rows, for each row of padding.
            return (
                f"the vertical padding {geometry.padding[0]} must be at most the kernel's height {geometry.kernel[0]}"
            )
        return None
    if geometry.input_channels == 1 and output_channels > 1:
        return find_convolution_limitation(isa, geometry, has_bias)
    if not has_bias and geometry.input_channels > DEPTHWISE_CHANNEL_BLOCK:
        # From the second block on, arm_depthwise_conv_s8_opt reads a bias at the null pointer plus an offset.
        return (
            f"a depthwise convolution of more than {DEPTHWISE_CHANNEL_BLOCK} channels needs a bias, which may be zero"
        )
    return None


def find_transpose_conv2d_limitation(geometry: ConvGeometry, output_padding: Sequence[int]) -> str | None:
    """Limitations of ``arm_transpose_conv_wrapper_s8``."""
    axes = zip(geometry.kernel, geometry.stride, geometry.padding, output_padding, strict=True)
    for kernel, stride, padding, more in axes:
        if is_upsampled(geometry):
            if padding >= kernel:
                return f"the padding {padding} must be less than the kernel's size {kernel}"
        elif more - padding > max(0, stride - kernel):
            return f"the output padding {more} must be at most padding + max(0, stride - kernel)"
    if is_upsampled(geometry):
        return None
    # The code writes finished rows without comparing their number with the result's height.
    kernel, stride, padding, more = (
        values[0] for values in (geometry.kernel, geometry.stride, geometry.padding, output_padding)
    )
    limit = min(kernel - stride + more, geometry.input[0] * stride)
    return f"the vertical padding {padding} must be at most {limit}" if padding > limit else None
