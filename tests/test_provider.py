"""The provider: how it registers, next to ExecuTorch's own, and what importing it costs."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe, RecipeType, recipe_registry

import arm_recipes
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_recipes import ArmRecipeProvider, ArmRecipeType, types
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS


def _run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_load_only_what_they_need() -> None:
    """The package alone loads no library. Its public names load neither the compiler nor tools such as Vela."""
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


def test_names_for_programs_alone_import_neither_torch_nor_executorch() -> None:
    script = (
        "import sys, arm_recipes; [getattr(arm_recipes, name) for name in arm_recipes._LAZY_IMPORTS_WITHOUT_TORCH]; "
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'executorch'})"
    )
    assert _run(script).split() == []


def test_every_public_name_is_an_attribute() -> None:
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
    assert len(ArmRecipeType) == 18


def test_a_foreign_recipe_type_of_our_backend_name_is_refused() -> None:
    class Foreign(RecipeType):
        FP = "foreign_fp"

        @classmethod
        def get_backend_name(cls) -> str:
            return "arm_recipes"

    assert ArmRecipeProvider().create_recipe(Foreign.FP) is None
    with pytest.raises(ValueError, match="'foreign_fp' not supported by 'arm_recipes'"):
        ExportRecipe.get_recipe(Foreign.FP)


@pytest.mark.parametrize("name", ["ETHOSU_U55_INT8", "ethosu-u55-int8", "arm_recipes_ethosu_u55_int8"])
def test_a_recipe_by_its_name(name: str) -> None:
    recipe = arm_recipes.ExportRecipe.get_recipe(name, macs=64)
    assert repr(recipe) == "ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, macs=64)"
    assert isinstance(recipe, arm_recipes.ArmRecipe)
    assert isinstance(recipe, ExportRecipe)
    same = ArmRecipeType.ETHOSU_U55_INT8
    assert repr(arm_recipes.ExportRecipe.get_recipe(same, macs=64)) == repr(recipe)


def test_an_unknown_name_suggests_the_nearest() -> None:
    hint = r"; did you mean 'ETHOSU_U55_INT8'\? \(allowed: ETHOSU_U55_INT8, "
    with pytest.raises(AttributeError, match=f"^ArmRecipeType has no ETHOS_U55_INT8{hint}"):
        _ = getattr(ArmRecipeType, "ETHOS_U55_INT8")  # noqa: B009
    with pytest.raises(KeyError, match=f"ArmRecipeType has no ETHOS_U55_INT8{hint}"):
        _ = ArmRecipeType["ETHOS_U55_INT8"]
    with pytest.raises(ValueError, match=f"^ArmRecipeType has no ETHOS_U55_INT8{hint}"):
        ArmRecipeType("ETHOS_U55_INT8")
    with pytest.raises(ValueError, match=f"^there is no recipe 'ethos_u55_int8'{hint}"):
        arm_recipes.ExportRecipe.get_recipe("ethos_u55_int8")
    with pytest.raises(ValueError, match=r"^there is no recipe 'x' \(allowed: "):
        arm_recipes.ExportRecipe.get_recipe("x")
    with pytest.raises(TypeError, match=r"^recipe: got the name 'TOSA_FP'; pass ExportRecipe.get_recipe\('TOSA_FP', "):
        arm_recipes.export(torch.nn.ReLU(), "TOSA_FP", [(torch.ones(1),)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^recipe: got the name 'ETHOS_U55_INT8'; .*did you mean 'ETHOSU_U55_INT8'"):
        arm_recipes.export(torch.nn.ReLU(), "ETHOS_U55_INT8", [(torch.ones(1),)])  # type: ignore[arg-type]


def test_a_state_dict_is_not_a_model() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)
    for weights in (state, {"model": state, "epoch": 3}):
        with pytest.raises(TypeError, match=r"^model: got weights alone \(a state dict\); build the model, .* pass"):
            arm_recipes.export(weights, recipe, [(torch.ones(1, 2),)])  # type: ignore[arg-type]


def test_building_a_recipe_collects_no_garbage_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over PyTorch's objects takes 0.25 s, and the first recipe imports the compiler."""
    build, frozen = SPEC_BUILDERS["TOSA_INT8"], []

    def record_frozen(values: dict[str, Any]) -> ArmCompileSpec:
        frozen.append(gc.get_freeze_count())
        return build(values)

    monkeypatch.setitem(SPEC_BUILDERS, "TOSA_INT8", record_frozen)
    ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0
