"""Look-up tables: lowering of a univariate function on a quantized tensor to TABLE operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from arm_backend_core import compilation_log
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.common_scale import to_common_scale
from arm_backend_core.ops.fixed_point_value import Q15_MAX, FixedPoint
from arm_backend_core.ops.operands import Operand
from arm_backend_core.ops.separable_functions import approximate, emit_separable, factorize
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]


def apply_by_table(b: Builder, x: Operand, function: Callable[[Array], Array], q: QParams) -> Value:
    """Apply ``function`` to ``x`` and quantize the result to ``q``.

    The table from int8 to int8 is exact: it has an entry for each of the 256 values. If the operand or the result is
    int16, the int16 TABLE of TOSA 1.0 is used. It has 513 entries, one for every 128th value, and interpolates
    linearly. Its result is INT32 with 7 fractional bits. An int8 operand is multiplied by 256 first, so that each value
    has an entry and nothing is interpolated.

    If interpolation has a large error in a part of the range, for example at a pole, a finer TABLE for that part adds a
    correction. For sinusoids with many periods in the range, the error is large everywhere. They are computed by angle
    addition (``_emit_sinusoid_by_angle_addition``), and functions of such sinusoids by ``separable_functions``.

    Rounding may move an operand out of the function's domain. The result is then the value at the nearest domain end.

    Args:
        b: builder that receives the operators.
        x: int8 or int16.
        function: maps a float64 vector to a float64 vector, elementwise; NaN outside its domain.
        q: the result's parameters.

    Raises:
        Unsupported: the function is NaN at every value of ``x``; or ``to_common_scale`` refuses to add a correction.
    """
    assert x.q is not None
    oversampling = 256 if x.q.dtype is DType.INT8 else 1
    samples = evaluate_on_operand(function, x.q, oversampling)
    defined_indices = np.flatnonzero(~np.isnan(samples))
    if not defined_indices.size:
        raise Unsupported(
            "the function has no value anywhere in its calibrated range (NaN everywhere); calibrate with other samples"
        )
    if oversampling > 1 and q.dtype is DType.INT8:
        return b.table(x.value, _quantize_entries(_extrapolate_nearest(samples, defined_indices)[:-1:256], q))
    index = b.rescale(x.value, DType.INT16, 256.0) if oversampling > 1 else x.value
    operand = FixedPoint(b, index, -Q15_MAX - 1, Q15_MAX)
    qparams = float(q.scale), q.zero_point, q.dtype, q.qmin, q.qmax
    phase_step, entries, scale, corrections, error = _build_table(samples.tobytes(), oversampling == 1, *qparams)
    if phase_step:
        return _emit_sinusoid_by_angle_addition(operand, samples, phase_step).requantize(q)
    if error.any():
        factors = factorize(samples.tobytes(), float(q.scale), float(np.abs(error).max()) / 4)
        if factors is not None:
            _note_coarse_table(b, approximate(*factors) - samples[:-1], q)
            return emit_separable(operand, *factors).requantize(q)
        _note_coarse_table(b, error, q)
    # On an NPU, the TABLE's INT32 result is rescaled to int16 first, also if the final result is int8. A TABLE whose
    # result is not rescaled to int16 takes six NPU operations.
    if not corrections and not (b.target.hardware.is_ethos_u and q.dtype is DType.INT8):
        low, high = (int(end) << 7 for end in (entries.min(), entries.max()))
        return FixedPoint(b, b.table(index, entries), low, high, scale / 128).requantize(q)
    result = operand.apply_table(entries, scale)
    for middle, refinement, values in corrections:
        magnified = (operand.to_int32() - middle).rescale(DType.INT16, refinement, saturate=True)
        # TOSA's specification requires (REQUIRE) that the differences of neighbouring entries fit int16.
        correction_scale = max(float(np.abs(values).max()), float(np.abs(np.diff(values)).max())) / Q15_MAX
        first, second = to_common_scale(result, magnified.apply_table(values / correction_scale, correction_scale), q)
        result = first + second
    return result.requantize(q)


@lru_cache(maxsize=8)  # unrolled time steps and equal layers have equal tables
def _build_table(
    sample_bytes: bytes, is_int16: bool, *qparams: Any
) -> tuple[float, Array, float, list[tuple[int, int, Array]], Array]:
    """Build the main table and the correction tables of a function.

    Args:
        sample_bytes: the function's values (``evaluate_on_operand``) as bytes, because the cache needs a hashable
            argument.
        is_int16: True for an int16 operand, which may lie between two entries. An int8 operand always falls on an
            entry.
        qparams: arguments of ``QParams`` for the result.

    Returns:
        The phase step (``find_sinusoid_phase_step``; 0 if the function is no fast sinusoid, and for an int8 operand),
        the entries, their scale, the corrections (``_correction_tables``), and the error of the result at each operand
        value. A single 0 replaces the errors if they are acceptable (``_is_acceptable_error``), and for an int8 operand
        or a fast sinusoid.
    """
    samples, q = np.frombuffer(sample_bytes), QParams(*qparams)
    defined_indices = np.flatnonzero(~np.isnan(samples))
    points = _extrapolate_nearest(samples, defined_indices)[::128]
    if is_int16:
        _interpolate_to_domain_ends(points, samples, defined_indices)
    # For an int16 result, the entries have its scale. For an int8 result, they have the finest int16 scale that covers
    # the function's values, up to twice the result's range.
    limit = 2.0 * float(q.scale) * (q.qmax - q.qmin)
    peak = max(float(np.abs(points).clip(max=limit).max()), 1e-30)
    table_q = q if q.dtype is DType.INT16 else QParams(peak / Q15_MAX, 0, DType.INT16, -Q15_MAX - 1, Q15_MAX)
    entries = _quantize_entries(points, table_q)
    # TOSA's specification requires (REQUIRE) that the differences of neighbouring entries fit int16. If a jump is too
    # high, double the scale of the entries, at the cost of an error of one step.
    if np.abs(np.diff(entries)).max() > Q15_MAX:
        table_q = replace(table_q, scale=2 * float(table_q.scale), qmin=-(Q15_MAX // 2) - 1, qmax=Q15_MAX // 2)
        entries = _quantize_entries(points, table_q)
    phase_step = find_sinusoid_phase_step(samples) if is_int16 else 0.0
    corrections = (
        list(_correction_tables(samples, defined_indices, entries, table_q, q)) if is_int16 and not phase_step else []
    )
    if is_int16 and not phase_step:
        fitted = _quantize_entries(_fit_interpolation(points, samples, corrections), table_q)
        entries = fitted if np.abs(np.diff(fitted)).max() <= Q15_MAX else entries
    error = np.zeros(1)
    if is_int16 and not phase_step:
        error = _interpolation_error(samples, defined_indices, table_q.dequantize(entries), corrections, q)
    error = np.zeros(1) if _is_acceptable_error(error, q) else error
    return phase_step, entries, float(table_q.scale), corrections, error


def evaluate_on_operand(function: Callable[[Array], Array], q: QParams, oversampling: int = 1) -> Array:
    """Evaluate ``function`` at q.dequantize(i / oversampling) for i in ``_INT16_OPERANDS``; 65537 float64 values."""
    return np.asarray(function(q.dequantize(_INT16_OPERANDS / oversampling)), dtype=np.float64)


def find_sinusoid_phase_step(samples: Array) -> float:
    """Return the phase difference of neighbouring samples in radians if they sample a fast sinusoid, else 0.

    A sinusoid is fast if a TABLE has fewer than 32 entries per period of the sinusoid. Linear interpolation then has an
    error above 0.48% of the amplitude.
    """
    neighbour_sums, centres = samples[2:] + samples[:-2], samples[1:-1]
    # f(i - 1) + f(i + 1) = 2 * cos(phase_step) * f(i)
    twice_cosine = (
        float(neighbour_sums @ centres / max(float(centres @ centres), 1e-30)) if np.isfinite(samples).all() else 2.0
    )
    is_sinusoid = (
        abs(twice_cosine) < 2 and np.abs(neighbour_sums - twice_cosine * centres).max() < 1e-9 * np.abs(centres).max()
    )
    return phase_step if is_sinusoid and (phase_step := math.acos(twice_cosine / 2)) > math.tau / 32 / 128 else 0.0


def _emit_sinusoid_by_angle_addition(x: FixedPoint, samples: Array, phase_step: float) -> FixedPoint:
    """Compute a sinusoid by the angle addition formula, from tables of the high byte h and of the low byte l.

    The tables are read only at their entries, so interpolation adds no error. With a = ``phase_step``:

    f(256 * h + l) = f(256 * h) * cos(l * a) + g(256 * h) * sin(l * a). Here g is f shifted by a quarter period. It is
    computed from f(i + 1) = f(i) * cos(a) + g(i) * sin(a).
    """
    # The value of h or l that each of the 513 entries stands for: the table index is 128 * h or 128 * l.
    byte = np.arange(-256, 257).clip(-128, 128)
    next_samples = np.append(samples[1:], 2 * math.cos(phase_step) * samples[-1] - samples[-2])
    f_samples, f_next = samples[byte * 256 + 32768], next_samples[byte * 256 + 32768]
    functions = (
        f_samples,
        (f_next - f_samples * math.cos(phase_step)) / math.sin(phase_step),
        np.cos(byte * phase_step),
        np.sin(byte * phase_step),
    )
    integers, high = x.to_int32(), x.rescale(DType.INT32, 1 / 256)
    operands = [high] * 2 + [(integers - high.refine_scale(256)).assume_range(-128, 128)] * 2
    pairs = np.stack(functions[:2]), np.stack(functions[2:])
    scales = [max(float(np.abs(pair).max()), float(np.abs(np.diff(pair)).max())) / Q15_MAX for pair in pairs]
    f, g, cosine, sine = (
        operand.rescale(DType.INT16, 128.0).apply_table(function / scale, scale)
        for operand, function, scale in zip(operands, functions, np.repeat(scales, 2).tolist(), strict=True)
    )
    return f * cosine + g * sine


def _correction_tables(
    samples: Array, defined_indices: Array, entries: Array, table_q: QParams, q: QParams
) -> Iterator[tuple[int, int, Array]]:
    """Yield at most two correction tables, for parts of the range in which linear interpolation has a large error.

    Activations such as SiLU get no correction, because their error is acceptable and a correction would increase the
    cycles of EfficientNet-B0 by half. The function ``logit`` gets two corrections, one at each pole.

    Yields:
        The int16 operand at the middle of the part, the factor by which the table is finer, and its 513 entries.
    """
    interpolated = np.interp(_INT16_OPERANDS, _INT16_OPERANDS[::128], table_q.dequantize(entries))
    table_error, result_error = np.zeros(samples.size), np.zeros(samples.size)
    # table_error is computed before the result is clipped to q's range, result_error after.
    for error, grid_q in ((table_error, table_q), (result_error, q)):
        ends = grid_q.real_range
        error[defined_indices] = (np.clip(samples, *ends) - np.clip(interpolated, *ends))[defined_indices]
    for _ in range(2):
        if _is_acceptable_error(result_error, q):
            return
        reduction, start, refinement, values, remaining = max(
            (_find_best_correction(table_error, result_error, refinement) for refinement in (128, 32, 8)),
            key=itemgetter(0),
        )
        # The error is spread over too many parts, or a finer table does not reduce it.
        if reduction < (result_error**2).sum() / 8:
            return
        yield start + 32768 // refinement - 32768, refinement, values
        for error in (table_error, result_error):
            error[start : start + remaining.size] = remaining


def _is_acceptable_error(error: Array, q: QParams) -> bool:
    """Whether the error is acceptable, relative to the width of the range of ``q``.

    The largest error must be at most 2**-9 of the width (half a step of int8), or the RMS error at most 2**-13 of it.
    """
    full_range = float(q.scale) * (q.qmax - q.qmin)
    largest: float = np.abs(error).max()
    return largest <= full_range * 2.0**-9 or bool((error**2).mean() <= (full_range * 2.0**-13) ** 2)


def _note_coarse_table(b: Builder, error: Array, q: QParams) -> None:
    """Add a note to the report if half of the results have an error above 2**-10 of the range, as in a fast chirp.

    A jump or a pole gets no note, because only the few results near it have a large error.
    """
    full_range = float(q.scale) * (q.qmax - q.qmin)
    if np.median(np.abs(error)) <= full_range * 2.0**-10:
        return
    names = [f"{origin.operator} ({origin.source})" if origin.source else origin.operator for origin in b.origins]
    compilation_log.current_log().add_notes_once(
        [
            f"{', '.join(names) or 'an elementwise function'} is part of a function that oscillates too fast for a "
            f"look-up table: its result has an error of up to {np.abs(error).max() / full_range:.0%} of its range; "
            "reduce the range of its operand, or use a floating-point recipe"
        ]
    )


def _interpolation_error(
    samples: Array, defined: Array, entries: Array, corrections: list[tuple[int, int, Array]], q: QParams
) -> Array:
    """Error at each operand value in the function's domain, after corrections and clipping to the range of ``q``."""
    result = np.interp(_INT16_OPERANDS, _INT16_OPERANDS[::128], entries)
    for middle, refinement, values in corrections:
        result += np.interp((_INT16_OPERANDS - middle) * refinement, _INT16_OPERANDS[::128], values)
    error: Array = (np.clip(result, *q.real_range) - np.clip(samples, *q.real_range))[defined]
    return error


def _find_best_correction(
    table_error: Array, result_error: Array, refinement: int
) -> tuple[float, int, int, Array, Array]:
    """Find the part of 65536 / ``refinement`` operand values with the largest sum of squared errors, and correct it.

    ``result_error`` selects the part, and the correction values are the ``table_error`` of the part.

    Returns:
        The reduction of the sum of squared errors, the start of the part, ``refinement``, the 513 correction values,
        and the remaining error of the part.
    """
    length = 65536 // refinement
    cumulative = np.concatenate([[0.0], np.cumsum(result_error**2)])
    starts = np.arange(0, 65537 - length, 128)
    start = int(starts[np.argmax(cumulative[starts + length] - cumulative[starts])])
    part = table_error[start : start + length + 1]
    values = part[:: 128 // refinement].copy()
    # Operands outside the part saturate to its ends, where the correction must be 0. The largest operand, 32767,
    # interpolates between the last two entries.
    values[[0, -2, -1]] = 0.0
    remaining = part - np.interp(np.arange(length + 1), np.arange(0, length + 1, 128 // refinement), values)
    return (
        float(cumulative[start + length] - cumulative[start] - (remaining**2).sum()),
        start,
        refinement,
        values,
        remaining,
    )


#: -32768 ... 32768: every int16, and 32768, which is the input of a TABLE's last entry.
_INT16_OPERANDS = np.arange(-32768, 32769)


def _extrapolate_nearest(samples: Array, defined: Array) -> Array:
    """Replace each NaN in ``samples`` by the nearest element whose index is in ``defined``."""
    if defined.size == samples.size:
        return samples.copy()
    after = np.minimum(np.searchsorted(defined, np.arange(samples.size)), defined.size - 1)
    before = np.maximum(after - 1, 0)
    distance = np.abs(defined[[before, after]] - np.arange(samples.size))
    return samples[np.where(distance[0] <= distance[1], defined[before], defined[after])]


def _interpolate_to_domain_ends(points: Array, samples: Array, defined: Array) -> None:
    """If the domain ends between two entries, extrapolate the outer entry from the last two values inside the domain.

    Linear interpolation then equals the function at the last sample of its domain. Edits ``points``.
    """
    for end, inward in ((defined[0], 1), (defined[-1], -1)):
        outer = (end if inward > 0 else end + 127) // 128
        if end % 128 and np.isfinite(samples[end]) and np.isfinite(points[outer + inward]):
            slope = (points[outer + inward] - samples[end]) / ((outer + inward) * 128 - end)
            points[outer] = samples[end] + slope * (outer * 128 - end)


def _fit_interpolation(points: Array, samples: Array, corrections: Iterable[tuple[int, int, Array]]) -> Array:
    """Move entries to the least-squares fit of linear interpolation, where that reduces the squared error.

    Interpolation between exact values exceeds a convex function f by h**2 / 12 * f'' on average (h: distance of the
    entries). Entries of f - h**2 / 12 * f'' have a sixth of the squared error. The entries remain exact at jumps, kinks
    and poles, at the ends, and at the integer 0 if f is 0 there. They also remain exact in each part that has a
    correction table, because the correction is 0 at the ends of its part. No entry leaves the range of the function.
    """
    with np.errstate(all="ignore"):
        shifts = np.zeros(points.size)
        shifts[1:-2] = -np.diff(points[:-1], 2) / 12
        shifts = np.clip(points + shifts, points.min(), points.max()) - points
        shifts[~np.isfinite(shifts) | ((points == 0) & (np.arange(513) == 256))] = 0.0
        for middle, refinement, _ in corrections:
            centre, half = (middle + 32768) // 128, 256 // refinement
            shifts[centre - half : centre + half + 1] = 0.0
        position = np.arange(128) / 128
        errors = points[:-1, None] + np.diff(points)[:, None] * position - samples[:-1].reshape(-1, 128)
        while shifts.any():
            moved = errors + shifts[:-1, None] + np.diff(shifts)[:, None] * position
            is_worse = ~((moved**2).sum(1) <= (errors**2).sum(1)) & (np.abs(shifts[:-1]) + np.abs(shifts[1:]) > 0)
            if not is_worse.any():
                break
            shifts[:-1][is_worse] = shifts[1:][is_worse] = 0.0
    return points + shifts


def _quantize_entries(samples: Array, q: QParams) -> Array:
    """Quantize a function's values; infinities saturate."""
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(samples, -bound, bound))
