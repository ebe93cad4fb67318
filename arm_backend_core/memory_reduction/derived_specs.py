"""Derived compile specs: copies of an Ethos-U compile spec with other optimization options of Vela."""

from __future__ import annotations

import copy

from arm_backend_core.targets.compile_spec import EthosUCompileSpec


def optimise_for_size(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec with ``--optimise Size``."""
    return _derive_spec(spec, (), "size")


def disable_cascades(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec that optimizes for performance with ``--disable-cascading``."""
    return _derive_spec(spec, ("--disable-cascading",), "performance")


def limit_arena(spec: EthosUCompileSpec, sram_bytes: int) -> EthosUCompileSpec:
    """Return a copy of the spec that optimizes for performance in ``sram_bytes`` of SRAM (``--arena-cache-size``).

    Vela cascades layers until the program fits. If no cascade suffices, the program takes more SRAM.
    """
    return _derive_spec(spec, (f"--arena-cache-size={sram_bytes}",), "performance")


def _derive_spec(spec: EthosUCompileSpec, flags: tuple[str, ...], optimise: str) -> EthosUCompileSpec:
    arguments = spec.accelerator, spec.system_config, spec.memory_mode, (*spec.extra_flags, *flags), spec.config_ini
    new = EthosUCompileSpec(*arguments, optimise=optimise)
    result = copy.copy(spec)  # keeps the folder of intermediate files
    result.configuration, result.compiler_flags, result.optimise = new.configuration, new.compiler_flags, new.optimise
    return result
