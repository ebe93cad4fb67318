"""Cortex-M processors: instruction sets that CMSIS-NN has kernels for, and the sets of each processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from arm_backend_core.similar_names import suggest_name


class Isa(Enum):
    """Instruction set that CMSIS-NN's kernels are compiled for."""

    SCALAR = "scalar"
    """No SIMD: Armv6-M, Armv7-M, Armv8-M Baseline, and processors without the extensions below."""

    DSP = "dsp"
    """The DSP extension of Armv7E-M and Armv8-M Mainline: two 16-bit MACs per instruction."""

    MVE = "mve"
    """The vector extension of Armv8.1-M (Helium): 16 int8 lanes."""


_ALL, _WITH_DSP, _SCALAR_ONLY = (Isa.MVE, Isa.DSP, Isa.SCALAR), (Isa.DSP, Isa.SCALAR), (Isa.SCALAR,)

#: {processor: instruction sets that it can have, the fastest first}. Chip vendors may omit DSP on M33 and M35P, and MVE
#: on M52, M55 and M85 (Arm's Technical Reference Manuals).
ISAS_BY_CPU: Mapping[str, tuple[Isa, ...]] = {
    "cortex-m0": _SCALAR_ONLY,
    "cortex-m0plus": _SCALAR_ONLY,
    "cortex-m3": _SCALAR_ONLY,
    "cortex-m4": _WITH_DSP,
    "cortex-m7": _WITH_DSP,
    "cortex-m23": _SCALAR_ONLY,
    "cortex-m33": _WITH_DSP,
    "cortex-m35p": _WITH_DSP,
    "cortex-m52": _ALL,
    "cortex-m55": _ALL,
    "cortex-m85": _ALL,
}


#: Processor of programs without an NPU, if the user names none.
DEFAULT_CPU = "cortex-m55"

#: {NPU family: Cortex-M beside the NPU in Arm's reference designs}: Corstone-300 and -310 for Ethos-U55, Corstone-320
#: for Ethos-U85. None for Ethos-U65, because it is mostly beside a Cortex-A. Each family needs an entry.
DEFAULT_HOST_CPU: Mapping[str, str | None] = {
    "ethos-u55": "cortex-m55",
    "ethos-u65": None,
    "ethos-u85": "cortex-m85",
}


def resolve_isa(cpu: str, isa: Isa | str | None = None) -> Isa:
    """The instruction set of a processor's kernels: ``isa``, or the fastest that the processor may have.

    Raises:
        ValueError: there is no such processor, or it never has the instruction set.
    """
    if cpu not in ISAS_BY_CPU:
        hint = suggest_name(str(cpu).replace("_", "-"), ISAS_BY_CPU)
        raise ValueError(f"cpu={cpu!r}: there is no such Cortex-M{hint} (allowed: {', '.join(ISAS_BY_CPU)})")
    names = {each.value: each for each in ISAS_BY_CPU[cpu]}
    if isa is None:
        return ISAS_BY_CPU[cpu][0]
    name = isa.value if isinstance(isa, Isa) else isa
    if name not in names:
        raise ValueError(f"isa={name!r}: {cpu} has {', '.join(map(repr, names))}")
    return names[name]


@dataclass(frozen=True)
class Processor:
    """A processor and the instruction set that its kernels are compiled for.

    Attributes:
        cpu: name of the processor, a key of ``ISAS_BY_CPU``.
        isa: the instruction set.
    """

    cpu: str
    isa: Isa

    @staticmethod
    def resolve(cpu: str, isa: Isa | str | None = None) -> Processor:
        """The processor called ``cpu``, see ``resolve_isa``."""
        return Processor(cpu, resolve_isa(cpu, isa))

    def __str__(self) -> str:
        names = {Isa.SCALAR: "scalar code", Isa.DSP: "DSP extension", Isa.MVE: "MVE"}
        return f"{self.cpu.title()} with {names[self.isa]}"
