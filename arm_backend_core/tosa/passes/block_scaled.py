"""Legalization of block-scaled convolutions: MX_CONV2D becomes CAST_TO_BLOCK_SCALED and CONV2D_BLOCK_SCALED.

The cast has two results, elements and scales. The pass runs late, so that other passes need not handle two results.
"""

from __future__ import annotations

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators.block_scaled import BLOCK_SIZE


def legalize_block_scaled(graph: Graph, target: Target) -> None:
    """Replace each MX_CONV2D by a CONV2D_BLOCK_SCALED.

    Convolutions with the same input and the same element type share one CAST_TO_BLOCK_SCALED.
    """
    casts: dict[tuple[Value, DType], Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "MX_CONV2D":
            x, weight, *others = op.inputs
            if (x, weight.dtype) not in casts:
                ops.append(casts.setdefault((x, weight.dtype), _emit_cast(graph, x, weight.dtype, op)))
            cast = casts[x, weight.dtype]
            op.kind, op.inputs = "CONV2D_BLOCK_SCALED", [*cast.results, weight, *others]
            op.attrs = {**op.attrs, "block_size": BLOCK_SIZE}
        ops.append(op)
    graph.ops = ops


def _emit_cast(graph: Graph, x: Value, dtype: DType, reader: Op) -> Op:
    kind = "CAST_TO_BLOCK_SCALED"
    elements = Value(x.shape, dtype, graph.new_name(kind))
    scales = Value((*x.shape[:-1], x.shape[-1] // BLOCK_SIZE), DType.FP8UE8M0, graph.new_name(kind))
    cast = Op(kind, [x], elements, {"block_size": BLOCK_SIZE}, reader.origins, [scales])
    elements.producer = scales.producer = cast
    return cast
