"""Lowering of a univariate function on a quantized tensor to TABLE operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.integers import Q15_MAX, FixedPoint, to_common_scale
from arm_backend_core.ops.operands import Tensor
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]


def lookup(b: Builder, x: Tensor, function: Callable[[Array], Array], q: QParams) -> Value:
    """Apply ``function`` to ``x`` and return the result in parameters ``q``.

    int8 to int8 has an entry for each of the 256 values, so it is exact. All other combinations use the int16 TABLE
    (TOSA 1.0): 513 entries, one for every 128th value, with linear interpolation and an INT32 result that has 7
    fractional bits. An int8 operand is multiplied by 256 first, so that it falls on entries exactly. Where
    interpolation has a large error, for example at a pole, a second TABLE for that part of the range adds a correction.
    Sinusoids of many periods have a large error everywhere: see ``_sinusoid_by_angle_addition``.

    Outside the function's domain, where rounding may bring an operand, the result is the value at the domain's end.

    Args:
        b: where the operators are appended.
        x: int8 or int16.
        function: maps real numbers to real numbers (float64, 1-D), NaN outside its domain.
        q: the result's parameters.

    Raises:
        Unsupported: the function is NaN on the whole range of ``x``.
    """
    assert x.q is not None
    parts = 256 if x.q.dtype is DType.INT8 else 1
    real = evaluate_on_operand(function, x.q, parts)
    defined = np.flatnonzero(~np.isnan(real))
    if not defined.size:
        raise Unsupported(
            "the function has no value anywhere in its calibrated range (NaN everywhere); calibrate with other samples"
        )
    if parts > 1 and q.dtype is DType.INT8:
        return b.table(x.value, _quantize_entries(_extrapolate_nearest(real, defined)[:-1:256], q))
    index = b.rescale(x.value, DType.INT16, 256.0) if parts > 1 else x.value
    operand = FixedPoint(b, index, -Q15_MAX - 1, Q15_MAX)
    form = float(q.scale), q.zero_point, q.dtype, q.qmin, q.qmax
    angle, entries, step, corrections = _build_table(real.tobytes(), parts == 1, *form)
    if angle:
        return _sinusoid_by_angle_addition(operand, real, angle).requantize(q)
    if not corrections and not (b.target.hardware.npu and q.dtype is DType.INT8):
        low, high = (int(end) << 7 for end in (entries.min(), entries.max()))
        return FixedPoint(b, b.table(index, entries), low, high, step / 128).requantize(q)
    # An int16 TABLE whose INT32 result is not rescaled to int16 takes six NPU operations.
    total = operand.apply_table(entries, step)
    for middle, gain, values in corrections:
        zoomed = (operand.to_int32() - middle).rescale(DType.INT16, gain, saturate=True)
        # REQUIRE in TABLE: differences of neighbouring entries fit int16
        scale = max(float(np.abs(values).max()), float(np.abs(np.diff(values)).max())) / Q15_MAX
        first, second = to_common_scale(total, zoomed.apply_table(values / scale, scale), q)
        total = first + second
    return total.requantize(q)


@lru_cache(maxsize=8)  # unrolled steps and equal layers have equal tables
def _build_table(numbers: bytes, exact: bool, *form: Any) -> tuple[float, Array, float, list[tuple[int, int, Array]]]:
    """Build the table of a function.

    Args:
        numbers: bytes of the function's values (``evaluate_on_operand``).
        exact: whether the operand can be any int16; an int8 operand falls on entries.
        form: the result's ``QParams`` as a tuple.

    Returns:
        The angle of ``sinusoid_angle`` (0 for other functions), the entries, their scale, and the corrections
        (``_correction_tables``).
    """
    real, q = np.frombuffer(numbers), QParams(*form)
    defined = np.flatnonzero(~np.isnan(real))
    points = _extrapolate_nearest(real, defined)[::128]
    if exact:
        _interpolate_to_domain_ends(points, real, defined)
    # An int16 result has entries at its own scale; an int8 result at the finest scale that covers its range.
    limit = 2.0 * float(q.scale) * (q.qmax - q.qmin)
    peak = max(float(np.abs(points).clip(max=limit).max()), 1e-30)
    fine = q if q.dtype is DType.INT16 else QParams(peak / Q15_MAX, 0, DType.INT16, -Q15_MAX - 1, Q15_MAX)
    entries = _quantize_entries(points, fine)
    # REQUIRE in TABLE: differences of neighbouring entries fit int16. At a jump, entries are halved: one step of error.
    if np.abs(np.diff(entries)).max() > Q15_MAX:
        fine = replace(fine, scale=2 * float(fine.scale), qmin=-(Q15_MAX // 2) - 1, qmax=Q15_MAX // 2)
        entries = _quantize_entries(points, fine)
    angle = sinusoid_angle(real) if exact else 0.0
    corrections = list(_correction_tables(real, defined, entries, fine, q)) if exact and not angle else []
    return angle, entries, float(fine.scale), corrections


def evaluate_on_operand(function: Callable[[Array], Array], q: QParams, parts: int = 1) -> Array:
    """The function at every int16 / ``parts`` in parameters ``q``, and at 32768 / ``parts``; 65537 values."""
    return np.asarray(function(q.dequantize(_INDEX / parts)), dtype=np.float64)


def sinusoid_angle(real: Array) -> float:
    """The angle between neighbouring values of a sinusoid if interpolation has an error above 2**-8 of it, else 0."""
    sums, middle = real[2:] + real[:-2], real[1:-1]
    # f(i - 1) + f(i + 1) = 2 * cos(angle) * f(i)
    double = float(sums @ middle / max(float(middle @ middle), 1e-30)) if np.isfinite(real).all() else 2.0
    is_wave = abs(double) < 2 and np.abs(sums - double * middle).max() < 1e-9 * np.abs(middle).max()
    return angle if is_wave and (angle := math.acos(double / 2)) > math.tau / 32 / 128 else 0.0


def _sinusoid_by_angle_addition(x: FixedPoint, real: Array, angle: float) -> FixedPoint:
    """A sinusoid by angle addition of high and low byte, with tables that are read only at their points.

    f(256 * h + l) = f(256 * h) * cos(l * angle) + g(256 * h) * sin(l * angle), where g leads f by a quarter period:
    f(i + 1) = f(i) * cos(angle) + g(i) * sin(angle).
    """
    byte = np.arange(-256, 257).clip(-128, 128)  # h or l at the table's points: the index is 128 times the byte
    following = np.append(real[1:], 2 * math.cos(angle) * real[-1] - real[-2])
    here, ahead = real[byte * 256 + 32768], following[byte * 256 + 32768]
    lines = here, (ahead - here * math.cos(angle)) / math.sin(angle), np.cos(byte * angle), np.sin(byte * angle)
    steps, high = x.to_int32(), x.rescale(DType.INT32, 1 / 256)
    places = [high] * 2 + [(steps - high * 256).assume_range(-128, 128)] * 2
    pairs = np.stack(lines[:2]), np.stack(lines[2:])
    units = [max(float(np.abs(pair).max()), float(np.abs(np.diff(pair)).max())) / Q15_MAX for pair in pairs]
    f, g, cosine, sine = (
        place.rescale(DType.INT16, 128.0).apply_table(line / unit, unit)
        for place, line, unit in zip(places, lines, np.repeat(units, 2).tolist(), strict=True)
    )
    return f * cosine + g * sine


def _correction_tables(
    real: Array, defined: Array, entries: Array, fine: QParams, q: QParams
) -> Iterator[tuple[int, int, Array]]:
    """Correction tables for the parts of the range where linear interpolation has a large error; at most two.

    Interpolation is good enough if its error is at most 2**-9 of the result's range (half a step of int8), or 2**-13
    root mean square. So bends of activations such as SiLU need no correction, which would cost EfficientNet-B0 half the
    cycles more. A logit needs two, one at each pole.

    Yields:
        The int16 at the middle of the part, the factor by which its grid is finer, and the 513 values to add.
    """
    lines = np.interp(_INDEX, _INDEX[::128], fine.dequantize(entries))
    table_error, result_error = np.zeros(real.size), np.zeros(real.size)
    # The error of the sum of tables, and the error of the clipped result
    for error, grid in ((table_error, fine), (result_error, q)):
        low, high = (float(grid.scale) * (end - grid.zero_point) for end in (grid.qmin, grid.qmax))
        error[defined] = (np.clip(real, low, high) - np.clip(lines, low, high))[defined]
    span = float(q.scale) * (q.qmax - q.qmin)
    for _ in range(2):
        if np.abs(result_error).max() <= span * 2.0**-9 or (result_error**2).mean() <= (span * 2.0**-13) ** 2:
            return
        reduction, start, gain, values, remaining = max(
            (_best_correction(table_error, result_error, gain) for gain in (128, 32, 8)), key=itemgetter(0)
        )
        if reduction < (result_error**2).sum() / 8:  # the error is spread over more places, or no finer grid reduces it
            return
        yield start + 32768 // gain - 32768, gain, values
        for error in (table_error, result_error):
            error[start : start + remaining.size] = remaining


def _best_correction(rest: Array, off: Array, gain: int) -> tuple[float, int, int, Array, Array]:
    """Find the part of 65536 / ``gain`` values with the largest error, and its correction.

    Returns:
        The reduction of the sum of squared errors, the start of the part, ``gain``, the 513 correction values, and the
        remaining error of the part.
    """
    length = 65536 // gain
    sums = np.concatenate([[0.0], np.cumsum(off**2)])
    starts = np.arange(0, 65537 - length, 128)
    start = int(starts[np.argmax(sums[starts + length] - sums[starts])])
    part = rest[start : start + length + 1]
    values = part[:: 128 // gain].copy()
    values[[0, -2, -1]] = 0.0  # 0 outside the part as well: index 32767 interpolates between the last two
    remaining = part - np.interp(np.arange(length + 1), np.arange(0, length + 1, 128 // gain), values)
    return float(sums[start + length] - sums[start] - (remaining**2).sum()), start, gain, values, remaining


#: Every int16, and 32768, where the last interval of a table ends.
_INDEX = np.arange(-32768, 32769)


def _extrapolate_nearest(real: Array, defined: Array) -> Array:
    """Replace NaN in ``real`` by the nearest of the ``defined`` elements."""
    if defined.size == real.size:
        return real.copy()
    after = np.minimum(np.searchsorted(defined, np.arange(real.size)), defined.size - 1)
    before = np.maximum(after - 1, 0)
    distance = np.abs(defined[[before, after]] - np.arange(real.size))
    return real[np.where(distance[0] <= distance[1], defined[before], defined[after])]


def _interpolate_to_domain_ends(points: Array, real: Array, defined: Array) -> None:
    """Where the domain ends between two points, move the outer point so that the line meets the last value inside."""
    for end, inward in ((defined[0], 1), (defined[-1], -1)):
        outer = (end if inward > 0 else end + 127) // 128
        if end % 128 and np.isfinite(real[end]) and np.isfinite(points[outer + inward]):
            slope = (points[outer + inward] - real[end]) / ((outer + inward) * 128 - end)
            points[outer] = real[end] + slope * (outer * 128 - end)


def _quantize_entries(real: Array, q: QParams) -> Array:
    """Quantize a function's values; infinities saturate."""
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(real, -bound, bound))
