"""Compile specs that differ from another one in Vela's optimization."""

from __future__ import annotations

import pytest

from arm_backend_core.memory_reduction.derived_specs import disable_cascades, limit_arena, optimise_for_size
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.workers import vela


def test_derived_specs_keep_everything_else() -> None:
    spec = EthosUCompileSpec("ethos-u55-128", extra_flags=["--disable-buffering"], optimise="auto")
    spec.sram_budget = 1000
    spec.dump_intermediate_artifacts_to("folder")
    for derived, flag, goal in (
        (optimise_for_size(spec), "--optimise=Size", "size"),
        (disable_cascades(spec), "--disable-cascading", "performance"),
        (limit_arena(spec, 4096), "--arena-cache-size=4096", "performance"),
    ):
        assert flag in derived.compiler_flags
        assert "--disable-buffering" in derived.compiler_flags
        assert (derived.optimise, derived.sram_budget) == (goal, 1000)
        assert derived.get_intermediate_path() == "folder"
    assert spec.optimise == "auto"


@pytest.mark.parametrize("flags", [(), ("--disable-buffering", "--disable-chaining", "--arena-cache-size=200000")])
@pytest.mark.parametrize("target", ["ethos-u55-128", "ethos-u65-256", "ethos-u85-256"])
def test_derived_configurations_are_those_of_the_command_line(target: str, flags: tuple[str, ...]) -> None:
    """They are built without Vela's parser, whose answer for the same flags is equal."""
    spec = EthosUCompileSpec(target, extra_flags=flags, optimise="auto")
    for derived, flag in (
        (optimise_for_size(spec), "--optimise=Size"),
        (disable_cascades(spec), "--disable-cascading"),
        (limit_arena(spec, 4096), "--arena-cache-size=4096"),
    ):
        parsed = EthosUCompileSpec(target, extra_flags=[*flags, flag])
        assert derived.configuration == parsed.configuration
        assert derived.compiler_flags == parsed.compiler_flags


def test_derived_specs_do_not_ask_vela(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EthosUCompileSpec("ethos-u85-256", optimise="auto")
    assert spec.configuration
    monkeypatch.setattr(vela, "parse_command_line", lambda argv: pytest.fail("an answer takes 10 ms"))
    assert limit_arena(optimise_for_size(spec), 4096).configuration.arena_cache_size == 4096
