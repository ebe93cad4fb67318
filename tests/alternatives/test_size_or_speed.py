"""``optimise=``: Vela's performance program, its size program, and the choice between them."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from arm_backend_core.alternatives import size_or_speed
from arm_backend_core.backends.payload import Payload
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import GOALS, EthosUCompileSpec
from arm_backend_core.workers import vela
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export, sweep
from arm_recipes.recipe import options
from arm_recipes.recipe.saved_recipe import read_saved_recipe
from arm_recipes.report.page_summary import answer_questions
from tests.small_models import Wide

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
X = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def test_goals_are_those_of_the_option() -> None:
    assert options.GOALS == GOALS


def _export(recipe: ArmRecipeType, **options: Any) -> ExportResult:
    return export(Wide().eval(), ExportRecipe.get_recipe(recipe, **options), [(X,)], progress=False)


def _figures(result: ExportResult) -> tuple[int, int, int]:
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    return delegate.vela.total_cycles, delegate.vela.sram_bytes, delegate.vela.weight_bytes


def _notes(result: ExportResult) -> list[str]:
    return [note for note in result.report.notes if "optimised for size" in note]


@pytest.fixture(scope="module")
def exported() -> dict[tuple[ArmRecipeType, str], ExportResult]:
    return {(recipe, aim): _export(recipe, optimise=aim) for recipe in (U55, U85) for aim in ("performance", "size")}


def test_auto_takes_the_smaller_program_at_equal_cycles(
    exported: dict[tuple[ArmRecipeType, str], ExportResult],
) -> None:
    fast, small, auto = exported[U85, "performance"], exported[U85, "size"], _export(U85)
    assert _figures(small)[0] <= 1.005 * _figures(fast)[0]
    assert _figures(small)[1] < 0.7 * _figures(fast)[1]
    assert auto.buffer == small.buffer != fast.buffer
    (note,) = _notes(auto)
    assert f"SRAM {_figures(small)[1]:,} instead of {_figures(fast)[1]:,} bytes" in note
    assert b"--optimise=Size" in auto.buffer
    assert not _notes(fast) + _notes(small)
    assert torch.equal(auto.run(X), fast.run(X))
    assert not any("optimise" in item.change for item in auto.advice())


def test_an_arena_limit_halves_the_sram_in_the_same_time() -> None:
    """The size program is much smaller, and 13% slower: the weights are read from flash again for each stripe."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in ((3, 24), (24, 32), (32, 48))]
    model = nn.Sequential(layers[0], nn.MaxPool2d(2), layers[1], nn.MaxPool2d(2), layers[2]).eval()
    samples = [(torch.randn(1, 3, 64, 64),) for _ in range(2)]
    fast, small, auto = (
        export(model, ExportRecipe.get_recipe(U55, optimise=goal), samples, progress=False)
        for goal in ("performance", "size", "auto")
    )
    assert _figures(small)[0] > 1.1 * _figures(fast)[0]
    assert _figures(auto)[0] <= 1.005 * _figures(fast)[0]
    assert _figures(auto)[1] < 0.5 * _figures(fast)[1]
    assert torch.equal(auto.run(*samples[0]), fast.run(*samples[0]))
    (note,) = (note for note in auto.report.notes if "compiled for an arena of" in note)
    assert f"SRAM {_figures(auto)[1]:,} instead of {_figures(fast)[1]:,} bytes" in note


def test_auto_prefers_fewer_cycles_to_less_sram(exported: dict[tuple[ArmRecipeType, str], ExportResult]) -> None:
    """On U55, the size program reads the weights from flash again for each stripe."""
    fast, small, auto = exported[U55, "performance"], exported[U55, "size"], _export(U55)
    assert _figures(small)[1] < 0.7 * _figures(fast)[1]
    assert _figures(small)[0] > 1.005 * _figures(fast)[0]
    assert auto.buffer == fast.buffer
    assert not _notes(auto)
    assert torch.equal(small.run(X), fast.run(X))


def test_the_fastest_program_that_fits_is_taken(exported: dict[tuple[ArmRecipeType, str], ExportResult]) -> None:
    """The performance program, or if it exceeds the budget, one with an arena limit or the size program."""
    fast, small = exported[U55, "performance"], exported[U55, "size"]
    assert fast.report.ram is not None
    assert small.report.ram is not None
    assert _figures(_export(U55, sram_budget=fast.report.ram.sram_bytes)) == _figures(fast)
    limited = _export(U55, sram_budget=fast.report.ram.sram_bytes * 9 // 10)
    assert _figures(limited)[0] < 1.05 * _figures(fast)[0] < _figures(small)[0]
    assert limited.report.ram is not None
    assert limited.report.ram.sram_bytes <= fast.report.ram.sram_bytes * 9 // 10
    assert torch.equal(limited.run(X), fast.run(X))


@pytest.mark.parametrize("part", ["program", "delegate"])
def test_the_report_states_the_cycles_that_a_budget_costs(
    exported: dict[tuple[ArmRecipeType, str], ExportResult], part: str
) -> None:
    """The delegate for performance exceeds the budget, or only the whole program does."""
    fast, small = exported[U55, "performance"], exported[U55, "size"]
    assert small.report.ram is not None
    least = small.report.ram.sram_bytes
    budget = least if part == "delegate" else _figures(fast)[1] + 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = _export(U55, sram_budget=budget).report
    assert report.ram is not None
    (vela,) = (delegate.vela for delegate in report.delegates)
    assert vela is not None
    cycles, fast_cycles = vela.total_cycles, _figures(fast)[0]
    assert cycles <= _figures(small)[0]
    assert f"; compiled for less RAM: {cycles:,} cycles instead of {fast_cycles:,}, SRAM of the NPU" in str(report)
    assert report.ram.sram_bytes <= budget
    fits = next(answer for answer in answer_questions(report, report.context, (), {}) if answer.question == "Fits?")
    assert fits.details[-1] == report.ram.ram_reduction == report.to_dict()["ram"]["ram_reduction"]
    assert len({str(each.message) for each in caught}) == len(caught)
    assert "compiled for less RAM" not in str(_export(U55, sram_budget="1MiB").report)


def test_unchanged_figures_are_not_in_the_note() -> None:
    def payload(cycles: int, sram: int, size: int) -> Any:
        return SimpleNamespace(vela=SimpleNamespace(total_cycles=cycles, sram_bytes=sram), data=bytes(size))

    describe = size_or_speed._describe_saving
    assert describe(payload(1000, 6976, 445_072), payload(1000, 6976, 444_800)) == ""
    assert describe(payload(1000, 6976, 4000), payload(1000, 6976, 3000)) == (
        "program 3,000 instead of 4,000 bytes, cycles +0.0%"
    )
    assert describe(payload(1000, 6976, 4000), payload(1100, 5000, 4000)) == (
        "SRAM 5,000 instead of 6,976 bytes, cycles +10.0%"
    )


@pytest.mark.parametrize("forks", [True, False])
def test_parallel_compilation_for_both_goals_gives_the_same_program(
    exported: dict[tuple[ArmRecipeType, str], ExportResult], monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    (delegate,) = exported[U85, "performance"].report.delegates
    asked = list[str]()
    compile_tosa = vela.compile_tosa

    def ask(*arguments: Any) -> Any:
        asked.append(arguments[3] if len(arguments) > 3 else "compile")
        return compile_tosa(*arguments)

    monkeypatch.setattr(vela, "compile_tosa", ask)
    monkeypatch.setattr(size_or_speed, "_MIN_PARALLEL_FLATBUFFER_BYTES", 0 if forks else 1 << 20)
    spec = EthosUCompileSpec("ethos-u85-256", optimise="auto")
    payload, chosen = size_or_speed.compile_best(spec, delegate.tosa, delegate="d", find_operator=lambda _: None)
    assert asked == ([size_or_speed.COMPILE_BOTH_FUNCTION] if forks else ["compile", "compile"])
    assert (chosen.compiler_flags[0], spec.optimise) == ("--optimise=Size", "auto")
    assert (
        payload.data
        == size_or_speed.compile_best(chosen, delegate.tosa, delegate="d", find_operator=lambda _: None)[0].data
    )


def test_vela_fails_on_one_of_two_goals(
    exported: dict[tuple[ArmRecipeType, str], ExportResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure for size is ignored. A failure for performance is an error, and Vela's process continues."""
    (delegate,) = exported[U85, "performance"].report.delegates
    spec = EthosUCompileSpec("ethos-u85-256", optimise="auto")
    small = size_or_speed.optimise_for_size(spec)

    def compiled() -> tuple[Payload, Any]:
        return size_or_speed.compile_best(spec, delegate.tosa, delegate="d", find_operator=lambda _: None)

    monkeypatch.setattr(size_or_speed, "optimise_for_size", lambda _: small)
    monkeypatch.setattr(size_or_speed, "_MIN_PARALLEL_FLATBUFFER_BYTES", 0)
    right = small.configuration
    small.configuration = _with_invalid_options(right)
    assert compiled()[1] is spec
    small.configuration, spec.configuration = right, _with_invalid_options(spec.configuration)
    with pytest.raises(CompileError, match="Vela refused it"):
        compiled()
    spec.configuration = EthosUCompileSpec("ethos-u85-256").configuration
    assert compiled()[1] is small


def _with_invalid_options(configuration: vela.VelaConfiguration) -> vela.VelaConfiguration:
    from dataclasses import replace

    return replace(configuration, options="[scheduler]\noptimize=Beauty\n")


def test_small_and_very_large_programs_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Any]()
    monkeypatch.setattr(size_or_speed, "try_compile", lambda *arguments, **_: tried.append(arguments))
    tiny = nn.Conv2d(3, 4, 3).eval(), [(torch.rand(1, 3, 8, 8),)]
    export(tiny[0], ExportRecipe.get_recipe(U85), tiny[1], progress=False)
    assert not tried
    monkeypatch.setattr(size_or_speed, "_MIN_PARALLEL_FLATBUFFER_BYTES", 0)
    monkeypatch.setattr(size_or_speed, "_MAX_FLATBUFFER_BYTES", 0)
    _export(U85)
    assert not tried


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (U85, {"optimise": "fast"}, "optimise must be one of 'auto', 'performance', 'size', 'ram'; got 'fast'"),
        (U85, {"optimise": None}, "optimise must be one of"),
        (ArmRecipeType.TOSA_INT8, {"optimise": "size"}, "unknown argument 'optimise'; it belongs to Ethos-U recipes"),
        (
            U85,
            {"optimise": "size", "extra_flags": ["--optimise", "Size"]},
            "extra_flags also set it, with '--optimise'",
        ),
    ],
)
def test_invalid_values_of_optimise_raise(recipe: ArmRecipeType, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportRecipe.get_recipe(recipe, **options)


def test_error_of_the_compile_spec_names_the_goals() -> None:
    with pytest.raises(ValueError, match=r"optimise='fast': unknown goal\. Allowed: auto, performance, size, ram"):
        EthosUCompileSpec("ethos-u55-128", optimise="fast")


def test_vela_flag_optimise_sets_the_goal() -> None:
    assert _spec_with_flag("Size").optimise == "size"
    assert _spec_with_flag("Performance").optimise == "performance"


def _spec_with_flag(aim: str) -> EthosUCompileSpec:
    recipe: Any = ExportRecipe.get_recipe(U55, extra_flags=["--optimise", aim])
    spec: EthosUCompileSpec = recipe.lowering_recipe.partitioners[0].compile_spec
    return spec


def test_saved_recipes_keep_the_goal(tmp_path: Path) -> None:
    recipe: Any = ExportRecipe.get_recipe(U55, optimise="size")
    assert read_saved_recipe(recipe.to_dict())[1] == {"optimise": "size"}


@pytest.mark.verify
def test_a_sweep_has_the_figures_of_an_export(exported: dict[tuple[ArmRecipeType, str], ExportResult]) -> None:
    rows = sweep(Wide().eval(), [U85], [(X,)], macs=[256], memory_modes=["Sram_Only"], progress=False).rows
    assert [(row.estimates.cycles, row.estimates.sram_bytes) for row in rows if row.estimates is not None] == [
        _figures(exported[U85, "size"])[:2]
    ]


def test_cascades_are_disabled_if_activations_are_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """U65 spills activations to DRAM. A cascade leaves too little SRAM for their cache."""
    arena = ["--arena-cache-size=60000"]
    recipe = ArmRecipeType.ETHOSU_U65_INT8
    auto = _export(recipe, extra_flags=arena)
    fast = _export(recipe, optimise="performance", extra_flags=arena)
    without_cascades = _export(recipe, optimise="performance", extra_flags=[*arena, "--disable-cascading"])
    assert _figures(without_cascades)[0] < 0.995 * _figures(fast)[0]
    assert auto.buffer == without_cascades.buffer
    assert any("compiled without cascades" in note for note in auto.report.notes)
    monkeypatch.setattr(size_or_speed, "disable_cascades", lambda _: pytest.fail("tried where nothing is spilled"))
    _export(U85)
