"""Decompositions of operators that write into a part of a tensor: slice_scatter, index_put, scatter_reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.composites.movement import Array, scalar_like, strided_indices
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.slice_scatter.default, takes_quantized=True)
def slice_scatter(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    quantized: bool = False,
) -> Tensor:
    """x with x[start:end:step] along ``dim`` replaced by ``source``."""
    size = x.shape[dim]
    positions = range(size)[start:end:step]
    if not positions:
        return x.clone()
    source = source.to(x.dtype)
    if step > 1:
        return index_copy(x, dim, torch.tensor(positions), source, quantized=quantized)
    before, after = x.narrow(dim, 0, positions.start), x.narrow(dim, positions.stop, size - positions.stop)
    return torch.cat([piece for piece in (before, source, after) if piece.numel()], dim)


@decomposition(aten.select_scatter.default)
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """x with x[index] along ``dim`` replaced by ``source``."""
    position = index % x.shape[dim]
    return slice_scatter(x, source.unsqueeze(dim), dim, position, position + 1)


def _scatter_into_view(x: Tensor, source: Tensor, view: Callable[[Array], Array]) -> Tensor:
    """Write ``source`` into a view of contiguous x, by an index_select from the elements of x and ``source``.

    ``view`` takes an array in the shape of x that holds the flat indices of x. It returns the indices to write to.
    """
    indices = np.arange(x.numel()).reshape(x.shape)
    indices.reshape(-1)[view(indices).reshape(-1)] = x.numel() + np.arange(source.numel())
    elements = torch.cat([x.reshape(-1), source.to(x.dtype).reshape(-1)])
    return torch.index_select(elements, 0, torch.tensor(indices.reshape(-1).tolist())).reshape(x.shape)


@decomposition(aten.diagonal_scatter.default)
def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """x with a diagonal replaced by ``source``."""
    return _scatter_into_view(x, source, lambda indices: indices.diagonal(offset, dim1, dim2).copy())


@decomposition(aten.as_strided_scatter.default, reads_storage_offset=True)
def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """x with a strided view replaced by ``source``."""
    view_indices = strided_indices(x, size, stride, storage_offset)
    return _scatter_into_view(x, source, lambda _: view_indices)


@decomposition(aten.put.default, takes_quantized=True)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False, *, quantized: bool = False) -> Tensor:
    """x with the elements of ``source`` written at ``index`` in the flattened x, or added with ``accumulate``."""
    flat = x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate
    return index_put(*flat, quantized=quantized).reshape(x.shape)


def _one_hot_mask(index: Tensor, size: int) -> Tensor:
    """One-hot mask [..., size] of indices; negative indices count from the end."""
    positions = torch.arange(size)
    return (index.unsqueeze(-1) == positions) | (index.unsqueeze(-1) == positions - size)


def _last_matching_index(matches: Tensor, dim: int, quantized: bool) -> Tensor:
    """Last index along ``dim`` at which ``matches`` is true, 0 if there is none.

    The maximum of the matching indices is computed in an element type that the target can compare.
    """
    index_dtype = torch.int32 if quantized else torch.float32
    positions = torch.arange(matches.shape[dim], dtype=index_dtype)
    return torch.where(matches, _reshape_along(positions, matches, dim), 0).amax(dim).to(torch.int32)


def _reshape_along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    """Reshape ``vector`` [size] so that it broadcasts along ``dim`` of x."""
    return vector.reshape([-1 if axis == dim % max(x.dim(), 1) else 1 for axis in range(x.dim())])


@decomposition(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """x with ``value`` at the indices along ``dim``."""
    size = x.shape[dim] if x.dim() else 1
    return torch.where(_reshape_along(_one_hot_mask(index.reshape(-1), size).any(0), x, dim), scalar_like(x, value), x)


@decomposition(aten.index_copy.default, takes_quantized=True)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor, *, quantized: bool = False) -> Tensor:
    """x with the rows of ``source`` at the indices along ``dim``; the last of equal indices wins."""
    if not index.numel():
        return x.clone()
    if not x.dim():
        return source.reshape(()).clone()
    matches = _one_hot_mask(index.reshape(-1), x.shape[dim])  # [rows of source, positions]
    rows = torch.index_select(source, dim, _last_matching_index(matches, 0, quantized))
    return torch.where(_reshape_along(matches.any(0), x, dim), rows, x)


@decomposition(aten.index_add.default, takes_quantized=True)
def index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, quantized: bool = False
) -> Tensor:
    """x with the rows of ``source`` added at the indices along ``dim``.

    Quantized floats are multiplied by a one-hot matrix. Other tensors use a masked sum, because 0 * inf is NaN.
    """
    if not x.dim():
        raise Unsupported("index_add on a scalar; add the number")
    # matches: [rows of source, positions], rows: [..., rows of source]
    matches, rows = _one_hot_mask(index.reshape(-1), x.shape[dim]), source.transpose(dim, -1)
    if quantized and x.is_floating_point():
        sums = torch.matmul(rows, matches.to(x.dtype))
    else:
        sums = torch.where(matches, rows.unsqueeze(-1), 0).sum(-2, dtype=x.dtype)
    sums = sums.transpose(dim, -1)
    return x + (sums if alpha == 1 else sums * alpha)


@decomposition(aten.scatter.value)
def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """x with ``value`` at the indices along ``dim``."""
    matches, _ = _one_hot_scatter_mask(x, dim, index, x)
    return torch.where(matches.any(-2).transpose(dim, -1), scalar_like(x, value), x)


@decomposition(aten.scatter.src, takes_quantized=True)
def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor, *, quantized: bool = False) -> Tensor:
    """x with the elements of ``source`` at the indices along ``dim``; the last of equal indices wins."""
    if not index.numel():
        return x.clone()
    matches, source = _one_hot_scatter_mask(x, dim, index, source)
    written = torch.gather(source, -1, _last_matching_index(matches, -2, quantized).to(torch.int64))
    return torch.where(matches.any(-2), written, x.transpose(dim, -1)).transpose(dim, -1)


@decomposition(aten.scatter_add.default)
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with the elements of ``source`` added at the indices along ``dim``."""
    return scatter_reduce(x, dim, index, source, "sum")


@decomposition(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with_reduction(x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    """x combined with the elements of ``source``, or with one number, by ``reduce`` = "add" or "multiply"."""
    elements = source if isinstance(source, Tensor) else torch.full(index.shape, source, dtype=x.dtype)
    return scatter_reduce(x, dim, index, elements, {"add": "sum", "multiply": "prod"}[reduce])


#: {reduction: (identity element, reduction along a dimension, the same operation on two tensors)}.
_REDUCTIONS: dict[str, tuple[float, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sum": (0.0, torch.sum, torch.add),
    "prod": (1.0, torch.prod, torch.mul),
    "amax": (-math.inf, torch.amax, torch.maximum),
    "amin": (math.inf, torch.amin, torch.minimum),
}


@decomposition(aten.scatter_reduce.two, takes_quantized=True)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, **options: bool
) -> Tensor:
    """x combined by ``reduce`` with the elements of ``source`` at the indices along ``dim``."""
    quantized = options.get("quantized", False)
    if not index.numel():
        return x.clone()
    if not x.is_floating_point() or (quantized and reduce == "prod"):
        if x.is_floating_point():
            raise Unsupported("scatter_reduce 'prod' in a quantized program; use 'sum', or keep it in floating point")
        raise Unsupported(f"scatter_reduce '{reduce}' of integers; convert them with .to(torch.float32)")
    neutral, reduce_dim, combine = _REDUCTIONS["sum" if reduce == "mean" else reduce]
    range_end = {"amax": torch.amin, "amin": torch.amax}.get(reduce) if quantized else None
    unmatched_value = range_end(source) if range_end else neutral  # no scale represents infinity
    matches, source = _one_hot_scatter_mask(x, dim, index, source)
    old, new = x.transpose(dim, -1), reduce_dim(torch.where(matches, source.unsqueeze(-1), unmatched_value), -2)
    new = combine(old, new) if include_self else new
    new = new if include_self and not range_end else torch.where(matches.any(-2), new, old)
    if reduce == "mean":
        new = new / (matches.to(x.dtype).sum(-2) + float(include_self)).clamp(min=1)
    return new.transpose(dim, -1)


@decomposition(aten.index_reduce.default, takes_quantized=True)
def index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, **options: bool) -> Tensor:
    """x combined by ``reduce`` with the rows of ``source`` at the indices along ``dim``."""
    positions = _reshape_along(index.reshape(-1), source, dim).expand(source.shape)
    return scatter_reduce(x, dim, positions, source, reduce, **options)


def _one_hot_scatter_mask(x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the one-hot mask [..., elements, positions] of a scatter along ``dim``, and the source with ``dim`` last.

    ``index`` may be smaller than x in the other dimensions. Both results are padded to the size of x in these
    dimensions, and the padding of the mask is False.
    """
    if not x.dim():
        raise Unsupported("scatter into a scalar; write it with torch.where")
    elements = source[tuple(slice(0, size) for size in index.shape)].transpose(dim, -1)
    rows, index = x.transpose(dim, -1).shape[:-1], index.transpose(dim, -1)
    pads = [n for covered, size in zip(index.shape[-2::-1], rows[::-1], strict=True) for n in (0, size - covered)]
    matches = _one_hot_mask(index, x.shape[dim])
    if any(pads):
        matches, elements = F.pad(matches, [0, 0, 0, 0, *pads], value=False), F.pad(elements, [0, 0, *pads])
    return matches, elements


@decomposition(aten.index_put.default, takes_quantized=True)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, quantized: bool = False
) -> Tensor:
    """x[..., index, ...] = values.

    A boolean mask is decomposed to ``where`` or masked_scatter. For integer indices, the indexed axes are flattened
    into one axis, and index_copy writes along this axis, or index_add with ``accumulate``.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    index_tensors = [index for index in indices if index is not None]
    if any(index.dtype is torch.bool for index in index_tensors):
        if len(index_tensors) > 1 or accumulate or (values.numel() != 1 and index_tensors[0].dim() != x.dim()):
            raise Unsupported("index_put of several values by a mask of some dimensions; write it with torch.where")
        if values.numel() != 1:
            return masked_scatter(x, index_tensors[0], values)
        mask = index_tensors[0].reshape(index_tensors[0].shape + (1,) * (x.dim() - index_tensors[0].dim() - axes[0]))
        return torch.where(mask, values.reshape(()), x)
    if axes != list(range(axes[0], axes[-1] + 1)):
        order = [*axes, *(axis for axis in range(x.dim()) if axis not in axes)]
        result = index_put(x.permute(order), index_tensors, values, accumulate, quantized=quantized)
        return result.permute([order.index(axis) for axis in range(x.dim())])
    first, *others = index_tensors
    index = torch.remainder(first, x.shape[axes[0]]) if others else first
    for next_index, axis in zip(others, axes[1:], strict=True):
        index = index * x.shape[axis] + torch.remainder(next_index, x.shape[axis])
    leading, trailing = x.shape[: axes[0]], x.shape[axes[-1] + 1 :]
    source = values.expand((*leading, *index.shape, *trailing)).reshape(*leading, -1, *trailing)
    flat, flat_index = x.reshape(*leading, -1, *trailing), index.reshape(-1)
    if accumulate:
        return index_add(flat, axes[0], flat_index, source, quantized=quantized).reshape(x.shape)
    return index_copy(flat, axes[0], flat_index, source, quantized=quantized).reshape(x.shape)


@decomposition(aten.masked_scatter.default)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x with source[n] at the position of the n-th true element of the mask, counted from 0."""
    x, mask = torch.broadcast_tensors(x, mask)
    ranks = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - mask.reshape(-1).to(torch.int64)
    elements = F.pad(source.reshape(-1), (0, max(x.numel() - source.numel(), 0)))
    written = torch.index_select(elements, 0, ranks)
    return torch.where(mask, written.reshape(x.shape), x)
