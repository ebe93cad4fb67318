"""Decompositions of extrema, sorting, order statistics and searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import intervals
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


def _arg_min_or_max(x: Tensor, dim: int | None, keepdim: bool, *, largest: bool) -> Tensor:
    """Index of the first extremum.

    Booleans are converted to integers, because torch.argmax rejects them. The minimum of floats is at the maximum of
    -x. The minimum of integers is at the maximum of ~x = -x - 1, because -x may overflow.
    """
    x = x.int() if x.dtype is torch.bool else x
    return torch.argmax(x if largest else -x if x.is_floating_point() else ~x, dim, keepdim)


@decomposition(aten.max.dim)
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Maximum along ``dim`` and its first index."""
    return torch.amax(x, dim, keepdim), _arg_min_or_max(x, dim, keepdim, largest=True)


@decomposition(aten.min.dim)
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Minimum along ``dim`` and its first index."""
    return torch.amin(x, dim, keepdim), _arg_min_or_max(x, dim, keepdim, largest=False)


@decomposition(aten.argmin.default, interval=intervals.element_index)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the smallest element; among equal elements the first, as in argmax."""
    return _arg_min_or_max(x, dim, keepdim, largest=False)


@decomposition(aten.max.default)
def max_all(x: Tensor) -> Tensor:
    """Maximum over all dimensions."""
    return torch.amax(x)


@decomposition(aten.min.default)
def min_all(x: Tensor) -> Tensor:
    """Minimum over all dimensions."""
    return torch.amin(x)


@decomposition(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over ``dim``, all dimensions if None."""
    dims = [] if dim is None else [dim]
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


@decomposition(aten.nonzero_static.default)
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Indices of the first ``size`` nonzero elements, [size, rank]."""
    # The flat index of the k-th nonzero element is the number of positions up to which fewer than k are nonzero.
    nonzero_counts = torch.cumsum((x != 0).reshape(-1).int(), 0)
    flat = (nonzero_counts < torch.arange(1, size + 1, dtype=torch.int32).unsqueeze(1)).int().sum(1)
    indices, rest = [], flat
    for dim in range(1, x.dim()):
        stride = math.prod(x.shape[dim:])
        indices.append(rest // stride)
        rest = rest - indices[-1] * stride
    return torch.where((flat < x.numel()).unsqueeze(1), torch.stack([*indices, rest], 1), fill_value).long()


def _kth_smallest(x: Tensor, dim: int, rank: int) -> tuple[Tensor, Tensor]:
    """The ``rank``-th smallest element (from 1) along ``dim`` and its index; ``dim`` keeps size 1. NaN sorts last."""
    if not x.dim():
        return x, torch.zeros((), dtype=torch.int64)
    values, indices = torch.topk(x, rank, dim, largest=False)
    return values.narrow(dim, rank - 1, 1), indices.narrow(dim, rank - 1, 1)


def _apply_keepdim(pair: tuple[Tensor, Tensor], dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return pair if keepdim else (pair[0].squeeze(dim), pair[1].squeeze(dim))


@decomposition(aten.sort.default, aten.sort.stable, takes_quantized=True)
def sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None, quantized: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Sort by topk. ExecuTorch has a CPU kernel for topk, but none for sort.

    The CPU's topk is not stable, so the indices of a stable sort come from ``_stable_argsort``. They are None (not
    computed) for more than ``_MAX_STABLE_SORT_SIZE`` elements along ``dim``, and for a rank-0 tensor.
    """
    size, compare_dtype = x.shape[dim] if x.dim() else 1, torch.int32 if quantized else torch.float32
    if x.dtype is torch.bool:
        sorted_numbers, indices = sort(x.to(compare_dtype), dim, descending, stable=stable, quantized=quantized)
        return sorted_numbers > 0, indices
    values, indices = torch.topk(x, size, dim, largest=descending)
    if stable:
        is_small = x.dim() and size <= _MAX_STABLE_SORT_SIZE
        return values, _stable_argsort(x, dim, descending, compare_dtype) if is_small else None
    return values, indices


#: Maximum number of elements along the dimension of a stable sort with indices, which compares each pair of elements.
_MAX_STABLE_SORT_SIZE = 64


def _stable_argsort(x: Tensor, dim: int, descending: bool, index_dtype: torch.dtype) -> Tensor:
    """Stable argsort by rank: the number of elements that precede an element in the sorted order. NaN is largest."""
    last = x.transpose(dim, -1)
    this, other = last.unsqueeze(-1), last.unsqueeze(-2)
    left, right = (other, this) if descending else (this, other)
    is_before, is_after = left > right, left < right  # ``other`` precedes, or follows, ``this``
    if x.is_floating_point():
        is_before = is_before | ((left != left) & (right == right))
        is_after = is_after | ((left == left) & (right != right))
    count = last.shape[-1]
    earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
    rank = (is_before | (~is_after & earlier)).to(index_dtype).sum(-1, dtype=index_dtype)
    positions = torch.arange(count, dtype=index_dtype)
    indices = torch.where(rank.unsqueeze(-2) == positions.unsqueeze(-1), positions, 0).sum(-1, dtype=index_dtype)
    return indices.to(torch.int32).to(torch.int64).transpose(dim, -1)


@decomposition(aten.kthvalue.default)
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """k-th smallest element and its index. Among equal elements, the index is arbitrary, as in PyTorch."""
    return _apply_keepdim(_kth_smallest(x, dim, k), dim, keepdim)


@decomposition(aten.median.dim, takes_quantized=True)
def median_dim(x: Tensor, dim: int, keepdim: bool = False, *, quantized: bool) -> tuple[Tensor, Tensor]:
    """Median; the lower of the two for an even number of elements. NaN if an element is NaN."""
    value, index = _kth_smallest(x, dim, (x.shape[dim] + 1) // 2 if x.dim() else 1)
    if x.is_floating_point() and not quantized and x.dim():
        is_nan = torch.where(x != x, 1.0, 0.0)
        has_nan = torch.any(x != x, dim, keepdim=True)
        value = torch.where(has_nan, math.nan, value)
        index = torch.where(has_nan, is_nan.argmax(dim, keepdim=True), index)
    return _apply_keepdim((value, index), dim, keepdim)


@decomposition(aten.mode.default, takes_quantized=True)
def mode(x: Tensor, dim: int = -1, keepdim: bool = False, *, quantized: bool) -> tuple[Tensor, Tensor]:
    """The most frequent element, and its last index. Among equally frequent elements, the smallest is taken."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    last, dtype = x.transpose(dim, -1), torch.int32 if quantized else torch.float32
    this, other = last.unsqueeze(-1), last.unsqueeze(-2)
    count = (this == other).to(dtype).sum(-1, dtype=dtype)
    is_most_frequent = count == count.amax(-1, keepdim=True)
    # The element is gathered by its index: the result of a torch.where would get a separate quantization scale. If
    # the element occurs several times, its last index is returned, as in PyTorch.
    is_smallest = is_most_frequent & ~((other < this) & is_most_frequent.unsqueeze(-2)).any(-1)
    positions = torch.where(is_smallest, torch.arange(last.shape[-1], dtype=dtype), 0).amax(-1, keepdim=True)
    positions = positions.to(torch.int32).to(torch.int64)
    result = torch.gather(last, -1, positions).transpose(dim, -1), positions.transpose(dim, -1)
    return _apply_keepdim(result, dim, keepdim)


@decomposition(aten.quantile.scalar, takes_quantized=True)
def quantile(
    x: Tensor,
    q: float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    quantized: bool,
) -> Tensor:
    """Interpolate between the elements around rank q * (count - 1), which is rounded to x's type as in PyTorch."""
    values, axis = (x.reshape(-1), 0) if dim is None or not x.dim() else (x, dim % x.dim())
    rank = float(torch.tensor(q, dtype=values.dtype) * (values.shape[axis] - 1))
    rounding: dict[str, Callable[[float], int]] = {"lower": math.floor, "higher": math.ceil, "nearest": round}
    weight = 0.5 if interpolation == "midpoint" and rank % 1 else 0.0 if interpolation in rounding else rank % 1
    first = rounding.get(interpolation, math.floor)(rank)
    value, _ = _kth_smallest(values, axis, first + 1)
    if weight:
        value = value * (1 - weight) + _kth_smallest(values, axis, first + 2)[0] * weight
    if not quantized:
        value = torch.where((values != values).any(axis, keepdim=True), math.nan, value)
    if dim is None or not x.dim():
        return value.reshape([1] * x.dim() if keepdim else [])
    return value if keepdim else value.squeeze(axis)


@decomposition(aten.median.default)
def median(x: Tensor) -> Tensor:
    """Median over all dimensions."""
    return torch.median(_flatten_nonempty(x), 0)[0]


def _flatten_nonempty(x: Tensor) -> Tensor:
    if not x.numel():
        raise Unsupported("the median of an empty tensor")
    return x.reshape(-1)


@decomposition(aten.nanmedian.dim, takes_quantized=True)
def nanmedian_dim(x: Tensor, dim: int, keepdim: bool = False, *, quantized: bool) -> tuple[Tensor, Tensor | None]:
    """Median of the elements that are not NaN. The index is None (not computed) if elements may be NaN.

    NaN is replaced by infinity, so that numbers are sorted to the front.
    """
    if quantized or not x.is_floating_point() or not x.dim():
        return median_dim(x, dim, keepdim, quantized=quantized)
    is_number = x == x
    ordered = torch.sort(torch.where(is_number, x, math.inf), dim)[0]
    count = is_number.to(torch.float32).sum(dim, keepdim=True)
    middle = torch.floor((count - 1) / 2).clamp(min=0).to(torch.int32).to(torch.int64)
    value = torch.where(count > 0, torch.gather(ordered, dim, middle), math.nan)
    return value if keepdim else value.squeeze(dim), None


@decomposition(aten.nanmean.default, takes_quantized=True)
def nanmean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> Tensor:
    """Mean of the elements that are not NaN."""
    dims = list(range(x.dim())) if not dim else list(dim)
    x = x.to(dtype or x.dtype)
    if quantized:  # quantized values are never NaN
        return torch.mean(x, dims, keepdim)
    is_number = x == x
    return torch.where(is_number, x, 0).sum(dims, keepdim) / is_number.to(x.dtype).sum(dims, keepdim)


@decomposition(aten.nanmedian.default)
def nanmedian(x: Tensor) -> Tensor:
    """Median of the elements that are not NaN, over all dimensions."""
    return torch.nanmedian(_flatten_nonempty(x), 0)[0]


def _count_below(boundaries: Tensor, x: Any, out_int32: bool, right: bool) -> Tensor:
    """Count the ``boundaries`` (last dimension) that are < x, or <= x if ``right``. If x is NaN, count all."""
    above = boundaries > x if right else boundaries >= x
    return torch.sum(~above, -1, dtype=torch.int32 if out_int32 else torch.int64)


@decomposition(aten.bucketize.Tensor)
def bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """For each element of x, the index of its bucket between the sorted ``boundaries`` [N]."""
    return _count_below(boundaries, x.unsqueeze(-1), out_int32, right)


@decomposition(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    boundaries: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Insertion index of x [..., M] in sorted boundaries [N] or [..., N]. If they are [N], x may also be a number."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    boundaries = boundaries.unsqueeze(-2) if boundaries.dim() > 1 else boundaries
    expanded = x.unsqueeze(-1) if isinstance(x, Tensor) else x
    return _count_below(boundaries, expanded, out_int32, right or side == "right")


@decomposition(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar)
def isin(x: Tensor, known: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element of x is in ``known``."""
    is_member = (x.unsqueeze(-1) == known.reshape(-1)).any(-1) if isinstance(known, Tensor) else x == known
    return ~is_member if invert else is_member


def _build_spread_and_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the decomposition that returns (``spread``, mean). ``spread`` is the variance or the standard deviation."""

    def spread_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dims = args[0] if args and not isinstance(args[0], bool) else kwargs.get("dim")
        return spread(x, *args, **kwargs), torch.mean(x, dims, kwargs.get("keepdim", args[2] if args[2:] else False))

    return spread_and_mean


decomposition(aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction)(_build_spread_and_mean(torch.var))
decomposition(aten.std_mean.default, aten.std_mean.dim, aten.std_mean.correction)(_build_spread_and_mean(torch.std))
