"""What a program costs: Vela's estimates for an Ethos-U, bytes of its TOSA graphs for other targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.tosa_graph import read_graph

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.explore.sweep.rows import Figures

#: What a budget can be of.
COST_KINDS = ("cycles", "sram", "flash", "traffic")


@dataclass(frozen=True)
class ProgramCost:
    """Of one inference.

    Attributes:
        cycles, sram: Vela's estimate of time, and bytes; None for targets that Vela does not know.
        flash: bytes as Vela estimates them; for other targets those of the TOSA graphs' constants.
        traffic: bytes that operators of the TOSA graph read and write; a time for targets without an estimate.
        cpu_operators: that no delegate takes.
    """

    cycles: int | None
    sram: int | None
    flash: int
    traffic: int
    cpu_operators: int

    @property
    def time_kind(self) -> str:
        """What stands for time."""
        return "traffic" if self.cycles is None else "cycles"

    @property
    def available(self) -> tuple[str, ...]:
        """Prices that this target has."""
        return tuple(name for name in COST_KINDS if self.get(name) is not None)

    def get(self, name: str) -> int | None:
        """One of ``COST_KINDS``; None where it is not known."""
        found: int | None = getattr(self, name)
        return found

    def value(self, name: str) -> int:
        """One of ``COST_KINDS`` that is known."""
        found = self.get(name)
        assert found is not None, name
        return found


def estimate_cost(
    figures: Figures | None, flatbuffers: Sequence[np.ndarray[Any, Any]], cpu_operators: int
) -> ProgramCost:
    """What Vela says of a program, or else its TOSA graphs."""
    traffic = constants = 0
    for flatbuffer in flatbuffers:
        graph = read_graph(memoryview(flatbuffer.tobytes()))
        made = {name for op in graph.operators for name in op.outputs} | set(graph.inputs)
        for op in graph.operators:
            traffic += sum(graph.bytes.get(name, 0) for name in (*op.inputs, *op.outputs))
        constants += sum(count for name, count in graph.bytes.items() if name not in made)
    if figures is None:
        return ProgramCost(None, None, constants, traffic, cpu_operators)
    return ProgramCost(figures.cycles, figures.sram_bytes, figures.flash_bytes, traffic, cpu_operators)
