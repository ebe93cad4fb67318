"""Decompositions of histograms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.histc.default, takes_quantized=True)
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, quantized: bool) -> Tensor:
    """Histogram of x with ``bins`` bins of equal width over [min, max], or over the range of x if min = max."""
    flat = x.reshape(-1, 1)
    data_range = (torch.amin(flat), torch.amax(flat)) if min == max else None
    low, high = data_range or (min, max)
    if quantized:  # quantized bin numbers are inexact, so elements are compared with the edges
        edges = low + (high - low) * (torch.arange(1, bins, dtype=x.dtype) / bins)
        first, beyond = (flat >= flat, flat != flat) if data_range else (flat >= low, flat > high)
        between = [flat >= edges] if bins > 1 else []
        inside = torch.cat([first, *between], 1) & ~torch.cat([*between, beyond], 1)
        counts = inside.to(x.dtype).sum(0)
        if not data_range:
            return counts
        middle = x.numel() * (torch.arange(bins) == bins // 2).to(x.dtype)
        # PyTorch widens a range of width 0 by 1 on each side, so that all elements fall into the middle bin.
        return torch.where(torch.eq(*data_range), middle, counts)
    if data_range:
        same = torch.eq(*data_range).to(x.dtype)
        low, high = low - same, high + same
    bin_numbers = torch.floor((flat - low) * (bins / (high - low)))
    bin_numbers = torch.where(flat == high, bins - 1, bin_numbers)
    return (bin_numbers == torch.arange(bins, dtype=x.dtype)).to(x.dtype).sum(0)


@decomposition(aten.histogram.bins_tensor)
def histogram(x: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False) -> tuple[Tensor, Tensor]:
    """Histogram: number of elements, or sum of their weights, per bin.

    Elements outside of the edges ``bins`` do not count.
    """
    flat = x.reshape(-1, 1)
    is_above_edge = torch.cat([flat >= bins[:-1], flat > bins[-1:]], 1)
    inside = is_above_edge[:, :-1] & ~is_above_edge[:, 1:]
    counts = (inside.to(x.dtype) if weight is None else torch.where(inside, weight.reshape(-1, 1), 0)).sum(0)
    return (counts / (counts.sum() * (bins[1:] - bins[:-1])) if density else counts), bins.clone()


@decomposition(aten.histogram.bin_ct)
def histogram_of_equal_bins(
    x: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Histogram of equal bins over ``range``, or over the range of x. A range of width 0 is widened by 0.5 per side."""
    range = range or ((0.0, 1.0) if x.numel() == 0 else None)
    low, high = (torch.tensor(end) for end in range) if range else (torch.amin(x), torch.amax(x))
    margin = torch.where(low == high, 0.5, 0.0).to(x.dtype)
    low, high = low - margin, high + margin
    edges = low + (high - low) * (torch.arange(bins, dtype=x.dtype) / bins)
    return histogram(x, torch.cat([edges, high.reshape(1)]), weight=weight, density=density)
