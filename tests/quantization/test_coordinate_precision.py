"""Coordinates that become indices are int16 in INT8 programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export

F = nn.functional


class Warp(nn.Module):
    """Moves the pixels of an image by a flow."""

    def forward(self, x: Tensor, flow: Tensor) -> Tensor:
        """x [1, 3, 32, 32], flow [1, 2, 32, 32]."""
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
        grid = torch.stack([columns, rows], -1)[None] + flow.permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, align_corners=True)


def _smooth(channels: int) -> Tensor:
    return F.interpolate(torch.randn(1, channels, 8, 8), size=(32, 32), mode="bicubic")


def _sqnr(**options: Any) -> float:
    torch.manual_seed(0)
    samples = [(_smooth(3), 0.1 * _smooth(2)) for _ in range(6)]
    model = Warp().eval()
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, **options), samples)
    expected = model(*samples[0])
    return float(10 * torch.log10(expected.square().sum() / (result.run(*samples[0]) - expected).square().sum()))


def test_int16_coordinates_improve_the_sqnr_of_grid_sample() -> None:
    assert _sqnr() > 31
    assert _sqnr(algorithms=False) < 28


def test_other_gathers_and_their_operands_stay_int8() -> None:
    class Lookup(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            """Integer indices need no coordinates."""
            return (x.relu() * 2).index_select(1, index) + 1

    samples = [(torch.randn(1, 8, 4), torch.randint(0, 8, (3,), dtype=torch.int32)) for _ in range(2)]
    buffers = [
        export(Lookup().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=names), samples).buffer
        for names in ([], ["int16_coordinates"])
    ]
    assert buffers[0] == buffers[1]
