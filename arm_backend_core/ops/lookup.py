"""A function of one quantized tensor as a TABLE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.integers import ONE, Int
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

    Beyond the function's domain (rounding may bring an operand there) it has the value at the domain's end.
    """
    assert x.q is not None
    parts = 256 if x.q.dtype is DType.INT8 else 1
    real = np.asarray(function(x.q.dequantize(_INDEX / parts)), dtype=np.float64)
    defined = np.flatnonzero(~np.isnan(real))
    if not defined.size:
        raise Unsupported("the function has no value anywhere in its calibrated range; calibrate with other samples")
    if parts > 1 and q.dtype is DType.INT8:
        return b.table(x.value, _entries(_nearest(real, defined)[:-1:256], q))
    index = b.rescale(x.value, DType.INT16, 256.0) if parts > 1 else x.value
    points = _nearest(real, defined)[::128]
    if parts == 1:
        _meet_ends(points, real, defined)
    # An int16 result is tabulated in its own steps; a narrower one in the finest that hold the function near its range.
    most = 2.0 * float(q.scale) * (q.qmax - q.qmin)
    peak = max(float(np.abs(points).clip(max=most).max()), 1e-30)
    fine = q if q.dtype is DType.INT16 else QParams(peak / ONE, 0, DType.INT16, -ONE - 1, ONE)
    entries = _entries(points, fine)
    if np.abs(np.diff(entries)).max() > ONE:  # REQUIRE in TABLE: at a jump, entries are halved, a step of error at most
        fine = replace(fine, scale=2 * float(fine.scale), qmin=-(ONE // 2) - 1, qmax=ONE // 2)
        entries = _entries(points, fine)
    if b.target.hardware.npu and q.dtype is DType.INT8:  # another result of a TABLE of int16 takes six operations
        return Int(b, index, -ONE - 1, ONE).tabulated(entries, float(fine.scale)).to(q)
    low, high = (int(end) << 7 for end in (entries.min(), entries.max()))
    return Int(b, b.table(index, entries), low, high, float(fine.scale) / 128).to(q)


#: Every int16, and the one after: where the last interval of a table ends.
_INDEX = np.arange(-32768, 32769)


def _nearest(real: Array, defined: Array) -> Array:
    """``real`` with the nearest of the ``defined`` elements where it is not a number."""
    if defined.size == real.size:
        return real.copy()
    after = np.minimum(np.searchsorted(defined, np.arange(real.size)), defined.size - 1)
    before = np.maximum(after - 1, 0)
    distance = np.abs(defined[[before, after]] - np.arange(real.size))
    return real[np.where(distance[0] <= distance[1], defined[before], defined[after])]


def _meet_ends(points: Array, real: Array, defined: Array) -> None:
    """Where the domain ends between two points, let the line go through the last value inside."""
    for end, inward in ((defined[0], 1), (defined[-1], -1)):
        outer = (end if inward > 0 else end + 127) // 128
        if end % 128 and np.isfinite(real[end]) and np.isfinite(points[outer + inward]):
            slope = (points[outer + inward] - real[end]) / ((outer + inward) * 128 - end)
            points[outer] = real[end] + slope * (outer * 128 - end)


def _entries(real: Array, q: QParams) -> Array:
    """Integers of a function's values; infinite ones saturate."""
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(real, -bound, bound))
