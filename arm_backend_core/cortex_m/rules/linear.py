"""Linear layers and matrix products: int8 operands, int32 accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.linear import compute_kernel_sum
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, Weight, quantize_single_multiplier, rule
from arm_backend_core.cortex_m.rules.convolution import ConvParameters, convolve_image
from arm_backend_core.nodes import arguments_of
from arm_backend_core.targets.cortex_m import Isa

aten = torch.ops.aten


@rule(aten.linear.default)
def multiply_by_weight(cx: KernelContext) -> QuantizedValue:
    """Linear layer of [..., IC] and a weight [OC, IC].

    ``quantized_linear`` has one multiplier for all channels. If the weight has per-channel scales, the layer is
    therefore computed as a 1x1 convolution.
    """
    arguments = arguments_of(cx.node)
    x, weight = cx.operand(arguments["input"]), cx.weight(arguments["weight"], 0)
    last = x.rank - 1
    layout = x.layout if x.layout[-1] == last else tuple(range(x.rank))
    stored = cx.emit.materialize(x, layout)
    shape: Sequence[int] = stored.meta["val"].shape
    channels, in_channels = weight.data.shape
    if weight.scale.ndim == 0 or np.all(weight.scale == weight.scale.flat[0]):
        node = _multiply_per_tensor(cx, x, stored, weight, arguments["bias"])
        return cx.make_result(node, layout)
    rows = cx.emit.reshape(stored, (1, 1, int(np.prod(shape[:-1])), in_channels))
    kernel, conv = Weight(weight.data[:, :, None, None], weight.scale), ConvParameters([1, 1], (0, 0, 0, 0), [1, 1])
    node = convolve_image(cx, x, rows, kernel, arguments["bias"], conv, 1)
    return cx.make_result(cx.emit.reshape(node, (*shape[:-1], channels)), layout)


def _multiply_per_tensor(cx: KernelContext, x: QuantizedValue, stored: Node, weight: Weight, bias: Any) -> Node:
    scale = x.scale * float(weight.scale.flat[0])
    channels = weight.data.shape[0]
    bias_data = cx.bias(bias, np.asarray(scale), channels)
    multiplier, shift = quantize_single_multiplier(scale / float(cx.result.q.scale))
    bias_node = sums_node = None
    if cx.isa is Isa.MVE:  # the MVE kernel ignores the bias operand, so the weight sums include the bias
        sums_node = cx.emit.constant(compute_kernel_sum(weight.data, bias_data, -x.zero_point, 0), "weight_sums")
    elif bias_data is not None:
        bias_node = cx.emit.constant(bias_data, "bias")
    limits = cx.result.high, cx.result.low  # the schema has the upper limit first
    return cx.emit.call_kernel(
        "quantized_linear",
        *(stored, cx.emit.constant(weight.data, "weight"), bias_node, sums_node),
        *(-x.zero_point, 0, cx.result.q.zero_point, [multiplier], [shift], *limits),
    )


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def multiply_matrices(cx: KernelContext) -> QuantizedValue:
    """Matrix product of [..., M, K] and [..., K, N]. A 1D operand is one row (the first) or one column (the second)."""
    first, second = (cx.operand(argument) for argument in cx.node.args[:2])
    batch = np.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    rows, depth = (1, *first.shape)[-2:]
    columns = second.shape[-1] if second.rank > 1 else 1
    batch_size = int(np.prod(batch))
    swapped = (*range(second.rank - 2), second.rank - 1, second.rank - 2) if second.rank > 1 else (0,)
    left, right = cx.emit.materialize(first), cx.emit.materialize(second, swapped)
    left = cx.emit.expand(_with_rank(cx, left, len(batch) + 2), (*batch, rows, depth))
    right = cx.emit.expand(_with_rank(cx, right, len(batch) + 2), (*batch, columns, depth))
    multiplier, shift = quantize_single_multiplier(first.scale * second.scale / float(cx.result.q.scale))
    node = cx.emit.call_kernel(
        "quantized_batch_matmul",
        *(cx.emit.reshape(left, (batch_size, rows, depth)), -first.zero_point),
        *(cx.emit.reshape(right, (batch_size, columns, depth)), -second.zero_point),
        *(cx.result.q.zero_point, multiplier, shift),
    )
    return cx.clamp(cx.make_result(cx.emit.reshape(node, cx.node.meta["val"].shape)))


def _with_rank(cx: KernelContext, node: Node, rank: int) -> Node:
    shape = tuple(node.meta["val"].shape)
    return cx.emit.reshape(node, (*(1,) * (rank - len(shape)), *shape))
