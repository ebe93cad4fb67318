"""Constant deduplication: constants that differ only in shape are stored once; the other shapes are RESHAPEs of it.

Tied embeddings (``linear.weight = embedding.weight``) are the common case: GATHER wants [1, N, C], CONV2D [N, 1, 1, C].
Quantized weights differ in their bytes if the table has one scale and the linear layer one for each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op

_MIN_BYTES = 1024  #: an operator, its result and its shape take about 250 bytes in the flatbuffer


def deduplicate_constants(graph: Graph, target: Target) -> None:
    """Store constants of equal bytes once. Skipped for NPUs: Vela encodes the weights of each reader separately."""
    if target.hardware.npu:
        return
    for part in (graph, *(inner for op in graph.walk() for inner in op.graphs)):
        uses: dict[Any, list[tuple[Op, int]]] = {}
        for op in (op for op in part.ops if not op.graphs):
            for i, x in enumerate(op.inputs):
                if x.data is not None and x.data.nbytes >= _MIN_BYTES:
                    uses.setdefault(x.content[1:], []).append((op, i))
        for equal in uses.values():
            _replace_by_reshapes(part, Builder(part, target), equal)


def _replace_by_reshapes(graph: Graph, build: Builder, uses: Sequence[tuple[Op, int]]) -> None:
    """Replace all but one of equal constants by RESHAPEs of it.

    A convolution's weight is the one that is kept, because compilers of flatbuffers may reorder a constant weight.
    """
    constants = [op.inputs[i] for op, i in uses]
    stored = next((x for (op, _), x in zip(uses, constants, strict=True) if op.weight is x), constants[0])
    views = {stored.shape: stored}
    for (op, i), x in zip(uses, constants, strict=True):
        if x.shape not in views:
            reshape = "RESHAPE", (stored,), x.dtype
            if build.refusal(*reshape, shape=list(x.shape)):  # the target moves no such elements: INT4
                continue
            build.origins = op.origins
            views[x.shape] = build.emit(*reshape, shape=list(x.shape))
            graph.ops.insert(graph.ops.index(op), graph.ops.pop())
        op.inputs[i] = views[x.shape]
