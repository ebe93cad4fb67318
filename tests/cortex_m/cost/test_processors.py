"""Processors of the cost model."""

from __future__ import annotations

import pytest

from arm_backend_core.cortex_m.cost.processors import (
    CYCLES_PER_INSTRUCTION,
    PEAK_MACS,
    CodeVariant,
    code_variant_of,
    has_fpu,
    to_cycles,
)
from arm_backend_core.targets.cortex_m import ISAS_BY_CPU, Isa, Processor


def test_each_processor_has_a_pace_with_a_source() -> None:
    assert set(CYCLES_PER_INSTRUCTION) == set(ISAS_BY_CPU)
    assert all(figure.source and figure.cycles > 0 for figure in CYCLES_PER_INSTRUCTION.values())


@pytest.mark.parametrize(
    ("cpu", "isa", "code"),
    [
        ("cortex-m0", None, CodeVariant.BASELINE),
        ("cortex-m23", None, CodeVariant.BASELINE),
        ("cortex-m3", None, CodeVariant.MAINLINE),
        ("cortex-m4", "scalar", CodeVariant.MAINLINE),
        ("cortex-m33", None, CodeVariant.DSP),
        ("cortex-m55", Isa.DSP, CodeVariant.DSP),
        ("cortex-m85", None, CodeVariant.MVE),
    ],
)
def test_the_instruction_set_determines_the_code(cpu: str, isa: str | None, code: CodeVariant) -> None:
    assert code_variant_of(Processor.resolve(cpu, isa)) is code


def test_only_small_processors_have_no_fpu() -> None:
    without = [cpu for cpu in ISAS_BY_CPU if not has_fpu(Processor.resolve(cpu))]
    assert without == ["cortex-m0", "cortex-m0plus", "cortex-m3", "cortex-m23"]


def test_cycles_are_instructions_at_the_processors_pace() -> None:
    assert to_cycles(Processor.resolve("cortex-m4"), 1000) == round(1000 * CYCLES_PER_INSTRUCTION["cortex-m4"].cycles)
    assert PEAK_MACS.of(CodeVariant.MVE) == 8
