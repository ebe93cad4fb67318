"""Common subexpressions: operators of one kind with equal operands and attributes are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, together


def share_common(graph: Graph, target: Target) -> None:
    """Keep the first of equal operators; every reader of the others reads the first's result."""
    first: dict[Any, Value] = {}
    replaced: dict[Value, Value] = {}
    kept: list[Op] = []
    for op in graph.ops:
        op.inputs = [replaced.get(value, value) for value in op.inputs]
        operands: Iterator[Any] = (value if value.data is None else value.content for value in op.inputs)
        key = (op.kind, op.output.dtype, op.output.shape, *operands)
        key += tuple((name, _frozen(attr)) for name, attr in sorted(op.attrs.items()))
        result = first.setdefault(key, op.output)
        if result is op.output:
            kept.append(op)
        else:
            replaced[op.output] = result
            assert result.producer is not None
            result.producer.origins = together([result.producer, op])
    graph.ops = kept
    graph.outputs = [replaced.get(value, value) for value in graph.outputs]


def _frozen(attr: Any) -> Any:
    if isinstance(attr, np.ndarray):
        return attr.tobytes()
    if isinstance(attr, list | tuple):
        return tuple(int(v) for v in attr)
    if isinstance(attr, float):  # 0.0 and -0.0 are equal, and NaN is not: compare representations
        return repr(attr)
    return attr
