"""Elementwise kernels: arithmetic of two tensors, and look-up tables for functions of one tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from arm_backend_core.cortex_m.fixed_point import requantize, requantize_to_int8
from arm_backend_core.cortex_m.kernels.registry import Array, Shape, broadcast_shape, kernel
from arm_backend_core.targets.cortex_m import Isa

#: Left shift of the operands of an addition, which keeps the sum's precision (``arm_elementwise_add_s8``).
ADD_LEFT_SHIFT = 20

#: Rank up to which ``minimum`` and ``maximum`` broadcast. ExecuTorch's kernels ignore further leading axes.
MAX_BROADCAST_RANK = 4


def is_channel_broadcast(first: Shape, second: Shape) -> bool:
    """Whether ``quantized_add`` and ``quantized_mul`` broadcast the shapes: one operand has one number per channel.

    Both have rank 4 and equal sizes on axis 1, and one operand has size 1 on all other axes. The caller must ensure
    that the operands and the result have channels_last memory format, because ExecuTorch's kernels do not check it.
    """
    if len(first) != 4 or len(second) != 4 or first[1] != second[1]:
        return False
    return any(shape[0] == shape[2] == shape[3] == 1 for shape in (first, second))


def channel_broadcast_shape(first: Shape, second: Shape) -> Shape:
    """Shape of the result of ``quantized_add`` or ``quantized_mul``.

    Raises:
        ValueError: the shapes differ, and ``is_channel_broadcast`` is false for them.
    """
    if tuple(first) != tuple(second) and not is_channel_broadcast(first, second):
        raise ValueError(f"the kernel broadcasts only a number per channel, not {tuple(first)} and {tuple(second)}")
    return broadcast_shape(first, second)


@kernel(
    "quantized_add",
    "Tensor self, int self_zero_point, int self_multiplier, int self_shift, "
    "Tensor other, int other_zero_point, int other_multiplier, int other_shift, "
    "int output_zero_point, int output_multiplier, int output_shift, int activation_min, int activation_max",
    result_shape=lambda first, zero_point, multiplier, shift, second, *rest: channel_broadcast_shape(first, second),
)
def quantized_add(
    first: Array,
    first_zero_point: int,
    first_multiplier: int,
    first_shift: int,
    second: Array,
    second_zero_point: int,
    second_multiplier: int,
    second_shift: int,
    output_zero_point: int,
    output_multiplier: int,
    output_shift: int,
    activation_min: int,
    activation_max: int,
) -> Array:
    """Sum of two int8 tensors (``arm_elementwise_add_s8``).

    Operands of equal shapes may have any memory format; both operands and the result must have the same format. For
    operands of different shapes, ``is_channel_broadcast`` must hold. Multipliers are int32, shifts are in [-31, 30]. If
    an operand's shift exceeds 3, a difference of 255 between its integer and its zero point overflows int32.
    """
    terms = [
        requantize((x.astype("int64") - zero_point) << ADD_LEFT_SHIFT, multiplier, shift)
        for x, zero_point, multiplier, shift in (
            (first, first_zero_point, first_multiplier, first_shift),
            (second, second_zero_point, second_multiplier, second_shift),
        )
    ]
    output = output_multiplier, output_shift, output_zero_point
    return requantize_to_int8(terms[0] + terms[1], *output, activation_min, activation_max)


@kernel(
    "quantized_mul",
    "Tensor self, int self_zero_point, Tensor other, int other_zero_point, "
    "int output_zero_point, int output_multiplier, int output_shift",
    result_shape=lambda first, zero_point, second, *rest: channel_broadcast_shape(first, second),
)
def quantized_mul(
    first: Array,
    first_zero_point: int,
    second: Array,
    second_zero_point: int,
    output_zero_point: int,
    output_multiplier: int,
    output_shift: int,
) -> Array:
    """Product of two int8 tensors (``arm_elementwise_mul_s8``).

    The rules for shapes and memory formats are the same as for ``quantized_add``. The result saturates to int8; there
    is no other activation. A product of two differences from the zero points has 17 bits, so shifts above 15 overflow
    int32. Zero points may exceed int8 if the differences fit 16 bits: ExecuTorch's kernel does not check the zero
    points, and CMSIS-NN computes the product correctly.
    """
    product = (first.astype("int64") - first_zero_point) * (second.astype("int64") - second_zero_point)
    return requantize_to_int8(product, output_multiplier, output_shift, output_zero_point)


def _equal_shape(first: Shape, second: Shape) -> Shape:
    if tuple(first) != tuple(second):
        raise ValueError(f"the kernel does not broadcast {tuple(first)} and {tuple(second)}")
    return first


@kernel(
    "quantized_div",
    "Tensor self, int self_zero_point, Tensor other, int other_zero_point, int output_zero_point, float output_scale",
    result_shape=lambda first, zero_point, second, *rest: _equal_shape(first, second),
)
def quantized_div(
    first: Array,
    first_zero_point: int,
    second: Array,
    second_zero_point: int,
    output_zero_point: int,
    output_scale: float,
) -> Array:
    """Quotient of two int8 or two int16 tensors of equal shapes and memory formats, computed in float32.

    CMSIS-NN has no division. ExecuTorch's kernel rounds the quotient to float32 and multiplies it by ``output_scale``.
    It rounds this product to float32 and then to an integer, with ties away from zero. If a divisor equals its zero
    point, the quotient is 0.

    Args:
        output_scale: scale of ``first`` / (scale of ``second`` * scale of the result).
    """
    # float32 represents the differences of int16 numbers exactly.
    dividend = (first.astype(np.int32) - first_zero_point).astype(np.float32)
    divisor = (second.astype(np.int32) - second_zero_point).astype(np.float32)
    quotient = np.divide(dividend, divisor, out=np.zeros_like(dividend), where=divisor != 0)
    with np.errstate(over="ignore"):
        scaled = quotient * np.float32(output_scale)
    rounded = np.copysign(np.floor(np.abs(scaled.astype(np.float64)) + 0.5), scaled).astype(np.float32)
    limits = np.iinfo(first.dtype)
    return np.clip(rounded + np.float32(output_zero_point), limits.min, limits.max).astype(first.dtype)


def _pad_to_broadcast_rank(shape: Shape) -> tuple[int, ...]:
    return (1,) * (MAX_BROADCAST_RANK - len(shape)) + tuple(shape)


def find_broadcast_limitation(isa: Isa, first: Shape, second: Shape) -> str | None:
    """Return why ``arm_minimum_s8`` and ``arm_maximum_s8`` do not broadcast two shapes correctly; None if they do.

    The functions support up to four axes. They read wrong elements of an operand of shape (n, h, 1, 1) with h > 1, if
    the width of the other operand exceeds 1.
    """
    if tuple(first) == tuple(second):
        return None
    if max(len(first), len(second)) > MAX_BROADCAST_RANK:
        return f"{tuple(first)} and {tuple(second)} cannot be broadcast: they have more than {MAX_BROADCAST_RANK} axes"
    one, other = _pad_to_broadcast_rank(first), _pad_to_broadcast_rank(second)
    for row, full in ((one, other), (other, one)):
        if row[1] > 1 and row[2] == row[3] == 1 and full[2] > 1:
            return f"{row} has single elements per row, which CMSIS-NN does not repeat correctly for {full}"
    return None


@kernel("minimum", "Tensor self, Tensor other", result_shape=broadcast_shape, find_limitation=find_broadcast_limitation)
def minimum(first: Array, second: Array) -> Array:
    """Elementwise minimum of two int8 tensors with equal scale and zero point (``arm_minimum_s8``).

    Any axis may be broadcast; ``find_broadcast_limitation`` has the exceptions. The kernel ignores memory formats:
    tensors of different shapes must be contiguous, unless one has a single element. Tensors of equal shapes must have
    the same memory format.
    """
    return np.minimum(first, second)


@kernel("maximum", "Tensor self, Tensor other", result_shape=broadcast_shape, find_limitation=find_broadcast_limitation)
def maximum(first: Array, second: Array) -> Array:
    """Elementwise maximum of two int8 tensors, with the restrictions of ``minimum`` (``arm_maximum_s8``)."""
    return np.maximum(first, second)


@kernel("quantized_activation", "Tensor input, Tensor lut")
def quantized_activation(x: Array, table: Array) -> Array:
    """Apply a function to an int8 tensor by look-up: ``table[x + 128]``, for any shape and memory format.

    Args:
        x: int8, any shape.
        table: int8, 256 elements: the results for -128 to 127.
    """
    result: Any = table.reshape(-1)[x.astype(np.int32) + 128]
    return np.asarray(result)
