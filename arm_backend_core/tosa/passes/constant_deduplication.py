"""Constant deduplication: constants that differ only in shape are stored once. RESHAPEs provide the other shapes.

Tied embeddings (``linear.weight = embedding.weight``) are the common case: GATHER reads [1, N, C], CONV2D
[N, 1, 1, C]. Quantized tied weights are not equal if the embedding has one scale and the linear layer one scale per
channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op

#: Minimum size of a deduplicated constant, in bytes. The RESHAPE that replaces a constant needs about 250 bytes in the
#: flatbuffer, together with its result and shape.
_MIN_BYTES = 1024


def deduplicate_constants(graph: Graph, target: Target) -> None:
    """Store constants with the same type and bytes once for each graph and region, if they have ``_MIN_BYTES`` or more.

    NPUs are skipped, because Vela encodes the weights separately for each reader.
    """
    if target.hardware.is_ethos_u:
        return
    for subgraph in (graph, *(region for op in graph.walk() for region in op.regions)):
        uses: dict[Any, list[tuple[Op, int]]] = {}
        for op in (op for op in subgraph.ops if not op.regions):
            for i, x in enumerate(op.inputs):
                if x.data is not None and x.data.nbytes >= _MIN_BYTES:
                    uses.setdefault(x.content_key[1:], []).append((op, i))
        for equal_uses in uses.values():
            _replace_by_reshapes(subgraph, Builder(subgraph, target), equal_uses)


def _replace_by_reshapes(graph: Graph, build: Builder, uses: Sequence[tuple[Op, int]]) -> None:
    """Store one of several equal constants, and replace the others by RESHAPEs of the stored one.

    If some of them are weights of convolutions, the first of these is stored, so that it stays constant: TOSA compilers
    may reorder a constant weight, but not the result of a RESHAPE. Otherwise, the first constant is stored.

    Args:
        uses: (operator, operand index) of each constant.
    """
    constants = [op.inputs[i] for op, i in uses]
    stored = next((x for (op, _), x in zip(uses, constants, strict=True) if op.weight is x), constants[0])
    views = {stored.shape: stored}
    for (op, i), x in zip(uses, constants, strict=True):
        if x.shape not in views:
            reshape = "RESHAPE", (stored,), x.dtype
            if build.refusal(*reshape, shape=list(x.shape)):  # the target has no RESHAPE of this type (INT4)
                continue
            build.origins = op.origins
            views[x.shape] = build.emit(*reshape, shape=list(x.shape))
            graph.ops.insert(graph.ops.index(op), graph.ops.pop())
        op.inputs[i] = views[x.shape]
