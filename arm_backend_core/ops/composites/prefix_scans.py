"""Decompositions of cumulative sums, products and extrema."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arm_backend_core.ops import intervals
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten

#: Maximum number of factors that ``cumprod`` multiplies one by one. One CONCAT joins the products, and TOSA's level 8K
#: limits its operands to 64.
_MAX_SEQUENTIAL_PRODUCTS = 64


@decomposition(aten.cumprod.default, takes_quantized=True)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, quantized: bool = False) -> Tensor:
    """Cumulative product, one factor after the other; for large dimensions and quantized programs a prefix scan."""
    size = x.shape[dim] if x.dim() else 1
    if quantized or not 1 < size <= _MAX_SEQUENTIAL_PRODUCTS:
        return _prefix_scan(x, dim, dtype, torch.mul)  # less exact: 0 times a partial product that overflows is NaN
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    products = [x.narrow(dim, 0, 1)]
    for i in range(1, size):
        products.append(products[-1] * x.narrow(dim, i, 1))
    return torch.cat(products, dim)


@decomposition(aten.cumsum.default, takes_quantized=True, interval=intervals.reduced_sum)
def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, quantized: bool = False) -> Tensor:
    """Cumulative sum by a prefix scan. Quantized floats: by a product with a triangular matrix, which rounds once."""
    if quantized and x.dim() and x.is_floating_point():
        size = x.shape[dim]
        return torch.matmul(x.transpose(dim, -1), torch.ones(size, size).triu()).transpose(dim, -1)
    return _prefix_scan(x, dim, dtype, torch.add)


@decomposition(aten.logcumsumexp.default)
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Logarithm of the cumulative sum of exp(x), by a prefix scan with logaddexp, which does not overflow."""
    return _prefix_scan(x, dim, x.dtype, torch.logaddexp)


def _build_cumulative_extreme(combine: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def cumulative_extreme(x: Tensor, dim: int, *, quantized: bool) -> tuple[Tensor, Tensor]:
        """Cumulative maximum or minimum, and the last index at which an element equals it."""
        values, index_dtype = _prefix_scan(x, dim, x.dtype, combine), torch.int32 if quantized else torch.float32
        if not x.dim():
            return values, torch.zeros((), dtype=torch.int64)
        positions = torch.arange(x.shape[dim], dtype=index_dtype)
        positions = positions.reshape([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])
        candidates = torch.where((x == values) | (x != x), positions, 0)
        return values, _prefix_scan(candidates, dim, index_dtype, torch.maximum).to(torch.int32).to(torch.int64)

    return cumulative_extreme


decomposition(aten.cummax.default, takes_quantized=True)(_build_cumulative_extreme(torch.maximum))
decomposition(aten.cummin.default, takes_quantized=True)(_build_cumulative_extreme(torch.minimum))


def _prefix_scan(x: Tensor, dim: int, dtype: torch.dtype | None, combine: Callable[..., Tensor]) -> Tensor:
    """Prefix scan (Hillis-Steele) along ``dim``: log2(n) steps that combine elements at a distance of 1, 2, 4, ..."""
    # In a matrix product, 0 * inf would turn the results before an infinity into NaN. A prefix scan keeps them.
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    if not x.dim():
        return x.clone()
    x = x.transpose(dim, -1)
    size, distance = x.shape[-1], 1
    while distance < size:
        x = torch.cat([x[..., :distance], combine(x[..., distance:], x[..., : size - distance])], -1)
        distance *= 2
    return x.transpose(dim, -1)
