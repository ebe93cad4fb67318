"""Squares of magnitudes become sums of squares; a magnitude with other readers stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.aten.magnitudes import simplify_squared_magnitudes

aten = torch.ops.aten


class _OfSpectrum(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.fft.rfft(x))


@pytest.mark.parametrize(
    ("function", "is_rewritten"),
    [
        (lambda z: z.abs().square(), True),
        (lambda z: z.abs() ** 2, True),
        (lambda z: z.abs().pow(2.0), True),
        (lambda z: z.abs() * z.abs(), True),
        (lambda z: torch.hypot(z.real, z.imag) ** 2, True),
        (lambda z: torch.cat([z.abs() ** 2, z.abs().square() + 1]), True),
        (lambda z: z.abs() ** 3, False),
        (lambda z: z.abs() * z.real.abs(), False),
        (lambda z: torch.cat([z.abs(), z.abs() ** 2]), False),
        (lambda z: z.real.abs() ** 2, False),
        (lambda z: z.abs(), False),
    ],
)
def test_squared_magnitude(function: Callable[[Tensor], Tensor], is_rewritten: bool) -> None:
    model, x = _OfSpectrum(function), torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(model, (x,)).module()
    assert simplify_squared_magnitudes(module) == is_rewritten
    targets = {node.target for node in module.graph.nodes}
    assert is_rewritten != bool(targets & {aten.abs.default, aten.hypot.default})
    module.recompile()
    torch.testing.assert_close(module(x), model(x))
