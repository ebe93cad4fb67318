"""Convolutions of 1x1 on few channels: neighbouring pixels, which lie side by side in NHWC, as channels of one."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.forms.choose import Form, Part, around
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Channels up to which Vela has U85 go through a window's elements first, four at a time, of which 1x1 has one: half a
#: cycle an element on U85-256, beyond 16. With more it goes through channels first: 226,656 cycles for 24 to 144
#: channels on 56x56 pixels, 113,620 for two pixels at once.
_FEW = 32


def join_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """CONV2D and RESCALE, and what is done to its result, on twice the channels of half as many pixels.

    Weights stand in blocks along the diagonal, one for each pixel: the other products are with 0. Bias and scales are
    repeated.
    """
    steps = _steps(op)
    b, conv, count = rewriter.build, steps[0], 2
    x, weight, bias = conv.inputs
    if weight.data is None or bias.data is None:
        return None
    n, height, width, channels = x.shape
    size = weight.shape[0]
    part = count if width % count == 0 else 1
    image = b.reshape(x, (n, height * part // count, width // part, count * channels))
    data = np.kron(np.eye(count, dtype=weight.data.dtype), weight.data.reshape(size, channels))
    inputs = (
        image,
        constant(data.reshape(count * size, 1, 1, count * channels), weight.dtype),
        constant(np.tile(np.broadcast_to(bias.data, (size,)), count), bias.dtype),
    )
    shape = (*image.shape[:3], count * size)
    value = b.emit("CONV2D", inputs, shape, conv.output.dtype, **conv.attrs)
    for step in steps[1:]:
        attrs: dict[str, Any] = dict(step.attrs)
        if attrs.get("per_channel"):
            attrs |= {name: np.tile(attrs[name], count) for name in ("multiplier", "shift")}
        value = b.emit(step.kind, (value,), shape, step.output.dtype, **attrs)
    return b.reshape(value, op.output.shape)


def _steps(op: Op) -> list[Op]:
    """CONV2D, RESCALE and what follows, up to ``op``."""
    steps = [op]
    while steps[0].kind != "CONV2D":
        before = steps[0].inputs[0].producer
        assert before is not None
        steps.insert(0, before)
    return steps


def _narrow(op: Op, rewriter: Rewriter) -> Part | None:
    x, weight = op.inputs[:2]
    if rewriter.build.target.family != "ethos-u85":
        return None
    plain = weight.shape[1:3] == (1, 1) and not any(op.attrs["pad"]) and max(op.attrs["stride"]) == 1
    pixels = x.shape[1] * x.shape[2]
    if not plain or x.dtype is not DType.INT8 or not 16 < x.shape[3] <= _FEW or gcd(pixels, 2) == 1 or pixels < 64:
        return None
    steps = [op]
    for kinds in (("RESCALE",), ("CLAMP", "TABLE")):
        readers = rewriter.users(steps[-1].output) or []
        if len(readers) != 1 or readers[0].kind not in kinds:
            break
        steps += readers
    # Others that read the same, before which Vela copies what is reshaped, and what reads the result in another order.
    beside = rewriter.users(x) or []
    behind = around(steps[-1], rewriter, (), ("CONCAT", "DEPTHWISE_CONV2D", "RESCALE"))
    return Part([*steps, *beside, *behind], ((steps[-1],),)) if len(steps) > 1 else None


PIXELS = Form("convolutions of two pixels at once", ("CONV2D",), join_pixels, _narrow)
