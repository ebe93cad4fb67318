"""Look-up tables: lowering of a univariate function on a quantized tensor to TABLE operators."""

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
from arm_backend_core.ops.common_scale import to_common_scale
from arm_backend_core.ops.integers import Q15_MAX, FixedPoint
from arm_backend_core.ops.operands import Tensor
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

Array = np.ndarray[Any, Any]


def lookup(b: Builder, x: Tensor, function: Callable[[Array], Array], q: QParams) -> Value:
    """Apply ``function`` to ``x`` and quantize the result to ``q``.

    The table from int8 to int8 is exact: it has an entry for each of the 256 values. Other types use the int16 TABLE
    (TOSA 1.0): 513 entries, one for every 128th value, with linear interpolation and an INT32 result that has 7
    fractional bits. An int8 operand is multiplied by 256 first, so that it falls on entries exactly. Where
    interpolation has a large error, for example at a pole, a finer TABLE for that part of the range adds a correction.
    The error of sinusoids with many periods is large everywhere: see ``_sinusoid_by_angle_addition``.

    Rounding may move an operand out of the function's domain. The result is then the value at the domain's end.

    Args:
        b: builder that receives the operators.
        x: int8 or int16.
        function: maps a float64 vector to a float64 vector, elementwise; NaN outside its domain.
        q: the result's parameters.

    Raises:
        Unsupported: the function is NaN on the whole range of ``x``.
    """
    assert x.q is not None
    oversampling = 256 if x.q.dtype is DType.INT8 else 1
    samples = evaluate_on_operand(function, x.q, oversampling)
    defined = np.flatnonzero(~np.isnan(samples))
    if not defined.size:
        raise Unsupported(
            "the function has no value anywhere in its calibrated range (NaN everywhere); calibrate with other samples"
        )
    if oversampling > 1 and q.dtype is DType.INT8:
        return b.table(x.value, _quantize_entries(_extrapolate_nearest(samples, defined)[:-1:256], q))
    index = b.rescale(x.value, DType.INT16, 256.0) if oversampling > 1 else x.value
    operand = FixedPoint(b, index, -Q15_MAX - 1, Q15_MAX)
    qparams = float(q.scale), q.zero_point, q.dtype, q.qmin, q.qmax
    angle, entries, scale, corrections = _build_table(samples.tobytes(), oversampling == 1, *qparams)
    if angle:
        return _sinusoid_by_angle_addition(operand, samples, angle).requantize(q)
    if not corrections and not (b.target.hardware.npu and q.dtype is DType.INT8):
        low, high = (int(end) << 7 for end in (entries.min(), entries.max()))
        return FixedPoint(b, b.table(index, entries), low, high, scale / 128).requantize(q)
    # An int16 TABLE whose INT32 result is not rescaled to int16 takes six NPU operations.
    total = operand.apply_table(entries, scale)
    for middle, gain, values in corrections:
        magnified = (operand.to_int32() - middle).rescale(DType.INT16, gain, saturate=True)
        # REQUIRE in TABLE: differences of neighbouring entries fit int16
        unit = max(float(np.abs(values).max()), float(np.abs(np.diff(values)).max())) / Q15_MAX
        first, second = to_common_scale(total, magnified.apply_table(values / unit, unit), q)
        total = first + second
    return total.requantize(q)


@lru_cache(maxsize=8)  # unrolled time steps and equal layers have equal tables
def _build_table(
    sample_bytes: bytes, is_int16: bool, *qparams: Any
) -> tuple[float, Array, float, list[tuple[int, int, Array]]]:
    """Build the tables of a function: main table and corrections.

    Args:
        sample_bytes: bytes of the function's values (``evaluate_on_operand``), which the cache can hash.
        is_int16: whether the operand can be any int16; False for an int8 operand, which always falls on an entry.
        qparams: arguments of the result's ``QParams``.

    Returns:
        The angle of ``find_phase_step`` (0 for other functions), the entries, their scale, and the corrections
        (``_correction_tables``).
    """
    samples, q = np.frombuffer(sample_bytes), QParams(*qparams)
    defined = np.flatnonzero(~np.isnan(samples))
    points = _extrapolate_nearest(samples, defined)[::128]
    if is_int16:
        _interpolate_to_domain_ends(points, samples, defined)
    # Entries have the scale of an int16 result. For an int8 result, they have the finest scale that covers its range.
    limit = 2.0 * float(q.scale) * (q.qmax - q.qmin)
    peak = max(float(np.abs(points).clip(max=limit).max()), 1e-30)
    table_q = q if q.dtype is DType.INT16 else QParams(peak / Q15_MAX, 0, DType.INT16, -Q15_MAX - 1, Q15_MAX)
    entries = _quantize_entries(points, table_q)
    # REQUIRE in TABLE: differences of neighbouring entries fit int16. At a jump, halve them: an error of one step.
    if np.abs(np.diff(entries)).max() > Q15_MAX:
        table_q = replace(table_q, scale=2 * float(table_q.scale), qmin=-(Q15_MAX // 2) - 1, qmax=Q15_MAX // 2)
        entries = _quantize_entries(points, table_q)
    angle = find_phase_step(samples) if is_int16 else 0.0
    corrections = list(_correction_tables(samples, defined, entries, table_q, q)) if is_int16 and not angle else []
    return angle, entries, float(table_q.scale), corrections


def evaluate_on_operand(function: Callable[[Array], Array], q: QParams, oversampling: int = 1) -> Array:
    """Evaluate the function at the real numbers of i / ``oversampling`` in parameters ``q``, i = -32768 ... 32768."""
    return np.asarray(function(q.dequantize(_INDEX / oversampling)), dtype=np.float64)


def find_phase_step(samples: Array) -> float:
    """Phase difference of neighbouring samples, if they are of a sinusoid that a TABLE interpolates badly; else 0.

    The limit is an interpolation error of 2**-8 of the amplitude.
    """
    sums, middle = samples[2:] + samples[:-2], samples[1:-1]
    # f(i - 1) + f(i + 1) = 2 * cos(angle) * f(i)
    twice_cosine = float(sums @ middle / max(float(middle @ middle), 1e-30)) if np.isfinite(samples).all() else 2.0
    is_sinusoid = abs(twice_cosine) < 2 and np.abs(sums - twice_cosine * middle).max() < 1e-9 * np.abs(middle).max()
    return angle if is_sinusoid and (angle := math.acos(twice_cosine / 2)) > math.tau / 32 / 128 else 0.0


def _sinusoid_by_angle_addition(x: FixedPoint, samples: Array, angle: float) -> FixedPoint:
    """Compute a sinusoid by the angle addition formula, from tables of the high byte h and of the low byte l.

    The tables are read only at their entries, so interpolation adds no error.

    f(256 * h + l) = f(256 * h) * cos(l * angle) + g(256 * h) * sin(l * angle), where g leads f by a quarter period:
    f(i + 1) = f(i) * cos(angle) + g(i) * sin(angle).
    """
    byte = np.arange(-256, 257).clip(-128, 128)  # h or l at the table's points: the index is 128 times the byte
    next_samples = np.append(samples[1:], 2 * math.cos(angle) * samples[-1] - samples[-2])
    f_samples, f_next = samples[byte * 256 + 32768], next_samples[byte * 256 + 32768]
    functions = (
        f_samples,
        (f_next - f_samples * math.cos(angle)) / math.sin(angle),
        np.cos(byte * angle),
        np.sin(byte * angle),
    )
    integers, high = x.to_int32(), x.rescale(DType.INT32, 1 / 256)
    operands = [high] * 2 + [(integers - high * 256).assume_range(-128, 128)] * 2
    pairs = np.stack(functions[:2]), np.stack(functions[2:])
    scales = [max(float(np.abs(pair).max()), float(np.abs(np.diff(pair)).max())) / Q15_MAX for pair in pairs]
    f, g, cosine, sine = (
        operand.rescale(DType.INT16, 128.0).apply_table(function / scale, scale)
        for operand, function, scale in zip(operands, functions, np.repeat(scales, 2).tolist(), strict=True)
    )
    return f * cosine + g * sine


def _correction_tables(
    samples: Array, defined: Array, entries: Array, table_q: QParams, q: QParams
) -> Iterator[tuple[int, int, Array]]:
    """Correction tables for the parts of the range where linear interpolation has a large error; at most two.

    Interpolation suffices if its error is at most 2**-9 of the result's range (half a step of int8), or 2**-13 in root
    mean square. So activations such as SiLU need no correction, which would add half to the cycles of
    EfficientNet-B0. A logit needs two corrections, one at each pole.

    Yields:
        The int16 at the middle of the part, the factor by which its table is finer, and the 513 values to add.
    """
    interpolated = np.interp(_INDEX, _INDEX[::128], table_q.dequantize(entries))
    table_error, result_error = np.zeros(samples.size), np.zeros(samples.size)
    # Errors of the sum of the tables, and of the result after clipping to its range.
    for error, grid_q in ((table_error, table_q), (result_error, q)):
        low, high = (float(grid_q.scale) * (end - grid_q.zero_point) for end in (grid_q.qmin, grid_q.qmax))
        error[defined] = (np.clip(samples, low, high) - np.clip(interpolated, low, high))[defined]
    full_range = float(q.scale) * (q.qmax - q.qmin)
    for _ in range(2):
        if (
            np.abs(result_error).max() <= full_range * 2.0**-9
            or (result_error**2).mean() <= (full_range * 2.0**-13) ** 2
        ):
            return
        reduction, start, gain, values, remaining = max(
            (_find_best_correction(table_error, result_error, gain) for gain in (128, 32, 8)), key=itemgetter(0)
        )
        # Too many places have an error, or a finer table does not reduce it.
        if reduction < (result_error**2).sum() / 8:
            return
        yield start + 32768 // gain - 32768, gain, values
        for error in (table_error, result_error):
            error[start : start + remaining.size] = remaining


def _find_best_correction(table_error: Array, result_error: Array, gain: int) -> tuple[float, int, int, Array, Array]:
    """Find the part of 65536 / ``gain`` values with the largest squared error, and its correction.

    Returns:
        The reduction of the sum of squared errors, the start of the part, ``gain``, the 513 correction values, and the
        remaining error of the part.
    """
    length = 65536 // gain
    cumulative = np.concatenate([[0.0], np.cumsum(result_error**2)])
    starts = np.arange(0, 65537 - length, 128)
    start = int(starts[np.argmax(cumulative[starts + length] - cumulative[starts])])
    part = table_error[start : start + length + 1]
    values = part[:: 128 // gain].copy()
    # Operands outside the part saturate to its ends: add 0. Index 32767 interpolates between the last two entries.
    values[[0, -2, -1]] = 0.0
    remaining = part - np.interp(np.arange(length + 1), np.arange(0, length + 1, 128 // gain), values)
    return float(cumulative[start + length] - cumulative[start] - (remaining**2).sum()), start, gain, values, remaining


#: Every int16, and 32768, the input of a table's last entry.
_INDEX = np.arange(-32768, 32769)


def _extrapolate_nearest(samples: Array, defined: Array) -> Array:
    """Replace each NaN in ``samples`` by the nearest element whose index is in ``defined``."""
    if defined.size == samples.size:
        return samples.copy()
    after = np.minimum(np.searchsorted(defined, np.arange(samples.size)), defined.size - 1)
    before = np.maximum(after - 1, 0)
    distance = np.abs(defined[[before, after]] - np.arange(samples.size))
    return samples[np.where(distance[0] <= distance[1], defined[before], defined[after])]


def _interpolate_to_domain_ends(points: Array, samples: Array, defined: Array) -> None:
    """Where the domain ends between two entries, extrapolate the outer entry from the last two values inside.

    Interpolation then meets the function at the last sample of its domain.
    """
    for end, inward in ((defined[0], 1), (defined[-1], -1)):
        outer = (end if inward > 0 else end + 127) // 128
        if end % 128 and np.isfinite(samples[end]) and np.isfinite(points[outer + inward]):
            slope = (points[outer + inward] - samples[end]) / ((outer + inward) * 128 - end)
            points[outer] = samples[end] + slope * (outer * 128 - end)


def _quantize_entries(samples: Array, q: QParams) -> Array:
    """Quantize a function's values; infinities saturate."""
    bound = float(q.scale) * 2.0**33
    return q.quantize(np.clip(samples, -bound, bound))
