"""Processors of the cost model: the code variant that they execute, and their cycles per instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from arm_backend_core.targets.cortex_m import Isa, Processor


class CodeVariant(Enum):
    """Variant of the kernels' machine code: the instructions that the compiler may use.

    The value is the index of the variant's field in ``PerCodeVariant``.
    """

    BASELINE = 0
    """Armv6-M and Armv8-M Baseline: mostly 16-bit instructions, no multiplication with a result of 64 bits."""

    MAINLINE = 1
    """Armv7-M and Armv8-M Mainline, without SIMD instructions."""

    DSP = 2
    MVE = 3


@dataclass(frozen=True)
class PerCodeVariant:
    """A number for each code variant, for example the instructions of one step of a kernel."""

    baseline: float
    mainline: float
    dsp: float
    mve: float

    def of(self, code: CodeVariant) -> float:
        """The number for ``code``."""
        return (self.baseline, self.mainline, self.dsp, self.mve)[code.value]


#: Processors without a floating-point unit. On other processors, the unit is optional, and is assumed.
_WITHOUT_FPU = ("cortex-m0", "cortex-m0plus", "cortex-m3", "cortex-m23")
#: Processors that execute ``CodeVariant.BASELINE``.
_BASELINE = ("cortex-m0", "cortex-m0plus", "cortex-m23")

#: Maximum number of int8 MACs per cycle (Arm's Technical Reference Manuals). Baseline and mainline: 1 multiplication
#: (on M0, M0+ and M23 with the fast multiplier). DSP: SMLAD computes 2 products of int16. MVE: 2 beats of 4 int8
#: products on M55 and M85.
PEAK_MACS = PerCodeVariant(1, 1, 2, 8)


@dataclass(frozen=True)
class CyclesPerInstruction:
    """Cycles per instruction of a processor.

    Attributes:
        cycles: average over the kernels' loops, including loads of two cycles, branches, dual issue and waits for
            memory.
        source: the measurement that the number is fitted to, or the reason for an assumption.
    """

    cycles: float
    source: str


_TINY, _MEASURED = "MLPerf Tiny", "median of the ratios of measured cycles and counted instructions"
_SAME_AS = "not measured; assumed equal to {}"
_MANUAL = (
    "not measured with CMSIS-NN; Technical Reference Manual: loads and taken branches, a third of the instructions, "
    "take {} cycles"
)

#: Cycles per instruction, by processor. ``docs/contributors/cpu_cycles.md`` compares the estimates with measurements.
CYCLES_PER_INSTRUCTION: Mapping[str, CyclesPerInstruction] = {
    "cortex-m0": CyclesPerInstruction(1.5, _MANUAL.format("2 and 3")),
    "cortex-m0plus": CyclesPerInstruction(1.35, _MANUAL.format("2")),
    "cortex-m3": CyclesPerInstruction(1.47, _SAME_AS.format("Cortex-M4, which has the same pipeline")),
    "cortex-m4": CyclesPerInstruction(1.47, f"{_MEASURED}: {_TINY} 1.1, NUCLEO-L4R5ZI at 120 MHz, CMSIS-NN"),
    "cortex-m7": CyclesPerInstruction(
        0.84,
        f"0.57 times the value of Cortex-M4: ratio of the cycles of X-CUBE-AI on NUCLEO-H7A3ZI-Q (M7) and "
        f"NUCLEO-L4R5ZI (M4) in {_TINY} 1.1",
    ),
    "cortex-m23": CyclesPerInstruction(1.35, _SAME_AS.format("Cortex-M0+, which has as many pipeline stages")),
    "cortex-m33": CyclesPerInstruction(1.2, f"{_MEASURED}: {_TINY} 1.1, nRF5340 at 128 MHz, CMSIS-NN"),
    "cortex-m35p": CyclesPerInstruction(1.2, _SAME_AS.format("Cortex-M33, which has the same pipeline")),
    "cortex-m52": CyclesPerInstruction(
        1.35, _SAME_AS.format("Cortex-M55; it is a smaller processor, so this is optimistic")
    ),
    "cortex-m55": CyclesPerInstruction(
        1.35, "sum of the first 8 layers of MobileNetV2 on Alif Ensemble E8, pytorch/executorch#17651"
    ),
    "cortex-m85": CyclesPerInstruction(0.91, f"{_MEASURED}: {_TINY} 1.2, EK-RA8D1 at 480 MHz, CMSIS-NN"),
}


def code_variant_of(processor: Processor) -> CodeVariant:
    """The code variant that a processor executes."""
    if processor.isa is Isa.SCALAR:
        return CodeVariant.BASELINE if processor.cpu in _BASELINE else CodeVariant.MAINLINE
    return CodeVariant.DSP if processor.isa is Isa.DSP else CodeVariant.MVE


def has_fpu(processor: Processor) -> bool:
    """Whether the processor has a floating-point unit."""
    return processor.cpu not in _WITHOUT_FPU


def to_cycles(processor: Processor, instructions: float) -> int:
    """Cycles that a processor needs for a number of instructions."""
    return round(instructions * CYCLES_PER_INSTRUCTION[processor.cpu].cycles)
