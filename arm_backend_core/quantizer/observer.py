"""Ranges of activations from few samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver

#: Values seen from which on a histogram says more than the extremes.
_MANY = 8192


def widened(low: torch.Tensor, high: torch.Tensor, count: int, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Extremes of ``count`` values, moved outwards: those of new values will lie beyond.

    The gap shrinks as the square root of the number of values. A bound that is exactly 0 is the end of a function's
    range (relu), not of a sample, and stays.
    """
    extra = (high - low) * min(margin / math.sqrt(max(count, 1)), 0.5)
    return torch.where(low == 0, low, low - extra), torch.where(high == 0, high, high + extra)


class SampleHistogramObserver(HistogramObserver):
    """A histogram's range with the least squared error; while few values were seen, their widened extremes."""

    def __init__(self, *args: Any, margin: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.margin = margin
        self.count = 0

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Observe a tensor; returned as it is."""
        self.count += x_orig.numel()
        result: torch.Tensor = super().forward(x_orig)
        return result

    def calculate_qparams(self) -> Any:
        """Scale and zero point."""
        if self.count >= _MANY:
            return super().calculate_qparams()
        return self._calculate_qparams(*widened(self.min_val, self.max_val, self.count, self.margin))


class SampleMinMaxObserver(MinMaxObserver):
    """Extremes, widened according to how few values they come from."""

    def __init__(self, *args: Any, margin: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.margin = margin
        self.count = 0

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Observe a tensor; returned as it is."""
        self.count += x_orig.numel()
        result: torch.Tensor = super().forward(x_orig)
        return result

    def calculate_qparams(self) -> Any:
        """Scale and zero point."""
        return self._calculate_qparams(*widened(self.min_val, self.max_val, self.count, self.margin))
