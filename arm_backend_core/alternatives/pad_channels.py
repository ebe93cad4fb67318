"""Channel padding: the input channels of convolutions on one pixel are padded to a multiple of Vela's weight block."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import match_epilogue
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Number of input channels of a weight block on U55 and U65. Vela fills missing channels with zeros and then uses
#: run-length encoding of zeros, which costs bits for each nonzero weight. Padding by weights of 1, which have short
#: codes, avoids this encoding.
_BLOCK_CHANNELS = 32
#: Minimum number of weights. The PAD for the missing channels takes 200 cycles.
_MIN_WEIGHTS = 1 << 14


def pad_input_channels(op: Op, rewriter: Rewriter) -> Value:
    """Pad the input channels of a 1x1 CONV2D to whole blocks, with the input's zero point and weights of 1.

    Bit-exact: the padding adds 0 to the sums. A squeeze-and-excitation layer from 144 to 576 channels takes 90,594
    instead of 96,880 cycles on U55-128.
    """
    x, weight, bias = op.inputs
    assert weight.data is not None
    padding = [(0, 0)] * 3 + [(0, -x.shape[3] % _BLOCK_CHANNELS)]
    image = rewriter.build.pad(x, padding, op.attrs["input_zp"])
    kernel = constant(np.pad(weight.data, padding, constant_values=1), weight.dtype)
    return rewriter.build.emit("CONV2D", (image, kernel, bias), op.output.dtype, **op.attrs)


def _match_single_pixel(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    is_one_pixel = x.shape[:3] == op.output.shape[:3] == (1, 1, 1) and weight.shape[1:3] == (1, 1)
    gains_nothing = x.shape[3] % _BLOCK_CHANNELS == 0 or weight.data is None or weight.size < _MIN_WEIGHTS
    pads = rewriter.build.target.hardware.pads_weight_blocks
    if gains_nothing or not is_one_pixel or x.dtype is not DType.INT8 or not pads:
        return None
    return Region(match_epilogue(op, rewriter), ((op,),))


PAD_CHANNELS = Alternative(
    "convolutions with padded input channels", ("CONV2D",), pad_input_channels, _match_single_pixel
)
