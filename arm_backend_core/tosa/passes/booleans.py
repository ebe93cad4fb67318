"""Lowering of booleans to int8 for hardware without boolean tensors: false is 0, true is 1.

Comparisons, logical operators and SELECT become arithmetic, REDUCE_ALL and REDUCE_ANY become REDUCE_MIN and REDUCE_MAX.
ExecuTorch stores booleans as the same bytes. The arithmetic is exact: it neither rounds nor overflows for any operands.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, apply_once
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant

_INT32_MIN, _INT32_MAX = (int(bound) for bound in DType.INT32.range)
_INT8_VALUES = np.arange(-128, 128)


def lower_bool_to_int8(graph: Graph, target: Target) -> None:
    """Lower all boolean operators and values of the graph to int8.

    Before this pass, ``compose_tables`` has replaced chains of int8 operators that contain comparisons by one TABLE
    each. The other comparisons become arithmetic here. In the next round of the pipeline, ``compose_tables`` can
    include this arithmetic in a TABLE too.
    """
    if target.hardware.has_booleans:
        return
    for value in graph.inputs:
        value.dtype = DType.INT8 if value.dtype is DType.BOOL else value.dtype
    for op in graph.ops:
        if op.output.dtype is DType.BOOL:
            assert op.kind != "CAST", "CAST to BOOL must be lowered as a comparison"
            op.output.dtype = DType.INT8
    for values in (graph.outputs, *(op.inputs for op in graph.ops)):
        for i, x in enumerate(values):
            if x.dtype is DType.BOOL and x.data is not None:
                values[i] = constant(x.data, DType.INT8)
    apply_once(graph, target, RULES)


def _int32_constant(x: Value, number: int, b: Builder) -> Value:
    return broadcast_constant(x, number, DType.INT32, b)


def _saturating_add(b: Builder, x: Value, step: int) -> Value:
    """Emit x + step, saturated to INT32; ``step`` is 1 or -1."""
    if x.data is not None:
        return b.const(np.clip(x.data.astype(np.int64) + step, _INT32_MIN, _INT32_MAX), DType.INT32)
    if step > 0:
        bounded = b.minimum(x, _int32_constant(x, _INT32_MAX - 1, b))
    else:
        bounded = b.maximum(x, _int32_constant(x, _INT32_MIN + 1, b))
    return b.add(bounded, _int32_constant(x, step, b))


def _clamp_between(b: Builder, x: Value, low: Value, high: Value) -> Value:
    return b.minimum(b.maximum(x, low), high)


def _emit_greater(b: Builder, x: Value, y: Value) -> Value:
    """Emit x > y as INT32 (1 or 0)."""
    if x.data is not None:
        return b.sub(x, _clamp_between(b, y, _saturating_add(b, x, -1), x))
    return b.sub(_clamp_between(b, x, y, _saturating_add(b, y, 1)), y)


def _emit_not_equal(b: Builder, x: Value, y: Value) -> Value:
    """Emit x != y as INT32 (1 or 0)."""
    x, y = (y, x) if x.data is not None else (x, y)
    difference = b.sub(_clamp_between(b, x, _saturating_add(b, y, -1), _saturating_add(b, y, 1)), y)
    return b.mul(difference, difference)


def _lower_comparison(op: Op, rewriter: Rewriter) -> Value:
    b, (x, y) = rewriter.builder, op.inputs
    if op.kind == "GREATER":
        return b.rescale(_emit_greater(b, x, y), DType.INT8, 1.0)
    complement = _emit_greater(b, y, x) if op.kind == "GREATER_EQUAL" else _emit_not_equal(b, x, y)
    return b.rescale(b.sub(_int32_constant(complement, 1, b), complement), DType.INT8, 1.0)


def _emit_not(b: Builder, x: Value) -> Value:
    return b.const(1 - x.data, DType.INT8) if x.data is not None else b.table(x, np.where(_INT8_VALUES > 0, 0, 1))


def _emit_sum(b: Builder, x: Value, y: Value) -> Value:
    if x.dtype is DType.INT32:
        return b.add(x, y)
    return b.rescale(b.add(*(b.rescale(value, DType.INT32, 1.0) for value in (x, y))), x.dtype, 1.0)


def _lower_logic(op: Op, rewriter: Rewriter) -> Value:
    b = rewriter.builder
    if op.kind == "LOGICAL_NOT":
        return _emit_not(b, op.inputs[0])
    if op.kind == "LOGICAL_AND":
        return b.rescale(b.mul(op.inputs[0], op.inputs[1]), DType.INT8, 1.0)
    count = _emit_sum(b, *op.inputs)
    return b.clamp(count, 0, 1) if op.kind == "LOGICAL_OR" else b.table(count, np.where(_INT8_VALUES == 1, 1, 0))


def _lower_reduction(op: Op, rewriter: Rewriter, kind: str) -> Value:
    return rewriter.builder.reduce(kind, op.inputs[0], op.attrs["axis"])


def _lower_select(op: Op, rewriter: Rewriter) -> Value:
    """Lower SELECT(condition, x, y) to x * condition + y * (1 - condition), without terms that are 0."""
    b, (condition, x, y), dtype = rewriter.builder, op.inputs, op.output.dtype

    def multiply_by_mask(value: Value, mask: Value) -> Value:
        mask = mask if dtype is DType.INT8 else b.rescale(mask, dtype, 1.0)
        product = mask if _is_scalar(value, 1) else b.mul(value, mask)
        return product if product.dtype is dtype else b.rescale(product, dtype, 1.0)

    choices = [(x, condition), (y, _emit_not(b, condition))]
    nonzero_choices = [choice for choice in choices if not _is_scalar(choice[0], 0)] or choices[:1]
    terms = [multiply_by_mask(*choice) for choice in nonzero_choices]
    return terms[0] if len(terms) == 1 else _emit_sum(b, *terms)


def _is_scalar(x: Value, number: int) -> bool:
    """Whether ``x`` is a constant of one element that is equal to ``number``."""
    return x.data is not None and x.size == 1 and x.data.item() == number


#: The rules for the operators in ``Hardware.bool_as_int8``.
RULES: dict[str, list[RewriteRule]] = {
    **{kind: [_lower_comparison] for kind in ("EQUAL", "GREATER", "GREATER_EQUAL")},
    **{kind: [_lower_logic] for kind in ("LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR", "LOGICAL_XOR")},
    "REDUCE_ALL": [partial(_lower_reduction, kind="REDUCE_MIN")],
    "REDUCE_ANY": [partial(_lower_reduction, kind="REDUCE_MAX")],
    "SELECT": [_lower_select],
}
