"""Convolutions of 1x1 on few channels: neighbouring pixels, which lie side by side in NHWC, as channels of one."""

from __future__ import annotations

from math import gcd

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.alternatives.conv_epilogue import done_to, selected_channels, steps_from, steps_to
from arm_backend_core.dtype import DType
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
    conv, *steps = steps_to(op, "CONV2D")
    b, count = rewriter.build, 2
    x, weight, bias = conv.inputs
    if weight.data is None or bias.data is None:
        return None
    n, height, width, depth = x.shape
    size = weight.shape[0]
    part = count if width % count == 0 else 1
    image = b.reshape(x, (n, height * part // count, width // part, count * depth))
    zero_point = conv.attrs["weight_zp"]
    data = np.kron(np.eye(count, dtype=np.int16), weight.data.reshape(size, depth) - np.int16(zero_point)) + zero_point
    kernel = constant(data.astype(weight.data.dtype).reshape(count * size, 1, 1, count * depth), weight.dtype)
    channels = np.tile(np.arange(size), count)
    inputs = (image, kernel, selected_channels(bias, size, channels))
    sums = b.emit("CONV2D", inputs, (*image.shape[:3], count * size), conv.output.dtype, **conv.attrs)
    return b.reshape(done_to(sums, steps, channels, b), op.output.shape)


def _narrow(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    if not rewriter.build.target.hardware.computes_pixel_pairs:
        return None
    plain = weight.shape[1:3] == (1, 1) and not any(op.attrs["pad"]) and max(op.attrs["stride"]) == 1
    pixels = x.shape[1] * x.shape[2]
    if not plain or x.dtype is not DType.INT8 or not 16 < x.shape[3] <= _FEW or gcd(pixels, 2) == 1 or pixels < 64:
        return None
    steps = steps_from(op, rewriter)
    # Others that read the same, before which Vela copies what is reshaped, and what reads the result in another order.
    beside = rewriter.users(x) or []
    behind = around(steps[-1], rewriter, (), ("CONCAT", "DEPTHWISE_CONV2D", "RESCALE"))
    return Region([*steps, *beside, *behind], ((steps[-1],),)) if len(steps) > 1 else None


PIXELS = Alternative("convolutions of two pixels at once", ("CONV2D",), join_pixels, _narrow)
