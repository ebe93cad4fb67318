"""Observers of int8 activations: how a quantization range follows from the calibration values.

The observers differ only for tensors with many calibration values. Below 8,192 values in all samples, every observer
but "minmax" takes minimum and maximum and widens the range, because new values will exceed it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.quantization.observer import MIN_HISTOGRAM_VALUES, ActivationObserver, RangeObserver

#: Fraction of the values that ``PercentileObserver`` clips at each end.
TAIL = 1e-4
_BINS, _CANDIDATES = 2048, 64


class MinMaxObserver(RangeObserver):
    """Minimum and maximum: no calibration value is clipped."""


class PercentileObserver(ActivationObserver):
    """Percentiles: clips one value of 10,000 (``TAIL``) at each end."""

    def _range(self, seen: Any) -> tuple[Any, Any]:
        low, high = super()._range(seen)
        if _uses_distribution(self, seen):
            values = torch.cat(seen.values).double().numpy()
            low, high = np.quantile(values, TAIL), np.quantile(values, 1 - TAIL)
        return low, high


class EntropyObserver(ActivationObserver):
    """Entropy calibration: the range with the smallest Kullback-Leibler divergence between values and integers."""

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
    """Whether there are enough distinct values to use their distribution instead of minimum and maximum."""
    return bool(seen.count >= MIN_HISTOGRAM_VALUES and not observer.is_integer and seen.high > seen.low)


def _minimize_divergence(values: torch.Tensor, low: float, high: float, steps: int) -> tuple[float, float]:
    """The range of smallest divergence among ranges that shrink both bounds by the same factor.

    Zeros, which ReLU produces often, are left out of the histogram: every range represents them exactly.
    """
    first, last = min(low, 0.0), max(high, 0.0)
    counts = torch.histc(values[values != 0], _BINS, first, last).double().numpy()
    edges = np.linspace(first, last, _BINS + 1)
    best, least = (first, last), np.inf
    for factor in np.arange(_CANDIDATES, 3, -1) / _CANDIDATES:
        bounds = first * factor, last * factor
        start, stop = np.searchsorted(edges, bounds[0], "right") - 1, np.searchsorted(edges, bounds[1], "left")
        divergence = _divergence(counts, max(int(start), 0), int(stop), steps + 1)
        if divergence < least:
            best, least = bounds, divergence
    return best


def _divergence(counts: Any, start: int, stop: int, levels: int) -> float:
    """Kullback-Leibler divergence between the histogram, clipped to [start, stop), and its rounding to ``levels``."""
    clipped = counts[start:stop].copy()
    inside = clipped.copy()
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[stop:].sum()
    level = np.arange(len(inside)) * levels // max(len(inside), 1)
    is_nonzero = (inside > 0).astype(float)
    sums, bins = np.bincount(level, inside, levels), np.bincount(level, is_nonzero, levels)
    rounded = np.where(inside > 0, (sums / np.maximum(bins, 1))[level], 0.0)
    p, q = clipped / clipped.sum(), np.maximum(rounded / max(rounded.sum(), 1.0), 1e-10)
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
