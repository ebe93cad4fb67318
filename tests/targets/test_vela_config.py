"""``get_recipe`` checks the arguments of Ethos-U recipes against Vela's configuration."""

from __future__ import annotations

from typing import Any

import pytest
from executorch.export import ExportRecipe

from arm_recipes import ArmRecipeType
from arm_recipes.recipe import options
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (
            ArmRecipeType.ETHOSU_U55_INT8,
            {"macs": 512},
            r"macs=512: no ethos-u55 .* did you mean 256\? \(allowed: 32, 64, 128, 256\)",
        ),
        (
            ArmRecipeType.ETHOSU_U65_A16W8,
            {"macs": 128},
            r"macs=128: .* did you mean 256\? \(allowed: 256, 512\)",
        ),
        (ArmRecipeType.ETHOSU_U55_INT8, {"memory_mode": "Dedicated_Sram"}, "memory_mode.*Dedicated_Sram"),
        (ArmRecipeType.ETHOSU_U85_INT8, {"memory_mode": "Sram_only"}, "memory_mode.*Sram_Only"),
        (ArmRecipeType.ETHOSU_U85_INT8, {"config_ini": "/nowhere/vela.ini"}, "config_ini.*/nowhere/vela.ini"),
        (ArmRecipeType.ETHOSU_U85_INT8, {"system_config": "Ethos_U85"}, "system_config.*Ethos_U85_SYS"),
        (ArmRecipeType.ETHOSU_U85_INT8, {"extra_flags": ["--no-such-flag"]}, "extra_flags.*--no-such-flag"),
    ],
)
def test_get_recipe_refuses_invalid_arguments(recipe: ArmRecipeType, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportRecipe.get_recipe(recipe, **arguments)


@pytest.mark.parametrize(
    ("family", "accelerator", "system_config", "memory_mode"),
    [
        ("U55", "ethos-u55-128", "Ethos_U55_High_End_Embedded", "Shared_Sram"),
        ("U65", "ethos-u65-256", "Ethos_U65_High_End", "Dedicated_Sram_384KB"),
        ("U85", "ethos-u85-256", "Ethos_U85_SYS_DRAM_Mid", "Sram_Only"),
    ],
)
def test_default_accelerator_system_config_and_memory_mode(
    family: str, accelerator: str, system_config: str, memory_mode: str
) -> None:
    for precision in ("INT8", "A8W4", "A16W8"):
        recipe = ArmRecipeType[f"ETHOSU_{family}_{precision}"]
        spec: Any = SPEC_BUILDERS[recipe.name](options.resolve_options(recipe.name, {}))
        assert (spec.accelerator, spec.system_config, spec.memory_mode) == (
            accelerator,
            system_config,
            memory_mode,
        )
