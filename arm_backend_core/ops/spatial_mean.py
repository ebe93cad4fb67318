"""Mean over neighbouring dimensions of a quantized tensor, as depthwise convolutions with weights of one.

The sum stays in the accumulator until it is rescaled to the result's own parameters, unlike AVG_POOL2D, whose result
has the input's. Two passes (rows, then columns) read every element once each; measured with Vela 5.1 on 7x7x576 they
take 43,222 cycles on U55-128 (AVG_POOL2D 48,313; one 2-D kernel 66,619; REDUCE_SUM 42,664 to 55,232) and on 56x56x32
58,602 on U85-256 (AVG_POOL2D 83,046; REDUCE_SUM 106,558).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.integers import Int, requantized
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value, prod


def spatial_mean(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value | None:
    """Mean of int8 or int16 ``x`` over one or two neighbouring ``axes``, kept with size 1; in parameters ``out``.

    Between the passes sums are int16: exact where they fit, else an error of at most 2**-9 of an int8 step.

    Returns:
        None where this form does not fit: the axes are apart, all there are, or the last one of a matrix.
    """
    axes = sorted(axes)
    if len(axes) == x.rank or len(axes) > 2 or axes != list(range(axes[0], axes[-1] + 1)) or x.rank > 4:
        return None
    lead, reduced, trail = x.shape[: axes[0]], [x.shape[i] for i in axes], x.shape[axes[-1] + 1 :]
    if axes[-1] == x.rank - 1 and len(axes) == 1:
        return None
    if axes[-1] == x.rank - 1:  # [N, C, H, W]: the channel goes last
        batch, channels = prod(lead[:-1]), lead[-1]
        image = b.transpose(b.reshape(x, (batch, channels, *reduced)), (0, 2, 3, 1))
    else:
        batch, channels = prod(lead), prod(trail)
        image = b.reshape(x, (batch, *reduced, *(1,) * (2 - len(axes)), channels))
    result = _reduce(b, image, q, out)
    kept = [1 if i in axes else size for i, size in enumerate(x.shape)]
    return b.reshape(result, kept)  # only the channel is left, so order does not matter


def window_means(
    b: Builder, image: Value, q: QParams, kernel: Sequence[int], stride: Sequence[int], out: QParams
) -> Value:
    """Mean of each window of int8 or int16 ``image`` [N, H, W, C], rounded once, in parameters ``out``.

    Raises:
        Unsupported: the target has no such depthwise convolution.
    """
    x, area, channels = Int.of(b, image, q), prod(kernel), image.shape[3]
    ones = b.const(np.ones((*kernel, channels, 1)), DType.INT8)
    zeros = b.const(np.zeros(channels), DType.INT48 if x.dtype is DType.INT16 else DType.INT32)
    sums = b.depthwise_conv2d(image, ones, zeros, pad=(0, 0, 0, 0), stride=stride, zps=(x.zero_point, 0))
    return requantized(b, sums, float(x.peak * area), np.array([x.scale / area]), out)


def _parts(size: int, longest: int) -> list[int]:
    """``size`` as a sum of kernel lengths, ``longest`` at most, that differ by one at most, the largest first."""
    count = -(-size // longest)
    return [(size + i) // count for i in reversed(range(count))]


def _reduce(b: Builder, image: Value, q: QParams, out: QParams) -> Value:
    """Mean of rows, then of columns; image [N, H, W, C].

    A kernel sums one part of an axis that is longer than itself, and the parts' sums are summed again. They lie side
    by side in memory, so taking them costs nothing, unlike a RESHAPE of a tensor that something else reads too
    (measured with Vela 5.1 on 112x112x32, gate included: 1,279,638 to 877,246 cycles on U55-128).
    """
    x = Int.of(b, image, q)
    x = x.in_steps_of(x.scale / prod(image.shape[1:3]))
    for axis in (1, 2):
        while x.shape[axis] > 1:
            parts = _parts(x.shape[axis], b.target.hardware.longest_kernel)
            sums = _sums(x, axis, parts)
            peak = x.peak * parts[0]
            if len(sums) == 1 and prod(sums[0].shape[1:3]) == 1:
                return requantized(b, sums[0], float(peak), np.array([x.scale]), out)
            step = min(1.0, 32767 / peak)  # exact where int16 holds the sum
            joined = b.concat([b.rescale(total, DType.INT16, step) for total in sums], axis)
            x = Int(b, joined, -math.ceil(peak * step), math.ceil(peak * step), x.scale / step)
    return x.to(out)


def _sums(x: Int, axis: int, parts: Sequence[int]) -> list[Value]:
    """Sums of neighbouring rows (axis 1) or columns (axis 2), as INT32 or INT48."""
    b, channels = x.b, x.shape[3]
    zeros = b.const(np.zeros(channels), DType.INT48 if x.dtype is DType.INT16 else DType.INT32)
    sums, start = [], 0
    for length in parts:
        starts, size = [0, 0, 0, 0], list(x.shape)
        starts[axis], size[axis] = start, length
        kernel = (length, 1, channels, 1) if axis == 1 else (1, length, channels, 1)
        ones = b.const(np.ones(kernel), DType.INT8)
        piece = b.slice(x.value, starts, size)
        sums.append(b.depthwise_conv2d(piece, ones, zeros, pad=(0, 0, 0, 0), zps=(x.zero_point, 0)))
        start += length
    return sums
