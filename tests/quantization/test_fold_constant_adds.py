"""Consecutive additions of constants become one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.small_models import Samples
from tests.sqnr import sqnr


class Sums(nn.Module):
    """Adds constants one after the other. The sum of two may broadcast to a larger shape than theirs."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for term in self.terms:
            x = x + term
        return x


@pytest.mark.parametrize(
    ("shapes", "count"), [([(1, 4, 8), (4, 8), (8,)], 1), ([(4, 1), (8,)], 2), ([(4, 1), (8,), (1, 4, 8)], 2)]
)
def test_consecutive_constant_adds_are_merged_unless_their_sum_is_larger(
    shapes: list[tuple[int, ...]], count: int
) -> None:
    torch.manual_seed(0)
    model = Sums(*shapes).eval()
    samples: Samples = [(torch.randn(1, 4, 8),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    (delegate,) = result.report.delegates
    assert delegate.tosa_operators.count("ADD") == count
    with torch.no_grad():
        assert sqnr(model(*samples[0]), result.run(*samples[0])) > 30
