"""``optimise="ram"`` and programs that fit a budget: which of Vela's configurations are tried, and which is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from arm_backend_core.backends.payload import Payload
from arm_backend_core.memory_reduction.vela_configuration_search import (
    CompiledCandidate,
    available_arena_bytes,
    find_least_ram,
    find_program_that_fits,
)
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from tests.small_models import Wide

U55 = ArmRecipeType.ETHOSU_U55_INT8
X = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _export(goal: str) -> ExportResult:
    recipe = ExportRecipe.get_recipe(U55, optimise=goal)
    return export(Wide().eval(), recipe, [(X,), (-X,)], progress=False)


@pytest.fixture(scope="module")
def exported() -> Mapping[str, ExportResult]:
    return {goal: _export(goal) for goal in ("performance", "size", "ram")}


def _ram_and_cycles(result: ExportResult) -> tuple[int, int]:
    (vela,) = (delegate.vela for delegate in result.report.delegates)
    assert vela is not None
    assert not vela.sram_exceeded
    return vela.scratch_bytes, vela.total_cycles


def test_goal_ram_takes_the_program_with_the_least_ram(exported: Mapping[str, ExportResult]) -> None:
    least = exported["ram"]
    assert _ram_and_cycles(least) <= min(_ram_and_cycles(exported[goal]) for goal in ("performance", "size"))
    assert _ram_and_cycles(least)[0] < 0.7 * _ram_and_cycles(exported["performance"])[0]
    assert torch.equal(least.run(X), exported["performance"].run(X))


def test_the_report_has_the_choice_and_its_cost(exported: Mapping[str, ExportResult]) -> None:
    report = exported["ram"].report
    assert report.ram is not None
    now, before = (_ram_and_cycles(exported[goal])[1] for goal in ("ram", "performance"))
    assert f"compiled for less RAM: {now:,} cycles instead of {before:,}, SRAM of the NPU" in report.ram.ram_reduction
    assert any("is optimised for size" in note or "compiled for an arena of" in note for note in report.notes)


def _program(spec: EthosUCompileSpec, exported: ExportResult, ram: int, cycles: int) -> Payload:
    """A payload with these figures."""
    (vela,) = (delegate.vela for delegate in exported.report.delegates)
    assert vela is not None
    limit = spec.configuration.arena_cache_size
    limited = limit if limit < spec.configuration.address_space else None
    figures = replace(vela, scratch_bytes=ram, sram_bytes=ram, total_cycles=cycles, sram_limit=limited)
    return Payload(b"", figures)


class _VelaStub:
    """Stub of Vela: a size program needs 400 bytes; one for an arena limit needs the limit, at least ``least``."""

    def __init__(self, exported: ExportResult, least: int) -> None:
        self.exported, self.least, self.tried = exported, least, list[int]()

    def __call__(self, spec: EthosUCompileSpec) -> Payload | None:
        if spec.optimise == "size":
            return _program(spec, self.exported, 400, 1500)
        limit = spec.configuration.arena_cache_size
        self.tried.append(limit)
        return None if limit > 1000 else _program(spec, self.exported, max(limit, self.least), 2000 - limit)


def test_the_search_continues_while_it_finds_less(exported: Mapping[str, ExportResult]) -> None:
    spec, vela = EthosUCompileSpec("ethos-u55-128", optimise="ram"), _VelaStub(exported["size"], least=150)
    fast = CompiledCandidate(_program(spec, exported["size"], 1000, 1000), spec)
    best = find_least_ram(fast, vela)
    assert best.ram_bytes == 150
    assert min(vela.tried) == 75
    assert not best.vela.sram_exceeded  # an arena limit of the search is not a limit of the board


def test_the_fastest_program_that_fits_is_taken_or_else_the_smallest(exported: Mapping[str, ExportResult]) -> None:
    spec, vela = EthosUCompileSpec("ethos-u55-128", optimise="auto"), _VelaStub(exported["size"], least=300)
    fast = CompiledCandidate(_program(spec, exported["size"], 1000, 1000), spec)
    small = _program(spec, exported["size"], 400, 1500)
    for budget, (ram, cycles) in {900: (900, 1100), 450: (400, 1500), 250: (300, 1738)}.items():
        spec.sram_budget = budget
        found = find_program_that_fits(fast, small, vela)
        assert (found.ram_bytes, found.vela.total_cycles) == (ram, cycles)
        assert found.exceeds_sram == (budget == 250)


def test_a_memory_mode_that_is_exceeded_keeps_the_program_for_performance(
    exported: Mapping[str, ExportResult],
) -> None:
    spec = EthosUCompileSpec("ethos-u55-128", extra_flags=["--arena-cache-size=200"], optimise="auto")
    fast, vela = (
        CompiledCandidate(_program(spec, exported["size"], 1000, 1000), spec),
        _VelaStub(exported["size"], least=300),
    )
    assert find_program_that_fits(fast, None, vela) is fast
    assert vela.tried == [210, 180]


def test_constants_in_sram_count_as_ram(exported: Mapping[str, ExportResult]) -> None:
    spec = EthosUCompileSpec("ethos-u85-256", optimise="auto")
    payload = _program(spec, exported["size"], 1000, 1000)
    assert payload.vela is not None
    in_sram = replace(payload, vela=replace(payload.vela, constant_bytes=300, constant_memory="OnChipFlash"))
    for budget, exceeds in {None: False, 1300: False, 1299: True}.items():
        spec.sram_budget = budget
        assert CompiledCandidate(in_sram, spec).exceeds_sram == exceeds
        assert not CompiledCandidate(payload, spec).exceeds_sram
    assert available_arena_bytes(CompiledCandidate(in_sram, spec)) == 999
    spec.sram_budget = 200
    assert available_arena_bytes(CompiledCandidate(in_sram, spec)) == 0
