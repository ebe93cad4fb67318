"""Layer norms with channel constants become group norms; the numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_backend_core.quantization.algorithms.fuse_decomposed_norms import fuse_norms
from arm_backend_core.quantization.algorithms.group_norms import layer_norms_to_group_norms

aten = torch.ops.aten


class _Norm(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6)[:, None, None])
        self.bias = nn.Parameter(torch.linspace(-1, 1, 6)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def _global_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The global layer norm of Conv-TasNet."""
    mean = x.mean((1, 2, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean((1, 2, 3), keepdim=True)
    return weight * (x - mean) / torch.sqrt(variance + 1e-8) + bias


def _grouped_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x.view(2, 3, -1)
    y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return y.view(2, 6, 4, 5) * weight + bias


@pytest.mark.parametrize(
    ("function", "is_rewritten"),
    [
        (_global_norm, True),
        (_grouped_norm, True),
        (lambda x, weight, bias: F.layer_norm(x, (4, 5)) + bias, True),
        (lambda x, weight, bias: F.layer_norm(x, (6, 4, 5)), False),
        (lambda x, weight, bias: F.layer_norm(x, (5,)) * weight + bias, False),
        (lambda x, weight, bias: F.layer_norm(x, (6, 4, 5)) * weight[..., :1, 0, 0], False),
    ],
)
def test_layer_norms_with_channel_constants_become_group_norms(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], is_rewritten: bool
) -> None:
    model, x = _Norm(function).eval(), torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(model, (x,)).module()
    fuse_norms(module, ["fused_norms"])
    layer_norms_to_group_norms(module)
    targets = [node.target for node in module.graph.nodes]
    assert (aten.group_norm.default in targets) == is_rewritten
    assert is_rewritten != bool({aten.mul.Tensor, aten.layer_norm.default} & set(targets))
    module.recompile()
    torch.testing.assert_close(module(x), model(x), atol=1e-5, rtol=1e-5)
