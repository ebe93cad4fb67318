"""A function of one quantized tensor as a TABLE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops.operands import Tensor
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]


def lookup(b: Builder, x: Tensor, function: Callable[[Array], Array], q: QParams) -> Value:
    """``function`` (on real numbers, float64, 1-D) of ``x``, in parameters ``q``.

    int8 to int8 has an entry for each of the 256 values, so it is exact. Everything else goes through the int16 TABLE:
    513 entries, one for every 128th value, linear interpolation between them, and an INT32 result with 7 fractional
    bits (TOSA 1.0, TABLE). An int8 operand is widened by 256 first, so that it meets entries exactly.
    """
    assert x.q is not None
    if x.q.dtype is DType.INT8 and q.dtype is DType.INT8:
        return b.table(x.value, _entries(function(x.q.dequantize(np.arange(-128, 128))), q))
    index = x.value
    grid = np.arange(-32768, 32769, 128)
    if x.q.dtype is DType.INT8:
        index = b.rescale(index, DType.INT16, 256.0)
        real = function(x.q.dequantize(grid / 256))
    else:
        real = function(x.q.dequantize(grid))
    # An int16 result is tabulated in its own steps; a narrower one in the finest steps that hold the function.
    fine = q if q.dtype is DType.INT16 else QParams(_finest_scale(real), 0, DType.INT16, -32768, 32767)
    interpolated = b.table(index, _gentle(_entries(real, fine)))
    return b.rescale(interpolated, q.dtype, float(fine.scale) / float(q.scale) / 128, 0, q.zero_point)


def _entries(real: Array, q: QParams) -> Array:
    """Integers of a function's values; what is not a number (log of a negative) becomes real 0."""
    real = np.nan_to_num(np.asarray(real, dtype=np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(real, -bound, bound))


def _gentle(entries: Array) -> Array:
    """TOSA wants neighbours of an int16 table to differ by int16 at most (REQUIRE in TABLE); a jump is shared out."""
    entries = entries.copy()
    for _ in range(len(entries)):
        rise = np.diff(entries)
        steep = np.flatnonzero(np.abs(rise) > 32767)
        if not steep.size:
            break
        excess = np.sign(rise[steep]) * (np.abs(rise[steep]) - 32767)
        entries[steep] += excess // 2
        entries[steep + 1] -= excess - excess // 2
    return entries


def _finest_scale(real: Array) -> float:
    finite = np.abs(real[np.isfinite(real)])
    return max(float(finite.max(initial=0.0)), 1e-30) / 32767
