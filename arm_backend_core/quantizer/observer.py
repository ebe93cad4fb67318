"""Ranges of activations from few samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver

#: Values seen from which on a histogram says more than the extremes.
_MANY = 8192


def widened(low: torch.Tensor, high: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Extremes of ``count`` values, moved outwards: those of new values will lie beyond.

    The gap shrinks as the square root of the number of values. A bound that is exactly 0 is the end of a function's
    range (relu), not of a sample, and stays.
    """
    extra = (high - low) * min(1 / math.sqrt(max(count, 1)), 0.5)
    return torch.where(low == 0, low, low - extra), torch.where(high == 0, high, high + extra)


class SampleHistogramObserver(HistogramObserver):
    """A histogram's range with the least squared error; while few values were seen, their widened extremes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        return self._calculate_qparams(*widened(self.min_val, self.max_val, self.count))


class HeadroomObserver(MinMaxObserver):
    """Extremes, doubled: for int16, which has a bit to spare for values that calibration did not show.

    Rounding to 15 bits is far below the noise of int8 weights; clipping one value is not.
    """

    def calculate_qparams(self) -> Any:
        """Scale and zero point."""
        return self._calculate_qparams(2 * self.min_val, 2 * self.max_val)
