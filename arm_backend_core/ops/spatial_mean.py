"""Mean over neighbouring dimensions of a quantized tensor, as depthwise convolutions with weights of one.

The sum stays in the accumulator until it is rescaled to the result's own parameters, unlike AVG_POOL2D, whose result
has the input's. Two passes (rows, then columns) read every element once each; measured with Vela 5.1 on 7x7x576 they
take 43,222 cycles on U55-128 (AVG_POOL2D 48,313; one 2-D kernel 66,619; REDUCE_SUM 42,664 to 55,232) and on 56x56x32
58,602 on U85-256 (AVG_POOL2D 83,046; REDUCE_SUM 106,558).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import DType, Value, prod

#: Vela's limit for a kernel's height and width.
_LONGEST = 64


def spatial_mean(b: Builder, x: Value, q: QParams, axes: Sequence[int], out: QParams) -> Value | None:
    """Mean of int8 or int16 ``x`` over one or two neighbouring ``axes``, kept with size 1; in parameters ``out``.

    Between the passes sums are int16 at full scale, an error of at most 2**-9 of an int8 step.

    Returns:
        None where this form does not fit: the axes are apart or the last ones of a matrix, or have a long prime factor.
    """
    axes = sorted(axes)
    if len(axes) > 2 or axes != list(range(axes[0], axes[-1] + 1)) or x.rank > 4:
        return None
    lead, reduced, trail = x.shape[: axes[0]], [x.shape[i] for i in axes], x.shape[axes[-1] + 1 :]
    if axes[-1] == x.rank - 1 and len(axes) == 1:
        return None
    factors = [_factors(size) for size in reduced]
    if any(factor is None for factor in factors):
        return None
    if axes[-1] == x.rank - 1:  # [N, C, H, W]: the channel goes last
        batch, channels = prod(lead[:-1]), lead[-1]
        image = b.transpose(b.reshape(x, (batch, channels, *reduced)), (0, 2, 3, 1))
    else:
        batch, channels = prod(lead), prod(trail)
        image = b.reshape(x, (batch, *reduced, *(1,) * (2 - len(axes)), channels))
    steps = [(i, factor) for i, found in enumerate(factors) for factor in found or ()]
    result = _reduce(b, image, q, steps, out)
    kept = [1 if i in axes else size for i, size in enumerate(x.shape)]
    return b.reshape(result, kept)  # only the channel is left, so order does not matter


def _factors(size: int) -> list[int] | None:
    """``size`` as a product of kernel lengths, the largest first; [] for 1."""
    factors = []
    while size > 1:
        factor = next((f for f in range(min(size, _LONGEST), 1, -1) if size % f == 0), None)
        if factor is None:
            return None
        factors.append(factor)
        size //= factor
    return factors


def _reduce(b: Builder, image: Value, q: QParams, steps: Sequence[tuple[int, int]], out: QParams) -> Value:
    """Sum groups of ``factor`` rows (0) or columns (1), step by step; image [N, H, W, C]."""
    scale, zero_point = float(q.scale), q.zero_point
    peak = float(max(q.qmax - zero_point, zero_point - q.qmin))
    if not steps:
        return b.rescale(image, out.dtype, scale / float(out.scale), zero_point, out.zero_point)
    for index, (axis, factor) in enumerate(steps):
        n, h, w, c = image.shape
        # Groups become a dimension of the batch, so that a kernel covers one whole.
        groups = (h if axis == 0 else w) // factor
        folded = (n * groups, factor, w, c) if axis == 0 else (n * h * groups, 1, factor, c)
        kernel = (factor, 1, c, 1) if axis == 0 else (1, factor, c, 1)
        wide = DType.INT48 if image.dtype is DType.INT16 else DType.INT32
        total = b.depthwise_conv2d(
            b.reshape(image, folded),
            b.const(np.ones(kernel), DType.INT8),
            b.const(np.zeros(c), wide),
            pad=(0, 0, 0, 0),
            zps=(zero_point, 0),
        )
        peak *= factor
        if index == len(steps) - 1:
            factor_out = scale / prod(f for _, f in steps) / float(out.scale)
            return b.rescale(total, out.dtype, factor_out, 0, out.zero_point)
        total = b.rescale(total, DType.INT16, 32767 / peak)
        scale, zero_point, peak = scale * peak / 32767, 0, 32767.0
        image = b.reshape(total, (n, groups, w, c) if axis == 0 else (n, h, groups, c))
    raise AssertionError("the last step returns")
