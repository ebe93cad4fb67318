"""Decompositions of ATen operators, as functions of tensors that PyTorch traces.

They cover operators that PyTorch does not decompose or decomposes unsuitably: its decomposition splits an operator that
a target runs as a whole, takes long to trace, or uses operators that no target has.
"""

import torch
from torch import Tensor


def replace_zero_by_one(x: Tensor) -> Tensor:
    """``x`` with 0 replaced by 1, as a divisor."""
    return torch.where(x == 0, 1.0, x)
