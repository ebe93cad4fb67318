"""Observers of int8 activations: how a quantization range follows from the calibration values.

"minmax" takes the minimum and maximum of all calibration values. The other observers differ from each other only for
tensors with at least ``MIN_HISTOGRAM_VALUES`` (8,192) values in all samples together, except casts of integers. For a
tensor with fewer values, they all take the same range. For a constant of the model, this range has the least squared
error. For another tensor, it is the minimum and maximum, widened because values of new inputs usually exceed the range
of few samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.quantization.observer import MIN_HISTOGRAM_VALUES, HistogramObserver, RangeObserver

#: Fraction of the values that ``PercentileObserver`` clips at each end.
TAIL_FRACTION = 1e-4
_HISTOGRAM_BINS, _CLIPPING_CANDIDATES = 2048, 64


class MinMaxObserver(RangeObserver):
    """Minimum and maximum: no calibration value is clipped."""


class PercentileObserver(HistogramObserver):
    """Percentiles: clips one value of 10,000 (``TAIL_FRACTION``) at each end."""

    def _range(self, statistics: Any) -> tuple[Any, Any]:
        low, high = super()._range(statistics)
        if _uses_distribution(self, statistics):
            values = torch.cat(statistics.values).double().numpy()
            low, high = np.quantile(values, TAIL_FRACTION), np.quantile(values, 1 - TAIL_FRACTION)
        return low, high


class EntropyObserver(HistogramObserver):
    """Entropy calibration: the range with the smallest Kullback-Leibler divergence between values and integers."""

    def _range(self, statistics: Any) -> tuple[Any, Any]:
        low, high = super()._range(statistics)
        if _uses_distribution(self, statistics):
            low, high = _minimize_kl_divergence(
                torch.cat(statistics.values), statistics.low, statistics.high, self.quant_max - self.quant_min
            )
        return low, high


#: Observer class of each value of the option ``observer``. The first value is the default.
OBSERVERS: dict[str, type[RangeObserver]] = {
    "mse": HistogramObserver,
    "minmax": MinMaxObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
}


def _uses_distribution(observer: RangeObserver, statistics: Any) -> bool:
    """Whether the range follows from the distribution of the values, not only from their minimum and maximum.

    Conditions: at least ``MIN_HISTOGRAM_VALUES`` values, which are not all equal, and the tensor is not a cast of
    integers.
    """
    enough = statistics.count >= MIN_HISTOGRAM_VALUES
    return bool(enough and not observer.is_integer and statistics.high > statistics.low)


def _minimize_kl_divergence(values: torch.Tensor, low: float, high: float, intervals: int) -> tuple[float, float]:
    """Find the range with the smallest KL divergence among candidates: both bounds times a factor from 1 down to 1/16.

    The histogram omits zeros, which ReLU often produces, because every range represents zero exactly.
    """
    range_min, range_max = min(low, 0.0), max(high, 0.0)
    counts = torch.histc(values[values != 0], _HISTOGRAM_BINS, range_min, range_max).double().numpy()
    edges = np.linspace(range_min, range_max, _HISTOGRAM_BINS + 1)
    best_bounds, smallest = (range_min, range_max), np.inf
    for factor in np.arange(_CLIPPING_CANDIDATES, 3, -1) / _CLIPPING_CANDIDATES:
        bounds = range_min * factor, range_max * factor
        start, stop = np.searchsorted(edges, bounds[0], "right") - 1, np.searchsorted(edges, bounds[1], "left")
        divergence = _kl_divergence(counts, max(int(start), 0), int(stop), intervals + 1)
        if divergence < smallest:
            best_bounds, smallest = bounds, divergence
    return best_bounds


def _kl_divergence(counts: Any, start: int, stop: int, levels: int) -> float:
    """KL divergence between the histogram clipped to [start, stop) and the same one quantized to ``levels`` levels."""
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
