"""1x1 convolutions of images with an odd number of rows or columns: all pixels become one row."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.alternatives.conv_epilogue import ACTIVATIONS, apply_epilogue, match_epilogue, trace_epilogue
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Consumers of the result that the cost comparison includes, because their cost depends on its memory layout.
_READERS = ("ADD", "AVG_POOL2D", "CONCAT", "DEPTHWISE_CONV2D", "MAX_POOL2D", "RESCALE")


def flatten_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """Let a 1x1 CONV2D and its epilogue compute on an image of one row. Bit-exact: each pixel has its own sums.

    The NPU computes blocks of an even number of rows and columns, 8x8 pixels for an image of 7x7, but of one row if the
    image has one row: 50 pixels for 49. On U85-256, a convolution from 576 to 96 channels on 7x7 pixels takes 12,648
    instead of 13,584 cycles.
    """
    conv, *epilogue = trace_epilogue(op, "CONV2D")
    b, x = rewriter.builder, conv.inputs[0]
    n, height, width, depth = x.shape
    row = b.reshape(x, (n, 1, height * width, depth))
    sums = b.emit("CONV2D", (row, *conv.inputs[1:]), conv.output.dtype, **conv.attrs)
    channels = np.arange(conv.output.shape[3])
    return b.reshape(apply_epilogue(sums, epilogue, channels, b), op.output.shape)


def _match_odd_image(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    is_pointwise = weight.shape[1:3] == (1, 1) and not any(op.attrs["pad"]) and max(op.attrs["stride"]) == 1
    _, height, width, _ = x.shape
    if not rewriter.builder.target.hardware.flattens_odd_images:
        return None
    if not is_pointwise or min(height, width) == 1 or height % 2 == width % 2 == 0:
        return None
    steps = match_epilogue(op, rewriter)
    # The region includes the producers of x, its other readers and the readers of the result: the memory layout of a
    # single row may make these operators slower.
    producers = collect_neighbors(op, rewriter, ("RESCALE", "DEPTHWISE_CONV2D", *ACTIVATIONS), ())
    other_readers = rewriter.users(x) or []
    readers = collect_neighbors(steps[-1], rewriter, (), _READERS)
    return Region([*producers, *steps, *other_readers, *readers], ((steps[-1],),)) if len(steps) > 1 else None


PIXEL_ROWS = Alternative("1x1 convolutions of one row of pixels", ("CONV2D",), flatten_pixels, _match_odd_image)
