"""One line that turns a PyTorch model into a program for an Arm target.

Importing this package registers its recipes with ExecuTorch.
"""

from executorch.export import recipe_registry

from arm_recipes.export import export
from arm_recipes.messages import ArmRecipesWarning, ExportError
from arm_recipes.provider import ArmRecipeProvider
from arm_recipes.recipe_types import ArmRecipeType
from arm_recipes.result import ExportResult
from arm_recipes.runtime.errors import RunError, RuntimeUnavailable
from arm_recipes.runtime.inspect import inspect
from arm_recipes.runtime.program import Program, load
from arm_recipes.runtime.pte import ProgramError

recipe_registry.register_backend_recipe_provider(ArmRecipeProvider())

__all__ = [
    "ArmRecipeProvider",
    "ArmRecipeType",
    "ArmRecipesWarning",
    "ExportError",
    "ExportResult",
    "Program",
    "ProgramError",
    "RunError",
    "RuntimeUnavailable",
    "export",
    "inspect",
    "load",
]
