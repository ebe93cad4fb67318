"""Decompositions of ATen operators, as functions of tensors that PyTorch traces.

They cover operators that PyTorch does not decompose, or whose decomposition in PyTorch is unsuitable: it splits an
operator that a target supports, takes long to trace, or uses operators that no target supports.
"""

import torch
from torch import Tensor


def replace_zero_by_one(x: Tensor) -> Tensor:
    """Replace each 0 in ``x`` by 1, so that ``x`` can be a divisor."""
    return torch.where(x == 0, 1.0, x)
