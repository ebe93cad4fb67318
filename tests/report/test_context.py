"""The context of an export: model, board and limits, as the page's title and first screen show them."""

from __future__ import annotations

from datetime import date

import torch
from executorch.export import ExportRecipe
from torch import nn

from arm_recipes import ArmRecipe
from arm_recipes.recipe.boards import BOARDS
from arm_recipes.report.context import ExportContext, describe_models, make_export_context


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.inner(x))


def test_the_model_has_the_name_of_its_class() -> None:
    captured = torch.export.export(Gate(), (torch.ones(1, 2),))
    today = date.today().isoformat()
    for model in (Gate(), captured):
        assert make_export_context(describe_models({"forward": model}), ExportRecipe(name="other")) == ExportContext(
            "Gate", today
        )
    assert describe_models({"a": Gate(), "b": Gate()}) == "Gate"


def test_a_board_sets_limits_that_options_do_not() -> None:
    board = next(board for board in BOARDS.values() if board.sram is not None and board.flash is not None)
    assert board.sram is not None
    assert board.flash is not None
    recipe = {"ethos-u55": ArmRecipe.ethosu_u55, "ethos-u65": ArmRecipe.ethosu_u65, "ethos-u85": ArmRecipe.ethosu_u85}
    context = make_export_context("", recipe[board.family](board=board.name))
    assert (context.board, context.sram_budget, context.flash_budget) == (
        board.name,
        board.sram.value,
        board.flash.value,
    )
    context = make_export_context("", recipe[board.family](board=board.name, sram_budget="64KiB"))
    assert (context.sram_budget, context.flash_budget) == (64 * 1024, board.flash.value)


def test_a_context_without_board_has_no_limits() -> None:
    context = make_export_context("", ArmRecipe.ethosu_u85())
    assert (context.board, context.sram_budget, context.flash_budget) == (None, None, None)
