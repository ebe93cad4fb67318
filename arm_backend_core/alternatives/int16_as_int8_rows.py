"""One row of int16 through a linear layer on a small Ethos-U85: its upper and lower bytes, as two rows of int8.

Vela estimates int16 activations at a quarter of int8's speed there, where only one pixel is computed: 291,121 cycles
for 1024 to 1000 channels on U85-256, and 72,497 in int8. Two rows of int8 take what one does, as weights are read once.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer
from arm_backend_core.tosa.vela_workarounds.arithmetic import broadcast_constant

#: MACs up to which it is so, and weights from which it is worth it: 5,242 cycles for 128 to 128 channels, here 3,812.
#: With 512 MACs int16 takes 5,284 for 256 to 256 channels, and this form 6,601.
_WEIGHTS = 1 << 14


def by_halves(op: Op, rewriter: Rewriter) -> Value | None:
    """RESCALE of sums of int16, equal to the bit: x = 256 * high + low, low = 0..255, is 2 rows for the same weights.

    ``low`` is stored as int8 of low - 128, and what that takes off the sums, 128 times the sum of the weights, is added
    with the bias. INT32 holds the sums where these weights cannot make larger ones. Channels have scales of their own:
    a MUL of INT32 with a shift in common rounds as RESCALE does, (sum * multiplier + half) >> shift.
    """
    b, conv = rewriter.build, producer(op.inputs[0], "CONV2D")
    if conv is None or not _is_slow(conv, b.target) or not rewriter.single_use(conv.output):
        return None
    x, weight, bias = conv.inputs
    if weight.data is None or bias.data is None or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return None
    weights = weight.data.astype(np.int64).reshape(weight.shape[0], -1)
    offsets = bias.data + 128 * weights.sum(1)
    shift = int(op.attrs["shift"].max())
    factors = op.attrs["multiplier"].astype(np.int64) << (shift - op.attrs["shift"].astype(np.int64))
    peaks = (2**15 + 2**7) * np.abs(weights).sum(1) + np.abs(offsets)
    most = DType.INT32.range[1]
    if max(peaks.max(), factors.max(), (peaks * np.ldexp(1.0, -shift) * factors).max()) >= most:
        return None
    whole = b.rescale(x, DType.INT32, 1.0)
    # rounds (x - 128) / 256
    high = b.rescale(b.sub(whole, broadcast_constant(x, 128, DType.INT32, b)), DType.INT8, 1 / 256)
    low = b.rescale(b.sub(whole, b.rescale(high, DType.INT32, 256.0)), DType.INT8, 1.0, 0, -128)
    none = b.const(np.zeros(1, np.int32), DType.INT32)
    sums = b.conv2d(b.concat([high, low], 2), weight, none, pad=(0, 0, 0, 0))
    upper, lower = (b.slice(sums, (0, 0, row, 0), op.output.shape) for row in range(2))
    total = b.add(b.mul(upper, broadcast_constant(upper, 256, DType.INT32, b)), lower)
    total = b.add(total, b.const(np.broadcast_to(offsets, op.output.shape), DType.INT32))
    scaled = b.mul(total, b.const(np.broadcast_to(factors, op.output.shape), DType.INT32), shift=shift)
    return b.rescale(scaled, op.output.dtype, 1.0, 0, op.attrs["output_zp"])


def _is_slow(conv: Op, target: Target) -> bool:
    x, weight = conv.inputs[:2]
    small = 0 < (target.macs or 0) <= target.hardware.slow_int16_macs
    plain = weight.shape[1:3] == (1, 1) and conv.output.shape[:3] == (1, 1, 1)
    return small and x.dtype is DType.INT16 and plain and x.shape[:3] == (1, 1, 1) and weight.size >= _WEIGHTS
