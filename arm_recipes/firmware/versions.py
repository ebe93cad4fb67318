"""Versions of the tools that compiled a program, and the program's target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """Versions of the tools that compiled a program, and the program's target.

    Attributes:
        executorch: version of the installed ExecuTorch. A program that was loaded from a ``.pte`` may have been
            compiled with another version.
        vela: version of Vela; "unknown" for a program that was loaded from a ``.pte``, "none" for a program without
            delegates.
        npu: the NPU, for example ``Ethos-U55-128``; "no NPU" for a program without delegates.
        stream: format of the command streams, for example ``COP1``; "none" for a program without delegates.
        architecture: NPU architecture release in the streams, which the driver checks; "none" for a program without
            delegates.
        cpu: processor for which a Cortex-M recipe chose the int8 kernels, for example ``cortex-m55``; empty for another
            recipe, or if it is unknown.
        isa: instruction set of the processor: ``scalar``, ``dsp`` or ``mve``; empty if ``cpu`` is empty.
    """

    executorch: str
    vela: str
    npu: str
    stream: str
    architecture: str
    cpu: str = ""
    isa: str = ""

    @property
    def has_npu(self) -> bool:
        """Whether the program has Ethos-U delegates."""
        return self.stream != "none"

    @property
    def target(self) -> str:
        """What executes the program: the NPU, or the processor, with its instruction set if known."""
        if self.has_npu:
            return self.npu
        cpu = self.cpu.replace("cortex-m", "Cortex-M").replace("plus", "+") or "Cortex-M"
        return f"{cpu}, {self.isa}" if self.isa else cpu
