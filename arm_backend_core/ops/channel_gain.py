"""Multiplication of a quantized tensor by one constant per channel: a depthwise 1x1 convolution."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.accumulator import Accumulator
from arm_backend_core.ops.fixed_point_value import Array
from arm_backend_core.ops.image_layout import to_nchw, to_nhwc_image
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.tosa.graph import Value, prod


def scale_channels(cx: Context, x: Operand, gain: Array, offset: Array | float = 0.0) -> Value:
    """gain * x + offset on a quantized x [N, C, ...], in the result's quantization parameters, rounded once.

    The weights of the convolution are 127 or -127, by the gain's sign; the per-channel RESCALE applies its magnitude.
    The gain thus has the 31-bit precision of a RESCALE multiplier, not the 7 bits of an int8 weight.

    Args:
        cx: context of the operator.
        x: int8 or int16, rank at least 2.
        gain: real numbers, [C].
        offset: real numbers, [C] or one number.

    Raises:
        Unsupported: ``Accumulator.from_weights`` or ``Accumulator.requantize`` raises it.
    """
    assert x.q is not None
    weight = np.where(gain < 0, -127, 127)
    scale = np.maximum(np.abs(gain), 1e-30) / 127 * float(x.q.scale)
    layer = Accumulator.from_weights(cx.to_fixed_point(x), weight, 0, scale, np.broadcast_to(offset, gain.shape))
    shape = x.shape
    value = x.value if x.rank <= 4 else cx.b.reshape(x.value, (*shape[:3], prod(shape[3:])))
    image = to_nhwc_image(cx.b, value, value.rank)
    accumulator = cx.b.depthwise_conv2d(
        image,
        cx.b.const(layer.weights.reshape(1, 1, -1, 1), DType.INT8),
        cx.b.const(layer.quantized_bias, layer.dtype),
        pad=(0, 0, 0, 0),
        zps=(x.q.zero_point, 0),
    )
    return cx.b.reshape(to_nchw(cx.b, cx.requantize_sums(accumulator, layer)), shape)
