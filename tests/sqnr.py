"""Signal to quantization noise ratio of outputs, for tests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def sqnr(expected: Tensor | Iterable[Tensor], actual: Tensor | Iterable[Tensor]) -> float:
    """Power of the signal over power of the error, in dB, over all elements of all tensors; infinite without error."""
    signals, results = ([x] if isinstance(x, Tensor) else list(x) for x in (expected, actual))
    noise = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(signals, results, strict=True))
    return 10 * math.log10(sum(float(x.double().square().sum()) for x in signals) / noise) if noise else math.inf
