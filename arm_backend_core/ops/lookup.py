"""A function of one quantized tensor as a TABLE."""

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
    """``function`` (on real numbers, float64, 1-D) of ``x``, in parameters ``q``.

    int8 to int8 has an entry for each of the 256 values, so it is exact. Everything else goes through the int16 TABLE:
    513 entries, one for every 128th value, linear interpolation between them, and an INT32 result with 7 fractional
    bits (TOSA 1.0, TABLE). An int8 operand is widened by 256 first, so that it meets entries exactly. Where the lines
    between entries are far off, as at a pole, a second TABLE of the part where they are adds what they lack; for waves
    of many turns, which they miss everywhere, see ``_sinusoid_by_angle_addition``.

    Beyond the function's domain (rounding may bring an operand there) it has the value at the domain's end.
    """
    assert x.q is not None
    parts = 256 if x.q.dtype is DType.INT8 else 1
    real = evaluate_on_operand(function, x.q, parts)
    defined = np.flatnonzero(~np.isnan(real))
    if not defined.size:
        raise Unsupported("the function has no value anywhere in its calibrated range; calibrate with other samples")
    if parts > 1 and q.dtype is DType.INT8:
        return b.table(x.value, _quantize_entries(_extrapolate_nearest(real, defined)[:-1:256], q))
    index = b.rescale(x.value, DType.INT16, 256.0) if parts > 1 else x.value
    whole = FixedPoint(b, index, -Q15_MAX - 1, Q15_MAX)
    form = float(q.scale), q.zero_point, q.dtype, q.qmin, q.qmax
    angle, entries, step, lacking = _build_table(real.tobytes(), parts == 1, *form)
    if angle:
        return _sinusoid_by_angle_addition(whole, real, angle).requantize(q)
    if not lacking and not (b.target.hardware.npu and q.dtype is DType.INT8):
        low, high = (int(end) << 7 for end in (entries.min(), entries.max()))
        return FixedPoint(b, b.table(index, entries), low, high, step / 128).requantize(q)
    # What is read other than as an int16 result, a TABLE of int16 takes six operations for.
    total = whole.apply_table(entries, step)
    for middle, gain, rest in lacking:
        near = (whole.to_int32() - middle).rescale(DType.INT16, gain, saturate=True)
        unit = max(float(np.abs(rest).max()), float(np.abs(np.diff(rest)).max())) / Q15_MAX  # as REQUIRE in TABLE wants
        first, second = to_common_scale(total, near.apply_table(rest / unit, unit), q)
        total = first + second
    return total.requantize(q)


@lru_cache(maxsize=8)  # those of steps, and of layers alike, are the same
def _build_table(numbers: bytes, exact: bool, *form: Any) -> tuple[float, Array, float, list[tuple[int, int, Array]]]:
    """Of the function whose values are ``numbers``, what ``sinusoid_angle`` says; its entries, their step, and what
    they lack.

    ``exact``: the operand is any int16; else it meets entries. ``form``: of the result's parameters.
    """
    real, q = np.frombuffer(numbers), QParams(*form)
    defined = np.flatnonzero(~np.isnan(real))
    points = _extrapolate_nearest(real, defined)[::128]
    if exact:
        _interpolate_to_domain_ends(points, real, defined)
    # An int16 result is tabulated in its own steps; a narrower one in the finest that hold the function near its range.
    most = 2.0 * float(q.scale) * (q.qmax - q.qmin)
    peak = max(float(np.abs(points).clip(max=most).max()), 1e-30)
    fine = q if q.dtype is DType.INT16 else QParams(peak / Q15_MAX, 0, DType.INT16, -Q15_MAX - 1, Q15_MAX)
    entries = _quantize_entries(points, fine)
    if (
        np.abs(np.diff(entries)).max() > Q15_MAX
    ):  # REQUIRE in TABLE: at a jump, entries are halved, a step of error at most
        fine = replace(fine, scale=2 * float(fine.scale), qmin=-(Q15_MAX // 2) - 1, qmax=Q15_MAX // 2)
        entries = _quantize_entries(points, fine)
    angle = sinusoid_angle(real) if exact else 0.0
    lacking = list(_correction_tables(real, defined, entries, fine, q)) if exact and not angle else []
    return angle, entries, float(fine.scale), lacking


def evaluate_on_operand(function: Callable[[Array], Array], q: QParams, parts: int = 1) -> Array:
    """Real numbers, for every int16 (over ``parts``) that a tensor of parameters ``q`` may hold, and for the next."""
    return np.asarray(function(q.dequantize(_INDEX / parts)), dtype=np.float64)


def sinusoid_angle(real: Array) -> float:
    """The angle between neighbours of a sine or cosine, where lines miss it by 2**-8 of it and more, else 0."""
    sums, middle = real[2:] + real[:-2], real[1:-1]
    # f(i - 1) + f(i + 1) = 2 * cos(angle) * f(i)
    double = float(sums @ middle / max(float(middle @ middle), 1e-30)) if np.isfinite(real).all() else 2.0
    is_wave = abs(double) < 2 and np.abs(sums - double * middle).max() < 1e-9 * np.abs(middle).max()
    return angle if is_wave and (angle := math.acos(double / 2)) > math.tau / 32 / 128 else 0.0


def _sinusoid_by_angle_addition(x: FixedPoint, real: Array, angle: float) -> FixedPoint:
    """f(256 * h + l) = f(256 * h) * cos(l * angle) + g(256 * h) * sin(l * angle): tables that are read at their points.

    ``g`` is a quarter of a turn ahead of f: f(i + 1) = f(i) * cos(angle) + g(i) * sin(angle).
    """
    turn = np.arange(-256, 257).clip(-128, 128)  # of h and l alike: 128 times these is what is looked up
    following = np.append(real[1:], 2 * math.cos(angle) * real[-1] - real[-2])
    here, ahead = real[turn * 256 + 32768], following[turn * 256 + 32768]
    lines = here, (ahead - here * math.cos(angle)) / math.sin(angle), np.cos(turn * angle), np.sin(turn * angle)
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
    """Around which int16 to look once more, how often finer, and the 513 values to add; nothing where lines do.

    They do within 2**-9 of the result's range, half a step of int8, or 2**-13 in the mean: next to the kinks of
    activations, as SiLU has (EfficientNet-B0 would take half the cycles more). Twice at most, as for a logit.
    """
    lines = np.interp(_INDEX, _INDEX[::128], fine.dequantize(entries))
    rest, off = np.zeros(real.size), np.zeros(real.size)
    for numbers, grid in ((rest, fine), (off, q)):  # what a sum of tables lacks, and what a reader of the result does
        low, high = (float(grid.scale) * (end - grid.zero_point) for end in (grid.qmin, grid.qmax))
        numbers[defined] = (np.clip(real, low, high) - np.clip(lines, low, high))[defined]
    span = float(q.scale) * (q.qmax - q.qmin)
    for _ in range(2):
        if np.abs(off).max() <= span * 2.0**-9 or (off**2).mean() <= (span * 2.0**-13) ** 2:
            return
        gained, start, gain, values, missed = max(
            (_best_correction(rest, off, gain) for gain in (128, 32, 8)), key=itemgetter(0)
        )
        if gained < (off**2).sum() / 8:  # it is off in more places, or where no finer grid meets it
            return
        yield start + 32768 // gain - 32768, gain, values
        for numbers in (rest, off):
            numbers[start : start + missed.size] = missed


def _best_correction(rest: Array, off: Array, gain: int) -> tuple[float, int, int, Array, Array]:
    """The part of 65536 / ``gain`` numbers that is off most: by how much less its squares add up to where 513 of what
    it lacks are added, where it starts, ``gain``, these, and what lacks still.
    """
    length = 65536 // gain
    sums = np.concatenate([[0.0], np.cumsum(off**2)])
    starts = np.arange(0, 65537 - length, 128)
    start = int(starts[np.argmax(sums[starts + length] - sums[starts])])
    part = rest[start : start + length + 1]
    values = part[:: 128 // gain].copy()
    values[[0, -2, -1]] = 0.0  # beyond them as well: 32767 is read between the last two
    missed = part - np.interp(np.arange(length + 1), np.arange(0, length + 1, 128 // gain), values)
    return float(sums[start + length] - sums[start] - (missed**2).sum()), start, gain, values, missed


#: Every int16, and the one after: where the last interval of a table ends.
_INDEX = np.arange(-32768, 32769)


def _extrapolate_nearest(real: Array, defined: Array) -> Array:
    """``real`` with the nearest of the ``defined`` elements where it is not a number."""
    if defined.size == real.size:
        return real.copy()
    after = np.minimum(np.searchsorted(defined, np.arange(real.size)), defined.size - 1)
    before = np.maximum(after - 1, 0)
    distance = np.abs(defined[[before, after]] - np.arange(real.size))
    return real[np.where(distance[0] <= distance[1], defined[before], defined[after])]


def _interpolate_to_domain_ends(points: Array, real: Array, defined: Array) -> None:
    """Where the domain ends between two points, let the line go through the last value inside."""
    for end, inward in ((defined[0], 1), (defined[-1], -1)):
        outer = (end if inward > 0 else end + 127) // 128
        if end % 128 and np.isfinite(real[end]) and np.isfinite(points[outer + inward]):
            slope = (points[outer + inward] - real[end]) / ((outer + inward) * 128 - end)
            points[outer] = real[end] + slope * (outer * 128 - end)


def _quantize_entries(real: Array, q: QParams) -> Array:
    """Integers of a function's values; infinite ones saturate."""
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(real, -bound, bound))
