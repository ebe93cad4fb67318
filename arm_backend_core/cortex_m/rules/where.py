"""ATen's ``where`` on int8-quantized tensors.

If possible, comparisons in the condition read int8 tensors, and logical operators read the booleans that these return.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, apply_table, rule
from arm_backend_core.nodes import is_dequantize, overload_of
from arm_backend_core.qparams import QParams

aten = torch.ops.aten
_COMPARISONS_OF_TENSORS = (
    *(aten.gt.Tensor, aten.ge.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.eq.Tensor, aten.ne.Tensor),
)
_COMPARISONS_WITH_NUMBER = (
    *(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.eq.Scalar, aten.ne.Scalar),
)
_LOGIC = (
    *(aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
    *(aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(cx: KernelContext) -> QuantizedValue:
    """Select one of two tensors or numbers for each element."""
    condition = _emit_condition(cx, cast(Node, cx.node.args[0]))
    branches = [_emit_branch(cx, argument) for argument in cx.node.args[1:3]]
    return cx.clamp(cx.make_result(cx.emit.call(aten.where.self, condition, *branches)))


def _emit_branch(cx: KernelContext, argument: Any) -> Node:
    """Convert a tensor or a number to int8 with the result's quantization parameters."""
    if isinstance(argument, Node):
        return cx.emit.materialize(cx.requantize(cx.operand(argument), cx.result.q))
    return cx.emit.constant(cx.result.q.quantize(np.array(float(argument))).astype(np.int8), "operand")


def _emit_condition(cx: KernelContext, argument: Node) -> Node:
    """Emit the condition as booleans. A condition that cannot be computed from int8 values stays in floating point."""
    constant = cx.constant_data(argument)
    if constant is not None:
        return cx.emit.constant(constant, "condition")
    overload, sources = overload_of(argument.target), argument.all_input_nodes
    if overload in _COMPARISONS_WITH_NUMBER and is_dequantize(sources[0]):
        return _compare_with_number(cx, argument)
    if overload in _COMPARISONS_OF_TENSORS and all(map(is_dequantize, sources)):
        return _compare(cx, argument)
    if overload in _LOGIC and all(source.meta["val"].dtype is torch.bool for source in sources):
        return cx.emit.call(overload, *(_emit_condition(cx, cast(Node, source)) for source in argument.args))
    return argument


def _compare_with_number(cx: KernelContext, node: Node) -> Node:
    """Compare a tensor with a number: a lookup table maps each int8 value to 0 or 1."""
    x, number = cx.operand(node.args[0]), node.args[1]
    real = torch.from_numpy((np.arange(-128, 128) - x.zero_point).astype(np.float32) * np.float32(x.scale))
    table = node.target(real, number).numpy().astype(np.int8)  # type: ignore[operator]
    flags = apply_table(cx.emit, x, table, QParams(1.0, 0, x.q.dtype, x.q.qmin, x.q.qmax))
    return cx.emit.call(aten.ne.Scalar, cx.emit.materialize(flags), 0)


def _compare(cx: KernelContext, node: Node) -> Node:
    """Compare the integers of two tensors. If their quantization parameters differ, return ``node`` unchanged."""
    first, second = (cx.operand(argument) for argument in node.args[:2])
    if not first.q.is_equivalent(second.q):
        return node
    return cx.emit.call(node.target, cx.emit.materialize(first), cx.emit.materialize(second))
