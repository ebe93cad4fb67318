"""Rows of a sweep: one configuration each, with its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Figures:
    """Vela's estimates for one inference on one configuration, all delegates together.

    Attributes:
        cycles: with waits for memory; ``npu_cycles``: of the NPU alone.
        milliseconds: at the clock of the system configuration.
        sram_bytes, dram_bytes, flash_bytes: peak use. Where everything is in SRAM, Vela counts the constants as flash.
            Of several delegates the largest for SRAM, which they use one after the other; the sum for the others.
        sram_exceeded: more SRAM is needed than the memory mode grants.
        fast_scratch_bytes: of the SRAM, what the firmware gives beside the scratch.
        weight_bytes: weights as encoded.
    """

    cycles: int
    npu_cycles: int
    milliseconds: float
    sram_bytes: int
    sram_exceeded: bool
    dram_bytes: int
    flash_bytes: int
    fast_scratch_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        recipe: its name, for example ``ETHOSU_U85_INT8``.
        target: the NPU, for example ``ethos-u85-256``, with ``macs`` multiplications in a cycle.
        figures: None where ``error`` says why there are none.
        cpu_operators: that no delegate takes: their time is in none of the figures.
        accuracy: by the metric; None where the program could not be run.
    """

    recipe: str
    target: str
    macs: int
    system_config: str
    memory_mode: str
    figures: Figures | None
    cpu_operators: int | None = None
    accuracy: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row with its figures beside the other columns; None for those that it has not."""
        empty = dict.fromkeys(field.name for field in fields(Figures))
        figures = empty if self.figures is None else asdict(self.figures)
        names = ("recipe", "target", "macs", "system_config", "memory_mode")
        rest = ("cpu_operators", "accuracy", "error")
        return {n: getattr(self, n) for n in names} | figures | {n: getattr(self, n) for n in rest}


def column_value(row: Row, column: str) -> Any:
    """A number of a row that has figures; None for an accuracy that was not measured.

    Raises:
        ValueError: there is no such column with numbers.
    """
    numbers = [name for name, cell in row.to_dict().items() if name == "accuracy" or _is_number(cell)]
    if column not in numbers:
        raise ValueError(f"there is no column '{column}' with numbers; there are: {', '.join(numbers)}")
    return row.to_dict()[column]


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)
