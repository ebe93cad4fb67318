"""int16 linear layers on a small Ethos-U85: the high and the low bytes of the input become two int8 pixels.

For a single pixel, Vela estimates four times as many cycles for int16 activations as for int8: 291,121 against 72,497
for 1024 to 1000 channels on U85-256. The two pixels are the rows of the activation matrix [2, C]. Two int8 pixels take
as many cycles as one, because the weights are read once.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant

#: Minimum number of weights. With this rewrite, a layer from 128 to 128 channels takes 3,812 instead of 5,242 cycles.
_MIN_WEIGHTS = 1 << 14


def split_int16_rows(op: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite an int16 CONV2D and its RESCALE bit-exactly to an int8 CONV2D on two pixels.

    x = 256 * high + low with low in 0..255. The int8 pixels are high and low - 128. Therefore, 128 times the sum of the
    weights is added to the bias. Per-channel scales become a MUL of INT32 with a common shift, which rounds as RESCALE
    does: (sum * multiplier + half) >> shift.

    The rewrite applies to large linear layers of one pixel on a small NPU (``_is_slow_in_int16``). The weights and the
    bias must be constant. The only reader of the CONV2D must be a RESCALE that rounds once. INT32 must hold the
    multipliers and, for any input, the sums and the scaled sums.
    """
    b, conv = rewriter.builder, producer(op.inputs[0], "CONV2D")
    if conv is None or not _is_slow_in_int16(conv, b.target) or not rewriter.has_one_use(conv.output):
        return None
    x, weight, bias = conv.inputs
    if weight.data is None or bias.data is None or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return None
    weight_zp = conv.attrs["weight_zp"]
    weights = weight.data.astype(np.int64).reshape(weight.shape[0], -1) - weight_zp
    offsets = bias.data + 128 * weights.sum(1)
    shift = int(op.attrs["shift"].max())
    factors = op.attrs["multiplier"].astype(np.int64) << (shift - op.attrs["shift"].astype(np.int64))
    max_sums = (2**15 + 2**7) * np.abs(weights).sum(1) + np.abs(offsets)
    limit = DType.INT32.range[1]
    if max(max_sums.max(), factors.max(), (max_sums * np.ldexp(1.0, -shift) * factors).max()) >= limit:
        return None
    x_int32 = b.rescale(x, DType.INT32, 1.0)
    # RESCALE rounds half up: round((x - 128) / 256) = floor(x / 256), the high byte.
    high = b.rescale(b.sub(x_int32, broadcast_constant(x, 128, DType.INT32, b)), DType.INT8, 1 / 256)
    low = b.rescale(b.sub(x_int32, b.rescale(high, DType.INT32, 256.0)), DType.INT8, 1.0, 0, -128)
    no_bias = b.const(np.zeros(1, np.int32), DType.INT32)
    sums = b.conv2d(b.concat([high, low], 2), weight, no_bias, pad=(0, 0, 0, 0), zps=(0, weight_zp))
    upper, lower = (b.slice(sums, (0, 0, pixel, 0), op.output.shape) for pixel in range(2))
    total = b.add(b.mul(upper, broadcast_constant(upper, 256, DType.INT32, b)), lower)
    total = b.add(total, b.const(np.broadcast_to(offsets, op.output.shape), DType.INT32))
    scaled = b.mul(total, b.const(np.broadcast_to(factors, op.output.shape), DType.INT32), shift=shift)
    return b.rescale(scaled, op.output.dtype, 1.0, 0, op.attrs["output_zp"])


def _is_slow_in_int16(conv: Op, target: Target) -> bool:
    x, weight = conv.inputs[:2]
    is_small_npu = 0 < (target.macs or 0) <= target.hardware.max_macs_for_int16_split
    is_linear_layer = weight.shape[1:3] == (1, 1) and conv.output.shape[:3] == (1, 1, 1)
    return (
        is_small_npu
        and x.dtype is DType.INT16
        and is_linear_layer
        and x.shape[:3] == (1, 1, 1)
        and weight.size >= _MIN_WEIGHTS
    )
