"""Error metrics (SQNR, cosine similarity, maximum error) computed from sums over all samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arm_backend_core.scalar_kind import ScalarKind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: ``IsolatedErrorSums.p999`` is this quantile. If a tensor has more than ``_MAX_QUANTILE_VALUES`` elements, the
#: quantile is computed from evenly spaced elements.
_QUANTILE, _MAX_QUANTILE_VALUES = 0.999, 1 << 16


@dataclass(frozen=True)
class ErrorMetrics:
    """Error of a tensor relative to its reference, over all samples.

    Attributes:
        sqnr: signal-to-quantization-noise ratio in dB; infinite without any error.
        cosine: cosine similarity; None if one of the tensors is 0 throughout.
        max_error: largest absolute difference.
    """

    sqnr: float
    cosine: float | None
    max_error: float


@dataclass
class ErrorSums:
    """Sums from which ``ErrorMetrics`` are computed.

    Attributes:
        signal: sum of squares of the reference.
        noise: sum of squares of the error.
        actual: sum of squares of the actual values.
        dot: dot product of reference and actual values.
        max_error: largest absolute difference.
    """

    signal: float = 0.0
    noise: float = 0.0
    actual: float = 0.0
    dot: float = 0.0
    max_error: float = 0.0

    @staticmethod
    def of(reference: Tensor, actual: Tensor) -> ErrorSums:
        """Compute the sums of one tensor."""
        if not reference.numel():
            return ErrorSums()
        x, y = _flatten(reference), _flatten(actual)
        if x.dtype is not y.dtype:
            x, y = x.double(), y.double()
        error = y - x
        return ErrorSums(_dot(x, x), _dot(error, error), _dot(y, y), _dot(x, y), _max_abs(error))

    @property
    def metrics(self) -> ErrorMetrics:
        """Error metrics of all values that the sums cover."""
        norm = math.sqrt(self.signal * self.actual)
        return ErrorMetrics(decibels(self.signal, self.noise), self.dot / norm if norm else None, self.max_error)


@dataclass
class IsolatedErrorSums:
    """Quantization error of an isolated layer, which reads floating-point inputs.

    Attributes:
        noise: sum of squares of the total error.
        weights: sum of squares of the error from quantizing the weights alone. The three sums ``weights``, ``rounding``
            and ``clipping`` need not add up to ``noise``.
        rounding: sum of squares of the error from rounding alone, after values outside of the range are clipped.
        clipping: sum of squares of the error from clipping alone.
        signal: sum of squares of the reference.
        count: number of values.
        clipped: number of values outside of the range.
        max_error: largest absolute error of a value.
        low, high: minimum and maximum of the reference.
        p999: 99.9th percentile of the reference's absolute values. Over several samples, the largest of their
            percentiles.
    """

    noise: float = 0.0
    weights: float = 0.0
    rounding: float = 0.0
    clipping: float = 0.0
    signal: float = 0.0
    count: int = 0
    clipped: int = 0
    max_error: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    p999: float = 0.0

    @staticmethod
    def of(reference: Tensor, unrounded: Tensor | None, qparams: TensorQParams) -> IsolatedErrorSums:
        """Compute the error sums of one tensor.

        Args:
            reference: result in floating point.
            unrounded: result with quantized weights, not yet rounded itself; None if it equals ``reference``.
            qparams: quantization parameters of the result.
        """
        if not reference.numel():
            return IsolatedErrorSums()
        x = _flatten(reference)
        low, high = qparams.bounds
        minimum, maximum = map(float, torch.aminmax(x))
        half_step = qparams.scale / 2  # values less than half a step outside are rounded, not clipped
        clips = minimum < low - half_step or maximum > high + half_step
        clipped_x = x.clamp(low, high) if clips else x
        rounding = qparams.round_values(clipped_x) - clipped_x
        error = (
            rounding if unrounded is None and not clips else qparams.round_values(x if unrounded is None else unrounded)
        )
        error = error if error is rounding else error.reshape(-1).sub_(x)
        return IsolatedErrorSums(
            noise=_sum_of_squares(error),
            weights=0.0 if unrounded is None else _sum_of_squares(_flatten(unrounded) - x),
            rounding=_sum_of_squares(rounding),
            clipping=_sum_of_squares(clipped_x - x) if clips else 0.0,
            signal=_sum_of_squares(x),
            count=x.numel(),
            clipped=int(((x < low - half_step) | (x > high + half_step)).sum()) if clips else 0,
            max_error=_max_abs(error),
            low=minimum,
            high=maximum,
            p999=_p999(x),
        )


@dataclass(frozen=True)
class TensorQParams:
    """Per-tensor quantization parameters. The tensor represents the numbers ``(integer - zero_point) * scale``."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest representable number."""
        return (self.quant_min - self.zero_point) * self.scale, (self.quant_max - self.zero_point) * self.scale

    @property
    def steps(self) -> int:
        """Number of steps from the smallest to the largest representable number."""
        return self.quant_max - self.quant_min

    def round_values(self, x: Tensor) -> Tensor:
        """Round to the nearest representable numbers."""
        first, last = self.quant_min - self.zero_point, self.quant_max - self.zero_point
        return (x / self.scale).round_().clamp_(first, last).mul_(self.scale)


def sum_errors(parts: Iterable[ErrorSums]) -> ErrorSums:
    """Add up the sums of all samples; ``max_error`` is the maximum."""
    total = ErrorSums()
    for part in parts:
        for name in ("signal", "noise", "actual", "dot"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.max_error = _max_or_nan(total.max_error, part.max_error)
    return total


def sum_isolated_errors(parts: Iterable[IsolatedErrorSums]) -> IsolatedErrorSums:
    """Add up the error sums of all samples; fields in ``_REDUCTIONS`` are the minimum or maximum."""
    total = IsolatedErrorSums()
    for part in parts:
        for field in fields(IsolatedErrorSums):
            one, other = getattr(total, field.name), getattr(part, field.name)
            reduce = _REDUCTIONS.get(field.name)
            setattr(total, field.name, one + other if reduce is None else reduce(one, other))
    return total


def decibels(signal: float, noise: float) -> float:
    """Compute 10 * log10(signal / noise); infinite without noise, minus infinity without signal."""
    if not noise:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf  # the quotient could underflow to 0


def _max_or_nan(one: float, other: float) -> float:
    """Return the larger number, NaN if either is NaN. Python's ``max`` returns its first argument in this case."""
    return one if one >= other or math.isnan(one) else other


#: How fields of ``IsolatedErrorSums`` are reduced over samples; the other fields are added.
_REDUCTIONS: dict[str, Callable[[float, float], float]] = {
    "max_error": _max_or_nan,
    "low": min,
    "high": max,
    "p999": max,
}


def to_float64(x: Tensor) -> Tensor:
    """Convert to float64; a complex tensor becomes its real and imaginary parts."""
    if kind_of(x.dtype) is ScalarKind.COMPLEX:
        x = torch.view_as_real(x.resolve_conj())
    return x.double()


def _flatten(x: Tensor) -> Tensor:
    """Flatten; float32 stays float32, other types become float64.

    Sums of squares in float32 have a relative error of 1e-6, and take a tenth of the time of float64.
    """
    return x.reshape(-1) if x.dtype is torch.float32 else to_float64(x).reshape(-1)


def _sum_of_squares(x: Tensor) -> float:
    return _dot(x, x)


def _dot(x: Tensor, y: Tensor) -> float:
    """Compute the dot product; in float64 if float32 might overflow or underflow."""
    absolute = abs(product := float(torch.dot(x, y)))
    return product if 1e-25 < absolute < 1e30 or x.dtype is torch.float64 else float(torch.dot(x.double(), y.double()))


def _max_abs(x: Tensor) -> float:
    minimum, maximum = map(float, torch.aminmax(x))
    return _max_or_nan(-minimum, maximum)


def _p999(x: Tensor) -> float:
    """Compute the 99.9th percentile of the absolute values, from evenly spaced elements if the tensor is large."""
    magnitudes = x[:: x.numel() // _MAX_QUANTILE_VALUES | 1].abs() if x.numel() > _MAX_QUANTILE_VALUES else x.abs()
    return float(magnitudes.kthvalue(max(math.ceil(_QUANTILE * magnitudes.numel()), 1)).values)
