"""Infinite constants: the error names the tensor and what to use instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.errors import ModelError
from arm_recipes import ArmRecipeType, export
from tests.small_models import Samples


class _Infinite(nn.Module):
    """A function of an input and of an infinite buffer, constant or parameter."""

    limit: Tensor

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("limit", torch.tensor([float("-inf"), 1.0]))
        self.weight = nn.Parameter(torch.tensor([[float("inf"), 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_INT8, ArmRecipeType.CORTEX_M_INT8])
@pytest.mark.parametrize(
    ("function", "subject"),
    [
        (lambda m, x: x + m.limit, r"buffer 'limit' \(read at .*test_non_finite.py:\d+\)"),
        (lambda m, x: torch.where(x > 0, x, m.limit), r"buffer 'limit' \(read at .*"),
        (lambda m, x: nn.functional.linear(x, m.weight), r"parameter 'weight' \(read at .*"),
        (lambda _, x: x + torch.tensor([float("inf"), 1.0]), r"the result of aten.clone.default \(.*"),
        (lambda _, x: torch.cat([x, torch.full((1, 2), float("-inf"))]), r"the result of aten.full.default \(.*"),
        (lambda _, x: x.masked_fill(x > 0, float("-inf")), r"the result of aten.where.ScalarSelf \(.*"),
    ],
)
def test_an_infinite_constant_is_named_with_a_remedy(
    function: Callable[..., Tensor], subject: str, kind: ArmRecipeType
) -> None:
    samples: Samples = [(torch.linspace(-1, 1, 6).reshape(3, 2),)]
    with pytest.raises(ModelError, match=rf"{subject} holds an infinity.*use a finite number near the other values"):
        export(_Infinite(function).eval(), ExportRecipe.get_recipe(kind), samples)


def test_an_infinite_mask_of_scores_is_supported() -> None:
    """The same buffer, added to scores that only a softmax reads."""
    model, x = _Infinite(lambda m, x: (x + m.limit).softmax(-1)).eval(), torch.linspace(-1, 1, 6).reshape(3, 2)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(x,)])
    torch.testing.assert_close(result.run(x), model(x), atol=0.01, rtol=0)
