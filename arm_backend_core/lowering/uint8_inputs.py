"""uint8 inputs of a TOSA graph: a RESCALE subtracts 128, so that all other operators read int8.

TOSA has no unsigned types. RESCALE reads the bits of an INT8 tensor as uint8 (``input_unsigned``; TOSA 1.0, RESCALE).
A uint8 tensor x is therefore the quantized int8 tensor x - 128 with scale 1 and zero point -128, which represents the
numbers 0 to 255 exactly. If a dequantize node reads x, it dequantizes the int8 tensor instead: with its own scale, and
with its zero point minus 128.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from arm_backend_core.dtype import UINT8_OFFSET, DType
from arm_backend_core.nodes import first_result, is_float
from arm_backend_core.ops.operands import Operand, to_tosa_dtype
from arm_backend_core.ops.registry import Record
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

#: Parameters of the int8 tensor x - 128 if no dequantize node reads the uint8 tensor x. The int8 tensor then represents
#: the integers of x.
_UINT8_NUMBERS = QParams(1.0, -UINT8_OFFSET, DType.INT8, *DType.INT8.range)


def is_uint8(node: Node) -> bool:
    """Whether ``node``'s (first) result is a uint8 tensor."""
    return getattr(first_result(node), "dtype", None) is torch.uint8


def uint8_to_int8(builder: Builder, bits: Value) -> Operand:
    """Convert the bits of a uint8 tensor to a quantized int8 tensor of the same numbers."""
    return Operand(builder.rescale(bits, DType.INT8, 1.0, UINT8_OFFSET, input_unsigned=True), _UINT8_NUMBERS)


def require_signed_operands(node: Node, record: Record, target: Target) -> None:
    """Check that ``node`` reads no uint8 tensor.

    A cast to floating point may read one if the target has TOSA's integer profile.

    Raises:
        Unsupported: it reads uint8. Other operators would compute with x - 128, for example as an index.
    """
    casts = record.is_cast and is_float(node) and target.has_int_profile
    if not casts and any(map(is_uint8, node.all_input_nodes)):
        to_tosa_dtype(torch.uint8)
