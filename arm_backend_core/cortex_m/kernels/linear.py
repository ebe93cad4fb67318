"""Linear layers and matrix products of int8 tensors. Sums of products wrap at 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.fixed_point import requantize_to_int8
from arm_backend_core.cortex_m.kernels.registry import Array, Shape, kernel
from arm_backend_core.targets.cortex_m import Isa


def compute_kernel_sum(weights: Array, bias: Array | None, input_offset: int, filter_offset: int) -> Array:
    """Compute the argument ``kernel_sum`` of ``quantized_linear`` for MVE (``arm_vector_sum_s8``).

    Args:
        weights: [O, I] int8.
        bias: [O] int32, or None.
        input_offset: negated zero point of the input.
        filter_offset: negated zero point of the weights.

    Returns:
        [1, O] int32: bias + input_offset * sum(weights + filter_offset).
    """
    total = (weights.astype(np.int64) + filter_offset).sum(axis=1) * input_offset
    return np.asarray(total if bias is None else total + bias).astype(np.int32)[None]


def _linear_shape(inputs: Shape, weights: Shape, *rest: Any) -> Shape:
    return (*inputs[:-1], weights[0])


@kernel(
    "quantized_linear",
    "Tensor input, Tensor weights, Tensor? bias, Tensor? kernel_sum, int input_offset, int filter_offset, "
    "int output_offset, int[] requantize_multipliers, int[] requantize_shifts, int activation_max, int activation_min",
    result_shape=_linear_shape,
)
def quantized_linear(
    inputs: Array,
    weights: Array,
    bias: Array | None,
    kernel_sum: Array | None,
    input_offset: int,
    filter_offset: int,
    output_offset: int,
    multipliers: Sequence[int],
    shifts: Sequence[int],
    activation_max: int,
    activation_min: int,
) -> Array:
    """Linear layer (``arm_fully_connected_s8``): [..., I] and weights [O, I] to [..., O].

    On MVE, CMSIS-NN reads ``kernel_sum`` (see ``compute_kernel_sum``) and ignores the bias. On other processors, it
    reads the bias and ignores ``kernel_sum``. Programs pass only the argument that their processor reads. If both are
    present, ``kernel_sum`` must be computed from this bias. The lists of multipliers and shifts have one element.
    """
    left = inputs.astype(np.float64) + (0 if kernel_sum is not None else input_offset)
    total = (left @ (weights.T.astype(np.float64) + filter_offset)).astype(np.int64)
    start = bias if kernel_sum is None else kernel_sum
    if start is not None:
        total = total + start.reshape(-1)
    return requantize_to_int8(total, multipliers[0], shifts[0], output_offset, activation_min, activation_max)


def _matmul_shape(left: Shape, offset: int, right: Shape, *rest: Any) -> Shape:
    return (left[0], left[1], right[1])


def _matmul_scratch(isa: Isa, left: Shape, offset: int, right: Shape, *rest: Any) -> tuple[int, ...]:
    """Same size as ``arm_fully_connected_s8_get_buffer_size``: MVE code stores an int32 sum for each result column."""
    return (4 * right[1] if isa is Isa.MVE else 0,)


@kernel(
    "quantized_batch_matmul",
    "Tensor lhs, int lhs_zero_point, Tensor rhs_transposed, int rhs_zero_point, int output_zero_point, "
    "int output_multiplier, int output_shift, Tensor scratch",
    result_shape=_matmul_shape,
    scratch_bytes=_matmul_scratch,
)
def quantized_batch_matmul(
    left: Array,
    left_offset: int,
    right: Array,
    right_offset: int,
    output_zero_point: int,
    output_multiplier: int,
    output_shift: int,
    scratch: Array | None = None,
) -> Array:
    """Batched matrix product (``arm_batch_matmul_s8``): [N, R, I] and [N, C, I] to [N, R, C].

    Despite their names in the schema, the arguments ``lhs_zero_point`` and ``rhs_zero_point`` are the negated zero
    points, which the kernel adds.
    """
    columns = (right.astype(np.float64) + right_offset).swapaxes(1, 2)
    total = ((left.astype(np.float64) + left_offset) @ columns).astype(np.int64)
    return requantize_to_int8(total, output_multiplier, output_shift, output_zero_point)
