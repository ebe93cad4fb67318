"""How far numbers are from those that they stand for: sums over one sample, which add up over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arm_backend_core.kinds import ScalarKind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Share of the values that ``Losses.p999`` bounds, and how many are enough to find it.
_PERCENTILE, _PERCENTILE_SAMPLES = 0.999, 1 << 16


@dataclass(frozen=True)
class ErrorMetrics:
    """The distance between two tensors, over all samples.

    Attributes:
        sqnr: power of the signal over power of the error, in dB; infinite without any error.
        cosine: of the angle between both; None where one of them is 0 throughout.
        max_error: the largest difference.
    """

    sqnr: float
    cosine: float | None
    max_error: float


@dataclass
class ErrorSums:
    """What ``ErrorMetrics`` follows from.

    Attributes:
        signal, noise, actual, dot: sums of squares of what is right, of the error, of what is given; of products.
        max_error: difference.
    """

    signal: float = 0.0
    noise: float = 0.0
    actual: float = 0.0
    dot: float = 0.0
    max_error: float = 0.0

    @staticmethod
    def of(right: Tensor, given: Tensor) -> ErrorSums:
        """Of one tensor."""
        if not right.numel():
            return ErrorSums()
        x, y = _flatten(right), _flatten(given)
        if x.dtype is not y.dtype:
            x, y = x.double(), y.double()
        error = y - x
        return ErrorSums(_dot(x, x), _dot(error, error), _dot(y, y), _dot(x, y), _max_abs(error))

    @property
    def metrics(self) -> ErrorMetrics:
        """The figures."""
        norm = math.sqrt(self.signal * self.actual)
        return ErrorMetrics(decibels(self.signal, self.noise), self.dot / norm if norm else None, self.max_error)


@dataclass
class Losses:
    """What a layer loses by itself, on the inputs that it has in floating point; sums of squares.

    Attributes:
        noise: all of it. The others are what it comes from, each by itself.
        weights: integers in place of weights.
        rounding: to the steps of the result, of values within its range.
        clipping: of values beyond its range.
        signal, count, clipped: the values' squares, their number, and how many lie beyond the range.
        max_error: loss of a value.
        low, high: extremes of the values.
        p999: what 99.9 % of their sizes do not exceed, in the sample where that is most.
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
    def of(right: Tensor, unrounded: Tensor | None, grid: QuantizationGrid) -> Losses:
        """Of one tensor.

        Args:
            unrounded: what integers as weights make of right inputs; None where that is ``right``.
        """
        if not right.numel():
            return Losses()
        x = _flatten(right)
        low, high = grid.bounds
        least, most = map(float, torch.aminmax(x))
        half = grid.scale / 2  # so far out a value is rounded to the end of the range, not cut off
        clips = least < low - half or most > high + half
        inside = x.clamp(low, high) if clips else x
        rounding = grid.round_values(inside) - inside
        error = (
            rounding if unrounded is None and not clips else grid.round_values(x if unrounded is None else unrounded)
        )
        error = error if error is rounding else error.reshape(-1).sub_(x)
        return Losses(
            noise=_energy(error),
            weights=0.0 if unrounded is None else _energy(_flatten(unrounded) - x),
            rounding=_energy(rounding),
            clipping=_energy(inside - x) if clips else 0.0,
            signal=_energy(x),
            count=x.numel(),
            clipped=int(((x < low - half) | (x > high + half)).sum()) if clips else 0,
            max_error=_max_abs(error),
            low=least,
            high=most,
            p999=_p999(x),
        )


@dataclass(frozen=True)
class QuantizationGrid:
    """The real numbers that a quantized tensor can hold: ``(integer - zero_point) * scale``."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The first and the last."""
        return (self.quant_min - self.zero_point) * self.scale, (self.quant_max - self.zero_point) * self.scale

    @property
    def steps(self) -> int:
        """How many there are, less one."""
        return self.quant_max - self.quant_min

    def round_values(self, x: Tensor) -> Tensor:
        """The nearest of them."""
        first, last = self.quant_min - self.zero_point, self.quant_max - self.zero_point
        return (x / self.scale).round_().clamp_(first, last).mul_(self.scale)


def sum_errors(parts: Iterable[ErrorSums]) -> ErrorSums:
    """Of all samples."""
    total = ErrorSums()
    for part in parts:
        for name in ("signal", "noise", "actual", "dot"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.max_error = _max_or_nan(total.max_error, part.max_error)
    return total


def sum_losses(parts: Iterable[Losses]) -> Losses:
    """Of all samples."""
    total = Losses()
    for part in parts:
        for field in fields(Losses):
            one, other = getattr(total, field.name), getattr(part, field.name)
            extreme = _EXTREMES.get(field.name)
            setattr(total, field.name, one + other if extreme is None else extreme(one, other))
    return total


def decibels(signal: float, noise: float) -> float:
    """``signal`` over ``noise``; infinite without noise, minus infinity for noise alone."""
    if not noise:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf  # the quotient may be 0


def _max_or_nan(one: float, other: float) -> float:
    """The larger; NaN where either is that: ``max`` takes the first then."""
    return one if one >= other or math.isnan(one) else other


#: Fields of ``Losses`` that do not add up.
_EXTREMES: dict[str, Callable[[float, float], float]] = {"max_error": _max_or_nan, "low": min, "high": max, "p999": max}


def in_float64(x: Tensor) -> Tensor:
    """In float64; of complex numbers both parts of each."""
    if kind_of(x.dtype) is ScalarKind.COMPLEX:
        x = torch.view_as_real(x.resolve_conj())
    return x.double()


def _flatten(x: Tensor) -> Tensor:
    """In a row, as float32 where it is that: a sum of squares so is good to a millionth, in a tenth of the time."""
    return x.reshape(-1) if x.dtype is torch.float32 else in_float64(x).reshape(-1)


def _energy(x: Tensor) -> float:
    return _dot(x, x)


def _dot(x: Tensor, y: Tensor) -> float:
    """The sum of products; in float64 where float32 might not hold it."""
    found = abs(made := float(torch.dot(x, y)))
    return made if 1e-25 < found < 1e30 or x.dtype is torch.float64 else float(torch.dot(x.double(), y.double()))


def _max_abs(x: Tensor) -> float:
    least, most = map(float, torch.aminmax(x))
    return _max_or_nan(-least, most)


def _p999(x: Tensor) -> float:
    """What 99.9 % of the sizes do not exceed; of some of many."""
    sizes = x[:: x.numel() // _PERCENTILE_SAMPLES | 1].abs() if x.numel() > _PERCENTILE_SAMPLES else x.abs()
    return float(sizes.kthvalue(max(math.ceil(_PERCENTILE * sizes.numel()), 1)).values)
