"""1x1 convolutions with few channels: two neighbouring pixels, adjacent in NHWC, become the channels of one."""

from __future__ import annotations

from math import gcd

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.alternatives.conv_epilogue import (
    apply_epilogue,
    match_epilogue,
    select_constant_channels,
    trace_epilogue,
)
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Maximum number of channels. Up to it, Vela makes U85 traverse the window first, four elements at a time, of which 1x1
#: has one: half a cycle an element on U85-256 from 17 channels on. With more channels it traverses channels first. 24
#: to 144 channels on 56x56 pixels: 226,656 cycles, 113,620 with two pixels at once.
_MAX_CHANNELS = 32


def pair_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite a 1x1 CONV2D with its epilogue on twice the channels and half the pixels.

    Bit-equal: weights are block-diagonal, one block for each pixel, so other products are 0. Bias and scales repeat.
    """
    conv, *steps = trace_epilogue(op, "CONV2D")
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
    inputs = (image, kernel, select_constant_channels(bias, size, channels))
    sums = b.emit("CONV2D", inputs, conv.output.dtype, **conv.attrs)
    return b.reshape(apply_epilogue(sums, steps, channels, b), op.output.shape)


def _match_narrow(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    if not rewriter.build.target.hardware.computes_pixel_pairs:
        return None
    is_pointwise = weight.shape[1:3] == (1, 1) and not any(op.attrs["pad"]) and max(op.attrs["stride"]) == 1
    pixels = x.shape[1] * x.shape[2]
    if (
        not is_pointwise
        or x.dtype is not DType.INT8
        or not 16 < x.shape[3] <= _MAX_CHANNELS
        or gcd(pixels, 2) == 1
        or pixels < 64
    ):
        return None
    steps = match_epilogue(op, rewriter)
    # Include other readers of x, for which Vela copies the reshaped tensor, and readers that need another memory order.
    other_readers = rewriter.users(x) or []
    result_readers = collect_neighbors(steps[-1], rewriter, (), ("CONCAT", "DEPTHWISE_CONV2D", "RESCALE"))
    return Region([*steps, *other_readers, *result_readers], ((steps[-1],),)) if len(steps) > 1 else None


PIXEL_PAIRS = Alternative("1x1 convolutions of two pixels at once", ("CONV2D",), pair_pixels, _match_narrow)
