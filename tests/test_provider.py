"""The provider: how it registers, next to ExecuTorch's own, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from executorch.export import ExportRecipe, RecipeType, recipe_registry

import arm_recipes
from arm_recipes import ArmRecipeProvider, ArmRecipeType, types
from arm_recipes.recipe.targets import SPEC_BUILDERS


def _run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_load_no_more_than_they_must() -> None:
    """The package alone loads nothing; what needs PyTorch and ExecuTorch loads no tool of ours."""
    script = (
        "import sys; before = set(sys.modules); import arm_recipes; print(*set(sys.modules) - before); "
        "import torch, executorch.export; before = set(sys.modules); "
        "from arm_recipes import ArmRecipeType, export; "
        "print(*set(sys.modules) - before)"
    )
    alone, behind = map(str.split, _run(script).splitlines())
    assert "arm_recipes" in alone
    assert not [name for name in alone if name.split(".")[0] in ("torch", "executorch", "numpy")]
    assert not {"ethosu", "tosa_reference_model", "tosa", "tqdm"} & {name.split(".")[0] for name in behind}
    compiler = tuple(f"arm_backend_core.{name}" for name in ("ops", "quantization", "tosa.passes", "lowering"))
    assert not [name for name in behind if name.startswith(compiler)]


def test_every_public_name_is_there() -> None:
    for name in arm_recipes.__all__:
        value = getattr(arm_recipes, name)
        assert value is vars(types).get(name) or value.__name__ == name
    assert set(arm_recipes.__all__) <= set(dir(arm_recipes))
    with pytest.raises(AttributeError, match="module 'arm_recipes' has no attribute 'exports'"):
        _ = arm_recipes.exports


def test_imports_of_third_parties_are_silent() -> None:
    """torchao names libraries that it could not load, pytree and ExecuTorch warn about one another."""
    script = "from arm_recipes import ArmRecipeType, ExportRecipe, export; ExportRecipe.get_recipe(ArmRecipeType.{})"
    done = subprocess.run(
        [sys.executable, "-c", script.format("TOSA_INT8")], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_every_recipe_is_supported() -> None:
    assert [recipe.name for recipe in ArmRecipeType] == list(SPEC_BUILDERS)
    assert list(recipe_registry.get_supported_recipes("arm_recipes")) == list(ArmRecipeType)
    assert len(ArmRecipeType) == 17


def test_a_foreign_recipe_type_is_not_ours() -> None:
    class Foreign(RecipeType):
        FP = "foreign_fp"

        @classmethod
        def get_backend_name(cls) -> str:
            return "arm_recipes"

    assert ArmRecipeProvider().create_recipe(Foreign.FP) is None
    with pytest.raises(ValueError, match="'foreign_fp' not supported by 'arm_recipes'"):
        ExportRecipe.get_recipe(Foreign.FP)
