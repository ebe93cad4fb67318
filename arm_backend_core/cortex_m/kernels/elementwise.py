"""Elementwise kernels: arithmetic of two tensors, functions of one tensor by table."""

from __future__ import annotations

from arm_backend_core.cortex_m.arithmetic import clamp_to_int8, requantize
from arm_backend_core.cortex_m.kernels.registry import Array, broadcast_shape, kernel

#: Left shift of the operands of an addition, which keeps the sum's precision (``arm_elementwise_add_s8``).
ADD_LEFT_SHIFT = 20


@kernel(
    "quantized_add",
    "Tensor self, int self_zero_point, int self_multiplier, int self_shift, "
    "Tensor other, int other_zero_point, int other_multiplier, int other_shift, "
    "int output_zero_point, int output_multiplier, int output_shift, int activation_min, int activation_max",
    result_shape=lambda first, zero_point, multiplier, shift, second, *rest: broadcast_shape(first, second),
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
    """Sum of two int8 tensors of equal shapes, or of which one has only channels (``arm_elementwise_add_s8``)."""
    terms = [
        requantize((x.astype("int64") - zero_point) << ADD_LEFT_SHIFT, multiplier, shift)
        for x, zero_point, multiplier, shift in (
            (first, first_zero_point, first_multiplier, first_shift),
            (second, second_zero_point, second_multiplier, second_shift),
        )
    ]
    total = requantize(terms[0] + terms[1], output_multiplier, output_shift) + output_zero_point
    return clamp_to_int8(total, activation_min, activation_max)
