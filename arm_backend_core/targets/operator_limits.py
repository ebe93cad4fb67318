"""Operator limits: shapes, attributes and constants of operators that Vela does not compile for an Ethos-U.

A limit returns its violation: the property that is not supported, or None. ``find_axes_lost_on_split`` returns the axes
along which Vela splits an operator incorrectly. The limits follow Vela 5.1's report (``vela --supported-ops-report``)
and the programs that Vela was observed to refuse or to compile incorrectly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from arm_backend_core.dtype import DType
from arm_backend_core.targets.transpose_swaps import MAX_EXTENT, plan_swaps

if TYPE_CHECKING:
    import numpy as np


class Tensor(Protocol):
    """An operand of a TOSA operator; ``data`` is set if it is constant."""

    shape: tuple[int, ...]
    dtype: DType
    data: np.ndarray[Any, Any] | None


class Operation(Protocol):
    """A TOSA operator with its TOSA attributes."""

    kind: str
    attrs: dict[str, Any]

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The operands."""

    @property
    def output(self) -> Tensor:
        """The result."""


#: Returns the property of an operator that the hardware does not support, or None.
Limit = Callable[[Operation], "str | None"]
#: Returns axes of an operator's operands, counted from the last.
FindAxes = Callable[[Operation], Sequence[int]]


def _padding_and_stride(op: Operation, kernel: Sequence[int]) -> tuple[bool, int]:
    """Whether there is padding, and the largest stride of an axis along which the window moves; 1 if it never moves."""
    pad, stride = op.attrs["pad"], op.attrs["stride"]
    dilation = op.attrs.get("dilation", (1,) * len(kernel))
    moves = [
        size + pad[2 * i] + pad[2 * i + 1] > dilation[i] * (kernel[i] - 1) + 1
        for i, size in enumerate(op.inputs[0].shape[1:-1])
    ]
    return any(pad), max((step for step, moved in zip(stride, moves, strict=True) if moved), default=1)


def _computed_weights_violation(op: Operation) -> str | None:
    return "weights and bias that are not constant" if any(value.data is None for value in op.inputs[1:]) else None


def _bias_violation(op: Operation) -> str | None:
    """Refuse a constant bias of more than 40 bits, and weights or bias that are not constant.

    Ethos-U55 and U65 store a bias in 40 bits. Vela 5.1 truncates larger biases without a message.
    """
    bias = op.inputs[2].data
    is_large = bias is not None and bias.size and max(-int(bias.min()), int(bias.max()) + 1) > 1 << 39
    return "a bias of more than 40 bits" if is_large else _computed_weights_violation(op)


def _conv2d_violation(op: Operation) -> str | None:
    kernel = op.inputs[1].shape[1:3]
    is_padded, stride = _padding_and_stride(op, kernel)
    if stride > 3 and is_padded and max(kernel) > 1:
        return f"stride {stride} (3 at most) together with padding"
    return _batched_stride_violation(op) or _bias_violation(op)


def _depthwise_violation(op: Operation) -> str | None:
    _, stride = _padding_and_stride(op, op.inputs[1].shape[:2])
    return f"stride {stride} (3 at most)" if stride > 3 else _bias_violation(op)


def _conv3d_violation(op: Operation) -> str | None:
    depth, pad = op.inputs[1].shape[1], op.attrs["pad"][:2]  # Vela does not compute results that read only padding
    refusal = f"padding {pad} in depth (none)" if any(pad) else _bias_violation(op)
    return f"a kernel {depth} deep (1 at most)" if depth > 1 else refusal


def _transpose_conv2d_violation(op: Operation) -> str | None:
    stride = tuple(op.attrs["stride"])
    is_flat = [op.inputs[0].shape[i] == op.inputs[1].shape[i] == 1 for i in (1, 2)]
    if (
        stride not in ((1, 1), (2, 2))
        and not (stride == (1, 2) and is_flat[0])
        and not (stride == (2, 1) and is_flat[1])
    ):
        return f"stride {stride} (1x1 and 2x2; 1x2 and 2x1 for one-dimensional input)"
    return _small_result_violation(op) or _bias_violation(op)


def _transpose_conv2d_u85_violation(op: Operation) -> str | None:
    return _small_result_violation(op) or _computed_weights_violation(op)


def _small_result_violation(op: Operation) -> str | None:
    # Vela finds no block configuration for most results that are smaller than the stride.
    output, stride = op.output.shape[1:3], op.attrs["stride"]
    reason = f"stride {tuple(stride)} for a result of {output[0]} x {output[1]} (at most the size of the result)"
    return reason if any(size < step for size, step in zip(output, stride, strict=True)) else None


def _max_pool_violation(op: Operation) -> str | None:
    is_padded, stride = _padding_and_stride(op, op.attrs["kernel"])
    return f"stride {stride} (3 at most) together with padding" if stride > 3 and is_padded else None


def _avg_pool_violation(op: Operation) -> str | None:
    if any(op.attrs["pad"]) and max(op.attrs["kernel"]) > 8:
        return f"kernel {tuple(op.attrs['kernel'])} (8x8 at most) together with padding"
    return _max_pool_violation(op)


def _avg_pool_u85_violation(op: Operation) -> str | None:
    """Refuse padded pools of several images with a kernel over 8 or a stride over 3.

    These are Vela's bugs ``batched_pool_kernel`` and ``batched_pool_stride``. Vela computes kernels over 8 with three
    operations for each image. With padding, results of later images are wrong, or are written to memory behind the
    result.
    """
    images, kernel = op.inputs[0].shape[0], tuple(op.attrs["kernel"])
    if images > 1 and any(op.attrs["pad"]) and max(kernel) > 8:
        return f"{images} images and kernel {kernel} (8x8 at most) together with padding"
    return _batched_stride_violation(op)


def _batched_stride_violation(op: Operation) -> str | None:
    """If there are several images, refuse strides above 3 of padded pools and of 1x1 convolutions.

    Vela splits these operators by image, then splits each part again, and does not compute later images. For pools,
    this is the bug ``batched_pool_stride``; for convolutions, in Vela 5.1, ``batched_conv_stride``.
    """
    kernel = op.attrs["kernel"] if "kernel" in op.attrs else op.inputs[1].shape[1:3]
    is_padded, stride = _padding_and_stride(op, kernel)
    images = op.inputs[0].shape[0] if (max(kernel) == 1 if op.kind == "CONV2D" else is_padded) else 1
    reason = f"{images} images and stride {stride} (3 at most) together with padding or a 1x1 kernel"
    return reason if images > 1 and stride > 3 else None


def _argmax_violation(op: Operation) -> str | None:
    shape = op.inputs[0].shape
    if op.attrs["axis"] != len(shape) - 1:
        return "an axis other than the last"
    if len(shape) > 4 or (len(shape) == 4 and shape[0] != 1):
        return f"shape {shape} (rank 1 to 3, or rank 4 with one batch)"
    return f"{shape[-1]} candidates (127 at most)" if shape[-1] > 127 else None


def _matmul_violation(op: Operation) -> str | None:
    _, inner, width = op.inputs[1].shape
    return (
        f"a right-hand side of {inner} x {width} (65536 at most along each axis)"
        if max(inner, width) > MAX_EXTENT
        else None
    )


def _gather_violation(op: Operation) -> str | None:
    """Refuse 65536 or more indices for each image, because of Vela's bug ``long_gather``."""
    count = op.inputs[1].shape[1]
    return f"{count} indices ({MAX_EXTENT - 1} at most)" if count >= MAX_EXTENT else None


def _reduce_sum_violation(op: Operation) -> str | None:
    shape, axis = op.inputs[0].shape, op.attrs["axis"]
    sizes = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    too_long = max(sizes[1:2] if axis == len(shape) - 1 else sizes) > MAX_EXTENT
    return f"shape {shape} over axis {axis} (65536 at most before, along and after it)" if too_long else None


def _resize_violation(op: Operation) -> str | None:
    yn, yd, xn, xd = op.attrs["scale"]
    if op.attrs["mode"] != "NEAREST":
        return "bilinear interpolation"
    if op.inputs[0].shape[0] != 1:
        return "several images in a batch (one only)"
    if yn not in (2 * yd, 4 * yd, 8 * yd) or xn not in (2 * xd, 4 * xd, 8 * xd):
        return f"factors {yn}/{yd} and {xn}/{xd} (2, 4 and 8 only)"
    _, h, w, _ = op.inputs[0].shape
    for size, numerator, denominator, offset, border in zip(
        (h, w), (yn, xn), (yd, xd), op.attrs["offset"], op.attrs["border"], strict=True
    ):
        factor = numerator // denominator
        aligned = offset == 0 and border == 0
        centred = 2 * offset == denominator * (1 - factor) and 2 * border == denominator * (factor - 1)
        if not aligned and not centred and size > 1:
            return "pixels aligned other than at centres or at corners"
    return None


def _transpose_violation(op: Operation) -> str | None:
    x, perms = op.inputs[0], tuple(op.attrs["perms"])
    reason = f"shape {x.shape} by {perms} (every decomposition into swaps exceeds 65536 along an axis)"
    return reason if plan_swaps(x.shape, perms, x.dtype, x.shape) is None else None


def _reverse_violation(op: Operation) -> str | None:
    # Vela documents only these two axes. It accepts other axes only for some shapes.
    return None if op.attrs["axis"] - len(op.inputs[0].shape) in HEIGHT_WIDTH else "an axis other than height and width"


ALL_AXES = tuple(range(-6, 0))  # axes of tensors of up to rank 6
HEIGHT_WIDTH = (-3, -2)  # height and width of [.., H, W, C]


def _window_axes_lost_on_split(op: Operation) -> tuple[int, ...]:
    """The axes along which Vela splits a convolution or pool and loses the offset of a fused SLICE."""
    shape, attrs = op.inputs[0].shape, op.attrs
    has_multiplier = op.kind == "DEPTHWISE_CONV2D" and op.inputs[1].shape[3] > 1
    is_dilated = max(attrs.get("dilation", (1,))) > 2 or max(shape) > MAX_EXTENT
    is_large = max(attrs["stride"]) > 3 or max(attrs.get("kernel", (1,))) > 8
    if any(attrs["pad"]) and (shape[0] > 1 or has_multiplier or is_dilated or is_large):
        return ALL_AXES  # the padding is lost too
    return HEIGHT_WIDTH if is_dilated else ()


def find_axes_lost_on_split(
    op: Operation, axes_by_kind: Mapping[str, tuple[int, ...]], unsplit_reductions: Sequence[int]
) -> tuple[int, ...]:
    """Find the axes along which Vela splits an operator and loses the offset of a fused SLICE.

    A SLICE that Vela fuses into its reader gives the reader an offset into a larger tensor. If Vela also splits the
    reader, the offset of the part overwrites the offset of the SLICE.

    A REDUCE_SUM loses the offset if it sums the last of four or more dimensions. Another reduction loses the offset if
    its operand has several images, or if it reduces one image along an axis that is not in ``unsplit_reductions``.

    Args:
        op: the operator.
        axes_by_kind: {operator kind: axes along which every operator of this kind loses the offset}.
        unsplit_reductions: axes along which Vela reduces one image without a split.
    """
    # Vela splits arithmetic that broadcasts if its rank is 5 or more.
    if len(op.inputs) == 2 and op.kind not in axes_by_kind:
        first, second = (x.shape for x in op.inputs)
        # Vela writes a constant of one element into a register, so that the operation does not broadcast.
        is_scalar = any(x.data is not None and math.prod(x.shape) == 1 for x in op.inputs)
        return ALL_AXES if first != second and max(len(first), len(second)) > 4 and not is_scalar else ()
    if not op.kind.startswith("REDUCE"):
        return axes_by_kind.get(op.kind, _window_axes_lost_on_split(op) if "pad" in op.attrs else ())
    shape, axis = op.inputs[0].shape, op.attrs["axis"] - len(op.inputs[0].shape)
    if op.kind == "REDUCE_SUM":
        return ALL_AXES if len(shape) > 3 and axis == -1 else ()
    return ALL_AXES if axis not in unsplit_reductions or math.prod(shape[:-3]) > 1 else ()


U55_U65_LIMITS: dict[str, Limit] = {
    "ARGMAX": _argmax_violation,
    # Vela also compiles shifts without rounding, although its documentation excludes them ("Round: true only").
    "ARITHMETIC_RIGHT_SHIFT": lambda op: None if op.attrs["round"] else "a shift that does not round",
    "AVG_POOL2D": _avg_pool_violation,
    "CONV2D": _conv2d_violation,
    "CONV3D": _conv3d_violation,
    "DEPTHWISE_CONV2D": _depthwise_violation,
    "MATMUL": _matmul_violation,
    "MAX_POOL2D": _max_pool_violation,
    "REDUCE_SUM": _reduce_sum_violation,
    "RESIZE": _resize_violation,
    "REVERSE": _reverse_violation,
    "TRANSPOSE": _transpose_violation,
    "TRANSPOSE_CONV2D": _transpose_conv2d_violation,
}
U85_LIMITS: dict[str, Limit] = {
    "AVG_POOL2D": _avg_pool_u85_violation,
    "CONV2D": _batched_stride_violation,
    "CONV3D": _computed_weights_violation,
    "GATHER": _gather_violation,
    "TRANSPOSE_CONV2D": _transpose_conv2d_u85_violation,
}
