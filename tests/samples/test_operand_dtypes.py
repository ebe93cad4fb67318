"""Operand dtypes: graphs that PyTorch traces and refuses to run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportError, ExportRecipe, export
from arm_recipes.samples.operand_dtypes import RequireEqualDtypes, check_operand_dtypes

X = torch.rand(1, 8)
RECIPE = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float()


def test_weights_of_two_dtypes_name_the_operator() -> None:
    with pytest.raises(
        ExportError, match=r"'linear_1'.* has operands of float32 and float16, and PyTorch takes one dtype"
    ):
        export(TwoDtypes().eval(), RECIPE, [(X,)])


def test_operand_dtypes_of_captured_programs_are_checked() -> None:
    program = torch.export.export(nn.Linear(8, 4).half().eval(), (X,))
    with pytest.raises(RuntimeError, match="operands of float32 and float16"):
        check_operand_dtypes(program.graph)
    with pytest.raises(ValueError, match=r"^model: the program of 'forward' cannot run: .*capture the model again$"):
        export(program, RECIPE, [(X,)])


def test_autocast_converts_operands() -> None:
    export(Autocast().eval(), RECIPE, [(X,)])


def test_require_equal_dtypes_raises_as_pytorch_does() -> None:
    with RequireEqualDtypes():
        assert (X @ X.T).shape == (1, 1)
        with pytest.raises(RuntimeError, match=r"aten.mm.default has operands of float32 and float64"):
            X @ X.double().T
