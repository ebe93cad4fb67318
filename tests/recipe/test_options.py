"""Keyword arguments of recipes: errors, defaults, copies and representations."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe, QuantizationRecipe
from torch import nn

from arm_recipes import ArmRecipe, ArmRecipeType, export
from arm_recipes.recipe import options, typed_options
from arm_recipes.stages.quantize import recipe_algorithms

U85 = ArmRecipeType.ETHOSU_U85_INT8
ETHOS_U = [recipe for recipe in ArmRecipeType if recipe.name.startswith("ETHOSU")]


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (
            U85,
            {"mac": 128},
            r"ETHOSU_U85_INT8: unknown argument 'mac'; did you mean 'macs'\? \(allowed: board, ",
        ),
        (U85, {"MACS": 128}, r"did you mean 'macs'\?"),
        (
            U85,
            {"channels_last": True},
            r"unknown argument 'channels_last'; it belongs to export\(model, recipe, samples, \.\.\.\)",
        ),
        (U85, {"zzzzz": 1}, r"unknown argument 'zzzzz' \(allowed: board, .*dump_dir\)"),
        (ArmRecipeType.TOSA_INT8, {"macs": 128}, "unknown argument 'macs'; it belongs to Ethos-U recipes"),
        (ArmRecipeType.TOSA_FP, {"calibration_samples": []}, "'calibration_samples'; it belongs to quantizing recipes"),
        (
            ArmRecipeType.VGF_FP,
            {"quantised_io": True},
            r"\(allowed: extensions, steps_per_call, plan_inputs, plan_outputs, require_full_delegation, "
            r"require_runnable, dump_dir\)",
        ),
        (U85, {"macs": True}, "macs must be an int that the family has; got True: not an int"),
        (U85, {"macs": "256"}, "got '256': not an int"),
        (U85, {"macs": -256}, "got -256: not positive"),
        (U85, {"macs": None}, "got None: not an int"),
        (
            U85,
            {"system_config": 3},
            r"system_config must be the name of a \[System_Config\].*got 3: not a str",
        ),
        (U85, {"memory_mode": " "}, "memory_mode must be .*got ' ': empty"),
        (U85, {"extra_flags": "--optimise=Size"}, r"a single str; write extra_flags=\['--optimise=Size'\]"),
        (
            U85,
            {"extra_flags": [1]},
            "extra_flags must be a list of Vela command line flags; got .*not a list of str",
        ),
        (U85, {"config_ini": 5}, "config_ini must be the path of a Vela .ini file; got 5: not a path"),
        (U85, {"per_channel": 1}, "per_channel must be a bool; got 1: not a bool"),
        (U85, {"quantized_io": "yes"}, "quantized_io must be a bool; got 'yes': not a bool"),
        (U85, {"direct_drive": 1}, "direct_drive must be a bool; got 1: not a bool"),
        (
            ArmRecipeType.ETHOSU_U65_INT8,
            {"direct_drive": True},
            "ETHOSU_U65_INT8: unknown argument 'direct_drive'; it belongs to Ethos-U85 recipes",
        ),
        (ArmRecipeType.VGF_INT8, {"direct_drive": False}, "'direct_drive'; it belongs to Ethos-U85 recipes"),
        (
            U85,
            {"direct_drive": True, "extra_flags": ["--cop-format", "COP1"]},
            "direct_drive=True sets --cop-format and --separate-io-regions: remove '--cop-format'",
        ),
        (ArmRecipeType.TOSA_FP, {"extensions": "bf16"}, r"a single str; write extensions=\['bf16'\]"),
        (ArmRecipeType.VGF_INT8, {"extensions": [16]}, "extensions must be a list of names .*not a list of str"),
        (
            ArmRecipeType.TOSA_A16W8,
            {"extensions": ["fp8e4m4"]},
            r"extensions: TOSA has no 'fp8e4m4'; did you mean 'fp8e4m3'\? \(allowed: int16, ",
        ),
        (ArmRecipeType.VGF_FP, {"extensions": ["cf"]}, "the VGF converter does not support control flow"),
        (U85, {"extensions": ["bf16"]}, "'extensions'; it belongs to TOSA and VGF recipes"),
        (U85, {"require_full_delegation": None}, "require_full_delegation must be a bool; got None"),
        (
            U85,
            {"require_runnable": "yes"},
            "require_runnable must be True, False or \"warn\"; got 'yes': none of these",
        ),
        (U85, {"require_runnable": 1}, "require_runnable must be .*; got 1: none of these"),
        (U85, {"dump_dir": 4}, "dump_dir must be a directory for intermediate artefacts; got 4: not a path"),
        (
            U85,
            {"calibration_samples": torch.zeros(2, 3)},
            r"got tensor of shape \(2, 3\): a single tensor; write calibration_samples=",
        ),
        (
            U85,
            {"calibration_samples": {"a": []}},
            r"a dict; give samples per method to export\(\) as samples=",
        ),
        (U85, {"calibration_samples": "digits"}, "got 'digits': not iterable"),
        (U85, {"calibration_samples": 7}, "got 7: not iterable"),
        (U85, {"qat": 3}, "qat must be a function that trains the model that it is given; got 3: not callable"),
        (ArmRecipeType.TOSA_FP, {"qat": print}, "'qat'; it belongs to quantizing recipes"),
        (U85, {"calibration_samples": []}, r"got \[\]: it has no samples"),
        (U85, {"observer": "median"}, "observer must be one of 'mse', .*; got 'median': none of these"),
        (
            U85,
            {"algorithms": "bias_correction"},
            "algorithms must be a bool, or a list of names of attention_scales, .*: neither a bool nor",
        ),
        (
            U85,
            {"algorithms": ["bias_correction", "luck"]},
            r"got \['bias_correction', 'luck'\]: there is no algorithm 'luck'",
        ),
        (U85, {"sram_budget": 0}, "sram_budget must be a number of bytes, .*got 0: not positive"),
        (U85, {"sram_budget": "2 GB"}, "got '2 GB': not a number of bytes, of B, KiB, MiB, KB or MB"),
        (U85, {"flash_budget": 1e6}, "flash_budget must be .*got 1000000.0: neither an int nor a str"),
        (
            ArmRecipeType.CORTEX_M_INT8,
            {"cpu": "cortex-m56"},
            "cpu='cortex-m56': there is no such Cortex-M; did you mean 'cortex-m85'",
        ),
        (ArmRecipeType.CORTEX_M_INT8, {"cpu": "cortex-m0", "isa": "dsp"}, "isa='dsp': cortex-m0 has 'scalar'"),
        (ArmRecipeType.CORTEX_M_INT8, {"isa": "neon"}, "'neon'"),
        (ArmRecipeType.TOSA_INT8, {"cpu": "cortex-m55"}, "'cpu'; it belongs to"),
        (ArmRecipeType.TOSA_INT8, {"flash_budget": 1}, "'flash_budget'; it belongs to Cortex-M and Ethos-U recipes"),
    ],
)
def test_a_wrong_argument_is_named(recipe: ArmRecipeType, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportRecipe.get_recipe(recipe, **arguments)


def test_dump_dir_must_not_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for given in (file, file / "below"):
        with pytest.raises(ValueError, match=r"dump_dir must be .*file' is not a directory"):
            ExportRecipe.get_recipe(U85, dump_dir=given)


def test_long_values_are_shortened_in_errors() -> None:
    with pytest.raises(ValueError, match=r"got 'x{76}\.\.\.: not a bool"):
        ExportRecipe.get_recipe(U85, per_channel="x" * 500)


@pytest.mark.parametrize("recipe", list(ArmRecipeType))
def test_allowed_options_of_each_recipe(recipe: ArmRecipeType) -> None:
    expected = {"require_full_delegation", "require_runnable", "dump_dir", "steps_per_call"}
    expected |= {"plan_inputs", "plan_outputs"}
    if not recipe.name.endswith("FP"):
        expected |= {"per_channel", "calibration_samples", "observer", "algorithms", "precisions", "qat"}
        expected |= {"quantized_io", "input_dtype", "min_sqnr"}
    if recipe in ETHOS_U:
        expected |= {"board", "macs", "system_config", "memory_mode", "extra_flags", "config_ini"}
        expected |= {"sram_budget", "flash_budget", "search_alternatives", "optimise", "external", "memory"}
        expected |= {"shared_scratch"}
    if recipe.name.startswith("ETHOSU_U85"):
        expected |= {"direct_drive"}
    if recipe in ETHOS_U:
        expected |= {"cpu"}
    elif recipe is ArmRecipeType.CORTEX_M_INT8:
        expected |= {"cpu", "isa", "sram_budget", "flash_budget"}
    else:
        expected |= {"extensions"}
    if recipe is ArmRecipeType.TOSA_FP:
        expected |= {"mx"}
    assert set(options.option_names(recipe.name)) == expected


class _Joined(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.flip(0)])


@pytest.mark.parametrize("extension", ["bf16", "fp8e4m3", "fp8e5m2"])
def test_extensions_let_more_run_on_the_target(extension: str) -> None:
    kinds = {"bf16": torch.bfloat16, "fp8e4m3": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}
    inputs = (torch.linspace(-2, 2, 8).to(kinds[extension]),)
    for extensions in ([extension], []):
        recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, extensions=extensions, require_runnable=False)
        result = export(_Joined(), recipe, [inputs])
        assert bool(result.report.delegates) == bool(extensions)
        if extensions:
            assert torch.equal(result.run(*inputs).float(), _Joined()(inputs[0].float()))


def _copies(recipe: ExportRecipe) -> list[ExportRecipe]:
    return [copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))]


def test_a_copy_of_a_recipe_makes_the_same_program() -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [(torch.randn(2, 8),)] * 2
    recipe = ExportRecipe.get_recipe(
        U85, macs=512, precisions={"0": "A16W8"}, algorithms=["bias_correction"], per_channel=False
    )
    buffers = [export(model, each, samples).buffer for each in (recipe, *_copies(recipe))]
    assert buffers[0] == buffers[1] == buffers[2]


@pytest.mark.parametrize("name", ["TOSA_INT8", "VGF_INT8"])
def test_a_copy_of_a_recipe_has_its_options(name: str) -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType[name], algorithms=["bias_correction"])
    for copied in _copies(recipe):
        assert isinstance(copied, ArmRecipe)
        assert copied.to_dict() == {"recipe": name, "options": {"algorithms": ["bias_correction"]}}
        assert copied.quantization_recipe is not None
        combined = QuantizationRecipe(quantizers=copied.quantization_recipe.quantizers)  # what ``combine`` keeps
        assert recipe_algorithms(copied.quantization_recipe) == recipe_algorithms(combined) == ("bias_correction",)


def test_recipes_copy_their_lists() -> None:
    torch.manual_seed(0)
    model, samples, algorithms = nn.Linear(8, 4).eval(), [(torch.ones(2, 8),)] * 2, ["bias_correction", "int16_outputs"]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=algorithms, calibration_samples=samples)
    assert isinstance(recipe, ArmRecipe)
    before = export(model, recipe, samples[:1]).buffer
    algorithms.clear()
    samples[:] = [(torch.zeros(2, 8),)] * 2
    assert recipe.options["algorithms"] == ["bias_correction", "int16_outputs"]
    assert export(model, recipe, samples[:1]).buffer == before


@pytest.mark.parametrize(
    ("given", "count"), [(512, 512), ("512", 512), ("384KiB", 393_216), ("1.5 MiB", 1_572_864), ("2mb", 2_000_000)]
)
def test_parse_bytes(given: int | str, count: int) -> None:
    assert options.parse_bytes(given) == count


def test_defaults_are_filled_in() -> None:
    given = options.resolve_options("TOSA_INT8", {"quantized_io": True})
    assert given == {
        "extensions": None,
        "per_channel": True,
        "precisions": None,
        "calibration_samples": None,
        "observer": "mse",
        "algorithms": True,
        "qat": None,
        "min_sqnr": None,
        "quantized_io": True,
        "input_dtype": None,
        "steps_per_call": "auto",
        "plan_inputs": True,
        "plan_outputs": True,
        "require_full_delegation": False,
        "require_runnable": "warn",
        "dump_dir": None,
    }


@pytest.mark.parametrize(
    ("options_type", "recipes"),
    [
        (typed_options.EthosUOptions, ["ETHOSU_U55_INT8", "ETHOSU_U65_A8W4"]),
        (typed_options.EthosU85Options, ["ETHOSU_U85_INT8", "ETHOSU_U85_A16W8"]),
        (typed_options.CortexMOptions, ["CORTEX_M_INT8"]),
        (typed_options.TosaOptions, ["TOSA_FP", "TOSA_INT8"]),
        (typed_options.VgfOptions, ["VGF_FP", "VGF_A16W8"]),
    ],
)
def test_typed_options_are_those_of_the_table(options_type: Any, recipes: list[str]) -> None:
    assert typing.get_type_hints(options_type).keys() == set().union(*map(options.option_names, recipes))


@pytest.mark.parametrize(
    ("recipe", "typed"),
    [
        (ArmRecipe.ethosu_u85(macs=512), "ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=512)"),
        (ArmRecipe.cortex_m(cpu="cortex-m4"), "ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu='cortex-m4')"),
        (ArmRecipe.ethosu_u55("A16W8"), "ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_A16W8)"),
        (ArmRecipe.ethosu_u65("A8W4"), "ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U65_A8W4)"),
        (
            ArmRecipe.tosa("FP", extensions=["bf16"]),
            "ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, extensions=['bf16'])",
        ),
        (ArmRecipe.vgf(per_channel=False), "ExportRecipe.get_recipe(ArmRecipeType.VGF_INT8, per_channel=False)"),
        (
            ArmRecipe.ethosu_u85(dump_dir=Path("dump"), sram_budget="512KiB"),
            "ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, dump_dir='dump', sram_budget='512KiB')",
        ),
        (
            ArmRecipe.vgf(precisions={"head": "FP"}, algorithms={"gptq"}),
            "ExportRecipe.get_recipe(ArmRecipeType.VGF_INT8, precisions={'head': 'FP'}, algorithms={'gptq'})",
        ),
    ],
)
def test_repr_is_the_call_that_makes_the_recipe(recipe: ArmRecipe, typed: str) -> None:
    assert repr(recipe) == typed
    again = eval(typed, {"ExportRecipe": ExportRecipe, "ArmRecipeType": ArmRecipeType})
    assert again.to_dict() == recipe.to_dict()


def test_a_repr_leaves_samples_and_functions_out() -> None:
    recipe = ArmRecipe.tosa(calibration_samples=[(torch.ones(1000),)], qat=lambda model: model)
    assert repr(recipe) == "ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, calibration_samples=..., qat=...)"
    assert repr(ArmRecipe.tosa(qat=None)) == "ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, qat=None)"


def test_typed_constructors_check_as_get_recipe_does() -> None:
    with pytest.raises(ValueError, match="there is no recipe 'TOSA_INT9'; did you mean 'TOSA_INT8'"):
        ArmRecipe.tosa("INT9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="TOSA_INT8: unknown argument 'macs'; it belongs to Ethos-U recipes"):
        ArmRecipe.tosa(macs=8)  # type: ignore[call-arg]


@pytest.mark.parametrize("old", options.OLD_OPTION_NAMES)
def test_errors_suggest_the_new_name_of_an_old_option(old: str) -> None:
    with pytest.raises(ValueError, match=f"unknown argument '{old}'; did you mean '{options.OLD_OPTION_NAMES[old]}'"):
        ExportRecipe.get_recipe(U85, **{old: None})


def test_arguments_of_export_are_those_of_its_signature() -> None:
    assert inspect.signature(export).parameters.keys() == options.EXPORT_ARGUMENTS | {"model", "recipe"}
