"""Booleans as the int8 numbers 0 and 1, for hardware that has none: comparisons, logic and choices by arithmetic.

ExecuTorch's are the same in memory. Nothing is rounded and no difference overflows, whatever the operands.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, apply_once
from arm_backend_core.tosa.vela_workarounds.arithmetic import broadcast_constant

_LOW, _HIGH = (int(bound) for bound in DType.INT32.range)
_NUMBERS = np.arange(-128, 128)


def lower_bool_to_int8(graph: Graph, target: Target) -> None:
    """Where a chain of int8 operators compares, the arithmetic becomes part of its TABLE."""
    if target.hardware.booleans:
        return
    for value in graph.inputs:
        value.dtype = DType.INT8 if value.dtype is DType.BOOL else value.dtype
    for op in graph.ops:
        if op.output.dtype is DType.BOOL:
            assert op.kind != "CAST", "a cast to BOOL is to be written as a comparison"
            op.output.dtype = DType.INT8
    for values in (graph.outputs, *(op.inputs for op in graph.ops)):
        for i, x in enumerate(values):
            if x.dtype is DType.BOOL and x.data is not None:
                values[i] = constant(x.data, DType.INT8)
    apply_once(graph, target, RULES)


def _number(x: Value, number: int, b: Builder) -> Value:
    return broadcast_constant(x, number, DType.INT32, b)


def _next(b: Builder, x: Value, step: int) -> Value:
    """x + step, at most and at least what INT32 holds."""
    if x.data is not None:
        return b.const(np.clip(x.data.astype(np.int64) + step, _LOW, _HIGH), DType.INT32)
    held = b.minimum(x, _number(x, _HIGH - 1, b)) if step > 0 else b.maximum(x, _number(x, _LOW + 1, b))
    return b.add(held, _number(x, step, b))


def _bounded(b: Builder, x: Value, low: Value, high: Value) -> Value:
    return b.minimum(b.maximum(x, low), high)


def _above(b: Builder, x: Value, y: Value) -> Value:
    """1 where x > y, else 0; INT32."""
    if x.data is not None:
        return b.sub(x, _bounded(b, y, _next(b, x, -1), x))
    return b.sub(_bounded(b, x, y, _next(b, y, 1)), y)


def _differ(b: Builder, x: Value, y: Value) -> Value:
    """1 where x != y, else 0; INT32."""
    x, y = (y, x) if x.data is not None else (x, y)
    apart = b.sub(_bounded(b, x, _next(b, y, -1), _next(b, y, 1)), y)
    return b.mul(apart, apart)


def _compared(op: Op, rewriter: Rewriter) -> Value:
    b, (x, y) = rewriter.build, op.inputs
    if op.kind == "GREATER":
        return b.rescale(_above(b, x, y), DType.INT8, 1.0)
    others = _above(b, y, x) if op.kind == "GREATER_EQUAL" else _differ(b, x, y)
    return b.rescale(b.sub(_number(others, 1, b), others), DType.INT8, 1.0)


def _not(b: Builder, x: Value) -> Value:
    return b.const(1 - x.data, DType.INT8) if x.data is not None else b.table(x, np.where(_NUMBERS > 0, 0, 1))


def _added(b: Builder, x: Value, y: Value) -> Value:
    if x.dtype is DType.INT32:
        return b.add(x, y)
    return b.rescale(b.add(*(b.rescale(value, DType.INT32, 1.0) for value in (x, y))), x.dtype, 1.0)


def _logic(op: Op, rewriter: Rewriter) -> Value:
    b = rewriter.build
    if op.kind == "LOGICAL_NOT":
        return _not(b, op.inputs[0])
    if op.kind == "LOGICAL_AND":
        return b.rescale(b.mul(op.inputs[0], op.inputs[1]), DType.INT8, 1.0)
    count = _added(b, *op.inputs)
    return b.clamp(count, 0, 1) if op.kind == "LOGICAL_OR" else b.table(count, np.where(_NUMBERS == 1, 1, 0))


def _reduced(op: Op, rewriter: Rewriter, kind: str) -> Value:
    return rewriter.build.reduce(kind, op.inputs[0], op.attrs["axis"])


def _chosen(op: Op, rewriter: Rewriter) -> Value:
    """The sum of both, each times whether it is chosen."""
    b, (condition, x, y), dtype = rewriter.build, op.inputs, op.output.dtype

    def kept(value: Value, holds: Value) -> Value:
        holds = holds if dtype is DType.INT8 else b.rescale(holds, dtype, 1.0)
        product = holds if _is(value, 1) else b.mul(value, holds)
        return product if product.dtype is dtype else b.rescale(product, dtype, 1.0)

    choices = [(x, condition), (y, _not(b, condition))]
    parts = [kept(*choice) for choice in choices if not _is(choice[0], 0)] or [kept(*choices[0])]
    return parts[0] if len(parts) == 1 else _added(b, *parts)


def _is(x: Value, number: int) -> bool:
    return x.data is not None and x.size == 1 and x.data.item() == number


#: What is written for each of ``Hardware.bool_as_int8``.
RULES: dict[str, list[Rule]] = {
    **{kind: [_compared] for kind in ("EQUAL", "GREATER", "GREATER_EQUAL")},
    **{kind: [_logic] for kind in ("LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR", "LOGICAL_XOR")},
    "REDUCE_ALL": [partial(_reduced, kind="REDUCE_MIN")],
    "REDUCE_ANY": [partial(_reduced, kind="REDUCE_MAX")],
    "SELECT": [_chosen],
}
