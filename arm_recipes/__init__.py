"""One line that turns a PyTorch model into a program for an Arm target.

The recipes are registered with ExecuTorch when the first name that needs it is taken from this package. What third
parties print while they are imported is silenced, if they are imported here: ``ExportRecipe`` is ExecuTorch's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_recipes._internal.messages import ArmRecipesWarning, ExportError
    from arm_recipes.api import export
    from arm_recipes.comparison.compare import compare
    from arm_recipes.comparison.result import Comparison
    from arm_recipes.explore.sweep.result import Sweep
    from arm_recipes.explore.sweep.sweep import sweep
    from arm_recipes.explore.tune.result import Tuned
    from arm_recipes.explore.tune.tune import tune
    from arm_recipes.firmware.saving import Firmware, save_firmware
    from arm_recipes.provider import ArmRecipeProvider, load_recipe
    from arm_recipes.qat.prepare import prepare_qat
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.recipe_types import ArmRecipeType
    from arm_recipes.result import ExportResult
    from arm_recipes.runtime.errors import RunError, RuntimeUnavailable
    from arm_recipes.runtime.inspect import inspect_program
    from arm_recipes.runtime.load import load
    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.pte import ProgramError
    from arm_recipes.runtime.vela_program import VelaProgram
    from arm_recipes.samples.sample import Inputs

__all__ = [
    "ArmRecipe",
    "ArmRecipeProvider",
    "ArmRecipeType",
    "ArmRecipesWarning",
    "Comparison",
    "ExportError",
    "ExportRecipe",
    "ExportResult",
    "Firmware",
    "Inputs",
    "Program",
    "ProgramError",
    "RunError",
    "RuntimeUnavailable",
    "Sweep",
    "Tuned",
    "VelaProgram",
    "compare",
    "export",
    "inspect_program",
    "load",
    "load_recipe",
    "prepare_qat",
    "save_firmware",
    "sweep",
    "tune",
]

#: Modules that import neither PyTorch nor ExecuTorch, and those that do, by the names that are taken from them.
_CHEAP = {
    "ArmRecipesWarning": "_internal.messages",
    "Comparison": "comparison.result",
    "ExportError": "_internal.messages",
    "ExportResult": "result",
    "Program": "runtime.program",
    "ProgramError": "runtime.pte",
    "RunError": "runtime.errors",
    "RuntimeUnavailable": "runtime.errors",
    "Sweep": "explore.sweep.result",
    "Tuned": "explore.tune.result",
    "VelaProgram": "runtime.vela_program",
    "inspect_program": "runtime.inspect",
    "load": "runtime.load",
}
_COSTLY = {
    "ArmRecipe": "recipe.recipe",
    "ArmRecipeProvider": "provider",
    "ArmRecipeType": "provider",
    "ExportRecipe": "provider",
    "Firmware": "firmware.saving",
    "Inputs": "samples.sample",
    "compare": "comparison.compare",
    "export": "api",
    "load_recipe": "provider",
    "prepare_qat": "qat.prepare",
    "save_firmware": "firmware.saving",
    "sweep": "explore.sweep.sweep",
    "tune": "explore.tune.tune",
}


def __getattr__(name: str) -> Any:
    if name in _CHEAP:
        module = importlib.import_module(f"{__name__}.{_CHEAP[name]}")
    elif name in _COSTLY:
        from arm_recipes._internal.messages import quiet

        with quiet():
            importlib.import_module(f"{__name__}.provider")  # registers the recipes
            module = importlib.import_module(f"{__name__}.{_COSTLY[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
