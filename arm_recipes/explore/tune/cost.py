"""Cost of a program: estimates for an Ethos-U and a Cortex-M; memory traffic of its TOSA graphs for other targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.tosa_flatbuffer import read_tosa_graph

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.explore.sweep.rows import ProgramEstimates
    from arm_recipes.pipeline.artifact import Artifact

#: Kinds of cost that a budget can limit.
COST_KINDS = ("cycles", "sram", "flash", "traffic")


@dataclass(frozen=True)
class ProgramCost:
    """Cost of one inference.

    Attributes:
        cycles, sram: estimated cycles and SRAM bytes of an Ethos-U (by Vela) or a Cortex-M; None for other targets.
        flash: flash bytes, estimated by Vela. For a Cortex-M, the bytes of the program; for other targets, the bytes
            of the TOSA graphs' constants.
        traffic: bytes that the operators of the TOSA graphs, or of a Cortex-M's program, read and write. It represents
            time on targets without estimated cycles.
        cpu_operators: number of operators outside delegates, whose cost is not estimated; 0 for a Cortex-M, whose
            cycles include them.
    """

    cycles: int | None
    sram: int | None
    flash: int
    traffic: int
    cpu_operators: int

    @property
    def time_kind(self) -> str:
        """Kind of cost that represents time: cycles, or traffic if cycles are unknown."""
        return "traffic" if self.cycles is None else "cycles"

    @property
    def available(self) -> tuple[str, ...]:
        """Kinds of cost that are known for this target."""
        return tuple(name for name in COST_KINDS if self.get(name) is not None)

    def get(self, name: str) -> int | None:
        """Return the cost of a kind of ``COST_KINDS``; None if unknown."""
        amount: int | None = getattr(self, name)
        return amount

    def value(self, name: str) -> int:
        """Return the cost of a kind of ``COST_KINDS``, which must be known."""
        amount = self.get(name)
        assert amount is not None, name
        return amount


def cortex_m_cost(artifact: Artifact) -> ProgramCost:
    """Return the cost of an exported program for a Cortex-M, from its report."""
    report = artifact.report
    return ProgramCost(
        cycles=sum(method.cpu_cycles or 0 for method in report.methods),
        sram=0 if report.ram is None else report.ram.sram_bytes,
        flash=artifact.stored_bytes,
        traffic=sum(cost.bytes_read + cost.bytes_written for cost in report.layers),
        cpu_operators=0,
    )


def estimate_cost(
    estimates: ProgramEstimates | None, flatbuffers: Sequence[np.ndarray[Any, Any]], cpu_operators: int
) -> ProgramCost:
    """Estimate the cost of a program from its TOSA graphs and, for an Ethos-U, from Vela's estimates."""
    traffic = constants = 0
    for flatbuffer in flatbuffers:
        graph = read_tosa_graph(memoryview(flatbuffer.tobytes()))
        computed = {name for op in graph.operators for name in op.outputs} | set(graph.inputs)
        for op in graph.operators:
            traffic += sum(graph.tensor_bytes.get(name, 0) for name in (*op.inputs, *op.outputs))
        constants += sum(count for name, count in graph.tensor_bytes.items() if name not in computed)
    if estimates is None:
        return ProgramCost(None, None, constants, traffic, cpu_operators)
    return ProgramCost(estimates.cycles, estimates.sram_bytes, estimates.flash_bytes, traffic, cpu_operators)
