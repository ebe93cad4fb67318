"""Rows of a sweep. A row holds one configuration, with the estimates of its program."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

#: Numeric columns that are None if the program could not be executed, or if the clock of a processor is unknown.
_OPTIONAL_COLUMNS = ("accuracy", "ram_bytes", "milliseconds")


@dataclass(frozen=True)
class ProgramEstimates:
    """Estimates for one inference: by Vela for the delegates, or by the CPU cost model for a Cortex-M without an NPU.

    Attributes:
        cycles: cycles including memory stalls; without an NPU, estimated cycles of the CPU.
        npu_cycles: cycles of the NPU alone.
        milliseconds: inference time at the clock of the system configuration, or at the given clock of a Cortex-M; None
            if no clock was given.
        sram_bytes, dram_bytes, flash_bytes: memory use. Vela reports constants as flash even if the memory mode places
            them in SRAM: ``flash_bytes`` then counts bytes in SRAM. Delegates use SRAM in sequence, so ``sram_bytes``
            is their maximum. DRAM and flash are summed. Without an NPU, ``sram_bytes`` is the RAM of the board, and
            ``flash_bytes`` the size of the program.
        sram_exceeded: whether the program needs more SRAM than the memory mode allows.
        fast_scratch_bytes: part of the SRAM that the firmware provides as fast scratch.
        npu_ram_bytes: RAM that the NPU needs: scratch, and the constants if the memory mode places them in RAM; 0
            without an NPU.
        npu_sram_bytes: part of ``npu_ram_bytes`` in SRAM; 0 without an NPU.
        weight_bytes: size of the encoded weights; 0 without an NPU.
        placement: hash of each delegate's scratch size and of the offsets of its inputs and outputs in the scratch.
            With ``fast_scratch_bytes``, these values determine the memory plan of the program. ``placement`` is not a
            column of the sweep.
    """

    cycles: int
    npu_cycles: int
    milliseconds: float | None
    sram_bytes: int
    sram_exceeded: bool
    dram_bytes: int
    flash_bytes: int
    fast_scratch_bytes: int
    npu_ram_bytes: int
    npu_sram_bytes: int
    weight_bytes: int
    placement: str = field(default="", compare=False)


#: The estimates that are columns of a sweep.
_COLUMNS = tuple(column.name for column in fields(ProgramEstimates) if column.name != "placement")


@dataclass(frozen=True)
class Row:
    """One configuration of a sweep.

    Attributes:
        recipe: name of the recipe, for example ``ETHOSU_U85_INT8``.
        target: NPU, for example ``ethos-u85-256``, or Cortex-M, for example ``cortex-m4``.
        macs: peak MACs per cycle of the target.
        system_config, memory_mode: Vela's system configuration and memory mode. Without an NPU, ``system_config`` is
            the clock, such as "120 MHz", and ``memory_mode`` is "".
        estimates: estimates of Vela or of the CPU cost model; None if compilation failed (see ``error``).
        cpu_operators: number of operators outside delegates, whose time an NPU's estimates do not include; None if the
            program could not be lowered.
        accuracy: accuracy by the sweep's metric; None if the program could not be compiled or executed.
        error: error message of a failed configuration; None for a compiled one.
        board: name of the board that determined the configuration; None without a board.
        ram_bytes: RAM that the program needs on a board: the sum of the RAM for the NPU, ExecuTorch's runtime, the
            application's inputs and outputs, and tensors outside delegates; None if compilation failed, or an NPU's
            program could not be executed.
        exceeds_board: whether the program needs more SRAM than the board has; False without a board, and if the program
            could not be executed.
    """

    recipe: str
    target: str
    macs: int
    system_config: str
    memory_mode: str
    estimates: ProgramEstimates | None
    cpu_operators: int | None = None
    accuracy: float | None = None
    error: str | None = None
    board: str | None = None
    ram_bytes: int | None = None
    exceeds_board: bool = False

    @property
    def has_npu(self) -> bool:
        """Whether the configuration has an NPU; otherwise it is a Cortex-M alone."""
        return self.memory_mode != ""

    def to_dict(self) -> dict[str, Any]:
        """Flatten the row and its estimates to one dict. Missing estimates are None."""
        estimates = {column: getattr(self.estimates, column, None) for column in _COLUMNS}
        leading = ("recipe", "board", "target", "macs", "system_config", "memory_mode", "ram_bytes", "exceeds_board")
        trailing = ("cpu_operators", "accuracy", "error")
        return {n: getattr(self, n) for n in leading} | estimates | {n: getattr(self, n) for n in trailing}


def column_value(row: Row, column: str) -> Any:
    """Return the number in a column of a row; None if an optional column is empty.

    Raises:
        ValueError: there is no such numeric column.
    """
    numbers = [name for name, cell in row.to_dict().items() if name in _OPTIONAL_COLUMNS or _is_number(cell)]
    if column not in numbers:
        raise ValueError(f"there is no numeric column '{column}'; there are: {', '.join(numbers)}")
    return row.to_dict()[column]


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)
