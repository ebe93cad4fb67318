"""Convolution epilogue: a convolution with its RESCALE and fused activation, which alternatives rewrite together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.alternatives.choose import collect_neighbors
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Activations that Vela fuses with the operation before them.
ACTIVATIONS = ("CLAMP", "TABLE")


def match_epilogue(op: Op, rewriter: Rewriter) -> list[Op]:
    """Match a convolution, its RESCALE and a following CLAMP or TABLE, as long as each is the only reader."""
    steps = [op]
    for kinds in (("RESCALE",), ACTIVATIONS):
        readers = rewriter.users(steps[-1].output) or []
        if len(readers) != 1 or readers[0].kind not in kinds:
            break
        steps += readers
    return steps


def trace_epilogue(op: Op, kind: str) -> list[Op]:
    """Trace the same chain backwards from its last operator to the operator of this ``kind``."""
    steps = [op]
    while steps[0].kind != kind:
        before = steps[0].inputs[0].producer
        assert before is not None
        steps.insert(0, before)
    return steps


def collect_readers(last: Op, rewriter: Rewriter) -> list[Op]:
    """Collect ``last`` and its readers up to convolutions.

    Without its readers the result would be an output of the region, whose memory layout costs twice as much.
    """
    readers = collect_neighbors(last, rewriter, (), ("CONCAT", "RESCALE", *ACTIVATIONS))
    convs = [reader for step in readers for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    return [*readers, *(step for conv in convs for step in collect_neighbors(conv, rewriter, (), ("RESCALE",)))]


def select_constant_channels(value: Value, size: int, channels: Array) -> Value:
    """Select channels of a constant with ``size`` channels, or with one that applies to all of them."""
    assert value.data is not None
    return constant(np.broadcast_to(value.data, (size, *value.shape[1:]))[channels], value.dtype)


def apply_epilogue(value: Value, steps: Sequence[Op], channels: Array, build: Builder) -> Value:
    """Emit the epilogue ``steps`` on sums that hold these channels of the convolution."""
    for step in steps:
        attrs = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: attrs[name][channels] for name in ("multiplier", "shift")}
        value = build.emit(step.kind, (value, *step.inputs[1:]), value.shape, step.output.dtype, **attrs)
    return value
