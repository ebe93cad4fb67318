"""Rows of a sweep: one configuration each, with Vela's estimates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

#: Columns without a number if the program could not be run.
_OPTIONAL = ("accuracy", "ram_bytes")


@dataclass(frozen=True)
class Figures:
    """Vela's estimates for one inference on one configuration, all delegates together.

    Attributes:
        cycles: cycles including memory stalls; ``npu_cycles``: cycles of the NPU alone.
        milliseconds: time at the clock of the system configuration.
        sram_bytes, dram_bytes, flash_bytes: peak use. If everything is in SRAM, Vela counts the constants as flash.
            For several delegates: the maximum for SRAM, which they use in sequence; the sum for the others.
        sram_exceeded: whether the program needs more SRAM than the memory mode allows.
        fast_scratch_bytes: part of the SRAM that the firmware provides as fast scratch.
        npu_ram_bytes: RAM that the NPU needs: scratch, and the constants if the memory mode places them in RAM;
            ``npu_sram_bytes``: the part in SRAM.
        weight_bytes: size of the encoded weights.
    """

    cycles: int
    npu_cycles: int
    milliseconds: float
    sram_bytes: int
    sram_exceeded: bool
    dram_bytes: int
    flash_bytes: int
    fast_scratch_bytes: int
    npu_ram_bytes: int
    npu_sram_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        recipe: name of the recipe, for example ``ETHOSU_U85_INT8``.
        target: NPU, for example ``ethos-u85-256``.
        macs: MACs per cycle of the NPU.
        system_config, memory_mode: Vela's system configuration and memory mode.
        figures: estimates; None if compilation failed, see ``error``.
        cpu_operators: number of operators outside delegates; the figures do not include their time.
        accuracy: accuracy by the sweep's metric; None if the program could not be run.
        error: error message of a failed configuration.
        board: board of the configuration; None if it was not given by a board.
        ram_bytes: RAM that a board needs: the NPU's, and the tensors outside delegates; None if the program could not
            be run.
        exceeds_board: whether the program needs more SRAM than the board has.
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
    board: str | None = None
    ram_bytes: int | None = None
    exceeds_board: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Flatten the row and its figures to one dict; missing figures are None."""
        no_figures = dict.fromkeys(field.name for field in fields(Figures))
        figures = no_figures if self.figures is None else asdict(self.figures)
        leading = ("recipe", "board", "target", "macs", "system_config", "memory_mode", "ram_bytes", "exceeds_board")
        trailing = ("cpu_operators", "accuracy", "error")
        return {n: getattr(self, n) for n in leading} | figures | {n: getattr(self, n) for n in trailing}


def column_value(row: Row, column: str) -> Any:
    """Return a number of a row with figures; None for an accuracy or RAM that is not known.

    Raises:
        ValueError: there is no such numeric column.
    """
    numbers = [name for name, cell in row.to_dict().items() if name in _OPTIONAL or _is_number(cell)]
    if column not in numbers:
        raise ValueError(f"there is no numeric column '{column}'; there are: {', '.join(numbers)}")
    return row.to_dict()[column]


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)
