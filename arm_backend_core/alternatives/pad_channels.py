"""Convolutions on one pixel with input channels that fill the blocks in which Vela encodes weights."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import steps_from
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Channels of a block on U55 and U65. Those that a convolution lacks Vela fills with zeros, and encodes runs of zeros
#: then: bits for each weight that is none. Weights of 1 are short too, and no runs.
_BLOCK = 32
#: Weights from which it is asked; the channels that are missing cost an operation of 200 cycles.
_WEIGHTS = 1 << 14


def fill_block(op: Op, rewriter: Rewriter) -> Value:
    """CONV2D of 1x1 with the channels of whole blocks: more of its input's zero point, with weights of 1.

    What they add to the sums is 0. A squeeze-and-excitation's 144 to 576 channels, U55-128: 96,880 cycles, 90,594.
    """
    x, weight, bias = op.inputs
    assert weight.data is not None
    more = [(0, 0)] * 3 + [(0, -x.shape[3] % _BLOCK)]
    image = rewriter.build.pad(x, more, op.attrs["input_zp"])
    kernel = constant(np.pad(weight.data, more, constant_values=1), weight.dtype)
    return rewriter.build.emit("CONV2D", (image, kernel, bias), op.output.shape, op.output.dtype, **op.attrs)


def _on_one_pixel(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    one = x.shape[:3] == op.output.shape[:3] == (1, 1, 1) and weight.shape[1:3] == (1, 1)
    filled = x.shape[3] % _BLOCK == 0 or weight.data is None or weight.size < _WEIGHTS
    if filled or not one or x.dtype is not DType.INT8 or not rewriter.build.target.hardware.pads_weight_blocks:
        return None
    return Region(steps_from(op, rewriter), ((op,),))


FILLING = Alternative("convolutions on one pixel with filled blocks of weights", ("CONV2D",), fill_block, _on_one_pixel)
