"""Matrix products whose result or operands have a type of their own, and those of groups of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.registry import decomposition, foreign_decomposition

aten = torch.ops.aten


@decomposition(aten.mm.dtype, aten.bmm.dtype)
def matmul_in_dtype(x: Tensor, y: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product in another type than that of the operands."""
    return torch.matmul(x.to(out_dtype), y.to(out_dtype))


@decomposition(aten.addmm.dtype)
def addmm_in_dtype(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta * x + alpha * a @ b; PyTorch's own decomposition takes the type for ``beta``."""
    return x.to(out_dtype) * beta + matmul_in_dtype(a, b, out_dtype) * alpha


@decomposition(aten._weight_int8pack_mm.default)
def int8_weight_mm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, K] times a weight [N, K] of int8 with a scale for each of N."""
    return F.linear(x, weight.to(x.dtype)) * scales


@decomposition(aten._scaled_mm.default)
def scaled_mm(
    x: Tensor,
    y: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """x @ y of 8 bits of floating point, times one scale of each, or one for each row and column, plus the bias."""
    total = torch.matmul(x.float(), y.float()) * scale_a * scale_b
    return (total if bias is None else total + bias.float()).to(out_dtype or x.dtype)


@foreign_decomposition("transformers::grouped_mm_fallback")  # its mixtures of experts, exported
@decomposition(aten._grouped_mm.default)
def grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows of x [M, K] up to each of ``offs`` [G] times a weight of their own, [G, K, N]: experts of a mixture.

    All rows are multiplied by all weights, as shapes do not depend on values.
    """
    if offs is None:
        return torch.bmm(x, weight)
    if x.dim() != 2 or weight.dim() != 3:
        raise Unsupported("grouped products of groups of columns")
    row = torch.arange(len(x), dtype=offs.dtype)[:, None]
    result = torch.zeros((len(x), weight.shape[-1]), dtype=x.dtype)
    for group in range(len(weight))[::-1]:  # the last first: an earlier group takes the rows before its end
        result = torch.where(row < offs[group], torch.mm(x, weight[group]), result)
    return result
