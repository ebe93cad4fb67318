"""A convolution with what scales its result and is done to it on its way: steps that a form writes anew together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter


def steps_from(op: Op, rewriter: Rewriter) -> list[Op]:
    """A convolution, its RESCALE, and the CLAMP or TABLE behind that, as far as one alone reads the other."""
    steps = [op]
    for kinds in (("RESCALE",), ("CLAMP", "TABLE")):
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


def repeated(value: Value, size: int, count: int) -> Value:
    """The constant [size], or [1] for all, ``count`` times."""
    assert value.data is not None
    return constant(np.tile(np.broadcast_to(value.data, (size,)), count), value.dtype)


def done_to(value: Value, steps: Sequence[Op], count: int, build: Builder) -> Value:
    """``steps`` on sums whose channels are those of the convolution ``count`` times."""
    for step in steps:
        attrs = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: np.tile(attrs[name], count) for name in ("multiplier", "shift")}
        value = build.emit(step.kind, (value, *step.inputs[1:]), value.shape, step.output.dtype, **attrs)
    return value
