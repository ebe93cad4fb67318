"""Export recipes: compile PyTorch models for Arm targets (Ethos-U, Cortex-M, TOSA, VGF) with ExecuTorch.

Public names are imported lazily, on first access. The first access to a name in ``_LAZY_IMPORTS_WITH_EXECUTORCH``
registers the recipes with ExecuTorch. During the import of such a name, warnings and logs of other packages are
suppressed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arm_backend_core.errors import ArmBackendError, ArmRecipesError, CompileError, FullDelegationError, ModelError
    from arm_recipes._internal.errors import (
        AccuracyError,
        ArmRecipesWarning,
        BudgetError,
        ExportError,
        NotRunnableError,
    )
    from arm_recipes.api import export
    from arm_recipes.comparison.compare import compare
    from arm_recipes.comparison.result import Comparison
    from arm_recipes.explore.advice.sparsity import compute_sparsity_masks
    from arm_recipes.explore.sweep.result import Sweep
    from arm_recipes.explore.sweep.sweep import sweep
    from arm_recipes.explore.tune.result import Tuned
    from arm_recipes.explore.tune.tune import tune
    from arm_recipes.firmware.saving import Firmware, save_firmware
    from arm_recipes.pipeline.verify_kernels import VerificationError
    from arm_recipes.provider import ArmRecipeProvider, load_recipe
    from arm_recipes.qat.prepare import prepare_qat
    from arm_recipes.recipe.recipe import ArmRecipe, ExportRecipe
    from arm_recipes.recipe_types import ArmRecipeType
    from arm_recipes.result import ExportResult
    from arm_recipes.runtime.errors import PayloadError, RunError, RuntimeUnavailable
    from arm_recipes.runtime.inspect import inspect_program
    from arm_recipes.runtime.load import load
    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.pte import ProgramError
    from arm_recipes.runtime.vela_program import VelaProgram
    from arm_recipes.samples.call_inputs import Inputs
    from arm_recipes.types import Budget, DynamicShapes, Labels, Metric, Model, Sample, Samples, Sizes

__all__ = [
    "AccuracyError",
    "ArmBackendError",
    "ArmRecipe",
    "ArmRecipeProvider",
    "ArmRecipeType",
    "ArmRecipesError",
    "ArmRecipesWarning",
    "Budget",
    "BudgetError",
    "Comparison",
    "CompileError",
    "DynamicShapes",
    "ExportError",
    "ExportRecipe",
    "ExportResult",
    "Firmware",
    "FullDelegationError",
    "Inputs",
    "Labels",
    "Metric",
    "Model",
    "ModelError",
    "NotRunnableError",
    "PayloadError",
    "Program",
    "ProgramError",
    "RunError",
    "RuntimeUnavailable",
    "Sample",
    "Samples",
    "Sizes",
    "Sweep",
    "Tuned",
    "VelaProgram",
    "VerificationError",
    "compare",
    "compute_sparsity_masks",
    "export",
    "inspect_program",
    "load",
    "load_recipe",
    "prepare_qat",
    "save_firmware",
    "sweep",
    "tune",
]

#: {public name: module that defines it}, for modules that import neither PyTorch nor ExecuTorch.
_LAZY_IMPORTS_WITHOUT_TORCH = {
    "AccuracyError": "arm_recipes._internal.errors",
    "ArmBackendError": "arm_backend_core.errors",
    "ArmRecipesError": "arm_backend_core.errors",
    "ArmRecipesWarning": "arm_recipes._internal.errors",
    "BudgetError": "arm_recipes._internal.errors",
    "CompileError": "arm_backend_core.errors",
    "ExportError": "arm_recipes._internal.errors",
    "FullDelegationError": "arm_backend_core.errors",
    "inspect_program": "arm_recipes.runtime.inspect",
    "load": "arm_recipes.runtime.load",
    "ModelError": "arm_backend_core.errors",
    "NotRunnableError": "arm_recipes._internal.errors",
    "PayloadError": "arm_recipes.runtime.errors",
    "Program": "arm_recipes.runtime.program",
    "ProgramError": "arm_recipes.runtime.pte",
    "RunError": "arm_recipes.runtime.errors",
    "RuntimeUnavailable": "arm_recipes.runtime.errors",
    "Sweep": "arm_recipes.explore.sweep.result",
    "Tuned": "arm_recipes.explore.tune.result",
    "VelaProgram": "arm_recipes.runtime.vela_program",
}
#: {public name: module that defines it}, for modules that import PyTorch and ExecuTorch.
_LAZY_IMPORTS_WITH_EXECUTORCH = {
    "ArmRecipe": "arm_recipes.recipe.recipe",
    "ArmRecipeProvider": "arm_recipes.provider",
    "ArmRecipeType": "arm_recipes.provider",
    "Budget": "arm_recipes.types",
    "compare": "arm_recipes.comparison.compare",
    "Comparison": "arm_recipes.comparison.result",
    "compute_sparsity_masks": "arm_recipes.explore.advice.sparsity",
    "DynamicShapes": "arm_recipes.types",
    "export": "arm_recipes.api",
    "ExportRecipe": "arm_recipes.recipe.recipe",
    "ExportResult": "arm_recipes.result",
    "Firmware": "arm_recipes.firmware.saving",
    "Inputs": "arm_recipes.samples.call_inputs",
    "Labels": "arm_recipes.types",
    "load_recipe": "arm_recipes.provider",
    "Metric": "arm_recipes.types",
    "Model": "arm_recipes.types",
    "prepare_qat": "arm_recipes.qat.prepare",
    "Sample": "arm_recipes.types",
    "Samples": "arm_recipes.types",
    "save_firmware": "arm_recipes.firmware.saving",
    "Sizes": "arm_recipes.types",
    "sweep": "arm_recipes.explore.sweep.sweep",
    "tune": "arm_recipes.explore.tune.tune",
    "VerificationError": "arm_recipes.pipeline.verify_kernels",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from arm_recipes._internal.versions import version

        return version("arm-recipes")
    if name in _LAZY_IMPORTS_WITHOUT_TORCH:
        module = importlib.import_module(_LAZY_IMPORTS_WITHOUT_TORCH[name])
    elif name in _LAZY_IMPORTS_WITH_EXECUTORCH:
        from arm_recipes._internal.frozen_gc import frozen_gc
        from arm_recipes._internal.messages import suppress_warnings

        with frozen_gc(), suppress_warnings():
            importlib.import_module(f"{__name__}.provider")  # registers the recipes
            module = importlib.import_module(_LAZY_IMPORTS_WITH_EXECUTORCH[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
