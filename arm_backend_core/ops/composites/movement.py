"""Decompositions of indexing, filling and scatter operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import ModelError, Unsupported
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten
Array = np.ndarray[Any, Any]


@decomposition(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Every (n + 1)-th element of the flattened square of side n."""
    x = x.movedim((dim1, dim2), (-2, -1))
    x = x[..., max(offset, 0) :] if offset > 0 else x[..., max(-offset, 0) :, :]
    side = min(x.shape[-2:])
    return x[..., :side, :side].flatten(-2)[..., :: side + 1]


@decomposition(aten.meshgrid.default, aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Tensor], *, indexing: str = "ij") -> list[Tensor]:
    """Each tensor along a dimension of its own; "xy" swaps the first two."""
    order = [1, 0, *range(2, len(tensors))] if indexing == "xy" and len(tensors) > 1 else list(range(len(tensors)))
    shape = [tensors[i].numel() for i in order]
    return [x.reshape([-1 if i == j else 1 for j in order]).expand(shape) for i, x in enumerate(tensors)]


@decomposition(aten.unfold.default, aten.unfold_copy.default)
def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Tensor.unfold: windows of ``size`` elements every ``step`` along ``dim``, in a new last dimension.

    Runs of gcd(size, step) elements are indexed together.
    """
    if not x.dim():
        return x.reshape(1)
    axis, row = dim % x.dim(), math.gcd(size, step)
    places = [
        [start + i for i in range(size // row)] for start in range(0, (x.shape[axis] - size) // row + 1, step // row)
    ]
    rows = x.narrow(axis, 0, x.shape[axis] // row * row).unflatten(axis, (-1, row)) if row > 1 else x
    picked = torch.index_select(rows, axis, torch.tensor(places).reshape(-1))
    if row > 1:
        picked = picked.flatten(axis, axis + 1)
    return picked.unflatten(axis, (len(places), size)).movedim(axis + 1, -1)


OUT_OF_VIEW = "it reaches memory beyond the view that it is given; index the whole tensor instead"


def _strided_indices(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Array:
    """Indices in contiguous memory of a strided view.

    Raises:
        ModelError: the view reaches beyond x, which is a part of some memory in eager mode but a tensor of its own in
            the program.
    """
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    steps = np.array(stride, dtype=int).reshape(-1, *[1] * len(size))
    places = np.asarray(first + (np.indices(tuple(size)) * steps).sum(0))
    if not x.is_contiguous() or (places.size and (places.min() < 0 or places.max() >= x.numel())):
        raise ModelError(OUT_OF_VIEW)
    return places


@decomposition(aten.as_strided.default, aten.as_strided_copy.default, reads_memory=True)
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """A strided view of contiguous memory as an index_select."""
    places = torch.tensor(_strided_indices(x, size, stride, storage_offset).reshape(-1).tolist(), dtype=torch.int64)
    return torch.index_select(x.reshape(-1), 0, places).reshape(tuple(size))


@decomposition(aten._reshape_alias.default, reads_memory=True)
def reshape_alias(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A view with the given strides, which usually are those of a reshape."""
    shaped = x.reshape(tuple(size))
    return shaped if x.is_contiguous() and shaped.stride() == tuple(stride) else as_strided(x, size, stride)


@decomposition(
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    takes_quantized=True,
)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
    *,
    quantized: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Sum (mode 0), mean (1) or maximum (2) of the rows from each offset to the next; 0 for an empty bag.

    Returns None for the bookkeeping results. A sum is a matrix product with 0 and 1, which needs finite rows.
    """
    places = torch.arange(len(indices), dtype=torch.int32)
    begun = places >= offsets.to(torch.int32).unsqueeze(-1)
    begun = begun if include_last_offset else F.pad(begun, (0, 0, 0, 1), value=False)
    member = begun[:-1] & ~begun[1:]  # [bags, places]
    if padding_idx is not None and padding_idx >= 0:
        member = member & (indices != padding_idx)
    rows = F.embedding(indices, weight)
    rows = rows if factors is None else rows * factors.unsqueeze(-1)
    if mode == 2:
        lowest = rows.amin() if quantized else -math.inf  # infinity has no scale
        largest = torch.where(member.unsqueeze(-1), rows, lowest).amax(1)
        return torch.where(member.any(1, keepdim=True), largest, 0.0), None, None, None
    shares = torch.where(member, 1.0, 0.0).to(rows.dtype)
    if mode == 1:
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    return torch.matmul(shares, rows), None, None, None


@decomposition(aten.take.default)
def take(x: Tensor, index: Tensor) -> Tensor:
    """Elements of the flattened tensor at ``index``."""
    return aten.index(x.reshape(-1), [index])  # negative indices count from the end


# -- filling ------------------------------------------------------------------------------------------------------


@decomposition(aten.full_like.default)
def full_like(x: Tensor, value: float, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant. Only shape and dtype of x are used."""
    return torch.full(x.shape, value, dtype=dtype or x.dtype)


@decomposition(aten.zeros_like.default, aten.zero.default)
def zeros_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant."""
    return full_like(x, 0, dtype=dtype)


@decomposition(aten.ones_like.default)
def ones_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant."""
    return full_like(x, 1, dtype=dtype)


@decomposition(aten.new_full.default)
def new_full(x: Tensor, size: Sequence[int], value: float, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant."""
    return torch.full(tuple(size), value, dtype=dtype or x.dtype)


@decomposition(aten.new_zeros.default)
def new_zeros(x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant."""
    return new_full(x, size, 0, dtype=dtype)


@decomposition(aten.new_ones.default)
def new_ones(x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A constant."""
    return new_full(x, size, 1, dtype=dtype)


@decomposition(aten.fill.Scalar)
def fill(x: Tensor, value: float) -> Tensor:
    """A constant."""
    return full_like(x, value)


@decomposition(aten.fill.Tensor, aten.copy.default)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``source`` in the shape and type of x."""
    return source.to(x.dtype).expand(x.shape).clone()  # separate memory, as the program may write to it


# -- replacing ----------------------------------------------------------------------------------------------------


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
    places = range(size)[start:end:step]
    if not places:
        return x.clone()
    source = source.to(x.dtype)
    if step > 1:
        return index_copy(x, dim, torch.tensor(places), source, quantized=quantized)
    before, after = x.narrow(dim, 0, places.start), x.narrow(dim, places.stop, size - places.stop)
    return torch.cat([part for part in (before, source, after) if part.numel()], dim)


@decomposition(aten.select_scatter.default)
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """x with x[index] along ``dim`` replaced by ``source``."""
    place = index % x.shape[dim]
    return slice_scatter(x, source.unsqueeze(dim), dim, place, place + 1)


def _scatter_into_view(x: Tensor, source: Tensor, view: Callable[[Array], Array]) -> Tensor:
    """x with the elements of ``source`` written through a view of contiguous memory, as an index_select."""
    chosen = np.arange(x.numel()).reshape(x.shape)
    chosen.reshape(-1)[view(chosen).reshape(-1)] = x.numel() + np.arange(source.numel())
    elements = torch.cat([x.reshape(-1), source.to(x.dtype).reshape(-1)])
    return torch.index_select(elements, 0, torch.tensor(chosen.reshape(-1).tolist())).reshape(x.shape)


@decomposition(aten.diagonal_scatter.default)
def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """x with a diagonal replaced by ``source``."""
    return _scatter_into_view(x, source, lambda places: places.diagonal(offset, dim1, dim2).copy())


@decomposition(aten.as_strided_scatter.default, reads_memory=True)
def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """x with a strided view replaced by ``source``."""
    places = _strided_indices(x, size, stride, storage_offset)
    return _scatter_into_view(x, source, lambda _: places)


@decomposition(aten.put.default, takes_quantized=True)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False, *, quantized: bool = False) -> Tensor:
    """x with the elements of ``source`` at indices of the flattened tensor."""
    flat = x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate
    return index_put(*flat, quantized=quantized).reshape(x.shape)


@decomposition(aten._unsafe_masked_index.default, takes_quantized=True)
def unsafe_masked_index(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float, *, quantized: bool = False
) -> Tensor:
    """x[indices] where the mask is true, else ``fill``. Any index is clamped to x, in a type that targets clamp."""
    if not x.numel():
        raise Unsupported("indexing an empty tensor; write it with torch.full")
    number = torch.int32 if quantized else torch.float32  # the FP profile clamps no integers
    limits = zip(indices, x.shape, strict=False)
    inside = [i if i is None else i.to(number).clamp(-n, n - 1).to(torch.int32) for i, n in limits]
    return torch.where(mask, aten.index(x, inside), _as_scalar_of(x, fill))


def _match_indices(index: Tensor, size: int) -> Tensor:
    """One-hot mask [..., size] of indices, which may count from the end."""
    positions = torch.arange(size)
    return (index.unsqueeze(-1) == positions) | (index.unsqueeze(-1) == positions - size)


def _last_match(hits: Tensor, dim: int, quantized: bool) -> Tensor:
    """Last index along ``dim`` with a hit, 0 if there is none; computed in a type that targets can compare."""
    number = torch.int32 if quantized else torch.float32
    positions = torch.arange(hits.shape[dim], dtype=number)
    return torch.where(hits, _reshape_along(positions, hits, dim), 0).amax(dim).to(torch.int32)


def _reshape_along(places: Tensor, x: Tensor, dim: int) -> Tensor:
    """Reshape ``places`` [size] so that it broadcasts along ``dim`` of x."""
    return places.reshape([-1 if axis == dim % max(x.dim(), 1) else 1 for axis in range(x.dim())])


@decomposition(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """x with ``value`` at the indices along ``dim``."""
    size = x.shape[dim] if x.dim() else 1
    return torch.where(
        _reshape_along(_match_indices(index.reshape(-1), size).any(0), x, dim), _as_scalar_of(x, value), x
    )


def _as_scalar_of(x: Tensor, value: Any) -> Tensor:
    """``value`` as a scalar of the type of x, as ``where`` would otherwise promote x."""
    return value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)


@decomposition(aten.index_copy.default, takes_quantized=True)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor, *, quantized: bool = False) -> Tensor:
    """x with the rows of ``source`` at the indices along ``dim``; the last of equal indices wins."""
    if not index.numel():
        return x.clone()
    if not x.dim():
        return source.reshape(()).clone()
    hits = _match_indices(index.reshape(-1), x.shape[dim])  # [rows of source, places]
    rows = torch.index_select(source, dim, _last_match(hits, 0, quantized))
    return torch.where(_reshape_along(hits.any(0), x, dim), rows, x)


@decomposition(aten.index_add.default, takes_quantized=True)
def index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, quantized: bool = False
) -> Tensor:
    """x with the rows of ``source`` added at the indices along ``dim``.

    Quantized: a matrix product with a one-hot matrix. Else a masked sum, as 0 * inf is NaN.
    """
    if not x.dim():
        raise Unsupported("index_add on a scalar; add the number")
    # [rows, places] and [..., rows]
    hits, rows = _match_indices(index.reshape(-1), x.shape[dim]), source.transpose(dim, -1)
    if quantized and x.is_floating_point():
        added = torch.matmul(rows, hits.to(x.dtype))
    else:
        added = torch.where(hits, rows.unsqueeze(-1), 0).sum(-2, dtype=x.dtype)
    added = added.transpose(dim, -1)
    return x + (added if alpha == 1 else added * alpha)


@decomposition(aten.scatter.value)
def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """x with ``value`` at the indices along ``dim``."""
    hits, _ = _match_scatter(x, dim, index, x)
    return torch.where(hits.any(-2).transpose(dim, -1), _as_scalar_of(x, value), x)


@decomposition(aten.scatter.src, takes_quantized=True)
def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor, *, quantized: bool = False) -> Tensor:
    """x with the elements of ``source`` at the indices along ``dim``; the last of equal indices wins."""
    if not index.numel():
        return x.clone()
    hits, source = _match_scatter(x, dim, index, source)
    chosen = torch.gather(source, -1, _last_match(hits, -2, quantized).to(torch.int64))
    return torch.where(hits.any(-2), chosen, x.transpose(dim, -1)).transpose(dim, -1)


@decomposition(aten.scatter_add.default)
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with the elements of ``source`` added at the indices along ``dim``."""
    return scatter_reduce(x, dim, index, source, "sum")


@decomposition(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with_reduction(x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    """x combined with elements of ``source``, or with a number, by "add" or "multiply"."""
    elements = source if isinstance(source, Tensor) else torch.full(index.shape, source, dtype=x.dtype)
    return scatter_reduce(x, dim, index, elements, {"add": "sum", "multiply": "prod"}[reduce])


#: Reduction -> its neutral element, and its operation on a dimension and on two tensors.
_REDUCTIONS: dict[str, tuple[float, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sum": (0.0, torch.sum, torch.add),
    "prod": (1.0, torch.prod, torch.mul),
    "amax": (-math.inf, torch.amax, torch.maximum),
    "amin": (math.inf, torch.amin, torch.minimum),
}


@decomposition(aten.scatter_reduce.two, takes_quantized=True)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, **how: bool
) -> Tensor:
    """x combined with the elements of ``source`` at the indices along ``dim``."""
    quantized = how.get("quantized", False)
    if not index.numel():
        return x.clone()
    if not x.is_floating_point() or (quantized and reduce == "prod"):
        raise Unsupported(f"scatter_reduce '{reduce}' of integers, or a quantized 'prod'; use floating-point sums")
    neutral, along, join = _REDUCTIONS["sum" if reduce == "mean" else reduce]
    worst = {"amax": torch.amin, "amin": torch.amax}.get(reduce) if quantized else None  # no scale represents infinity
    other = worst(source) if worst else neutral
    hits, source = _match_scatter(x, dim, index, source)
    old, new = x.transpose(dim, -1), along(torch.where(hits, source.unsqueeze(-1), other), -2)
    new = join(old, new) if include_self else new
    new = new if include_self and not worst else torch.where(hits.any(-2), new, old)
    if reduce == "mean":
        new = new / (hits.to(x.dtype).sum(-2) + float(include_self)).clamp(min=1)
    return new.transpose(dim, -1)


@decomposition(aten.index_reduce.default, takes_quantized=True)
def index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, **how: bool) -> Tensor:
    """x combined with the rows of ``source`` at the indices along ``dim``."""
    places = _reshape_along(index.reshape(-1), source, dim).expand(source.shape)
    return scatter_reduce(x, dim, places, source, reduce, **how)


def _match_scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Hit mask [..., elements, places] of a scatter along ``dim``, and the source elements with ``dim`` last.

    If the indices cover only a part of the other dimensions, the rest has no hits.
    """
    if not x.dim():
        raise Unsupported("scatter into a scalar; write it with torch.where")
    part = source[tuple(slice(0, size) for size in index.shape)].transpose(dim, -1)
    rows, index = x.transpose(dim, -1).shape[:-1], index.transpose(dim, -1)
    pads = [n for have, want in zip(index.shape[-2::-1], rows[::-1], strict=True) for n in (0, want - have)]
    hits = _match_indices(index, x.shape[dim])
    if any(pads):
        hits, part = F.pad(hits, [0, 0, 0, 0, *pads], value=False), F.pad(part, [0, 0, *pads])
    return hits, part


@decomposition(aten.index_put.default, takes_quantized=True)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, quantized: bool = False
) -> Tensor:
    """x[..., index, ...] = values: ``where`` for a mask, else index_copy along the flattened indexed dimensions."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    present = [index for index in indices if index is not None]
    if present[0].dtype is torch.bool:
        if len(present) > 1 or accumulate or (values.numel() != 1 and present[0].dim() != x.dim()):
            raise Unsupported("index_put of several values by a mask of some dimensions; write it with torch.where")
        if values.numel() != 1:
            return masked_scatter(x, present[0], values)
        mask = present[0].reshape(present[0].shape + (1,) * (x.dim() - present[0].dim() - axes[0]))
        return torch.where(mask, values.reshape(()), x)
    if axes != list(range(axes[0], axes[-1] + 1)):
        order = [*axes, *(axis for axis in range(x.dim()) if axis not in axes)]
        written = index_put(x.permute(order), present, values, accumulate, quantized=quantized)
        return written.permute([order.index(axis) for axis in range(x.dim())])
    first, *others = present
    index = torch.remainder(first, x.shape[axes[0]]) if others else first
    for picked, axis in zip(others, axes[1:], strict=True):
        index = index * x.shape[axis] + torch.remainder(picked, x.shape[axis])
    lead, rest = x.shape[: axes[0]], x.shape[axes[-1] + 1 :]
    source = values.expand((*lead, *index.shape, *rest)).reshape(*lead, -1, *rest)
    merged, places = x.reshape(*lead, -1, *rest), index.reshape(-1)
    if accumulate:
        return index_add(merged, axes[0], places, source, quantized=quantized).reshape(x.shape)
    return index_copy(merged, axes[0], places, source, quantized=quantized).reshape(x.shape)


@decomposition(aten.masked_scatter.default)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x with consecutive elements of ``source`` where the mask is true."""
    x, mask = torch.broadcast_tensors(x, mask)
    places = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - mask.reshape(-1).to(torch.int64)
    elements = F.pad(source.reshape(-1), (0, max(x.numel() - source.numel(), 0)))
    picked = torch.index_select(elements, 0, places)
    return torch.where(mask, picked.reshape(x.shape), x)
