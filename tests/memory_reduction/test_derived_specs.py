"""Compile specs that differ from another one in Vela's optimization."""

from __future__ import annotations

from arm_backend_core.memory_reduction.derived_specs import disable_cascades, limit_arena, optimise_for_size
from arm_backend_core.targets.compile_spec import EthosUCompileSpec


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
