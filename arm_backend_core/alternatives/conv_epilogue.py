"""A convolution with what scales its result and is done to it on its way: steps that a form writes anew together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.alternatives.choose import around
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: What Vela does with the operation before it.
ACTIVATIONS = ("CLAMP", "TABLE")


def steps_from(op: Op, rewriter: Rewriter) -> list[Op]:
    """A convolution, its RESCALE, and the CLAMP or TABLE behind that, as far as one alone reads the other."""
    steps = [op]
    for kinds in (("RESCALE",), ACTIVATIONS):
        readers = rewriter.users(steps[-1].output) or []
        if len(readers) != 1 or readers[0].kind not in kinds:
            break
        steps += readers
    return steps


def steps_to(op: Op, kind: str) -> list[Op]:
    """The same, found from the last of them: back to the operator ``kind``."""
    steps = [op]
    while steps[0].kind != kind:
        before = steps[0].inputs[0].producer
        assert before is not None
        steps.insert(0, before)
    return steps


def read_behind(last: Op, rewriter: Rewriter) -> list[Op]:
    """``last`` and what reads it up to convolutions: what is returned lies in a layout that costs twice as much."""
    behind = around(last, rewriter, (), ("CONCAT", "RESCALE", *ACTIVATIONS))
    convs = [reader for step in behind for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    return [*behind, *(step for conv in convs for step in around(conv, rewriter, (), ("RESCALE",)))]


def selected_channels(value: Value, size: int, channels: Array) -> Value:
    """The constant of ``size`` channels, or of one for all of them, with these channels."""
    assert value.data is not None
    return constant(np.broadcast_to(value.data, (size, *value.shape[1:]))[channels], value.dtype)


def done_to(value: Value, steps: Sequence[Op], channels: Array, build: Builder) -> Value:
    """``steps`` on sums whose channels are these of the convolution."""
    for step in steps:
        attrs = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: attrs[name][channels] for name in ("multiplier", "shift")}
        value = build.emit(step.kind, (value, *step.inputs[1:]), value.shape, step.output.dtype, **attrs)
    return value
