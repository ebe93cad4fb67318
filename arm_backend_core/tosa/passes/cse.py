"""Common subexpression elimination: compute equal operators with equal operands and attributes once.

``duplicate_convolutions`` undoes the elimination where a shared convolution costs cycles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, merge_origins
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once


def eliminate_common_subexpressions(graph: Graph, target: Target) -> None:
    """Keep the first of equal operators. The readers of the others read its result."""
    first: dict[Any, Op] = {}
    replaced: dict[Value, Value] = {}
    for op in graph.ops:
        op.inputs = [replaced.get(value, value) for value in op.inputs]
        operands: Iterator[Any] = (value if value.data is None else value.content_key for value in op.inputs)
        key = (op.kind, op.output.dtype, op.output.shape, *operands)
        key += tuple((name, _to_hashable(attr)) for name, attr in sorted(op.attrs.items()))
        representative = first.setdefault(key, op)
        if representative is not op:
            replaced[op.output], representative.origins = representative.output, merge_origins([representative, op])
    graph.ops = list(first.values())
    graph.outputs = [replaced.get(value, value) for value in graph.outputs]


def duplicate_convolutions(graph: Graph, target: Target) -> None:
    """On NPUs, give each RESCALE of a CONV2D or DEPTHWISE_CONV2D its own convolution: Vela fuses one RESCALE only.

    A separate per-channel RESCALE takes 20 cycles per element on U55-128. On U55, Vela rejects a RESCALE of INT48 that
    it does not fuse into the convolution.
    """
    if target.hardware.is_npu:
        apply_once(graph, target, {"RESCALE": [_duplicate_convolution]})


def _duplicate_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    conv, b = op.inputs[0].producer, rewriter.builder
    if conv is None or conv.kind not in ("CONV2D", "DEPTHWISE_CONV2D") or rewriter.has_one_use(conv.output):
        return None
    sums = b.emit(conv.kind, conv.inputs, conv.output.dtype, **conv.attrs)
    return b.emit("RESCALE", (sums, *op.inputs[1:]), op.output.dtype, **op.attrs)


def _to_hashable(attr: Any) -> Any:
    """A hashable key of an attribute, equal for equal attributes."""
    if isinstance(attr, np.ndarray):
        return attr.tobytes()
    if isinstance(attr, list | tuple):
        return tuple(int(v) for v in attr)
    if isinstance(attr, float):  # repr: 0.0 == -0.0 although they differ, and NaN != NaN
        return repr(attr)
    return attr
