"""Pooling kernels over two spatial axes.

Each kernel has two operators. The operator without suffix takes (N, C, H, W) in channels_last memory format. The
operator with the suffix ``_nhwc`` takes (N, H, W, C) in contiguous memory format. The order of the elements in memory
is the same.

Padding is symmetric and less than the kernel size. Maxima and averages exclude padded elements
(``count_include_pad=False`` in PyTorch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.fixed_point import clamp_to_int8
from arm_backend_core.cortex_m.kernels.registry import Array, Shape, kernel
from arm_backend_core.targets.cortex_m import Isa

_AVERAGE_ARGUMENTS = (
    "Tensor input, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
    "int zero_point, int multiplier, int shift, Tensor scratch"
)
_MAXIMUM_ARGUMENTS = (
    "Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
    "int input_zero_point, int output_zero_point, int activation_min, int activation_max"
)


def pooled_size(size: int, kernel_size: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Number of windows along an axis, as PyTorch counts them.

    With ``ceil_mode``, the last window may extend beyond the padding, but must start before the padding on the right.

    Raises:
        ValueError: there is no window, the padding is not in [0, kernel_size), or the stride is below 1.
    """
    if not (0 <= padding < kernel_size <= size + 2 * padding and stride >= 1):
        raise ValueError(f"invalid windows: kernel {kernel_size}, {size} elements, padding {padding}, stride {stride}")
    span = size + 2 * padding - kernel_size
    windows = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _nhwc_shape(
    shape: Shape, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool
) -> tuple[int, int, int, int]:
    batch, height, width, channels = shape
    rows, columns = (
        pooled_size(size, kernel_size[axis], stride[axis], padding[axis], ceil_mode)
        for axis, size in enumerate((height, width))
    )
    return batch, rows, columns, channels


def _to_nhwc(shape: Shape) -> tuple[int, ...]:
    return shape[0], shape[2], shape[3], shape[1]


def _to_nchw(shape: Shape) -> tuple[int, ...]:
    return shape[0], shape[3], shape[1], shape[2]


def _taps(
    x: Array, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], shape: Shape, fill: int
) -> Iterator[Array]:
    """Yield, for each offset (row, column) in the kernel, an array with the element of each window at this offset.

    ``shape`` is the shape of the arrays: (N, windows per column, windows per row, C). Elements outside of ``x`` are
    ``fill``.
    """
    after = [
        max((count - 1) * step + window - size - before, 0)
        for count, step, window, size, before in zip(
            shape[1:3], stride, kernel_size, x.shape[1:3], padding, strict=True
        )
    ]
    widths = [(0, 0), *zip(padding, after, strict=True), (0, 0)]
    padded = np.pad(x.astype(np.int64), widths, constant_values=fill)
    for row in range(kernel_size[0]):
        for column in range(kernel_size[1]):
            rows = slice(row, row + (shape[1] - 1) * stride[0] + 1, stride[0])
            columns = slice(column, column + (shape[2] - 1) * stride[1] + 1, stride[1])
            yield padded[:, rows, columns]


def _average(
    x: Array, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool
) -> Array:
    """Averages of the windows of an image (N, H, W, C)."""
    shape = _nhwc_shape(x.shape, kernel_size, stride, padding, ceil_mode)
    windows = (kernel_size, stride, padding, shape)
    total = np.asarray(sum(_taps(x, *windows, fill=0)))
    count = np.asarray(sum(_taps(np.ones_like(x), *windows, fill=0)))
    return clamp_to_int8(np.sign(total) * ((np.abs(total) + count // 2) // count))


def _maximum(x: Array, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Array:
    """Maxima of the windows of an image (N, H, W, C), as int64."""
    shape = _nhwc_shape(x.shape, kernel_size, stride, padding, False)
    taps = _taps(x, kernel_size, stride, padding, shape, fill=-129)
    return np.asarray(np.maximum.reduce(list(taps)))


def _register_average(suffix: str, to_nhwc: Callable[..., Any], from_nhwc: Callable[..., Any]) -> None:
    """Register ``quantized_avg_pool2d`` for an order of the axes.

    Args:
        suffix: suffix of the operator's name.
        to_nhwc: permutes a shape to (N, H, W, C).
        from_nhwc: the inverse of ``to_nhwc``.
    """

    def result_shape(
        shape: Shape,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        *rest: Any,
    ) -> Shape:
        return tuple(from_nhwc(_nhwc_shape(to_nhwc(shape), kernel_size, stride, padding, ceil_mode)))

    def scratch_bytes(isa: Isa, shape: Shape, *rest: Any) -> tuple[int, ...]:
        """One int32 sum per channel for ``Isa.DSP`` (``arm_avgpool_s8_get_buffer_size_dsp``), otherwise 0."""
        return (4 * to_nhwc(shape)[3] if isa is Isa.DSP else 0,)

    @kernel(f"quantized_avg_pool2d{suffix}", _AVERAGE_ARGUMENTS, result_shape=result_shape, scratch_bytes=scratch_bytes)
    def quantized_avg_pool2d(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        zero_point: int,
        multiplier: int,
        shift: int,
        scratch: Array | None = None,
    ) -> Array:
        """Average of each window of an int8 tensor (``arm_avgpool_s8``). The result has the input's quantization.

        The sum of the integers is divided by the number of elements of the window that are not padding. The quotient is
        rounded to nearest, with ties away from the integer 0 (not from the zero point). The kernel ignores
        ``zero_point``, ``multiplier`` and ``shift``. Dilation and ``divisor_override`` are not supported.
        """
        axes = to_nhwc(range(4))
        back = from_nhwc(range(4))
        return _average(x.transpose(axes), kernel_size, stride, padding, ceil_mode).transpose(back)


def _register_maximum(suffix: str, to_nhwc: Callable[..., Any], from_nhwc: Callable[..., Any]) -> None:
    """Register ``quantized_max_pool2d`` for an order of the axes; see ``_register_average`` for the arguments."""

    def result_shape(
        shape: Shape,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        *rest: Any,
    ) -> Shape:
        if ceil_mode or tuple(dilation) != (1, 1):
            raise ValueError("the kernel supports neither ceil_mode nor dilation")
        return tuple(from_nhwc(_nhwc_shape(to_nhwc(shape), kernel_size, stride, padding, False)))

    @kernel(f"quantized_max_pool2d{suffix}", _MAXIMUM_ARGUMENTS, result_shape=result_shape)
    def quantized_max_pool2d(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        input_zero_point: int,
        output_zero_point: int,
        activation_min: int,
        activation_max: int,
    ) -> Array:
        """Maximum of each window of an int8 tensor, clamped to the activation limits (``arm_max_pool_s8``).

        Input and result have the same quantization: the zero points must be equal, and have no effect. ``dilation``
        must be [1, 1] and ``ceil_mode`` false.
        """
        result = _maximum(x.transpose(to_nhwc(range(4))), kernel_size, stride, padding)
        return clamp_to_int8(result, activation_min, activation_max).transpose(from_nhwc(range(4)))


for _register in (_register_average, _register_maximum):
    _register("", _to_nhwc, _to_nchw)
    _register("_nhwc", tuple, tuple)
