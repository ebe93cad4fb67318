"""GPTQ: weights are rounded to minimize the output error of a layer on its calibration inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.small_models import Samples
from tests.sqnr import sqnr


def test_gptq_improves_the_sqnr_for_correlated_inputs() -> None:
    """With correlated inputs, the rounding error of one weight can compensate that of another."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (64, 1, 1)), nn.Conv2d(64, 8, 1)
    )
    samples: Samples = [(torch.randn(64, 4),) for _ in range(6)]
    with torch.no_grad():
        expected = model.eval()(*samples[-1])
    found = []
    for names in (["bias_correction", "int16_outputs"], ["bias_correction", "int16_outputs", "gptq"]):
        recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_A8W4, algorithms=names)
        found.append(sqnr(expected, export(model, recipe, samples[:-1]).run(*samples[-1])))
    assert found[1] > found[0] + 2


@pytest.mark.parametrize("shape", [(1, 640), (2, 300)])
def test_gptq_leaves_layers_with_few_calibration_inputs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, samples = nn.Linear(shape[1], 8).eval(), [(torch.rand(shape),) for _ in range(3)]
    recipes = [
        ExportRecipe.get_recipe(ArmRecipeType.TOSA_A8W4, algorithms=names)
        for names in (["bias_correction"], ["bias_correction", "gptq"])
    ]
    assert torch.equal(*(export(model, recipe, samples).run(*samples[0]) for recipe in recipes))
