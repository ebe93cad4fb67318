"""Derived compile specs: copies of an Ethos-U compile spec with other optimization options of Vela.

A derived spec differs in one option of Vela. This module replaces the line of this option in
``VelaConfiguration.options``, the text that Vela's command line parser produced. Running the parser again would give
the same text, but takes 10 ms, and a delegate may be compiled for several derived specs.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.workers.vela import VelaConfiguration

#: Possible values of Vela's option ``disable_feature``, in the order in which Vela's parser joins them by "|".
_FEATURES = ("Grouping", "FWD", "Cascading", "WeightBuffering", "ReuseIFM")


def optimise_for_size(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec with ``--optimise Size``."""
    return _derive_spec(spec, "--optimise=Size", "size", _set_option(spec.configuration, "optimize", "Size"))


def disable_cascades(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec that optimizes for performance with ``--disable-cascading``."""
    return _derive_spec(spec, "--disable-cascading", "performance", _disable_cascading(spec.configuration))


def limit_arena(spec: EthosUCompileSpec, sram_bytes: int) -> EthosUCompileSpec:
    """Return a copy of the spec that optimizes for performance in ``sram_bytes`` of SRAM (``--arena-cache-size``).

    Vela cascades layers until the program fits. If no cascade suffices, the program takes more SRAM.
    """
    configuration = _set_option(spec.configuration, "arena_size_limit", str(sram_bytes))
    configuration = replace(configuration, arena_cache_size=sram_bytes)
    return _derive_spec(spec, f"--arena-cache-size={sram_bytes}", "performance", configuration)


def _derive_spec(
    spec: EthosUCompileSpec, flag: str, optimise: str, configuration: VelaConfiguration
) -> EthosUCompileSpec:
    result = copy.copy(spec)  # keeps the folder of intermediate files
    position = len(spec.extra_flags)
    result.compiler_flags = [*spec.compiler_flags[:position], flag, *spec.compiler_flags[position:]]
    result.configuration, result.optimise = configuration, optimise
    return result


def _disable_cascading(configuration: VelaConfiguration) -> VelaConfiguration:
    disabled = {*_get_option(configuration, "disable_feature").split("|"), "Cascading"}
    return _set_option(configuration, "disable_feature", "|".join(name for name in _FEATURES if name in disabled))


def _get_option(configuration: VelaConfiguration, name: str) -> str:
    """Return the value of the only line ``name=value`` in the options."""
    values = re.findall(rf"^{name}=(.*)$", configuration.options, re.MULTILINE)
    if len(values) != 1:
        raise ArmBackendError(f"Vela's options have {len(values)} lines '{name}=', not one; report Vela's version")
    return str(values[0])


def _set_option(configuration: VelaConfiguration, name: str, value: str) -> VelaConfiguration:
    line = f"{name}={_get_option(configuration, name)}\n"
    return replace(configuration, options=configuration.options.replace(f"\n{line}", f"\n{name}={value}\n"))
