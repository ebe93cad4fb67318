"""1x1 convolutions with few channels: two neighbouring pixels, adjacent in NHWC, become the channels of one pixel."""

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

#: Maximum number of input channels. With at most 32 of them, Vela selects part-kernel-first traversal on U85. This
#: traversal computes four kernel elements at a time, although a 1x1 kernel has only one. With 17 to 32 input channels,
#: each element of the result takes half a cycle on U85-256. With more than 32, Vela selects depth-first traversal. A
#: convolution from 24 to 144 channels on 56x56 pixels takes 226,656 cycles, but 113,620 with two pixels at once.
_MAX_CHANNELS = 32


def pair_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite a 1x1 CONV2D with its epilogue to twice the channels and half the pixels.

    Bit-exact: the weights are block-diagonal with one block for each pixel, so that all additional products are 0. Bias
    and scales repeat for each pixel.
    """
    conv, *epilogue = trace_epilogue(op, "CONV2D")
    b, pixels_at_once = rewriter.builder, 2
    x, weight, bias = conv.inputs
    if weight.data is None or bias.data is None:
        return None
    n, height, width, depth = x.shape
    out_channels = weight.shape[0]
    paired_columns = pixels_at_once if width % pixels_at_once == 0 else 1
    image_size = height * paired_columns // pixels_at_once, width // paired_columns
    image = b.reshape(x, (n, *image_size, pixels_at_once * depth))
    zero_point = conv.attrs["weight_zp"]
    block = weight.data.reshape(out_channels, depth) - np.int16(zero_point)
    data = np.kron(np.eye(pixels_at_once, dtype=np.int16), block) + zero_point
    shape = (pixels_at_once * out_channels, 1, 1, pixels_at_once * depth)
    kernel = constant(data.astype(weight.data.dtype).reshape(shape), weight.dtype)
    channels = np.tile(np.arange(out_channels), pixels_at_once)
    inputs = (image, kernel, select_constant_channels(bias, out_channels, channels))
    sums = b.emit("CONV2D", inputs, conv.output.dtype, **conv.attrs)
    return b.reshape(apply_epilogue(sums, epilogue, channels, b), op.output.shape)


def _match_few_channels(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    if not rewriter.builder.target.hardware.computes_pixel_pairs:
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
    # The region includes other readers of x, because Vela copies the reshaped tensor for them. It also includes readers
    # of the result that need another memory layout.
    other_readers = rewriter.users(x) or []
    result_readers = collect_neighbors(steps[-1], rewriter, (), ("CONCAT", "DEPTHWISE_CONV2D", "RESCALE"))
    return Region([*steps, *other_readers, *result_readers], ((steps[-1],),)) if len(steps) > 1 else None


PIXELS_AS_CHANNELS = Alternative(
    "1x1 convolutions of two pixels at once", ("CONV2D",), pair_pixels, _match_few_channels
)
