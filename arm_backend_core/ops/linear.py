"""Linear layers and matrix products: TOSA 1.0 CONV2D (constant weight) and MATMUL."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import TIMESTEP_SLOT
from arm_backend_core.ops.accumulator import Accumulator
from arm_backend_core.ops.convolution import build_accumulator, zero_points
from arm_backend_core.ops.fixed_point_value import Q15_MAX, FixedPoint, requantize
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value, prod
from arm_backend_core.tosa.legality import type_refusal

aten = torch.ops.aten


@op(aten.linear.default, kind=AnnotationKind.CONV, activation_operands=(0,), absorbs_activation=True)
def linear(cx: Context, x: Operand, weight: Operand, bias: Operand | None = None) -> Value:
    """Linear layer of x [..., IC] and weight [OC, IC], as a 1x1 convolution in which each row of x is a pixel.

    On NPUs that decode weights slowly, a linear layer in a time step of a recurrent layer becomes a MATMUL instead, if
    it has one row of int8 inputs, an int16 result and at least 2**14 weights.
    """
    if x.q is not None and weight.q is None:
        raise Unsupported("its input is quantized but its weight is not")
    assert weight.value.data is not None  # otherwise the layer was decomposed (composites/computed_weights)
    out_channels, in_channels = weight.shape
    rows = prod(x.shape[:-1])
    image = cx.b.reshape(x.value, (1, 1, rows, in_channels))
    filters = weight.value.data.reshape(out_channels, 1, 1, in_channels)
    layer = build_accumulator(cx, x, weight, bias, filters, slice(None))
    is_slow_as_conv = 0 < (cx.target.macs or 0) <= cx.target.hardware.slow_weights_max_macs and filters.size >= 1 << 14
    # MATMUL rounds differently. It is limited to recurrent layers, so that other layers are bit-equal on all targets.
    is_slow_as_conv = is_slow_as_conv and TIMESTEP_SLOT in cx.node.meta
    if (
        is_slow_as_conv
        and rows == 1
        and cx.result_q is not None
        and x.value.dtype is DType.INT8
        and cx.q.dtype is DType.INT16
    ):
        return cx.b.reshape(_linear_by_matmul(cx, x, weight, layer), cx.shape)
    kernel, quantized_bias = (
        cx.b.const(layer.weights, weight.value.dtype),
        cx.b.const(layer.quantized_bias, layer.dtype),
    )
    value = cx.b.conv2d(image, kernel, quantized_bias, pad=(0, 0, 0, 0), zps=zero_points(x, weight))
    return cx.b.reshape(cx.requantize_sums(value, layer), cx.shape)


linear.integer_rule(linear.lower)


def _linear_by_matmul(cx: Context, x: Operand, weight: Operand, layer: Accumulator) -> Value:
    """Linear layer of one row (a vector x) by MATMUL.

    The sums are rescaled to int16, at a scale at which the largest possible sum fits. MUL applies the scales of the
    output channels, and the bias is added.
    """
    assert layer.scales is not None
    assert layer.peaks is not None
    assert layer.residual_bias is not None
    matrix = cx.b.const(layer.weights.reshape(1, *weight.shape), weight.value.dtype)
    products = cx.b.matmul(matrix, cx.b.reshape(x.value, (1, x.value.size, 1)), zero_points(x, weight)[::-1])
    step, max_scale = max(float(layer.peaks.max()) / Q15_MAX, 1.0), float(layer.scales.max())
    sums_int16 = cx.b.reshape(cx.b.rescale(products, DType.INT16, 1 / step), (1, 1, 1, weight.shape[0]))
    scales = np.broadcast_to(np.rint(layer.scales * (Q15_MAX / max_scale)), weight.shape[:1]).reshape(sums_int16.shape)
    product = FixedPoint(cx.b, sums_int16, -Q15_MAX, Q15_MAX, step) * FixedPoint.const(
        cx.b, scales, DType.INT16, max_scale / Q15_MAX
    )
    bias = (
        np.rint((layer.quantized_bias * layer.scales + layer.residual_bias) / product.scale)
        .astype(np.int64)
        .reshape(sums_int16.shape)
    )
    return (product + FixedPoint.const(cx.b, bias, DType.INT32, product.scale) if bias.any() else product).requantize(
        cx.q
    )


def _matmul(cx: Context, a: Operand, b: Operand) -> Value:
    """Matrix product of a [N, H, C] and b [N, C, W]."""
    if a.q is None or b.q is None:
        if a.q is not b.q:
            raise Unsupported("one of its operands is quantized and the other is not; annotate both (set_global)")
        # The accumulator of TOSA is INT32 for int8, and FP32 for FP16 and BF16.
        return cx.b.cast(cx.b.matmul(a.value, b.value), cx.dtype)
    if a.value.dtype is not b.value.dtype:
        raise Unsupported(
            "a matrix product of an int8 and an int16 operand; TOSA's MATMUL needs operands of equal types"
        )
    left, right = cx.to_fixed_point(a), cx.to_fixed_point(b)
    if a.value.dtype is DType.INT16 and type_refusal(cx.target, "MATMUL", (DType.INT16, DType.INT16), DType.INT48):
        return _int16_matmul_by_bytes(cx, left, right)
    sums = cx.b.matmul(a.value, b.value, (a.q.zero_point, b.q.zero_point))
    peak = float(left.peak * right.peak * a.shape[-1])
    if peak > sums.dtype.range[1]:
        name = sums.dtype.value
        raise Unsupported(f"a matrix product over {a.shape[-1]} elements, which may exceed {name}; split it")
    return requantize(cx.b, sums, peak, np.array([left.scale * right.scale]), cx.q)


def _int16_matmul_by_bytes(cx: Context, a: FixedPoint, b: FixedPoint) -> Value:
    """Int16 matrix product as four int8 products, for hardware without int16 MATMUL (Ethos-U55 and U65).

    x = 256 * xh + xl, with xh = floor(x / 256) and 0 <= xl <= 255. The low byte xl is int8 with zero point -128. So
    a @ b = 2**16 (ah @ bh) + 256 (ah @ bl + al @ bh) + al @ bl. The partial sums are rescaled to one scale before they
    are added. This scale is 2**-14 of the result's scale. It is larger if the largest possible sum of K products,
    divided by the scale, would exceed 2**29, the input limit of RESCALE.
    """
    radix = 256

    def split_bytes(x: FixedPoint) -> tuple[FixedPoint, FixedPoint]:
        """Split int16 into high and low byte by SUB, MUL and SUB with fused RESCALEs: three NPU operations."""
        x = x.with_scale(1.0)
        half = x.full_like(radix // 2)
        # RESCALE rounds half up, so (x - 128) / 256 is rounded to floor(x / 256).
        high = (x.rescale(DType.INT32, 1.0) - half.rescale(DType.INT32, 1.0)).rescale(DType.INT8, 1 / radix)
        high_part = high.refine_scale(64).rescale(DType.INT16, 4.0)  # its integers are 256 * high
        # Not 1.0 as for ``high``: equal RESCALEs of ``x`` would be merged, and Vela does not fuse a RESCALE that two
        # operators share.
        scale = 2.0**14
        remainder = x.rescale(DType.INT32, scale) - high_part.rescale(DType.INT32, scale)
        low = cx.b.rescale(remainder.value, DType.INT8, 1 / scale, 0, DType.INT8.range[0])
        return high, FixedPoint(cx.b, low, 0, radix - 1, zero_point=DType.INT8.range[0])

    (a_high, a_low), (b_high, b_low) = split_bytes(a), split_bytes(b)
    k, scale = a.shape[-1], a.scale * b.scale
    step = max(float(cx.q.scale) * 2.0**-14, scale * (k + 1) * 2.0 ** (30 - 29))  # sums below 2**29 steps, for RESCALE

    if step > float(cx.q.scale):
        raise Unsupported(
            f"a matrix product over {k} int16 elements, which {cx.target.name} sums at a scale of {step:.2g}; its "
            f"result has a smaller scale, {float(cx.q.scale):.2g}: calibrate with samples in which the result varies"
        )

    def product(left: FixedPoint, right: FixedPoint, byte_weight: int) -> FixedPoint:
        sums = cx.b.matmul(left.value, right.value, (left.zero_point, right.zero_point))
        peak = left.peak * right.peak * k
        partial = FixedPoint(cx.b, sums, -peak, peak, scale * byte_weight)
        return partial.rescale(DType.INT32, partial.scale / step).with_scale(step)

    total = product(a_high, b_high, radix**2)
    for left, right, byte_weight in ((a_high, b_low, radix), (a_low, b_high, radix), (a_low, b_low, 1)):
        total = total + product(left, right, byte_weight)
    return total.requantize(cx.q)


@op(aten.bmm.default, aten.mm.default, aten.matmul.default, aten._int_mm.default, absorbs_activation=True)
def matmul(cx: Context, a: Operand, b: Operand) -> Value:
    """torch.matmul: leading dimensions broadcast; a vector operand becomes a matrix with one row or column.

    ``_int_mm`` multiplies plain int8 operands and returns INT32 sums, as MATMUL does.
    """
    left = a.shape if a.rank > 1 else (1, *a.shape)
    right = b.shape if b.rank > 1 else (*b.shape, 1)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    result = _matmul(cx, _broadcast_batch(cx, a, left, batch), _broadcast_batch(cx, b, right, batch))
    return cx.b.reshape(result, cx.shape)


matmul.integer_rule(matmul.lower)


def _broadcast_batch(cx: Context, x: Operand, shape: tuple[int, ...], batch: tuple[Any, ...]) -> Operand:
    """Broadcast x to [N, rows, columns], where N is the product of the batch dimensions."""
    lead = (1,) * (len(batch) - len(shape[:-2])) + shape[:-2]
    value = cx.b.reshape(x.value, (*lead, *shape[-2:]))
    repeats = [target // size for target, size in zip(batch, lead, strict=True)]
    if value.data is not None:
        value = cx.b.const(np.tile(value.data, (*repeats, 1, 1)), value.dtype)
    else:
        value = cx.b.tile(value, (*repeats, 1, 1))
    return Operand(cx.b.reshape(value, (prod(batch), *shape[-2:])), x.q)
