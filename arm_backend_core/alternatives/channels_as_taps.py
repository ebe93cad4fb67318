"""1x1 convolutions with few channels: each half of the input channels becomes one element of a 1x2 kernel."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.alternatives.conv_epilogue import apply_epilogue, match_epilogue, trace_epilogue
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Range of input channels for which Vela selects part-kernel-first traversal on U85, and for which the products take
#: more cycles than writing the results. In this traversal, the NPU computes four kernel elements of eight channels at a
#: time. A 1x1 kernel uses only one of the four: a convolution from 24 to 144 channels on 56x56 pixels takes 226,656
#: cycles, but 113,620 with a kernel of 1x2 (Vela 5.2, U85-256).
#: ``pixels_as_channels`` saves as many cycles, but a depthwise convolution that reads its result may wait for SRAM.
#: Example of MobileNetV3-small: a convolution from 24 to 96 channels on 28x28 pixels and a 5x5 depthwise convolution
#: with stride 2 take 46,824 cycles with ``pixels_as_channels``, and 37,183 with this rewrite.
_MIN_CHANNELS, _MAX_CHANNELS = 18, 32
#: Width of the new kernel.
_TAPS = 2
#: Minimum number of pixels.
_MIN_PIXELS = 64


def fold_channels_into_kernel(op: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite a 1x1 CONV2D with its epilogue to a 1x2 kernel with stride 2 on half of the channels.

    Bit-exact: in NHWC, the channels of one pixel are stored like two neighbouring pixels with half as many channels, so
    that the sums have the same products.
    """
    conv, *epilogue = trace_epilogue(op, "CONV2D")
    b, (x, weight, bias) = rewriter.builder, conv.inputs
    if weight.data is None:
        return None
    n, height, width, depth = x.shape
    image = b.reshape(x, (n, height, _TAPS * width, depth // _TAPS))
    kernel = constant(weight.data.reshape(weight.shape[0], 1, _TAPS, depth // _TAPS), weight.dtype)
    attrs = dict(conv.attrs) | {"stride": [1, _TAPS], "dilation": [1, 1]}  # the dilation of a 1x1 kernel has no effect
    sums = b.emit("CONV2D", (image, kernel, bias), conv.output.dtype, **attrs)
    return apply_epilogue(sums, epilogue, np.arange(weight.shape[0]), b)


def _match_few_channels(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    if not rewriter.builder.target.hardware.computes_pixel_pairs:
        return None
    is_pointwise = weight.shape[1:3] == (1, 1) and not any(op.attrs["pad"]) and max(op.attrs["stride"]) == 1
    depth = x.shape[3]
    if not is_pointwise or x.dtype is not DType.INT8 or not _MIN_CHANNELS <= depth <= _MAX_CHANNELS or depth % _TAPS:
        return None
    if x.shape[1] * x.shape[2] < _MIN_PIXELS:
        return None
    steps = match_epilogue(op, rewriter)
    if len(steps) == 1:
        return None
    # The region includes the producers and the other readers of x, because their cost changes: Vela stores x as NHWC
    # instead of NHCWB16 if the convolution reads it reshaped.
    writers = collect_neighbors(x.producer, rewriter, ("ADD", "CLAMP", "RESCALE", "TABLE"), ()) if x.producer else []
    convs = [
        source for step in writers for value in step.inputs if (source := value.producer) and "CONV" in source.kind
    ]
    other_readers = rewriter.users(x) or []
    result_readers = collect_neighbors(steps[-1], rewriter, (), ("CONCAT", "DEPTHWISE_CONV2D", "RESCALE"))
    return Region([*convs, *writers, *steps, *other_readers, *result_readers], ((steps[-1],),))


CHANNELS_AS_TAPS = Alternative(
    "1x1 convolutions with channels as kernel elements", ("CONV2D",), fold_channels_into_kernel, _match_few_channels
)
