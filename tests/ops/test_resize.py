"""Bilinear interpolation: whether RESIZE or two convolutions are emitted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export

F = nn.functional


class Upsample(nn.Module):
    """Bilinear upsampling of 16 channels to a size."""

    def __init__(self, size: tuple[int, int], align_corners: bool) -> None:
        super().__init__()
        self.size, self.align_corners = size, align_corners

    def forward(self, x: Tensor) -> Tensor:
        """x [1, 16, 48, 64]."""
        return F.interpolate(x, size=self.size, mode="bilinear", align_corners=self.align_corners)


@pytest.mark.parametrize(("size", "align_corners"), [((96, 128), True), ((96, 128), False), ((72, 100), False)])
def test_two_convolutions_replace_resize_on_u85_where_they_take_fewer_cycles(
    size: tuple[int, int], align_corners: bool
) -> None:
    model = Upsample(size, align_corners).eval()
    samples = [(torch.randn(1, 16, 48, 64),) for _ in range(2)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=256), samples)
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert delegate.vela.total_cycles < 0.9 * size[0] * size[1] * 16  # the cycles of RESIZE alone
    expected = model(*samples[0])
    assert (result.run(*samples[0]) - expected).square().mean() < 1e-3 * expected.square().mean()


def test_resize_stays_where_convolutions_take_more_cycles() -> None:
    """Few multipliers, and a division by a power of two, which is fused."""
    model = Upsample((96, 128), align_corners=False).eval()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=128)
    result = export(model, recipe, [(torch.randn(1, 16, 48, 64),)])
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert "Resize" in {layer.npu_operator for layer in delegate.vela.layers}
