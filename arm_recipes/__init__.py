"""One line that turns a PyTorch model into a program for an Arm target.

The recipes are registered with ExecuTorch when the first name that needs it is taken from this package. What third
parties print while they are imported is silenced, if they are imported here: ``ExportRecipe`` is ExecuTorch's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_backend_core.errors import ArmBackendError, ArmRecipesError, CompileError, FullDelegationError, ModelError
    from arm_recipes._internal.messages import (
        AccuracyError,
        ArmRecipesWarning,
        BudgetError,
        ExportError,
        NotRunnableError,
    )
    from arm_recipes.api import export
    from arm_recipes.comparison.compare import compare
    from arm_recipes.comparison.result import Comparison
    from arm_recipes.explore.sweep.result import Sweep
    from arm_recipes.explore.sweep.sweep import sweep
    from arm_recipes.explore.tune.result import Tuned
    from arm_recipes.explore.tune.tune import tune
    from arm_recipes.firmware.saving import Firmware, save_firmware
    from arm_recipes.pipeline.verify import VerificationError
    from arm_recipes.provider import ArmRecipeProvider, load_recipe
    from arm_recipes.qat.prepare import prepare_qat
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.recipe_types import ArmRecipeType
    from arm_recipes.result import ExportResult
    from arm_recipes.runtime.errors import PayloadError, RunError, RuntimeUnavailable
    from arm_recipes.runtime.inspect import inspect_program
    from arm_recipes.runtime.load import load
    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.pte import ProgramError
    from arm_recipes.runtime.vela_program import VelaProgram
    from arm_recipes.samples.sample import Inputs

__all__ = [
    "AccuracyError",
    "ArmBackendError",
    "ArmRecipe",
    "ArmRecipeProvider",
    "ArmRecipeType",
    "ArmRecipesError",
    "ArmRecipesWarning",
    "BudgetError",
    "Comparison",
    "CompileError",
    "ExportError",
    "ExportRecipe",
    "ExportResult",
    "Firmware",
    "FullDelegationError",
    "Inputs",
    "ModelError",
    "NotRunnableError",
    "PayloadError",
    "Program",
    "ProgramError",
    "RunError",
    "RuntimeUnavailable",
    "Sweep",
    "Tuned",
    "VelaProgram",
    "VerificationError",
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
    "AccuracyError": "arm_recipes._internal.messages",
    "ArmBackendError": "arm_backend_core.errors",
    "ArmRecipesError": "arm_backend_core.errors",
    "ArmRecipesWarning": "arm_recipes._internal.messages",
    "BudgetError": "arm_recipes._internal.messages",
    "Comparison": "arm_recipes.comparison.result",
    "CompileError": "arm_backend_core.errors",
    "ExportError": "arm_recipes._internal.messages",
    "ExportResult": "arm_recipes.result",
    "FullDelegationError": "arm_backend_core.errors",
    "inspect_program": "arm_recipes.runtime.inspect",
    "load": "arm_recipes.runtime.load",
    "ModelError": "arm_backend_core.errors",
    "NotRunnableError": "arm_recipes._internal.messages",
    "PayloadError": "arm_recipes.runtime.errors",
    "Program": "arm_recipes.runtime.program",
    "ProgramError": "arm_recipes.runtime.pte",
    "RunError": "arm_recipes.runtime.errors",
    "RuntimeUnavailable": "arm_recipes.runtime.errors",
    "Sweep": "arm_recipes.explore.sweep.result",
    "Tuned": "arm_recipes.explore.tune.result",
    "VelaProgram": "arm_recipes.runtime.vela_program",
}
_COSTLY = {
    "ArmRecipe": "arm_recipes.recipe.recipe",
    "ArmRecipeProvider": "arm_recipes.provider",
    "ArmRecipeType": "arm_recipes.provider",
    "compare": "arm_recipes.comparison.compare",
    "export": "arm_recipes.api",
    "ExportRecipe": "arm_recipes.provider",
    "Firmware": "arm_recipes.firmware.saving",
    "Inputs": "arm_recipes.samples.sample",
    "load_recipe": "arm_recipes.provider",
    "prepare_qat": "arm_recipes.qat.prepare",
    "save_firmware": "arm_recipes.firmware.saving",
    "sweep": "arm_recipes.explore.sweep.sweep",
    "tune": "arm_recipes.explore.tune.tune",
    "VerificationError": "arm_recipes.pipeline.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from arm_recipes._internal.versions import version

        return version("arm-recipes")
    if name in _CHEAP:
        module = importlib.import_module(_CHEAP[name])
    elif name in _COSTLY:
        from arm_recipes._internal.messages import quiet

        with quiet():
            importlib.import_module(f"{__name__}.provider")  # registers the recipes
            module = importlib.import_module(_COSTLY[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
