"""Arguments for which CMSIS-NN's convolutions fail, compute other results or write outside of their result.

Each function returns the reason, or None for arguments that CMSIS-NN computes as the records do. The faults were found
by comparing CMSIS-NN, on a Cortex-M55 and on a PC, with the records, and by reading its sources.
"""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.cortex_m.kernels.scratch import (
    DEPTHWISE_CHANNEL_BLOCK,
    Window,
    depthwise_bytes,
    is_upsampled,
    split_row,
)
from arm_backend_core.targets.cortex_m import Isa

#: Products per result that code without MVE counts in 16 bits.
_MAX_PRODUCTS = 65_535


def find_convolution_fault(isa: Isa, window: Window, has_bias: bool) -> str | None:
    """Faults of ``arm_convolve_wrapper_s8``."""
    if not window.is_dense and not has_bias:
        # arm_convolve_s8 advances the null pointer from the second group on.
        return "a convolution with groups needs a bias, which may be zero"
    if window.is_pointwise:
        return None
    if isa is Isa.MVE:
        return _find_row_fault(window) if window.is_row else None
    products = window.kernel[0] * window.kernel[1] * window.kernel_channels
    return f"{products} products per result exceed {_MAX_PRODUCTS}" if products > _MAX_PRODUCTS else None


def _find_row_fault(window: Window) -> str | None:
    """Faults of ``arm_convolve_1_x_n_s8``, which only MVE code uses."""
    padding, stride = window.padding[1], window.stride[1]
    if 2 * padding != (window.output[1] - 1) * stride + window.kernel[1] - window.input[1]:
        return "the windows of a convolution of one row must end at the end of the padded row"
    if split_row(window) is None:
        return None
    if window.padding[0]:
        return "a convolution of one row must have no vertical padding"
    if padding and (padding - 1) % stride:
        # The code assumes that the first window with padding on the right has a single pixel of it.
        return f"the padding {padding} of a convolution of one row must be 1 plus a multiple of the stride {stride}"
    return None


def find_depthwise_fault(isa: Isa, window: Window, output_channels: int, has_bias: bool) -> str | None:
    """Faults of ``arm_depthwise_conv_wrapper_s8``."""
    if isa is Isa.SCALAR:
        return None
    if isa is Isa.DSP:
        is_optimized = depthwise_bytes(isa, window, 1, output_channels) > 0
        if is_optimized and window.padding[0] > window.kernel[0]:
            # arm_depthwise_conv_s8_opt clears as many rows of its buffer as there is padding.
            return f"the vertical padding {window.padding[0]} must be at most the kernel's height {window.kernel[0]}"
        return None
    if window.input_channels == 1 and output_channels > 1:
        return find_convolution_fault(isa, window, has_bias)
    if not has_bias and window.input_channels > DEPTHWISE_CHANNEL_BLOCK:
        # arm_depthwise_conv_s8_opt advances the null pointer from the second block of channels on.
        return (
            f"a depthwise convolution of more than {DEPTHWISE_CHANNEL_BLOCK} channels needs a bias, which may be zero"
        )
    return None


def find_transpose_fault(window: Window, output_padding: Sequence[int]) -> str | None:
    """Faults of ``arm_transpose_conv_wrapper_s8``."""
    axes = zip(window.kernel, window.stride, window.padding, output_padding, strict=True)
    for kernel, stride, padding, more in axes:
        if is_upsampled(window):
            if padding >= kernel:
                return f"the padding {padding} must be less than the kernel's size {kernel}"
        elif more - padding > max(0, stride - kernel):
            return f"the output padding {more} must be at most padding + max(0, stride - kernel)"
    if is_upsampled(window):
        return None
    # The code writes finished rows without comparing their number with the result's height.
    kernel, stride, padding, more = (
        values[0] for values in (window.kernel, window.stride, window.padding, output_padding)
    )
    limit = min(kernel - stride + more, window.input[0] * stride)
    return f"the vertical padding {padding} must be at most {limit}" if padding > limit else None
