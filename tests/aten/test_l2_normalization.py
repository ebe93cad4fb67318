"""``F.normalize`` as an RMS norm: equal results, or no rewrite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arm_backend_core.aten.l2_normalization import convert_l2_normalize_to_rms_norm

aten = torch.ops.aten


class _Normalize(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=1, eps=self.eps)


@pytest.mark.parametrize(("eps", "is_rewritten"), [(1e-12, True), (1e-3, True), (0.5, False)])
def test_normalize_keeps_its_value(eps: float, is_rewritten: bool) -> None:
    """A large ``eps``, up to which the operator divides by ``eps`` itself, is not rewritten."""
    x = torch.linspace(-1, 1, 48).reshape(2, 8, 3)
    module = torch.export.export(_Normalize(eps), (x,)).module()
    convert_l2_normalize_to_rms_norm(module)
    module.recompile()
    assert bool(module.graph.find_nodes(op="call_function", target=aten.rms_norm.default)) is is_rewritten
    torch.testing.assert_close(module(x), _Normalize(eps)(x))
