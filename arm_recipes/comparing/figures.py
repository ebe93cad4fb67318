"""How far numbers are from those that they stand for: sums over one sample, which add up over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

#: Share of the values that ``Spread.usual`` bounds.
_USUAL = 0.999


@dataclass(frozen=True)
class Gap:
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
class Sums:
    """What ``Gap`` follows from.

    Attributes:
        signal, noise, other, dot: sums of squares of what is right, of the error, of what is given; of products.
        largest: difference.
    """

    signal: float = 0.0
    noise: float = 0.0
    other: float = 0.0
    dot: float = 0.0
    largest: float = 0.0

    @staticmethod
    def of(right: Tensor, given: Tensor) -> Sums:
        """Of one tensor."""
        x, y = right.double(), given.double()
        error = y - x
        largest = float(error.abs().max()) if error.numel() else 0.0
        return Sums(_energy(x), _energy(error), _energy(y), float((x * y).sum()), largest)

    @property
    def gap(self) -> Gap:
        """The figures."""
        norm = math.sqrt(self.signal * self.other)
        return Gap(decibels(self.signal, self.noise), self.dot / norm if norm else None, self.largest)


@dataclass
class Losses:
    """What a layer loses by itself, on the inputs that it has in floating point; sums of squares.

    Attributes:
        noise: all of it. The others are what it comes from, each by itself.
        weights: integers in place of weights.
        rounding: to the steps of the result, of values within its range.
        clipping: of values beyond its range.
        signal, count, clipped: the values' squares, their number, and how many lie beyond the range.
        largest: loss of a value.
        low, high: extremes of the values.
        usual: what 99.9 % of them do not exceed; the largest of all samples.
    """

    noise: float = 0.0
    weights: float = 0.0
    rounding: float = 0.0
    clipping: float = 0.0
    signal: float = 0.0
    count: int = 0
    clipped: int = 0
    largest: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    usual: float = 0.0

    @staticmethod
    def of(right: Tensor, unrounded: Tensor | None, grid: Grid) -> Losses:
        """Of one tensor.

        Args:
            unrounded: what integers as weights make of right inputs; None where that is ``right``.
        """
        x = right.double()
        if not x.numel():
            return Losses()
        low, high = grid.bounds
        inside = x.clamp(low, high)
        mine = x if unrounded is None else unrounded.double()
        error = grid.rounded(mine) - x
        size = x.abs().flatten()
        place = max(math.ceil(_USUAL * size.numel()), 1)
        return Losses(
            noise=_energy(error),
            weights=0.0 if unrounded is None else _energy(mine - x),
            rounding=_energy(grid.rounded(inside) - inside),
            clipping=_energy(inside - x),
            signal=_energy(x),
            count=x.numel(),
            # Half a step further out is rounded to the end of the range, not cut off.
            clipped=int(((x < low - grid.scale / 2) | (x > high + grid.scale / 2)).sum()),
            largest=float(error.abs().max()),
            low=float(x.min()),
            high=float(x.max()),
            usual=float(size.kthvalue(place).values),
        )


@dataclass(frozen=True)
class Grid:
    """The real numbers that a quantized tensor can hold: ``(integer - zero_point) * scale``."""

    scale: float
    zero_point: int
    least: int
    most: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The first and the last."""
        return (self.least - self.zero_point) * self.scale, (self.most - self.zero_point) * self.scale

    @property
    def steps(self) -> int:
        """How many there are, less one."""
        return self.most - self.least

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest of them."""
        steps = (x / self.scale).round() + self.zero_point
        return (steps.clamp(self.least, self.most) - self.zero_point) * self.scale


def added(parts: Iterable[Sums]) -> Sums:
    """Of all samples."""
    total = Sums()
    for part in parts:
        for name in ("signal", "noise", "other", "dot"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.largest = max(total.largest, part.largest)
    return total


def lost(parts: Iterable[Losses]) -> Losses:
    """Of all samples."""
    total = Losses()
    for part in parts:
        for field in fields(Losses):
            one, other = getattr(total, field.name), getattr(part, field.name)
            extreme = {"largest": max, "low": min, "high": max, "usual": max}.get(field.name)
            setattr(total, field.name, one + other if extreme is None else extreme(one, other))
    return total


def decibels(signal: float, noise: float) -> float:
    """``signal`` over ``noise``; infinite without noise, minus infinity for noise alone."""
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _energy(x: Tensor) -> float:
    return float((x * x).sum())
