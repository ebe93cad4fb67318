"""Channel padding: pad the input channels of 1x1 convolutions with few pixels, where the cost model prefers it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import match_epilogue
from arm_backend_core.alternatives.cost_model import Cost
from arm_backend_core.dtype import DType
from arm_backend_core.targets.hardware import Hardware
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Number of input channels of a weight block on U55 and U65. Vela fills missing channels with zeros and then uses
#: run-length encoding of zeros, which costs bits for each nonzero weight. Padding by weights of 1, which have short
#: codes, avoids this encoding.
_BLOCK_CHANNELS = 32
#: Minimum number of weights on U55 and U65. The PAD for the missing channels takes 200 cycles.
_MIN_WEIGHTS = 1 << 14
#: Minimum number of weights and maximum number of pixels of a convolution that ``PAD_SLOW_CHANNELS`` pads.
_MIN_SLOW_WEIGHTS, _MAX_SLOW_PIXELS = 1 << 10, 32


#: Returns the number of input channels to pad to; the present number if the CONV2D should not be padded.
ChooseChannels = Callable[[Op, Hardware], int]


def pad_input_channels(op: Op, rewriter: Rewriter, *, choose_channels: ChooseChannels) -> Value:
    """Pad the input channels of a 1x1 CONV2D, with the input's zero point and weights of 1.

    Bit-exact: the padding adds 0 to the sums. A squeeze-and-excitation layer from 144 to 576 channels takes 90,594
    instead of 96,880 cycles on U55-128; a layer from 32 to 128 channels takes 761 instead of 2,682 on U85-256.
    """
    x, weight, bias = op.inputs
    assert weight.data is not None
    padding = [(0, 0)] * 3 + [(0, choose_channels(op, rewriter.builder.target.hardware) - x.shape[3])]
    padded_input = rewriter.builder.pad(x, padding, op.attrs["input_zp"])
    padded_weight = constant(np.pad(weight.data, padding, constant_values=1), weight.dtype)
    return rewriter.builder.emit("CONV2D", (padded_input, padded_weight, bias), op.output.dtype, **op.attrs)


def _round_up_to_weight_blocks(op: Op, hardware: Hardware) -> int:
    """Return the number of input channels, rounded up to whole weight blocks.

    The number is rounded only on U55 and U65, for int8 images of one pixel and at least ``_MIN_WEIGHTS`` weights.
    """
    x, weight = op.inputs[:2]
    is_one_pixel = x.shape[1:3] == (1, 1) and x.dtype is DType.INT8
    gains = hardware.pads_weight_blocks and is_one_pixel and weight.size >= _MIN_WEIGHTS
    return x.shape[3] + (-x.shape[3] % _BLOCK_CHANNELS if gains else 0)


def _avoid_slow_channels(op: Op, hardware: Hardware) -> int:
    """Return the first number of channels above ``Hardware.slow_input_channels``, if ``op`` has few pixels.

    If ``op`` has more pixels, few weights, or no slow number of channels, return its present number.
    """
    x, weight = op.inputs[:2]
    is_small = x.shape[1] * x.shape[2] <= _MAX_SLOW_PIXELS and weight.size >= _MIN_SLOW_WEIGHTS
    return hardware.slow_input_channels.stop if is_small and x.shape[3] in hardware.slow_input_channels else x.shape[3]


def _match_pointwise_conv(op: Op, rewriter: Rewriter, *, choose_channels: ChooseChannels) -> Region | None:
    x, weight = op.inputs[:2]
    is_pointwise = x.shape[:3] == op.output.shape[:3] and weight.shape[1:3] == (1, 1) and x.shape[0] == 1
    if not is_pointwise or weight.data is None:
        return None
    if choose_channels(op, rewriter.builder.target.hardware) == x.shape[3]:
        return None
    return Region(match_epilogue(op, rewriter), ((op,),))


def _cycles_times_weight_bytes(cost: Cost) -> float:
    """Cycles times bytes of weights: if padding doubles the bytes, it must take less than half of the cycles.

    The default objective, a sum, would count the added bytes once for each time step of an unrolled recurrent layer,
    although the steps share the weights.
    """
    return float(cost.cycles) * cost.weight_bytes


def _make_alternative(choose_channels: ChooseChannels, objective: Callable[[Cost], float]) -> Alternative:
    return Alternative(
        "convolutions with padded input channels",
        ("CONV2D",),
        partial(pad_input_channels, choose_channels=choose_channels),
        partial(_match_pointwise_conv, choose_channels=choose_channels),
        objective,
    )


PAD_CHANNELS = _make_alternative(_round_up_to_weight_blocks, attrgetter("total"))
PAD_SLOW_CHANNELS = _make_alternative(_avoid_slow_channels, _cycles_times_weight_bytes)
