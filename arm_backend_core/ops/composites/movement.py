"""Decompositions of operators that index a tensor, view it by strides, or fill it with a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """A diagonal of ``dim1`` and ``dim2``: crop both dimensions to n x n, flatten, take every (n + 1)-th element."""
    x = x.movedim((dim1, dim2), (-2, -1))
    x = x[..., max(offset, 0) :] if offset > 0 else x[..., max(-offset, 0) :, :]
    side = min(x.shape[-2:])
    return x[..., :side, :side].flatten(-2)[..., :: side + 1]


@decomposition(aten.meshgrid.default, aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Tensor], *, indexing: str = "ij") -> list[Tensor]:
    """torch.meshgrid: place each tensor along its own dimension, and broadcast it along the others.

    Indexing "xy" swaps the first two dimensions.
    """
    order = [1, 0, *range(2, len(tensors))] if indexing == "xy" and len(tensors) > 1 else list(range(len(tensors)))
    shape = [tensors[i].numel() for i in order]
    return [x.reshape([-1 if i == j else 1 for j in order]).expand(shape) for i, x in enumerate(tensors)]


@decomposition(aten.unfold.default, aten.unfold_copy.default)
def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Tensor.unfold: windows of ``size`` elements every ``step`` along ``dim``, in a new last dimension.

    Each index selects a block of gcd(size, step) consecutive elements, which keeps the index tensor short.
    """
    if not x.dim():
        return x.reshape(1)
    axis, block = dim % x.dim(), math.gcd(size, step)
    starts = range(0, (x.shape[axis] - size) // block + 1, step // block)
    indices = [[start + i for i in range(size // block)] for start in starts]
    blocks = x.narrow(axis, 0, x.shape[axis] // block * block).unflatten(axis, (-1, block)) if block > 1 else x
    selected = torch.index_select(blocks, axis, torch.tensor(indices).reshape(-1))
    if block > 1:
        selected = selected.flatten(axis, axis + 1)
    return selected.unflatten(axis, (len(indices), size)).movedim(axis + 1, -1)


READS_BEYOND_VIEW = (
    "it reads by strides, and its input is not contiguous, or is a view of a larger tensor and it also reads elements "
    "outside of this view; index the larger tensor instead, or make the input contiguous()"
)


def strided_indices(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Array:
    """Indices, in the flattened x, of the elements of a strided view of x.

    Raises:
        ModelError: x is not contiguous, or the view reads memory outside of x. In eager mode, x may share its memory
            with a larger tensor; in the program, it is a separate tensor.
    """
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    strides = np.array(stride, dtype=int).reshape(-1, *[1] * len(size))
    indices = np.asarray(first + (np.indices(tuple(size)) * strides).sum(0))
    if not x.is_contiguous() or (indices.size and (indices.min() < 0 or indices.max() >= x.numel())):
        raise ModelError(READS_BEYOND_VIEW)
    return indices


@decomposition(aten.as_strided.default, aten.as_strided_copy.default, reads_storage_offset=True)
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """Strided view of contiguous memory, computed by an index_select."""
    indices = torch.tensor(strided_indices(x, size, stride, storage_offset).reshape(-1).tolist(), dtype=torch.int64)
    return torch.index_select(x.reshape(-1), 0, indices).reshape(tuple(size))


@decomposition(aten._reshape_alias.default, reads_storage_offset=True)
def reshape_alias(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """View with the given strides: a reshape if it has these strides, else ``as_strided``."""
    reshaped = x.reshape(tuple(size))
    return reshaped if x.is_contiguous() and reshaped.stride() == tuple(stride) else as_strided(x, size, stride)


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
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
    *,
    quantized: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Sum (mode 0), mean (1) or maximum (2) of the table rows of each bag; 0 for an empty bag.

    A bag is the range of ``indices`` from one offset to the next. Sum and mean multiply the table rows by a matrix with
    one row per bag: 1 (mean: 1 / count) at the positions of the bag, else 0. For these two modes, the table rows must
    be finite, because 0 * inf is NaN. The other three results of the operator are None, because only its gradient needs
    them.
    """
    positions = torch.arange(len(indices), dtype=torch.int32)
    is_after_offset = positions >= offsets.to(torch.int32).unsqueeze(-1)
    is_after_offset = is_after_offset if include_last_offset else F.pad(is_after_offset, (0, 0, 0, 1), value=False)
    in_bag = is_after_offset[:-1] & ~is_after_offset[1:]  # [bags, positions]
    if padding_idx is not None and padding_idx >= 0:
        in_bag = in_bag & (indices != padding_idx)
    rows = F.embedding(indices, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
    if mode == 2:
        lowest = rows.amin() if quantized else -math.inf  # no scale represents -inf
        maximum = torch.where(in_bag.unsqueeze(-1), rows, lowest).amax(1)
        return torch.where(in_bag.any(1, keepdim=True), maximum, 0.0), None, None, None
    factor_matrix = torch.where(in_bag, 1.0, 0.0).to(rows.dtype)
    if mode == 1:
        factor_matrix = factor_matrix / factor_matrix.sum(1, keepdim=True).clamp(min=1)
    return torch.matmul(factor_matrix, rows), None, None, None


@decomposition(aten.take.default)
def take(x: Tensor, index: Tensor) -> Tensor:
    """Elements of the flattened x at ``index``."""
    return aten.index(x.reshape(-1), [index])  # negative indices count from the end


@decomposition(aten._unsafe_masked_index.default, takes_quantized=True)
def unsafe_masked_index(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float, *, quantized: bool = False
) -> Tensor:
    """x[indices] where the mask is true, else ``fill``.

    Indices are clamped, because those under a false mask may be out of range.
    """
    if not x.numel():
        raise Unsupported("indexing an empty tensor; write it with torch.full")
    dtype = torch.int32 if quantized else torch.float32  # the FP profile has no integer CLAMP
    index_sizes = zip(indices, x.shape, strict=False)
    clamped = [i if i is None else i.to(dtype).clamp(-n, n - 1).to(torch.int32) for i, n in index_sizes]
    return torch.where(mask, aten.index(x, clamped), scalar_like(x, fill))


# -- filling ------------------------------------------------------------------------------------------------------


@decomposition(aten.full_like.default)
def full_like(x: Tensor, fill_value: float, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Constant tensor with the shape of x. ``dtype`` defaults to the type of x."""
    return torch.full(x.shape, fill_value, dtype=dtype or x.dtype)


@decomposition(aten.zeros_like.default, aten.zero.default)
def zeros_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Constant zeros with the shape of x. ``dtype`` defaults to the type of x."""
    return full_like(x, 0, dtype=dtype)


@decomposition(aten.ones_like.default)
def ones_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Constant ones with the shape of x. ``dtype`` defaults to the type of x."""
    return full_like(x, 1, dtype=dtype)


@decomposition(aten.new_full.default)
def new_full(
    x: Tensor, size: Sequence[int], fill_value: float, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """Constant of shape ``size``. ``dtype`` defaults to the type of x."""
    return torch.full(tuple(size), fill_value, dtype=dtype or x.dtype)


@decomposition(aten.new_zeros.default)
def new_zeros(x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Constant zeros of shape ``size``. ``dtype`` defaults to the type of x."""
    return new_full(x, size, 0, dtype=dtype)


@decomposition(aten.new_ones.default)
def new_ones(x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Constant ones of shape ``size``. ``dtype`` defaults to the type of x."""
    return new_full(x, size, 1, dtype=dtype)


@decomposition(aten.fill.Scalar)
def fill(x: Tensor, value: float) -> Tensor:
    """Constant tensor of the shape of x, filled with ``value``."""
    return full_like(x, value)


@decomposition(aten.fill.Tensor, aten.copy.default)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy of ``source`` in the shape and type of x."""
    return source.to(x.dtype).expand(x.shape).clone()  # a copy, because the program may write to it


def scalar_like(x: Tensor, value: Any) -> Tensor:
    """Convert ``value`` to a scalar of the type of x, because ``where`` would promote x to the type of ``value``."""
    return value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)
