"""Elementwise arithmetic of two quantized tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.emitter import KernelLimitation
from arm_backend_core.cortex_m.fixed_point import quantize_multiplier
from arm_backend_core.cortex_m.kernels.elementwise import ADD_LEFT_SHIFT
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, apply_table, quantize_single_multiplier, rule
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of
from arm_backend_core.permutation import Layout, identity

aten = torch.ops.aten
#: A slope may exceed 1 by this much, because of rounding in float32, and still counts as at most 1.
_SLOPE_TOLERANCE = 1e-6


def _with_rank(cx: KernelContext, value: QuantizedValue, rank: int) -> QuantizedValue:
    """Add leading dimensions of size 1."""
    added = rank - value.rank
    if not added:
        return value
    shape = (*(1,) * added, *value.shape)
    if value.data is not None:
        return QuantizedValue.from_constant(value.data.reshape(shape), value.q)
    assert value.node is not None
    node = cx.emit.reshape(value.node, (*(1,) * added, *value.node.meta["val"].shape))
    return QuantizedValue(value.q, shape, (*range(added), *(axis + added for axis in value.layout)), node=node)


def _common_layout(values: Sequence[QuantizedValue]) -> Layout:
    """The layout of the largest operand that is not a constant. The other operands are converted to this layout."""
    largest = max(values, key=lambda value: (value.data is None, math.prod(value.shape)))
    return largest.layout if largest.data is None else identity(largest.rank)


def _operands(cx: KernelContext) -> tuple[list[QuantizedValue], list[Node], Layout]:
    """Both operands with the rank of the result, their tensors in a common layout, and this layout."""
    return _align(cx, [cx.operand(argument) for argument in cx.node.args[:2]])


def _align(cx: KernelContext, values: Sequence[QuantizedValue]) -> tuple[list[QuantizedValue], list[Node], Layout]:
    """Values with the rank of the result, their tensors in a common layout, and this layout."""
    values = [_with_rank(cx, value, cx.node.meta["val"].dim()) for value in values]
    layout = _common_layout(values)
    return values, [cx.emit.materialize(value, layout) for value in values], layout


def _broadcast(cx: KernelContext, tensors: Sequence[Node], layout: Layout) -> tuple[list[Node], tuple[int, ...]]:
    """Reshape the operands to shapes that the kernels of ADD and MUL accept.

    These are equal shapes, or (rows, C, 1, 1) for one operand and (1, C, 1, 1) for the other.

    Returns:
        The operands, and the shape of the result in ``layout``.
    """
    shape = tuple(cx.node.meta["val"].shape[axis] for axis in layout)
    shapes = [tuple(x.meta["val"].shape) for x in tensors]
    small = 0 if math.prod(shapes[0]) < math.prod(shapes[1]) else 1
    inner, outer = math.prod(shapes[small]), shapes[1 - small]
    if shapes[0] != shapes[1] and outer == shape and _is_trailing(shapes[small], shape):
        sizes = [inner, inner]
        sizes[1 - small] = math.prod(shape)
        views = [cx.emit.reshape(x, (size // inner, inner, 1, 1)) for x, size in zip(tensors, sizes, strict=True)]
        return views, shape
    return [cx.emit.expand(x, shape) for x in tensors], shape


def _is_trailing(small: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether ``small``, without its leading dimensions of size 1, equals the last dimensions of ``shape``."""
    start = next((i for i, size in enumerate(small) if size != 1), len(small))
    return tuple(small[start:]) == tuple(shape[start:])


def _finish(cx: KernelContext, node: Node, shape: Sequence[int], layout: Layout) -> QuantizedValue:
    return cx.make_result(cx.emit.reshape(node, shape), layout)


@rule(aten.add.Tensor, aten.sub.Tensor)
def add(cx: KernelContext) -> QuantizedValue:
    """Sum or difference. The kernel converts both operands to one scale: 2 / 2**20 times the larger of their scales."""
    alpha = float(arguments_of(cx.node)["alpha"]) * (-1 if cx.node.target is aten.sub.Tensor else 1)
    return _add(cx, [cx.operand(argument) for argument in cx.node.args[:2]], alpha)


def _add(cx: KernelContext, operands: Sequence[QuantizedValue], alpha: float) -> QuantizedValue:
    """The first operand plus ``alpha`` times the second."""
    values, tensors, layout = _align(cx, operands)
    (first, second), shape = _broadcast(cx, tensors, layout)
    factors = values[0].scale, values[1].scale * alpha
    common = 2 * max(map(abs, factors))
    (multiplier, shift), (other_multiplier, other_shift) = (quantize_multiplier(x / common) for x in factors)
    output = quantize_single_multiplier(common / (float(cx.result.q.scale) * (1 << ADD_LEFT_SHIFT)))
    node = cx.emit.call_kernel(
        "quantized_add",
        *(first, values[0].zero_point, multiplier, shift),
        *(second, values[1].zero_point, other_multiplier, other_shift),
        *(cx.result.q.zero_point, *output, cx.result.low, cx.result.high),
    )
    return _finish(cx, node, shape, layout)


@rule(aten.mul.Tensor)
def multiply(cx: KernelContext) -> QuantizedValue:
    """Product."""
    return cx.clamp(_multiply(cx, [cx.operand(argument) for argument in cx.node.args[:2]]))


def _multiply(cx: KernelContext, operands: Sequence[QuantizedValue]) -> QuantizedValue:
    values, tensors, layout = _align(cx, operands)
    (first, second), shape = _broadcast(cx, tensors, layout)
    multiplier = quantize_single_multiplier(values[0].scale * values[1].scale / float(cx.result.q.scale))
    zero_points = [value.zero_point for value in values]
    node = cx.emit.call_kernel(
        "quantized_mul", first, zero_points[0], second, zero_points[1], cx.result.q.zero_point, *multiplier
    )
    return _finish(cx, node, shape, layout)


@rule(aten.div.Tensor)
def divide(cx: KernelContext) -> QuantizedValue:
    """Quotient. The kernel computes it in floating point; a divisor of 0 gives 0."""
    values, tensors, layout = _operands(cx)
    shape = tuple(cx.node.meta["val"].shape[axis] for axis in layout)
    first, second = (cx.emit.expand(x, shape) for x in tensors)
    scale = values[0].scale / (values[1].scale * float(cx.result.q.scale))
    zero_points = [value.zero_point for value in values]
    node = cx.emit.call_kernel(
        "quantized_div", first, zero_points[0], second, zero_points[1], cx.result.q.zero_point, scale
    )
    return cx.clamp(cx.make_result(node, layout))


@rule(aten.minimum.default, aten.maximum.default)
def minimum_or_maximum(cx: KernelContext) -> QuantizedValue:
    """Elementwise minimum or maximum. The operands are first requantized to the result's quantization parameters."""
    return _minimum_or_maximum(cx, [cx.operand(argument) for argument in cx.node.args[:2]], cx.node.target)


def _minimum_or_maximum(cx: KernelContext, operands: Sequence[QuantizedValue], target: Any) -> QuantizedValue:
    """Minimum or maximum of two values, by the ATen operator ``target``."""
    _, tensors, layout = _align(cx, [cx.requantize(value, cx.result.q) for value in operands])
    name = "minimum" if target is aten.minimum.default else "maximum"
    try:
        node = cx.emit.call_kernel(name, *tensors)
    except KernelLimitation:  # CMSIS-NN does not broadcast these shapes correctly
        shape = [cx.node.meta["val"].shape[axis] for axis in layout]
        node = cx.emit.call_kernel(name, *(cx.emit.expand(x, shape) for x in tensors))
    return cx.clamp(cx.make_result(node, layout))


@rule(aten.prelu.default, aten._prelu_kernel.default)
def prelu(cx: KernelContext) -> QuantizedValue:
    """PReLU with a slope for each channel. With one slope for all channels, it is univariate and becomes a table.

    With slopes from 0 to 1, PReLU is max(x, slope * x). Otherwise, it is the sum of max(x, 0) and slope * min(x, 0).
    Both terms have the quantization parameters of the result. For each element, one term is 0, so the sum is exact.
    """
    x, slopes = (cx.operand(argument) for argument in cx.node.args[:2])
    if slopes.data is None:
        raise Unsupported("its slopes are computed at run time")
    shape = slopes.shape if cx.node.target is aten._prelu_kernel.default else (-1, *[1] * (x.rank - 2))
    slope, real = QuantizedValue.from_constant(slopes.data.reshape(shape), slopes.q), slopes.q.dequantize(slopes.data)
    if real.min() >= 0 and real.max() <= 1 + _SLOPE_TOLERANCE:
        return _minimum_or_maximum(cx, [x, _multiply(cx, [x, slope])], aten.maximum.default)
    numbers = x.q.dequantize(np.arange(-128, 128))
    negative = apply_table(cx.emit, x, x.q.quantize(np.minimum(numbers, 0)).astype(np.int8), x.q)
    positive = apply_table(cx.emit, x, cx.result.q.quantize(np.maximum(numbers, 0)).astype(np.int8), cx.result.q)
    return _add(cx, [positive, _multiply(cx, [negative, slope])], 1.0)
