"""Context of an export: model, recipe options and date, for the title and the first screen of the HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from torch.export import ExportedProgram

from arm_backend_core.targets.cortex_m import Processor
from arm_recipes.recipe import compile_specs, options
from arm_recipes.recipe.recipe import ArmRecipe

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch import nn


@dataclass(frozen=True)
class ExportContext:
    """What was exported, when, and for which board.

    Attributes:
        model: names of the models' classes; empty if the models are captured programs that do not contain the names.
        date: date of the export, ISO 8601.
        board: the recipe's option ``board``.
        sram_budget, flash_budget: limits in bytes; None for no limit.
        processor: the CPU of the recipe; None if it is not known.
    """

    model: str = ""
    date: str = ""
    board: str | None = None
    sram_budget: int | None = None
    flash_budget: int | None = None
    processor: Processor | None = None


def describe_models(models: Mapping[str, nn.Module | ExportedProgram]) -> str:
    """Return the names of the models' classes. ``models`` has the model of each method."""
    return ", ".join(filter(None, dict.fromkeys(map(_model_name, models.values()))))


def make_export_context(model_names: str, recipe: ExportRecipe) -> ExportContext:
    """Make the context of an export that runs now.

    Args:
        model_names: from ``describe_models``.
        recipe: recipe of the export. For a recipe of another package, board, budgets and processor are None.
    """
    values = options.resolve_options(recipe.type_name, recipe.options) if isinstance(recipe, ArmRecipe) else {}
    sram, flash = (values.get(name) for name in ("sram_budget", "flash_budget"))
    return ExportContext(
        model=model_names,
        date=date.today().isoformat(),
        board=values.get("board"),
        sram_budget=options.parse_bytes(sram) if sram else None,
        flash_budget=options.parse_bytes(flash) if flash else None,
        processor=compile_specs.recipe_processor(recipe.type_name, values) if isinstance(recipe, ArmRecipe) else None,
    )


def _model_name(model: nn.Module | ExportedProgram) -> str:
    if not isinstance(model, ExportedProgram):
        return type(model).__name__
    # The first entry of a node's module stack is (path, type) of the captured model. In a program that was loaded from
    # a file, the type is the name of the class.
    stacks = (node.meta.get("nn_module_stack") for node in model.graph.nodes)
    root = next((next(iter(stack.values())) for stack in stacks if stack), None)
    return "" if root is None else getattr(root[1], "__name__", str(root[1])).split(".")[-1]
