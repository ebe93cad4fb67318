"""Convolution epilogue: the RESCALE and the activation after a convolution.

Alternatives rewrite the convolution and its epilogue together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.alternatives.choose import collect_neighbors
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back

#: Activations that Vela fuses into the preceding operation.
ACTIVATIONS = ("CLAMP", "TABLE")


def match_epilogue(op: Op, rewriter: Rewriter) -> list[Op]:
    """Match a convolution, its RESCALE, and a CLAMP or TABLE after the RESCALE.

    Returns:
        The matched operators in execution order; at least ``op``. The list ends before an operator of another kind, and
        after an operator whose result has several readers or is an output of the graph.
    """
    chain = [op]
    for kinds in (("RESCALE",), ACTIVATIONS):
        readers = rewriter.users(chain[-1].output) or []
        if len(readers) != 1 or readers[0].kind not in kinds:
            break
        chain += readers
    return chain


def trace_epilogue(op: Op, kind: str) -> list[Op]:
    """Follow the first input of each operator from ``op`` back to an operator of this ``kind``.

    Returns:
        The operators on this path, in execution order.
    """
    source, steps = trace_back(op.output, lambda step: step.kind != kind)
    assert source.producer is not None
    return [source.producer, *steps]


def collect_readers(last: Op, rewriter: Rewriter) -> list[Op]:
    """Collect ``last`` and its transitive readers that are CONCATs, RESCALEs or activations.

    The CONV2Ds that read any of these, and the RESCALEs of the CONV2Ds, are collected too. If a region ended at
    ``last``, its result would be an output of the region. Vela stores outputs in another memory layout than
    intermediate tensors, and estimates twice the cycles for the layout of outputs.
    """
    readers = collect_neighbors(last, rewriter, (), ("CONCAT", "RESCALE", *ACTIVATIONS))
    convs = [reader for step in readers for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    return [*readers, *(step for conv in convs for step in collect_neighbors(conv, rewriter, (), ("RESCALE",)))]


def select_constant_channels(value: Value, size: int, channels: Array) -> Value:
    """Select channels of a constant. A constant of one channel is first broadcast to ``size`` channels."""
    assert value.data is not None
    return constant(np.broadcast_to(value.data, (size, *value.shape[1:]))[channels], value.dtype)


def apply_epilogue(value: Value, steps: Sequence[Op], channels: Array, build: Builder) -> Value:
    """Emit the operators of an epilogue.

    Args:
        value: accumulators of the selected output channels of the convolution.
        steps: the operators of the epilogue.
        channels: for each channel of ``value``, the output channel of the original convolution. The RESCALE gets the
            per-channel scales of these channels.
    """
    for step in steps:
        attrs = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: attrs[name][channels] for name in ("multiplier", "shift")}
        value = build.emit(step.kind, (value, *step.inputs[1:]), step.output.dtype, **attrs)
    return value
