"""What calibration shows of a tensor, and the scale and zero point that follow from it.

Parameters are computed once, when they are first asked for after a forward pass, whatever was seen: a tensor that was
zero, a constant, 1e-30 and 1e30 all give a positive finite scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import ObserverBase

from arm_backend_core.errors import ModelError

#: Values of a tensor that its histogram is made of; of more, every other one is dropped.
_MAX_KEPT_VALUES = 1 << 16
#: Values seen from which on their distribution says more than their extremes.
MIN_HISTOGRAM_VALUES = 8192
#: Bins of a histogram and candidates for each end of a range.
_BINS, _CANDIDATES = 2048, 256
#: Weights of fewer steps on either side of 0 are clipped where that errs less.
MIN_UNCLIPPED_LEVELS = 16
#: Smallest scale: the product of two, the step of an accumulator, is still a normal float32.
SMALLEST_SCALE = 2.0**-60
Array = np.ndarray[Any, Any]
#: A lower or upper bound of a tensor, or of each of its channels.
Bounds = Array | float
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


class NonFiniteError(ModelError):
    """Calibration met a value that has no place on any scale."""


@dataclass
class _Statistics:
    """What was seen of a tensor: extremes, one or one for each channel; floats and arrays cost less than tensors.

    ``values``, ``kept_count`` in all, are float32, 1-D; of ``stride`` elements one is kept.
    ``is_integer``: it had whole numbers alone; None where nobody looked.
    """

    low: Bounds = 0.0
    high: Bounds = 0.0
    count: int = 0
    values: list[Tensor] = field(default_factory=list)
    kept_count: int = 0
    stride: int = 1
    is_integer: bool | None = None
    parameters: tuple[Tensor, Tensor] | None = None


class RangeObserver(ObserverBase):
    """Keeps the extremes of a tensor; a subclass says which range they give.

    Attributes:
        scale_of_zeros: scale of what was zero whenever it was seen; products with it still leave room for a bias.
        description: what is observed, in words.
        is_constant: whether it is a constant, of which no other values will come.
        is_integer: whether it is integers cast to real numbers: in steps of a power of two, each of these is exact, as is
            what had whole numbers alone in all samples (masks, what was rounded), which comparisons find equal then.
    """

    scale_of_zeros = 2.0**-14

    def __init__(
        self, dtype: torch.dtype, *, qscheme: torch.qscheme, quant_min: int, quant_max: int, is_dynamic: bool = False
    ) -> None:
        super().__init__(dtype, is_dynamic)
        self.qscheme, self.quant_min, self.quant_max = qscheme, quant_min, quant_max
        self.description, self.is_constant, self.is_integer = "a tensor", False, False
        self._statistics = _Statistics()

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor; returned as it is.

        Raises:
            NotFinite: it holds NaN or an infinity.
        """
        if x.numel():
            seen = self._statistics
            low, high = self._min_max(x)
            if not np.isfinite(low + high).all():
                what = "NaN" if bool(x.isnan().any()) else "an infinity"
                raise NonFiniteError(f"{self.description} holds {what}, which no scale can represent")
            if seen.count:
                low, high = np.minimum(low, seen.low), np.maximum(high, seen.high)
            seen.low, seen.high, seen.parameters = low, high, None
            seen.count += x.numel()
        return x

    @property
    def count(self) -> int:
        """How many elements it was given."""
        return self._statistics.count

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the largest element that it was given."""
        return float(np.min(self._statistics.low)), float(np.max(self._statistics.high))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale (float32) and zero point (int64), of one element or one for each channel."""
        seen = self._statistics
        if seen.parameters is None:
            seen.parameters = self._scale_and_zero_point(*self._range(seen))
        return seen.parameters

    def _min_max(self, x: Tensor) -> tuple[Bounds, Bounds]:
        first = x.reshape(-1)[:8]  # of other numbers these tell already
        alone = bool((first == first.round()).all()) and bool((x == x.round()).all())
        self._statistics.is_integer = alone and self._statistics.is_integer is not False
        low, high = torch.aminmax(x)
        return low.item(), high.item()

    def _range(self, seen: _Statistics) -> tuple[Bounds, Bounds]:
        """The real numbers that the integers span."""
        return seen.low, seen.high

    def _scale_and_zero_point(self, low: Bounds, high: Bounds) -> tuple[Tensor, Tensor]:
        """0 is always in the range, exactly: padding and relu give it."""
        low, high = np.minimum(low, 0.0).reshape(-1), np.maximum(high, 0.0).reshape(-1)
        if self.qscheme in _SYMMETRIC:
            scale = self._make_positive(np.maximum(-low, high) * 2 / (self.quant_max - self.quant_min))
            return torch.from_numpy(scale), torch.zeros(scale.shape, dtype=torch.int64)
        scale = self._make_positive((high - low) / (self.quant_max - self.quant_min))
        zero_point = self.quant_min - np.rint(low / scale.astype(np.float64))
        return torch.from_numpy(scale), torch.from_numpy(zero_point.clip(self.quant_min, self.quant_max)).long()

    def _make_positive(self, scale: Array) -> Array:
        scale = np.where(scale > 0, np.maximum(scale, SMALLEST_SCALE), self.scale_of_zeros)
        return np.where(
            (self.is_integer or bool(self._statistics.is_integer)) & (scale < 1), 2.0 ** np.ceil(np.log2(scale)), scale
        ).astype(np.float32)


class HeadroomObserver(RangeObserver):
    """Extremes, doubled: for int16, which has a bit to spare for values that calibration did not show.

    Rounding to 15 bits is far below the noise of int8 weights; clipping one value is not.
    """

    def _range(self, seen: _Statistics) -> tuple[Bounds, Bounds]:
        return 2 * seen.low, 2 * seen.high


class ActivationObserver(RangeObserver):
    """The range with the least squared error; while few values were seen, their widened extremes."""

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor; returned as it is. See ``RangeObserver``."""
        super().forward(x)
        seen = self._statistics
        # An odd stride meets every row and channel of a tensor whose sizes are powers of two.
        stride = seen.stride * max(x.numel() * 4 // _MAX_KEPT_VALUES, 1) | 1
        kept = x.detach().reshape(-1)[::stride].to(torch.float32, copy=True)  # x may be a buffer, and would be kept
        seen.values.append(kept)
        seen.kept_count += kept.numel()
        if seen.kept_count > _MAX_KEPT_VALUES:
            seen.values, seen.stride = [torch.cat(seen.values)[::2].clone()], 2 * seen.stride
            seen.kept_count = seen.values[0].numel()
        return x

    def _range(self, seen: _Statistics) -> tuple[Bounds, Bounds]:
        if not seen.count or (seen.count < MIN_HISTOGRAM_VALUES and not self.is_constant):
            return widen_range(seen.low, seen.high, seen.count)
        return find_min_mse_range(torch.cat(seen.values), seen.low, seen.high, self.quant_max - self.quant_min)


def widen_range(low: Bounds, high: Bounds, count: int) -> tuple[Bounds, Bounds]:
    """Extremes of ``count`` values, moved outwards: those of new values will lie beyond.

    The gap shrinks as the square root of the number of values. A bound that is exactly 0 is the end of a function's
    range (relu), not of a sample, and stays.
    """
    extra = (high - low) * min(1 / math.sqrt(max(count, 1)), 0.5)
    return np.where(low == 0, low, low - extra), np.where(high == 0, high, high + extra)


def find_min_mse_range(values: Tensor, low: Bounds, high: Bounds, steps: int) -> tuple[float, float]:
    """The part of [low, high], 0 included, that ``values`` have the least squared error in.

    A value inside errs by step**2 / 12 on average (squared), one below half a step by itself, as it becomes 0, and one
    beyond a bound by its distance from it. Sums over such values come from one histogram, so that all pairs of
    candidates are judged at once. Where the best range is a small part of the histogram's, it is looked for again
    there: one far value does not make the bins coarse.

    Args:
        values: float32, 1-D.
        steps: of the quantized range, 255 for int8.
    """
    first, last = min(float(low), 0.0), max(float(high), 0.0)
    while True:
        edges = np.linspace(first, last, _BINS + 1)
        sums = _moments_below(values, edges)
        ends = np.arange(0, _BINS + 1, _BINS // _CANDIDATES)
        bottoms, tops = ends[edges[ends] < 0], ends[edges[ends] > 0]
        zero = np.searchsorted(edges, 0.0)
        bottoms, tops = (x if x.size else np.array([zero]) for x in (bottoms, tops))
        below, lost_below = _clipping_error(sums[:, bottoms], edges[bottoms])
        above, lost_above = _clipping_error(sums[:, -1:] - sums[:, tops], edges[tops])
        inside = len(values) - below[:, None] - above
        usual, near = _rounding_error(sums, edges, (last - first) / _BINS / steps * ends)
        widths = (tops - bottoms[:, None]) // ends[1]
        error = lost_below[:, None] + lost_above + inside * usual[widths] + near[widths]
        row, column = np.unravel_index(error.argmin(), error.shape)
        bottom, top = edges[bottoms[row]], edges[tops[column]]
        if top - bottom > (last - first) / 4 or top - bottom < 1e-30:
            return bottom, top
        first, last = max(first, 2 * bottom), min(last, 2 * top)


def _moments_below(values: Tensor, edges: Array) -> Array:
    """Number, sum and sum of squares of the values below each edge, and (last column) of all values; [3, edges + 1]."""
    first, last = float(edges[0]), float(edges[-1])
    counts = torch.histc(values, len(edges) - 1, first, last).numpy()
    centres = (edges[1:] + edges[:-1]) / 2
    least, most = map(float, torch.aminmax(values))
    under = _moments(values[values < first]) if least < first else np.zeros(3)
    over = _moments(values[values > last]) if most > last else np.zeros(3)
    bins = np.stack([counts, counts * centres, counts * centres**2])
    return np.cumsum(np.column_stack([under, bins, over]), axis=1)


def _moments(x: Tensor) -> Array:
    return np.array([float((x.double() ** power).sum()) for power in range(3)])


def _rounding_error(moments: Array, edges: Array, step: Array) -> Array:
    """Error of a value for each step, and what all that are nearer to 0 than half a step lack of it; [2, steps]."""
    usual = step**2 / 12
    near = [np.interp(step / 2, edges, of) - np.interp(-step / 2, edges, of) for of in moments[::2, :-1]]
    return np.stack([usual, near[1] - near[0] * usual])


def _clipping_error(moments: Array, bounds: Array) -> tuple[Array, Array]:
    """How many values lie beyond each bound, and their squared distances from it, from the moments of these values."""
    count, total, squares = moments
    return count, squares - 2 * bounds * total + bounds**2 * count


class WeightObserver(RangeObserver):
    """A weight's extremes, with one scale.

    The bias is added in steps of the activation's scale times the weight's, as int32. Where it is so large that this
    could not hold it (the activation was zero in all samples, or all weights of a channel are), the weight's scale is
    enlarged: what the products add to such a bias is below 2**-16 of it for each term.
    """

    scale_of_zeros = SMALLEST_SCALE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accumulators: list[tuple[RangeObserver, Array]] = []

    def add_accumulator(self, activation: RangeObserver, bias: Tensor) -> None:
        """The products with the int8 tensor that ``activation`` observes are added to ``bias`` (one for a channel)."""
        self.accumulators.append((activation, bias.detach().abs().double().numpy(force=True)))

    def _make_positive(self, scale: Array) -> Array:
        for activation, bias in self.accumulators:
            least = bias / (2.0**30 * activation.calculate_qparams()[0].double().numpy())
            # One scale may be that of several channels: of all, or of one in each group (transposed convolutions).
            scale = np.maximum(scale, least.reshape(-1, scale.size).max(0))
        return super()._make_positive(scale)

    def _min_max(self, x: Tensor) -> tuple[Bounds, Bounds]:
        rows = self._rows(x)
        bounds = rows.abs().amax(1, keepdim=True)
        if self.quant_max < MIN_UNCLIPPED_LEVELS:
            bounds = _find_min_mse_row_bounds(rows, bounds, self.quant_max)
        most = bounds[:, 0].double().numpy(force=True)
        return -most, most

    def _rows(self, x: Tensor) -> Tensor:
        """What shares a scale, in a row."""
        return x.reshape(1, -1)


def _find_min_mse_row_bounds(rows: Tensor, peaks: Tensor, largest: int) -> Tensor:
    """The bound of each row, up to its peak, with the least squared error in steps of which ``largest`` reach it."""
    unit = rows / peaks.clamp_min(torch.finfo(rows.dtype).tiny)
    best, least = torch.ones_like(peaks), torch.full_like(peaks, torch.inf)
    for bound in np.arange(10, 33) / 32:
        step = bound / largest
        error = ((unit / step).round_().clamp_(-largest, largest).mul_(step) - unit).square_().sum(1, keepdim=True)
        best, least = torch.where(error < least, bound, best), torch.minimum(error, least)
    return best * peaks


class PerChannelWeightObserver(WeightObserver):
    """A weight's extremes, with a scale for each output channel (torchao gives ``ch_axis`` to such a class name)."""

    def __init__(self, *args: Any, ch_axis: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ch_axis = ch_axis

    def _rows(self, x: Tensor) -> Tensor:
        return x.movedim(self.ch_axis, 0).flatten(1)
