"""Processors and the instruction sets of their kernels."""

from __future__ import annotations

import re

import pytest

from arm_backend_core.targets.cortex_m import ISAS_BY_CPU, Isa, resolve_isa


@pytest.mark.parametrize(
    ("cpu", "isa"),
    [
        ("cortex-m0", "scalar"),
        ("cortex-m3", "scalar"),
        ("cortex-m4", "dsp"),
        ("cortex-m33", "dsp"),
        ("cortex-m55", "mve"),
    ],
)
def test_default_isa_is_the_fastest(cpu: str, isa: str) -> None:
    assert resolve_isa(cpu) is Isa(isa)


@pytest.mark.parametrize("cpu", ISAS_BY_CPU)
def test_resolve_isa_accepts_names_and_members(cpu: str) -> None:
    for isa in ISAS_BY_CPU[cpu]:
        assert resolve_isa(cpu, isa) is resolve_isa(cpu, isa.value) is isa


@pytest.mark.parametrize(
    ("cpu", "isa", "message"),
    [
        ("cortex-m0", "mve", "isa='mve': cortex-m0 has 'scalar'"),
        ("cortex-m4", Isa.MVE, "isa='mve': cortex-m4 has 'dsp', 'scalar'"),
        ("cortex-m55", "neon", "isa='neon': cortex-m55 has 'mve', 'dsp', 'scalar'"),
        (
            "Cortex_M55",
            None,
            "cpu='Cortex_M55': there is no such Cortex-M; did you mean 'cortex-m55'? (allowed: cortex-m0",
        ),
        ("xtensa", None, "cpu='xtensa': there is no such Cortex-M"),
    ],
)
def test_unknown_cpu_or_isa_is_refused(cpu: str, isa: Isa | str | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_isa(cpu, isa)
