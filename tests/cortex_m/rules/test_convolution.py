"""Transposed convolutions with groups and dilation, which the kernel lacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arm_recipes import ArmRecipeType, ExportRecipe, export


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose2d(8, 12, 3, 2, groups=2), (1, 8, 5, 6)),
        (nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=4), (1, 4, 5, 6)),
        (nn.ConvTranspose2d(4, 6, (3, 2), 1, dilation=(2, 3)), (1, 4, 5, 6)),
        (nn.ConvTranspose1d(4, 6, 3, 2, dilation=2, groups=2), (1, 4, 9)),
    ],
    ids=["groups", "depthwise", "dilation", "row"],
)
def test_transposed(layer: nn.Module, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    samples = [(torch.randn(shape, generator=generator),) for _ in range(2)]
    result = export(layer.eval(), ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples)
    assert "quantized_transpose_conv2d_nhwc" in [call.kernel for call in result.report.methods[0].kernels]
    assert not [operator for operator in result.report.cpu_operators if operator.reason]
    expected = layer(*samples[0])
    assert (result.run(*samples[0]) - expected).abs().max() < 0.03 * expected.abs().max()


def test_many_groups_stay_in_float() -> None:
    layer = nn.ConvTranspose2d(32, 32, 3, 2, groups=32).eval()
    samples = [(torch.randn(1, 32, 5, 6),) for _ in range(2)]
    result = export(layer, ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples)
    [reason] = [operator.reason for operator in result.report.cpu_operators if "convolution" in operator.operator]
    assert "32 groups would need 32 times the weights" in reason
