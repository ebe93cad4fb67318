"""Softmax."""

from __future__ import annotations

import torch

from arm_backend_core.cortex_m.kernels.softmax import OUTPUT_SCALE, OUTPUT_ZERO_POINT, softmax_parameters
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, rule
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of
from arm_backend_core.qparams import QParams

aten = torch.ops.aten
#: Quantization parameters of the softmax kernel's result.
_SOFTMAX_RESULT = QParams(OUTPUT_SCALE, OUTPUT_ZERO_POINT, DType.INT8, -128, 127)


@rule(aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
def softmax(cx: KernelContext) -> QuantizedValue:
    """Softmax along any dimension. The layout puts this dimension last, as the kernel requires."""
    x = cx.operand(cx.node.args[0])
    dim = x.normalize_dim(int(arguments_of(cx.node)["dim"]))
    layout = (*(axis for axis in x.layout if axis != dim), dim)
    try:
        parameters = softmax_parameters(x.scale)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    stored = cx.emit.materialize(x, layout)
    node = cx.emit.call_kernel("softmax", stored, x.rank - 1, x.zero_point, OUTPUT_ZERO_POINT, *parameters)
    value = QuantizedValue.from_node(node, _SOFTMAX_RESULT, layout)
    return cx.clamp(cx.requantize(value, cx.result.q))
