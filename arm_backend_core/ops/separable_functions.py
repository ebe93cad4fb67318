"""Separable (low-rank) approximation of a function of int16 by a sum of few products, from an SVD.

With x = 256 * h + l, the 65536 values of a function are a matrix with a row for each high byte h and a column for each
low byte l. If the matrix has a small numerical rank, its singular value decomposition gives a short sum
f(x) = u1(h) * v1(l) + u2(h) * v2(l) + ... TABLEs hold all values of u and v, so no value is interpolated. Functions
that oscillate too fast for a TABLE often have a small rank: cos(a * x) has rank 2 (angle addition), and
(cos(a * x) + 2) * (abs(x) + 1) has rank 6.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.fixed_point_value import Q15_MAX, FixedPoint

Array = np.ndarray[Any, Any]
#: Maximum number of products. Each takes two TABLEs and a MUL.
_MAX_RANK = 8
#: Limit of the sum of the magnitudes of the integer products, so that INT32 holds each partial sum.
_MAX_SUM = (1 << 31) - (1 << 20)


@lru_cache(maxsize=8)
def factorize(sample_bytes: bytes, step: float, max_error: float) -> tuple[Array, Array] | None:
    """Approximate a function by the sum of few products.

    It takes the smallest number of products whose error, before the factors are rounded to int16, is at most half of
    ``step``. If this number exceeds ``_MAX_RANK``, it takes ``_MAX_RANK`` products.

    Args:
        sample_bytes: the function's values (``lookup.evaluate_on_operand``) as bytes, because the cache needs a
            hashable argument.
        step: the scale of the result.
        max_error: the largest permitted error, including the error of rounding the factors.

    Returns:
        u of shape [rank, 256] for h = -128 ... 127, and v of shape [rank, 256] for l = 0 ... 255. None if the error
        exceeds ``max_error``, or if a value is not finite.
    """
    samples = np.frombuffer(sample_bytes)[:-1]
    if not np.isfinite(samples).all():
        return None
    matrix = samples.reshape(256, 256)
    left, sizes, right = np.linalg.svd(matrix)
    u, v = left * np.sqrt(sizes), np.sqrt(sizes)[:, None] * right
    ranks = range(1, _MAX_RANK + 1)
    rank = next((n for n in ranks if np.abs(u[:, :n] @ v[:n] - matrix).max() <= step / 2), _MAX_RANK)
    u, v = u[:, :rank].T, v[:rank]
    u = np.rint(u / _finest_int16_scale(u)) * _finest_int16_scale(u)
    if np.linalg.matrix_rank(u) == rank:
        v = np.linalg.lstsq(u.T, matrix, rcond=None)[0]  # least squares: v compensates the rounding of u
    return (u, v) if np.abs(approximate(u, v) - samples).max() <= max_error else None


def approximate(u: Array, v: Array) -> Array:
    """The 65536 values of the sum of products, with the factors rounded to int16."""
    u_scale, v_scale = _choose_scales(u, v)
    matrix: Array = (np.rint(u / u_scale) * u_scale).T @ (np.rint(v / v_scale) * v_scale)
    return matrix.reshape(-1)


def emit_separable(x: FixedPoint, u: Array, v: Array) -> FixedPoint:
    """Compute the sum of u[i](h) * v[i](l) for int16 ``x`` = 256 * h + l, for the result of ``factorize``."""
    u_scale, v_scale = _choose_scales(u, v)
    integers = x.to_int32()
    high = (integers - 128).rescale(DType.INT32, 1 / 256)  # floor(x / 256), because RESCALE rounds half up
    high = high.assume_range(-128, 127)
    low = (integers - high.refine_scale(256) - 128).assume_range(-128, 127)
    indices = [operand.rescale(DType.INT16, 128.0) for operand in (high, low)]
    total: FixedPoint | None = None
    partial_sum = np.zeros((256, 256))
    for u_entries, v_entries in zip(np.rint(u / u_scale), np.rint(v / v_scale), strict=True):
        factors = [_look_up(index, entries) for index, entries in zip(indices, (u_entries, v_entries), strict=True)]
        product = factors[0].mul(factors[1]).with_scale(u_scale * v_scale)
        partial_sum += np.abs(np.outer(u_entries, v_entries))
        total = product if total is None else total.add(product, int(partial_sum.max()))
    assert total is not None
    return total


def _choose_scales(u: Array, v: Array) -> tuple[float, float]:
    """Choose scales of u and v with which int16 holds the factors, and INT32 the sum of the products' magnitudes."""
    u_scale, v_scale = _finest_int16_scale(u), _finest_int16_scale(v)
    total = float((np.abs(u).T @ np.abs(v)).max()) / (u_scale * v_scale)
    return u_scale, v_scale * max(total / _MAX_SUM, 1.0)


def _finest_int16_scale(x: Array) -> float:
    """The finest scale with which int16 holds the numbers and the differences of neighbours, as TABLE requires."""
    return max(float(np.abs(x).max()), float(np.abs(np.diff(x)).max()), 1e-30) / (Q15_MAX - 1)


def _look_up(index: FixedPoint, entries: Array) -> FixedPoint:
    """Look up one of 256 entries, the first for the byte -128.

    Args:
        index: 128 times the byte, because an int16 TABLE has an entry for every 128th value.
    """
    byte = np.arange(-256, 257).clip(-128, 127)
    return index.apply_table(entries[byte + 128], 1.0)
