"""Narrow types: reshape elements before an operator widens them, and store weights as INT4."""

from __future__ import annotations

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.legality import type_refusal
from arm_backend_core.tosa.operators import UNARY
from arm_backend_core.tosa.passes.rewrite import Rewriter, rewrite_to_fixpoint


def hoist_reshapes(graph: Graph, target: Target) -> None:
    """RESHAPE(widen(x)) becomes widen(RESHAPE(x)). A RESHAPE that needs a copy then copies fewer bytes."""
    rewrite_to_fixpoint(graph, target, {"RESHAPE": [hoist_reshape]})


def hoist_reshape(op: Op, rewriter: Rewriter) -> Value | None:
    """Move a RESHAPE before the elementwise operator that produces its operand, if this operator widens elements.

    The RESHAPE must be the only reader of the elementwise operator.
    """
    widened = op.inputs[0]
    widen = widened.producer
    if widen is None or widen.kind not in UNARY or widen.attrs.get("per_channel"):
        return None
    narrow = widen.inputs[0]
    if narrow.dtype.numpy.itemsize >= widened.dtype.numpy.itemsize or not rewriter.has_one_use(widened):
        return None
    reshaped = rewriter.builder.reshape(narrow, op.output.shape)
    return rewriter.builder.emit(widen.kind, (reshaped,), op.output.dtype, **widen.attrs)


def convert_weights_to_int4(graph: Graph, target: Target) -> None:
    """Convert constant int8 weights with zero point 0 and values from -7 to 7 to INT4, if the target supports INT4.

    NPUs are skipped: Vela encodes equal INT4 and int8 weights in the same way, so INT4 saves nothing.
    """
    for op in graph.ops if not target.hardware.is_ethos_u else ():
        if op.attrs.get("weight_zp") != 0:
            continue
        x, weight, bias = op.inputs
        if weight.data is None or type_refusal(target, op.kind, (x.dtype, DType.INT4, bias.dtype), op.output.dtype):
            continue
        if weight.dtype is DType.INT8 and weight.data.min() >= -7 and weight.data.max() <= 7:
            op.inputs[1] = constant(weight.data, DType.INT4, weight.name)
