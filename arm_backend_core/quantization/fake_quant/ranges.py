"""Rounding to integers with gradients, and the range of real numbers that the integers of a tensor span.

Forward, values are those of a quantize and a dequantize operator, bit for bit. Backward, rounding counts as the
identity inside the range and as a bound outside of it, so that the bounds have gradients too.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from arm_backend_core.quantization.observer import SMALLEST_SCALE, RangeObserver

#: What becomes of ranges in training.
RangeMode = Literal["learned", "follow"]
#: How much of the way to what a batch shows a followed range goes.
_MOMENTUM = 0.01
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
Parameters = tuple[Tensor, Tensor]


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
        steps = torch.round(x * (1 / scale)) + zero_point
        kept = steps.clamp(low, high)
        ctx.save_for_backward(x, scale, zero_point, steps)
        ctx.limits = low, high
        return (kept - zero_point) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, scale, zero_point, steps = ctx.saved_tensors
        low, high = ctx.limits
        inside = (steps >= low) & (steps <= high)
        of_scale = of_zero = None
        if ctx.needs_input_grad[1]:
            # A step's gradient adds up over all elements: as in "Learned step size quantization" (Esser, 2020) it is
            # divided by the root of their number, which leaves bounds about as quick as weights.
            share = 1 / math.sqrt(max(x.numel(), 1) * high)
            error = torch.where(inside, steps - x / scale, steps.clamp(low, high)) - zero_point
            of_scale = (grad * error).sum() * share
            of_zero = torch.where(inside, 0.0, grad).sum() * -scale * share
        return grad * inside, of_scale, of_zero, None, None


def fake_quantize(x: Tensor, parameters: Parameters, limits: tuple[int, int], axis: int | None = None) -> Tensor:
    """What is left of ``x`` as integers of ``limits``, as real numbers.

    Args:
        parameters: scale and zero point; of each channel along ``axis``, if that is given.
    """
    scale, zero_point = (value.to(device=x.device, dtype=x.dtype) for value in parameters)
    shape = [] if axis is None else [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    made: Tensor = _FakeQuantize.apply(x, scale.reshape(shape), zero_point.reshape(shape), *limits)
    return made


class QuantizationRange(torch.nn.Module):
    """What the integers of one or of several tensors span; it begins as calibration found it.

    Attributes:
        bounds: least and greatest real number.
        stretch: learned ones are these times exp(stretch), so that a learning rate is the same part of each, weight
            decay draws them to where they began, and a bound at 0 (relu) stays there.
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
        seen = torch.tensor(observer.extremes, dtype=torch.float64)
        # What the observer made of the extremes, it goes on making of those of a batch.
        self.register_buffer("factors", torch.where(seen * bounds > 0, bounds / seen, 1.0).float())
        empty = bool((bounds.abs() < 1e-30).all())  # nothing but zeros was seen: there is nothing to stretch
        self.stretch = torch.nn.Parameter(torch.zeros(2)) if mode == "learned" and not empty else None

    def forward(self) -> Parameters:
        """Scale and zero point."""
        bounds = self.bounds if self.stretch is None else self.bounds * self.stretch.exp()
        (low, high), (least, most) = bounds.unbind(), self.limits
        if self._symmetric:
            scale = (torch.maximum(-low, high) * 2 / (most - least)).clamp_min(SMALLEST_SCALE)
            return scale, torch.zeros_like(scale)
        scale = ((high - low) / (most - least)).clamp_min(SMALLEST_SCALE)
        zero_point = least - low / scale
        whole = zero_point.detach().round().clamp(least, most)
        return scale, zero_point + (whole - zero_point).detach()

    def follow(self, x: Tensor) -> None:
        """Go towards what ``x`` spans, where the range is not learned."""
        if self.stretch is None and x.numel():
            low, high = torch.aminmax(x.detach())
            spanned = torch.stack([low.clamp_max(0), high.clamp_min(0)]) * self.factors
            self.bounds.lerp_(spanned.to(self.bounds.dtype), _MOMENTUM)
