"""Sums, means and extremes along dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arm_backend_core.ops import fixed_point
from arm_backend_core.ops.indexing import reshape_indices
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.ops.spatial_mean import spatial_mean
from arm_backend_core.tosa.graph import Value, prod

aten = torch.ops.aten


def _axes(x: Tensor, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted(dim % x.rank for dim in dims)) if dims else tuple(range(x.rank))


def _reduce(cx: Context, kind: str, x: Value, axes: Sequence[int]) -> Value:
    for axis in axes:
        x = cx.b.reduce(kind, x, axis)
    return x


def _vector(cx: Context, x: Tensor) -> Tensor:
    """A scalar as a vector of one, since fixed-point sums take rows; others as they are."""
    return x if x.rank else Tensor(cx.b.reshape(x.value, (1,)), x.q)


def mean_over(cx: Context, x: Tensor, axes: Sequence[int]) -> Value:
    """Mean with the axes kept as size 1."""
    if x.q is not None:
        spatial = spatial_mean(cx.b, x.value, x.q, axes, cx.q)
        return fixed_point.mean(cx.b, x.value, x.q, tuple(axes), cx.q) if spatial is None else spatial
    count = prod(x.shape[axis] for axis in axes)
    return cx.b.mul(_reduce(cx, "REDUCE_SUM", x.value, axes), cx.operand(1.0 / count))


@op(aten.mean.dim, aten.mean.default, fuses=True)
def mean(
    cx: Context, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Mean over ``dim``, all dimensions if None."""
    x = _vector(cx, x)
    return cx.b.reshape(mean_over(cx, x, _axes(x, dim)), cx.shape)


mean.integer(mean.lower)


@op(aten.sum.dim_IntList, aten.sum.default, fuses=True)
def sum_(
    cx: Context, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Sum over ``dim``, all dimensions if None."""
    return cx.b.reshape(_reduce(cx, "REDUCE_SUM", cx.b.cast(x.value, cx.dtype), _axes(x, dim)), cx.shape)


@sum_.integer
def _(
    cx: Context, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    x = _vector(cx, x)
    assert x.q is not None
    return cx.b.reshape(fixed_point.sum_(cx.b, x.value, x.q, _axes(x, dim), cx.q), cx.shape)


@op(aten.amax.default, kind=Kind.SHARED)
def amax(cx: Context, x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Largest element over ``dim``; order does not depend on scale and zero point."""
    axes = _axes(x, dim)
    if x.q is not None and axes == (x.rank - 1,):
        return cx.b.reshape(fixed_point.largest(cx.b, x.value, axes[0]), cx.shape)
    return cx.b.reshape(_reduce(cx, "REDUCE_MAX", x.value, axes), cx.shape)


@op(aten.amin.default, kind=Kind.SHARED)
def amin(cx: Context, x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Smallest element over ``dim``."""
    return cx.b.reshape(_reduce(cx, "REDUCE_MIN", x.value, _axes(x, dim)), cx.shape)


@op(aten.argmax.default)
def argmax(cx: Context, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Value:
    """Index of the largest element; int32 inside a delegate. The dimension goes last, where Ethos-U55 wants it."""
    value = cx.b.reshape(x.value, (x.value.size,)) if dim is None else x.value
    axis = 0 if dim is None else dim % x.rank
    order = [*(i for i in range(value.rank) if i != axis), axis]
    value = cx.b.transpose(value, order)
    return reshape_indices(cx, cx.b.argmax(value, value.rank - 1), cx.shape)


argmax.integer(argmax.lower)
