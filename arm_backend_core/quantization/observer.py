"""Observers: collect statistics of a tensor during calibration and derive its scale and zero point.

Scale and zero point are computed lazily, once after each change of the statistics. The scale is positive and finite for
every finite tensor, even if its values are all 0, all equal, as small as 1e-30 or as large as 1e30.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import ObserverBase

from arm_backend_core.quantization.non_finite import NonFiniteError, NonFiniteKind, format_non_finite_message

#: Maximum number of values kept for the histogram; beyond it every other value is dropped.
_MAX_KEPT_VALUES = 1 << 16
#: With at least this number of observed values, ``HistogramObserver`` takes the range with the least squared error.
#: With fewer, it takes the widened minimum and maximum.
MIN_HISTOGRAM_VALUES = 8192
#: ``_BINS``: number of bins of a histogram. ``_CANDIDATES``: number of parts into which the candidate bounds of a range
#: divide the histogram. Every eighth edge of a bin (``_BINS / _CANDIDATES``) is a candidate.
_BINS, _CANDIDATES = 2048, 256
#: A weight with fewer levels than this on either side of 0 (int4: 7) is clipped where that reduces the squared error.
MIN_UNCLIPPED_LEVELS = 16
#: Smallest scale. The product of two such scales (the scale of an accumulator) is still a normal float32 number.
SMALLEST_SCALE = 2.0**-60
Array = np.ndarray[Any, Any]
#: A lower or upper bound of a tensor, or of each of its channels.
Bounds = Array | float
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


@dataclass
class _Statistics:
    """Statistics of a tensor. Floats and NumPy arrays cost less than tensors here.

    Attributes:
        low, high: minimum and maximum, of the tensor or of each channel.
        count: number of observed elements.
        values: sampled elements, float32, 1-D.
        kept_count: number of elements in ``values``.
        stride: every ``stride``-th element is sampled. From large tensors, fewer elements are sampled.
        is_integer: whether all values were integers; None if not checked.
        parameters: cached scale and zero point.
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
    """Tracks the minimum and maximum of a tensor; subclasses derive the quantized range from the statistics.

    Attributes:
        scale_of_zeros: scale of an all-zero tensor. With a smaller scale, the bias of a layer that reads the tensor
            would overflow int32: the scale of the bias is the activation's scale times the weight's scale.
        description: the observed tensor in words, for messages.
        is_constant: whether the tensor is a constant, so that no other values can occur.
        is_integer: whether the tensor was cast from an integer type. A scale below 1 is then rounded up to a power of
            two, so that integers are exact and equal integers compare equal. The same applies to tensors that held only
            integers in all samples (masks, rounded values).
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
        """Observe a tensor and return it unchanged.

        Raises:
            NonFiniteError: the tensor holds NaN or an infinity.
        """
        if x.numel():
            statistics = self._statistics
            low, high = self._min_max(x)
            if not np.isfinite(low + high).all():
                kind: NonFiniteKind = "NaN" if bool(x.isnan().any()) else "an infinity"
                raise NonFiniteError(format_non_finite_message(self.description, kind), kind)
            if statistics.count:
                low, high = np.minimum(low, statistics.low), np.maximum(high, statistics.high)
            statistics.low, statistics.high, statistics.parameters = low, high, None
            statistics.count += x.numel()
        return x

    @property
    def count(self) -> int:
        """Number of observed elements."""
        return self._statistics.count

    @property
    def extremes(self) -> tuple[float, float]:
        """Minimum and maximum of all observed elements."""
        return float(np.min(self._statistics.low)), float(np.max(self._statistics.high))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Compute scale (float32) and zero point (int64), with one element or one for each channel."""
        statistics = self._statistics
        if statistics.parameters is None:
            statistics.parameters = self._scale_and_zero_point(*self._range(statistics))
        return statistics.parameters

    def _min_max(self, x: Tensor) -> tuple[Bounds, Bounds]:
        first = x.reshape(-1)[:8]  # if one of these is no integer, as in most tensors, no other is tested
        all_integer = bool((first == first.round()).all()) and bool((x == x.round()).all())
        self._statistics.is_integer = all_integer and self._statistics.is_integer is not False
        low, high = torch.aminmax(x)
        return low.item(), high.item()

    def _range(self, statistics: _Statistics) -> tuple[Bounds, Bounds]:
        """Return the range of real numbers that the integers represent."""
        return statistics.low, statistics.high

    def _scale_and_zero_point(self, low: Bounds, high: Bounds) -> tuple[Tensor, Tensor]:
        """Compute parameters for the range extended to 0, so that 0 is exact: padding and relu produce zeros.

        The scale of a symmetric int16 range is max(abs(x)) / 32767.5, as in torchao. The largest magnitude is clipped
        to 32767, an error of half a step, as much as by rounding. In ExecuTorch's A16W8 quantizer, the scale is
        max(abs(x)) / 32767, which is 15 ppm coarser. For uniform and normal values, the SQNR of the two differs by
        0.004 dB.
        """
        low, high = np.minimum(low, 0.0).reshape(-1), np.maximum(high, 0.0).reshape(-1)
        if self.qscheme in _SYMMETRIC:
            scale = self._constrain_scale(np.maximum(-low, high) * 2 / (self.quant_max - self.quant_min))
            return torch.from_numpy(scale), torch.zeros(scale.shape, dtype=torch.int64)
        scale = self._constrain_scale((high - low) / (self.quant_max - self.quant_min))
        zero_point = self.quant_min - np.rint(low / scale.astype(np.float64))
        return torch.from_numpy(scale), torch.from_numpy(zero_point.clip(self.quant_min, self.quant_max)).long()

    def _constrain_scale(self, scale: Array) -> Array:
        """Make scales positive, and powers of two if they are below 1 and the tensor held only integers."""
        scale = np.where(scale > 0, np.maximum(scale, SMALLEST_SCALE), self.scale_of_zeros)
        return np.where(
            (self.is_integer or bool(self._statistics.is_integer)) & (scale < 1), 2.0 ** np.ceil(np.log2(scale)), scale
        ).astype(np.float32)


class FixedRangeObserver(RangeObserver):
    """Fixed parameters of a result such as ``tanh``, unless observed values lie beyond the fixed range.

    Such values occur in a buffer that several methods write: one method writes the result of ``tanh``, another method
    writes the result of another operator.

    Args:
        fixed: observer with the fixed parameters.
    """

    def __init__(self, fixed: Any) -> None:
        scheme = torch.per_tensor_symmetric if fixed.dtype is torch.int16 else torch.per_tensor_affine
        super().__init__(fixed.dtype, qscheme=scheme, quant_min=fixed.quant_min, quant_max=fixed.quant_max)
        self._fixed = fixed

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the fixed parameters if no observed value exceeds their range by over a step, else calibrated ones."""
        scale, zero_point = self._fixed.calculate_qparams()
        low, high = (float(scale) * (end - int(zero_point)) for end in (self.quant_min - 1, self.quant_max + 1))
        if not self.count or (low <= self.extremes[0] and self.extremes[1] <= high):
            return scale, zero_point
        return super().calculate_qparams()


class HeadroomObserver(RangeObserver):
    """Range of twice the minimum and maximum, for int16: one bit of headroom for values beyond the calibration range.

    The rounding error of the 15 bits that remain is far below the noise of int8 weights. In contrast, the error of a
    single clipped value can exceed this noise.
    """

    def _range(self, statistics: _Statistics) -> tuple[Bounds, Bounds]:
        return 2 * statistics.low, 2 * statistics.high


class HistogramObserver(RangeObserver):
    """Range with the least squared error (MSE); with fewer than 8,192 values, the widened minimum and maximum.

    Constants always get the range with the least squared error.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor and return it unchanged. See ``RangeObserver``."""
        super().forward(x)
        statistics = self._statistics
        # An odd stride samples every row and channel of a tensor whose sizes are powers of two.
        stride = statistics.stride * max(x.numel() * 4 // _MAX_KEPT_VALUES, 1) | 1
        # Copy the values, because x may be a buffer that is written later.
        sampled = x.detach().reshape(-1)[::stride].to(torch.float32, copy=True)
        statistics.values.append(sampled)
        statistics.kept_count += sampled.numel()
        if statistics.kept_count > _MAX_KEPT_VALUES:
            statistics.values, statistics.stride = [torch.cat(statistics.values)[::2].clone()], 2 * statistics.stride
            statistics.kept_count = statistics.values[0].numel()
        return x

    def _range(self, statistics: _Statistics) -> tuple[Bounds, Bounds]:
        if not statistics.count or (statistics.count < MIN_HISTOGRAM_VALUES and not self.is_constant):
            return widen_range(statistics.low, statistics.high, statistics.count)
        return find_min_mse_range(
            torch.cat(statistics.values), statistics.low, statistics.high, self.quant_max - self.quant_min
        )


def widen_range(low: Bounds, high: Bounds, count: int) -> tuple[Bounds, Bounds]:
    """Widen the minimum and maximum of ``count`` values, because new values will lie beyond them.

    The margin is the range divided by sqrt(count), at most half of the range. A bound of exactly 0 does not move: it
    is the limit of a function (relu), not of the samples.
    """
    margin = (high - low) * min(1 / math.sqrt(max(count, 1)), 0.5)
    return np.where(low == 0, low, low - margin), np.where(high == 0, high, high + margin)


def find_min_mse_range(values: Tensor, low: Bounds, high: Bounds, steps: int) -> tuple[float, float]:
    """Find the range with the least squared quantization error: it contains 0 and is in [low, high] extended to 0.

    Inside the range, the average squared error of a value is step**2 / 12. A value whose magnitude is below half a step
    rounds to 0: its squared error is the value squared. Outside of the range, the squared error is the squared distance
    to the bound.

    Cumulative sums over one histogram give the errors of all pairs of candidate bounds at once. An outlier makes the
    bins coarse. If the best range is at most a quarter of the histogram, the search therefore repeats in a histogram of
    twice the best range.

    Args:
        values: float32, 1-D.
        steps: number of steps of the quantized range, 255 for int8.
    """
    first, last = min(float(low), 0.0), max(float(high), 0.0)
    while True:
        edges = np.linspace(first, last, _BINS + 1)
        sums = _moments_below(values, edges)
        candidates = np.arange(0, _BINS + 1, _BINS // _CANDIDATES)
        bottoms, tops = candidates[edges[candidates] < 0], candidates[edges[candidates] > 0]
        zero = np.searchsorted(edges, 0.0)
        bottoms, tops = (x if x.size else np.array([zero]) for x in (bottoms, tops))
        below, error_below = _clipping_error(sums[:, bottoms], edges[bottoms])
        above, error_above = _clipping_error(sums[:, -1:] - sums[:, tops], edges[tops])
        inside = len(values) - below[:, None] - above
        per_value, near_zero = _rounding_error(sums, edges, (last - first) / _BINS / steps * candidates)
        widths = (tops - bottoms[:, None]) // candidates[1]
        error = error_below[:, None] + error_above + inside * per_value[widths] + near_zero[widths]
        row, column = np.unravel_index(error.argmin(), error.shape)
        bottom, top = edges[bottoms[row]], edges[tops[column]]
        if top - bottom > (last - first) / 4 or top - bottom < 1e-30:
            return bottom, top
        first, last = max(first, 2 * bottom), min(last, 2 * top)


def _moments_below(values: Tensor, edges: Array) -> Array:
    """Compute the count, the sum and the sum of squares of the values below each edge, [3, number of edges + 1].

    The last column is for all values.
    """
    first, last = float(edges[0]), float(edges[-1])
    counts = torch.histc(values, len(edges) - 1, first, last).numpy()
    centres = (edges[1:] + edges[:-1]) / 2
    minimum, maximum = map(float, torch.aminmax(values))
    under = _moments(values[values < first]) if minimum < first else np.zeros(3)
    over = _moments(values[values > last]) if maximum > last else np.zeros(3)
    bins = np.stack([counts, counts * centres, counts * centres**2])
    return np.cumsum(np.column_stack([under, bins, over]), axis=1)


def _moments(x: Tensor) -> Array:
    return np.array([float((x.double() ** power).sum()) for power in range(3)])


def _rounding_error(moments: Array, edges: Array, step: Array) -> Array:
    """Compute the squared rounding error for each step size; [2, number of step sizes].

    Row 0: average error of one value, step**2 / 12. Row 1: correction for all values within half a step of 0, whose
    error is the value squared.
    """
    per_value = step**2 / 12
    near = [np.interp(step / 2, edges, of) - np.interp(-step / 2, edges, of) for of in moments[::2, :-1]]
    return np.stack([per_value, near[1] - near[0] * per_value])


def _clipping_error(moments: Array, bounds: Array) -> tuple[Array, Array]:
    """Compute the number and the squared clipping error of the values beyond each bound, from their moments."""
    count, total, squares = moments
    return count, squares - 2 * bounds * total + bounds**2 * count


class WeightObserver(RangeObserver):
    """Range of a weight with one scale, from its largest magnitude.

    With fewer than ``MIN_UNCLIPPED_LEVELS`` levels on a side (int4), the range has the least squared error instead.

    The bias is int32 with the scale of the accumulator, activation scale times weight scale. This scale is tiny if the
    activation is 0 in all samples, or all weights of a channel are 0. The bias would then overflow. The observer
    enlarges the weight's scale until the bias is at most 2**30 accumulator steps. The loss of precision is small: a
    product of an activation and a weight is at most 2**15 accumulator steps, which is little beside a bias of
    2**30 steps.
    """

    scale_of_zeros = SMALLEST_SCALE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias_constraints: list[tuple[RangeObserver, Array]] = []

    def add_bias_constraint(self, activation: RangeObserver, bias: Tensor) -> None:
        """Register the bias of a layer that reads this weight, and the observer of the layer's int8 input."""
        self.bias_constraints.append((activation, bias.detach().abs().double().numpy(force=True)))

    def _constrain_scale(self, scale: Array) -> Array:
        for activation, bias in self.bias_constraints:
            min_scale = bias / (2.0**30 * activation.calculate_qparams()[0].double().numpy())
            # One scale may belong to several bias elements: to all of them (per tensor), or, in a grouped transposed
            # convolution, to those with the same index in their groups.
            scale = np.maximum(scale, min_scale.reshape(-1, scale.size).max(0))
        return super()._constrain_scale(scale)

    def _min_max(self, x: Tensor) -> tuple[Bounds, Bounds]:
        rows = self._rows(x)
        bounds = rows.abs().amax(1, keepdim=True)
        if self.quant_max < MIN_UNCLIPPED_LEVELS:
            bounds = _find_min_mse_row_bounds(rows, bounds, self.quant_max)
        bound = bounds[:, 0].double().numpy(force=True)
        return -bound, bound

    def _rows(self, x: Tensor) -> Tensor:
        """Return a view with one row for each scale."""
        return x.reshape(1, -1)


def _find_min_mse_row_bounds(rows: Tensor, peaks: Tensor, largest: int) -> Tensor:
    """Find the clipping bound of each row with the least squared error; ``largest`` is the integer at the bound."""
    unit = rows / peaks.clamp_min(torch.finfo(rows.dtype).tiny)
    best_bound, min_error = torch.ones_like(peaks), torch.full_like(peaks, torch.inf)
    for bound in np.arange(10, 33) / 32:
        step = bound / largest
        error = ((unit / step).round_().clamp_(-largest, largest).mul_(step) - unit).square_().sum(1, keepdim=True)
        best_bound, min_error = torch.where(error < min_error, bound, best_bound), torch.minimum(error, min_error)
    return best_bound * peaks


class PerChannelWeightObserver(WeightObserver):
    """Per-channel weight range: one scale for each output channel.

    torchao passes ``ch_axis`` to observers with "PerChannel" in the class name.
    """

    def __init__(self, *args: Any, ch_axis: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ch_axis = ch_axis

    def _rows(self, x: Tensor) -> Tensor:
        return x.movedim(self.ch_axis, 0).flatten(1)
