"""Lowering of booleans to int8 for hardware without boolean tensors: false is 0, true is 1.

Comparisons, logical operators and SELECT become arithmetic, REDUCE_ALL and REDUCE_ANY become REDUCE_MIN and REDUCE_MAX.
ExecuTorch stores booleans as the same bytes. The arithmetic is exact: it neither rounds nor overflows for any operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.operators import find_monotonic_range
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, apply_once
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant

_INT32_MIN, _INT32_MAX = (int(bound) for bound in DType.INT32.range)
_INT8_VALUES = np.arange(-128, 128)


def lower_bool_to_int8(graph: Graph, target: Target) -> None:
    """Lower all boolean operators and values of the graph to int8, if the hardware has no boolean tensors.

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


def _compute_in_int32(b: Builder, function: Callable[[Value, Value], Value], x: Value, y: Value) -> Value:
    """Compute an INT32-only operator of TOSA on two tensors of a narrower type; saturate the result to this type."""
    wide = function(b.rescale(x, DType.INT32, 1.0), b.rescale(y, DType.INT32, 1.0))
    return b.rescale(wide, x.dtype, 1.0)


def _find_bounds(x: Value) -> tuple[int, int] | None:
    """Smallest and largest element of a constant, or of the RESCALE of a narrow tensor; None for other values."""
    if x.data is not None:
        return int(x.data.min()), int(x.data.max())
    rescale = x.producer
    if rescale is None or rescale.kind != "RESCALE" or rescale.inputs[0].dtype not in (DType.INT8, DType.INT16):
        return None
    return find_monotonic_range(rescale, *map(int, rescale.inputs[0].dtype.range))


def _find_difference_scale(x: Value, y: Value) -> float | None:
    """The scale, 1 or 1/2, with which RESCALE accepts x - y and y - x; None if there is none or bounds are unknown.

    A RESCALE with scale 2**(30 - shift) accepts magnitudes below 2**(shift - 1) (TOSA 1.0, apply_scale_32).
    """
    left, right = _find_bounds(x), _find_bounds(y)
    if left is None or right is None:
        return None
    peak = max(right[1] - left[0], left[1] - right[0])
    return 1.0 if peak < 1 << 29 else 0.5 if peak < 1 << 30 else None


def _emit_narrow_comparison(b: Builder, kind: str, x: Value, y: Value, scale: float) -> Value:
    """Emit a comparison by the difference, scaled and saturated to int8. Vela fuses both steps into the subtraction.

    RESCALE rounds half up. Its result is therefore positive if and only if x > y, also with a scale of 1/2.
    """

    def subtract(left: Value, right: Value) -> Value:
        return b.rescale(b.sub(left, right), DType.INT8, scale)

    if kind == "GREATER":
        return b.clamp(subtract(x, y), 0, 1)
    if kind == "GREATER_EQUAL":
        return b.table(subtract(y, x), _INT8_VALUES <= 0)
    if scale == 1.0:
        return b.table(subtract(x, y), _INT8_VALUES == 0)
    return b.table(_compute_in_int32(b, b.maximum, subtract(x, y), subtract(y, x)), _INT8_VALUES <= 0)


def _lower_comparison(op: Op, rewriter: Rewriter) -> Value:
    b, (x, y) = rewriter.builder, op.inputs
    if (scale := _find_difference_scale(x, y)) is not None:
        return _emit_narrow_comparison(b, op.kind, x, y, scale)
    if op.kind == "GREATER":
        return b.rescale(_emit_greater(b, x, y), DType.INT8, 1.0)
    complement = _emit_greater(b, y, x) if op.kind == "GREATER_EQUAL" else _emit_not_equal(b, x, y)
    return b.rescale(b.sub(_int32_constant(complement, 1, b), complement), DType.INT8, 1.0)


def _emit_not(b: Builder, x: Value) -> Value:
    return b.const(1 - x.data, DType.INT8) if x.data is not None else b.table(x, np.where(_INT8_VALUES > 0, 0, 1))


def _emit_sum(b: Builder, x: Value, y: Value) -> Value:
    return b.add(x, y) if x.dtype is DType.INT32 else _compute_in_int32(b, b.add, x, y)


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


def _select_by_bounds(b: Builder, condition: Value, x: Value, y: Value) -> Value:
    """Emit max(min(x, bound), min(y, other bound)) of int8 or int16 tensors.

    The bound of the selected operand is the maximum of the type. The bound of the other operand is the minimum.
    """

    def emit_bound(largest_if: bool) -> Value:
        bound = b.table(condition, np.where((_INT8_VALUES > 0) == largest_if, 127, -128))
        return bound if x.dtype is DType.INT8 else b.rescale(bound, DType.INT16, 259.0)  # saturates

    bounded = [_compute_in_int32(b, b.minimum, z, emit_bound(largest)) for z, largest in ((x, True), (y, False))]
    return _compute_in_int32(b, b.maximum, *bounded)


def _lower_select(op: Op, rewriter: Rewriter) -> Value:
    """Lower SELECT(condition, x, y) to x * condition + y * (1 - condition), without terms that are 0.

    If both terms are needed, int8 and int16 operands are bounded instead (``_select_by_bounds``).
    """
    b, (condition, x, y), dtype = rewriter.builder, op.inputs, op.output.dtype

    def multiply_by_mask(value: Value, mask: Value) -> Value:
        mask = mask if dtype is DType.INT8 else b.rescale(mask, dtype, 1.0)
        product = mask if _is_scalar(value, 1) else b.mul(value, mask)
        return product if product.dtype is dtype else b.rescale(product, dtype, 1.0)

    choices = [(x, condition), (y, _emit_not(b, condition))]
    nonzero_choices = [choice for choice in choices if not _is_scalar(choice[0], 0)] or choices[:1]
    if len(nonzero_choices) == 2 and dtype in (DType.INT8, DType.INT16):
        return _select_by_bounds(b, condition, x, y)
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
