"""Decompositions of normalization operators, matrix products, elementwise functions and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import intervals
from arm_backend_core.ops.composites import replace_zero_by_one
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


# -- normalization ------------------------------------------------------------------------------------------------


@decomposition(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None]:
    """The core ATen batch norm in eval mode. Returns None for the saved statistics, which are empty."""
    return native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)


@decomposition(aten.native_batch_norm.default)
def native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None]:
    """The older ATen batch norm. Returns None for the saved statistics, which only gradients need."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), None, None


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_with_batch_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, None, None]:
    """Batch norm with batch statistics, which are not returned.

    ``F.batch_norm`` would refuse channels with a single value; ``torch.batch_norm`` does not.
    """
    return torch.batch_norm(x, weight, bias, None, None, True, momentum, eps, False), None, None


@decomposition(aten._fused_rms_norm.default)
def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, None]:
    """The core ATen RMS norm. Returns None for the reciprocal root mean square."""
    return F.rms_norm(x, tuple(shape), weight, eps), None


@decomposition(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, None, None]:
    """The core ATen layer norm. Returns None for the mean and the reciprocal deviation."""
    return F.layer_norm(x, shape, weight, bias, eps), None, None


@decomposition(aten.native_group_norm.default)
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, None, None]:
    """The core ATen group norm. Returns None for the mean and the reciprocal deviation."""
    return torch.group_norm(x, groups, weight, bias, eps), None, None  # F.group_norm refuses groups with a single value


# -- products -----------------------------------------------------------------------------------------------------


@decomposition(aten.addmm.default)
def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * x @ weight."""
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return F.linear(x, weight.t(), bias)
    return torch.mm(x, weight) * alpha + bias * beta


def matmul_of_empty_inner_dimension(
    shape: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Matrix product whose inner dimension has size 0: the bias, or 0. ``shape`` is the shape of the result."""
    zeros = torch.zeros(shape, dtype=x.dtype)
    return zeros if bias is None else zeros + bias


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * sum of first[n] @ second[n] over n, with first [N, I, K] and second [N, K, J]."""
    rows = first.transpose(0, 1).flatten(1)
    return aten.addmm(x, rows, second.flatten(0, 1), beta=beta, alpha=alpha)


@decomposition(aten.heaviside.default)
def heaviside(x: Tensor, values: Tensor) -> Tensor:
    """Heaviside step function: 0 for x < 0, ``values`` for x = 0, 1 for x > 0."""
    return torch.where(x == 0, values, torch.where(x > 0, 1.0, 0.0).to(x.dtype))


def _build_zero_guarded_product(function: Callable[[Tensor], Tensor], at_zero: float) -> Callable[..., Tensor]:
    def product(x: Any, y: Any, *, quantized: bool) -> Tensor:
        """x * function(y), but 0 where x is 0 and y is not NaN.

        Where x is 0, y is replaced by ``at_zero``, so that calibration observes no large or infinite function(y).
        """
        dtype = (x * y).dtype
        x, y = (z if isinstance(z, Tensor) else torch.full((), z, dtype=dtype) for z in (x, y))
        if dtype.is_floating_point:  # a 0-dim y of a wider type does not widen the result
            y = y.to(dtype)
        is_zero = x == 0 if quantized else (x == 0) & (y == y)
        return x * function(torch.where(is_zero, at_zero, y))

    return product


decomposition(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self, takes_quantized=True)(
    _build_zero_guarded_product(torch.log, 1.0)
)
decomposition(
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
    takes_quantized=True,
)(_build_zero_guarded_product(torch.log1p, 0.0))


@decomposition(aten._cdist_forward.default)
def cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """Pairwise distances [..., M, N]: p-norm of x[..., m, :] - y[..., n, :], with x [..., M, K] and y [..., N, K]."""
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


@decomposition(aten._pdist_forward.default)
def pdist(x: Tensor, p: float = 2.0) -> Tensor:
    """Pairwise distances [N * (N - 1) / 2]: p-norm of x[i] - x[j] for all i < j, with x [N, K]."""
    first, second = torch.triu_indices(len(x), len(x), 1)
    return torch.linalg.vector_norm(x.index_select(0, first) - x.index_select(0, second), p, -1)


@decomposition(aten.bilinear.default)
def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Bilinear layer [..., O]: x^T @ weight[o] @ y for every o; x [..., I], y [..., J], weight [O, I, J]."""
    outputs, size, _ = weight.shape
    mixed = F.linear(x, weight.permute(0, 2, 1).reshape(-1, size)).unflatten(-1, (outputs, -1))
    result = (mixed * y.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias


@decomposition(aten._convolution.default)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """The convolution that TorchScript emits. Arguments after ``groups`` select GPU kernels and are ignored."""
    return aten.convolution(x, weight, bias, *arguments[:6])


@decomposition(aten.conv_tbc.default)
def conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """1D convolution with the time axis first: x [T, N, C], weight [K, C, OC]. The bias may have any type."""
    return F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias.to(x.dtype), padding=pad).permute(2, 0, 1)


# -- elementwise --------------------------------------------------------------------------------------------------


@decomposition(aten.clamp.Tensor, interval=intervals.elementwise(intervals.clamp))
def clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """Clamp by maximum and minimum. PyTorch's own decomposition uses comparisons and ``where``."""
    clamped_below = x if min is None else torch.maximum(x, min)
    return clamped_below if max is None else torch.minimum(clamped_below, max)


@decomposition(aten._add_relu.Tensor, aten._add_relu.Scalar)
def add_relu(x: Tensor, y: Any, alpha: float = 1) -> Tensor:
    """relu(x + alpha * y), which PyTorch's fusion emits. For integers, ``alpha`` is truncated to an integer."""
    return torch.relu(torch.add(x, y, alpha=alpha if (x + y).is_floating_point() else int(alpha)))


@decomposition(aten.hypot.default)
def hypot(x: Tensor, y: Tensor) -> Tensor:
    """sqrt(x * x + y * y) as large * sqrt(1 + (small / large)**2), in which no square overflows.

    ``large`` and ``small`` are the larger and the smaller magnitude of x and y.
    """
    x, y = (z.to((x + y).dtype) for z in (x, y))  # abs does not accept booleans
    large, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = small / replace_zero_by_one(large)
    return torch.where(torch.isinf(x) | torch.isinf(y), math.inf, large * torch.sqrt(1 + ratio * ratio))


@decomposition(aten.signbit.default, takes_quantized=True)
def signbit(x: Tensor, *, quantized: bool = False) -> Tensor:
    """Sign bit, which is also set for -0.0. The test is min(x, 1 / x) < 0.

    x < 0 is false for -0.0, but there, 1 / x is -inf. 1 / x < 0 is false for -inf, where 1 / x is -0.0.
    Quantized numbers are never -0.0, and no scale represents 1 / 0, so a quantized program tests x < 0.
    """
    return x < 0 if quantized else torch.minimum(x, 1 / x) < 0


@decomposition(aten.copysign.Tensor, aten.copysign.Scalar, takes_quantized=True)
def copysign(x: Tensor, y: Any, *, quantized: bool = False) -> Tensor:
    """Return the magnitude of x with the sign of y."""
    dtype = (x / y).dtype  # the type to which integers are promoted
    x, y = x.to(dtype), y.to(dtype) if isinstance(y, Tensor) else torch.full((), y, dtype=dtype)
    return torch.where(signbit(y, quantized=quantized), -x.abs(), x.abs())


@decomposition(aten.atan2.default)
def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Angle of the point (x, y): atan(smaller / larger magnitude), mirrored into the octant of the point.

    Infinity is clamped to the largest finite number, so that inf / inf is 1.
    """
    dtype = (y / x).dtype  # the type to which integers are promoted
    x, y = x.to(dtype), y.to(dtype)
    abs_x, abs_y = (z.abs().clamp(max=torch.finfo(dtype).max) for z in (x, y))
    large = torch.maximum(abs_x, abs_y)
    angle = torch.atan(torch.minimum(abs_x, abs_y) / replace_zero_by_one(large))
    angle = torch.where(abs_y > abs_x, math.pi / 2 - angle, angle)
    return torch.copysign(torch.where(torch.signbit(x), math.pi - angle, angle), y)


@decomposition(aten.angle.default)
def angle(x: Tensor) -> Tensor:
    """Angle of a real number: 0 or pi; NaN stays NaN."""
    return torch.where(x < 0, math.pi, torch.where(x == x, 0.0, x))


@decomposition(aten.rrelu_with_noise.default)
def rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """RReLU in eval mode: leaky ReLU with the mean slope."""
    if training:
        raise Unsupported("rrelu in training mode; call model.eval() before exporting")
    return F.leaky_relu(x, (lower + upper) / 2)


@decomposition(aten.rrelu_with_noise_functional.default)
def rrelu_functional(x: Tensor, noise: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The functionalized RReLU, which also returns ``noise``. Only training mode writes it."""
    return rrelu(x, noise, *args), noise


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood -x[target] * weight[target], and the sum of weight[target].

    ``reduction`` is 0 (none), 1 (mean) or 2 (sum). Without a reduction, the second result is 0 for a batch.
    """
    dim, is_counted = min(1, x.dim() - 1), target != ignore_index
    classes = torch.where(is_counted, target, 0)
    weights = is_counted.to(x.dtype) if weight is None else torch.where(is_counted, weight[classes[None]][0], 0.0)
    log_probabilities = x.gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    loss = -torch.where(is_counted, log_probabilities, 0.0) * weights  # ignored elements may be infinite
    total = weights.sum() if reduction or x.dim() == 1 else x.new_zeros(())
    return (loss if reduction == 0 else loss.sum() / total if reduction == 1 else loss.sum()), total


@decomposition(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Sum of max(0, 1 - x[target] + x[other]), divided by the number of classes.

    The sum is over all pairs of a target and a class that is no target. The targets are the classes before the first
    -1. The second result is the mask of classes that are targets.
    """
    is_listed = (target < 0).cumsum(-1) == 0
    target_classes = torch.where(is_listed, target, 0)
    classes = torch.arange(x.shape[-1], device=x.device)
    is_target = ((target_classes[..., None] == classes) & is_listed[..., None]).any(-2).to(x.dtype)
    margins = (
        F.relu(1 - x.gather(-1, target_classes)[..., None] + x[..., None, :])
        * is_listed[..., None]
        * (1 - is_target)[..., None, :]
    )
    loss = margins.sum((-2, -1)) / x.shape[-1]
    if reduction == 0:
        return torch.atleast_1d(loss), is_target  # PyTorch's shape inference gives [1], its kernel a scalar
    return (loss.mean() if reduction == 1 else loss.sum()), is_target


@decomposition(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Sum over the other classes of max(0, margin - x[target] + x[other])**p, divided by the number of classes.

    Without reduction, a 1-D input gives one loss. Its shape is (1,), as ``torch.export`` records it, also for a target
    of shape (). For such a target, the eager operator returns the shape ().
    """
    target_classes = target.reshape(*x.shape[:-1], 1)
    others = torch.arange(x.shape[-1], device=x.device) != target_classes
    margins = torch.where(others, F.relu(margin - x.gather(-1, target_classes) + x), 0.0) ** p
    loss = (margins if weight is None else margins * weight[target_classes]).sum(-1) / x.shape[-1]
    return loss.reshape(-1) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()
