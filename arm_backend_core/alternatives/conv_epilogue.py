"""Convolution epilogue: a convolution with its RESCALE and fused activation, which alternatives rewrite together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.alternatives.choose import collect_neighbors
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back

#: Activations that Vela fuses with the operation before them.
ACTIVATIONS = ("CLAMP", "TABLE")


def match_epilogue(op: Op, rewriter: Rewriter) -> list[Op]:
    """Match a convolution, its RESCALE and a following CLAMP or TABLE; stop where a result has several readers."""
    chain = [op]
    for kinds in (("RESCALE",), ACTIVATIONS):
        readers = rewriter.users(chain[-1].output) or []
        if len(readers) != 1 or readers[0].kind not in kinds:
            break
        chain += readers
    return chain


def trace_epilogue(op: Op, kind: str) -> list[Op]:
    """Follow first inputs from ``op`` back to an operator of this ``kind``; return the chain, that operator first."""
    source, steps = trace_back(op.output, lambda step: step.kind != kind)
    assert source.producer is not None
    return [source.producer, *steps]


def collect_readers(last: Op, rewriter: Rewriter) -> list[Op]:
    """Collect ``last`` and its readers, up to and including convolutions and their RESCALE.

    The region includes the readers because an output of a region has a memory layout that costs twice as much.
    """
    readers = collect_neighbors(last, rewriter, (), ("CONCAT", "RESCALE", *ACTIVATIONS))
    convs = [reader for step in readers for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    return [*readers, *(step for conv in convs for step in collect_neighbors(conv, rewriter, (), ("RESCALE",)))]


def select_constant_channels(value: Value, size: int, channels: Array) -> Value:
    """Select channels of a constant, which is first broadcast to ``size`` channels if it has only one."""
    assert value.data is not None
    return constant(np.broadcast_to(value.data, (size, *value.shape[1:]))[channels], value.dtype)


def apply_epilogue(value: Value, steps: Sequence[Op], channels: Array, build: Builder) -> Value:
    """Emit the epilogue's operators on ``value``: the accumulators of these channels of the convolution."""
    for step in steps:
        attrs = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: attrs[name][channels] for name in ("multiplier", "shift")}
        value = build.emit(step.kind, (value, *step.inputs[1:]), step.output.dtype, **attrs)
    return value
