"""Learned step size quantization (LSQ, Esser et al. 2020): fake quantization with gradients, and learned ranges.

The forward pass equals a quantize and a dequantize operator bit for bit. The backward pass uses the gradients of LSQ.
The derivative of a result element is:

- with respect to x: 1 inside the range, 0 outside (straight-through estimator),
- with respect to the scale: inside the range, the rounding error in integer steps; outside, the clamped integer minus
  the zero point,
- with respect to the zero point: 0 inside the range, minus the scale outside.

The gradients of scale and zero point are sums over elements. As in LSQ, each sum is divided by
sqrt(number of elements * largest integer).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from arm_backend_core.quantization.observer import SMALLEST_SCALE, RangeObserver

#: How ranges change in training: by gradients ("learned"), or by a moving average of the minimum and maximum of each
#: batch ("follow").
RangeMode = Literal["learned", "follow"]
#: Weight of the current batch in the moving average of a range.
_MOMENTUM = 0.01
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
ScaleAndZeroPoint = tuple[Tensor, Tensor]


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
        levels = torch.round(x * (1 / scale)) + zero_point
        clamped = levels.clamp(low, high)
        ctx.save_for_backward(x, scale, zero_point, levels)
        ctx.limits = low, high
        return (clamped - zero_point) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, scale, zero_point, levels = ctx.saved_tensors
        low, high = ctx.limits
        is_inside = (levels >= low) & (levels <= high)
        scale_grad = zero_point_grad = None
        if ctx.needs_input_grad[1]:
            # The scale's gradient is a sum over all elements. As in LSQ (Esser et al. 2020) it is divided by
            # sqrt(number of elements * largest integer), so that bounds and weights learn at similar rates.
            factor = 1 / math.sqrt(max(x.numel(), 1) * high)
            error = torch.where(is_inside, levels - x / scale, levels.clamp(low, high)) - zero_point
            scale_grad = (grad * error).sum() * factor
            zero_point_grad = torch.where(is_inside, 0.0, grad).sum() * -scale * factor
        return grad * is_inside, scale_grad, zero_point_grad, None, None


def fake_quantize(x: Tensor, qparams: ScaleAndZeroPoint, limits: tuple[int, int], axis: int | None = None) -> Tensor:
    """Quantize and dequantize ``x``, with gradients by a straight-through estimator.

    Args:
        qparams: scale and zero point, per channel along ``axis`` if ``axis`` is not None.
        limits: smallest and largest integer.
    """
    scale, zero_point = (value.to(device=x.device, dtype=x.dtype) for value in qparams)
    shape = [] if axis is None else [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    result: Tensor = _FakeQuantize.apply(x, scale.reshape(shape), zero_point.reshape(shape), *limits)
    return result


class QuantizationRange(torch.nn.Module):
    """Quantized range of one or several tensors, initialized from calibration.

    Scale and zero point derive from the bounds. The scale of a symmetric range is the smallest scale with which the
    integers (-32768 to 32767 for int16) represent both bounds. The initial bounds give the calibrated scale. The zero
    point is rounded, so the representable range may differ a little from the bounds after training.
    The names of the attributes are keys of saved state dicts.

    Attributes:
        bounds: lower and upper bound. Initially, the smallest and the largest number that the calibrated scale and zero
            point can represent.
        factors: ratio of each initial bound to the observed minimum or maximum; 1 if the two do not have the same sign.
            A ratio above 1 is a margin, a ratio below 1 clips.
        stretch: natural logarithm of the learned factor of each bound: learned bounds are bounds * exp(stretch). The
            learning rate is therefore relative to the magnitude of a bound. Weight decay pulls bounds to their initial
            values. A bound at 0 (relu) stays 0. None if the range is not learned, or if both bounds are 0.
    """

    bounds: Tensor
    factors: Tensor
    stretch: torch.nn.Parameter | None

    def __init__(self, observer: RangeObserver, mode: RangeMode) -> None:
        super().__init__()
        scale, zero_point = (value.double().reshape(()) for value in observer.calculate_qparams())
        self.limits = observer.quant_min, observer.quant_max
        self._symmetric = observer.qscheme in _SYMMETRIC
        bounds = torch.stack([(limit - zero_point) * scale for limit in self.limits])
        self.register_buffer("bounds", bounds.float())
        extremes = torch.tensor(observer.extremes, dtype=torch.float64)
        # The moving average multiplies the minimum and maximum of a batch by the factors that calibration chose.
        self.register_buffer("factors", torch.where(extremes * bounds > 0, bounds / extremes, 1.0).float())
        is_all_zero = bool((bounds.abs() < 1e-30).all())  # both bounds are 0: nothing to learn
        self.stretch = torch.nn.Parameter(torch.zeros(2)) if mode == "learned" and not is_all_zero else None

    def forward(self) -> ScaleAndZeroPoint:
        """Compute scale and zero point."""
        bounds = self.bounds if self.stretch is None else self.bounds * self.stretch.exp()
        (low, high), (quant_min, quant_max) = bounds.unbind(), self.limits
        if self._symmetric:
            scale = torch.maximum(low / quant_min, high / quant_max).clamp_min(SMALLEST_SCALE)
            return scale, torch.zeros_like(scale)
        scale = ((high - low) / (quant_max - quant_min)).clamp_min(SMALLEST_SCALE)
        zero_point = quant_min - low / scale
        rounded = zero_point.detach().round().clamp(quant_min, quant_max)
        return scale, zero_point + (rounded - zero_point).detach()

    def update_moving_average(self, x: Tensor) -> None:
        """Update the moving averages of the bounds with the minimum and maximum of ``x``; no-op for a learned range."""
        if self.stretch is None and x.numel():
            low, high = torch.aminmax(x.detach())
            spanned = torch.stack([low.clamp_max(0), high.clamp_min(0)]) * self.factors
            self.bounds.lerp_(spanned.to(self.bounds.dtype), _MOMENTUM)
