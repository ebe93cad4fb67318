"""Observers of int8 activations by name: how the range of a tensor follows from what calibration shows of it.

They differ in what they make of many values. Of fewer than 8,192 in all samples, all but "minmax" take the extremes,
moved outwards, as new values will lie beyond.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.quantization.observer import MANY, ActivationObserver, RangeObserver

#: Part of the values of a tensor that a percentile leaves out at either end.
TAIL = 1e-4
_BINS, _CANDIDATES = 2048, 64


class MinMaxObserver(RangeObserver):
    """The least and the largest value: nothing that was seen is clipped."""


class PercentileObserver(ActivationObserver):
    """All but one value of 10,000 at either end."""

    def _range(self, seen: Any) -> tuple[Any, Any]:
        low, high = super()._range(seen)
        if _uses_distribution(self, seen):
            values = torch.cat(seen.values).double().numpy()
            low, high = np.quantile(values, TAIL), np.quantile(values, 1 - TAIL)
        return low, high


class EntropyObserver(ActivationObserver):
    """The range whose integers are distributed most like the values (least Kullback-Leibler divergence)."""

    def _range(self, seen: Any) -> tuple[Any, Any]:
        low, high = super()._range(seen)
        if _uses_distribution(self, seen):
            low, high = _minimize_divergence(
                torch.cat(seen.values), seen.low, seen.high, self.quant_max - self.quant_min
            )
        return low, high


#: Names for ``observer=``; the first is the default.
OBSERVERS: dict[str, type[RangeObserver]] = {
    "mse": ActivationObserver,
    "minmax": MinMaxObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
}


def _uses_distribution(observer: RangeObserver, seen: Any) -> bool:
    """Whether the distribution of what was seen says more than its extremes."""
    return bool(seen.count >= MANY and not observer.exact and seen.high > seen.low)


def _minimize_divergence(values: torch.Tensor, low: float, high: float, steps: int) -> tuple[float, float]:
    """Bounds moved inwards by the same part of the range. Zeros, which relu makes many of, are exact in every range."""
    first, last = min(low, 0.0), max(high, 0.0)
    counts = torch.histc(values[values != 0], _BINS, first, last).double().numpy()
    edges = np.linspace(first, last, _BINS + 1)
    best, least = (first, last), np.inf
    for part in np.arange(_CANDIDATES, 3, -1) / _CANDIDATES:
        bounds = first * part, last * part
        start, stop = np.searchsorted(edges, bounds[0], "right") - 1, np.searchsorted(edges, bounds[1], "left")
        divergence = _divergence(counts, max(int(start), 0), int(stop), steps + 1)
        if divergence < least:
            best, least = bounds, divergence
    return best


def _divergence(counts: Any, start: int, stop: int, levels: int) -> float:
    """Of the histogram that is clipped to [start, stop) from what ``levels`` integers keep of it."""
    clipped = counts[start:stop].copy()
    inside = clipped.copy()
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[stop:].sum()
    place = np.arange(len(inside)) * levels // max(len(inside), 1)
    filled = (inside > 0).astype(float)
    sums, numbers = np.bincount(place, inside, levels), np.bincount(place, filled, levels)
    kept = np.where(inside > 0, (sums / np.maximum(numbers, 1))[place], 0.0)
    p, q = clipped / clipped.sum(), np.maximum(kept / max(kept.sum(), 1.0), 1e-10)
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
