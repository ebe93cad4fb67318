"""Data movement that met nothing to merge with goes back to where its elements are narrow."""

from __future__ import annotations

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import UNARY
from arm_backend_core.tosa.passes.rewrite import Rewriter, settle


def move_narrow_elements(graph: Graph, target: Target) -> None:
    """RESHAPE(widen(x)) becomes widen(RESHAPE(x)); where hardware copies for a RESHAPE, it copies less."""
    settle(graph, target, {"RESHAPE": [raise_reshape]})


def raise_reshape(op: Op, rewriter: Rewriter) -> Value | None:
    """A RESHAPE passes the elementwise operator that it alone reads, where that one widens."""
    wide = op.inputs[0]
    widen = wide.producer
    if widen is None or widen.kind not in UNARY or widen.attrs.get("per_channel"):
        return None
    narrow = widen.inputs[0]
    if narrow.dtype.numpy.itemsize >= wide.dtype.numpy.itemsize or not rewriter.single_use(wide):
        return None
    reshaped = rewriter.build.reshape(narrow, op.output.shape)
    return rewriter.build.emit(widen.kind, (reshaped,), op.output.shape, op.output.dtype, **widen.attrs)
