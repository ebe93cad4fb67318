"""Networks in which each step doubles the number of paths: a walk over all paths would not end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export, load

STEPS = 40
_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "moved": lambda x: torch.cat([x[:, 5:], x[:, :5]], 1),
    "interleaved": lambda x: torch.stack([x[:, ::2], x[:, 1::2]], -1).flatten(1),
    "bounded": lambda x: torch.maximum(torch.minimum(x, x * 0.9), x.clamp(max=0.5)),
    "added": lambda x: torch.relu(x) - 0.5 * torch.sigmoid(x),
    "chosen": lambda x: torch.where(x > 0, x * 0.9, -x),
}


class _Repeated(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.step = nn.Linear(16, 16), nn.Linear(16, 16), step

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(STEPS):
            x = self.step(x)
        return self.last(x)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8])
@pytest.mark.parametrize("step", _STEPS)
def test_paths_are_not_followed_one_by_one(step: str, recipe: ArmRecipeType) -> None:
    torch.manual_seed(0)
    model, x = _Repeated(_STEPS[step]).eval(), torch.randn(2, 16)
    result = export(model, ExportRecipe.get_recipe(recipe, require_full_delegation=True), (x,))
    (output,) = load(result.buffer).execute(x)
    assert (output - model(x)).abs().max() < 0.1 * model(x).abs().max()
