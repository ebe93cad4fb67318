"""Decompositions of mixed-precision, scaled and grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.registry import decomposition, decomposition_by_name

aten = torch.ops.aten


@decomposition(aten.mm.dtype, aten.bmm.dtype)
def matmul_in_dtype(x: Tensor, y: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Matrix product in ``out_dtype``, to which the operands are cast."""
    return torch.matmul(x.to(out_dtype), y.to(out_dtype))


@decomposition(aten.addmm.dtype)
def addmm_in_dtype(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta * x + alpha * a @ b in ``out_dtype``. PyTorch's own decomposition mistakes ``out_dtype`` for ``beta``."""
    return x.to(out_dtype) * beta + matmul_in_dtype(a, b, out_dtype) * alpha


@decomposition(aten._weight_int8pack_mm.default)
def int8_weight_mm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, K] @ weight^T for an int8 weight [N, K] with one scale per row, [N]."""
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
    """x @ y of FP8 matrices, times the scales, plus the bias.

    The scales are per tensor, or per row of x and per column of y.
    """
    total = torch.matmul(x.float(), y.float()) * scale_a * scale_b
    return (total if bias is None else total + bias.float()).to(out_dtype or x.dtype)


@decomposition_by_name("transformers::grouped_mm_fallback")  # exported mixtures of experts
@decomposition(aten._grouped_mm.default)
def grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Grouped matrix product (mixture of experts): rows offs[g - 1] to offs[g] - 1 of x [M, K] times weight[g].

    ``offs`` is [G], ``weight`` is [G, K, N]. All rows are multiplied by all weights, because shapes cannot depend on
    values. Without ``offs``, x is [G, M, K], and each x[g] is multiplied by weight[g].
    """
    if offs is None:
        return torch.bmm(x, weight)
    if x.dim() != 2 or weight.dim() != 3:
        raise Unsupported("a grouped matrix product over groups of columns; only groups of rows are supported")
    row = torch.arange(len(x), dtype=offs.dtype)[:, None]
    result = torch.zeros((len(x), weight.shape[-1]), dtype=x.dtype)
    for group in range(len(weight))[::-1]:  # last group first, so that each group overwrites the rows before its end
        result = torch.where(row < offs[group], torch.mm(x, weight[group]), result)
    return result
