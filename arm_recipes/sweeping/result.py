"""What ``sweep`` returns: a row for each configuration, as data, as text, as a frame and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from arm_recipes.report import Section, Shown, plain, size

#: What a front is of where nothing else is said: less is better, of the accuracy more.
CRITERIA = ("milliseconds", "sram_bytes", "dram_bytes", "flash_bytes", "accuracy", "cpu_operators")
_COLUMNS = ("", "recipe", "target", "system", "memory mode", "cycles", "ms", "SRAM", "DRAM", "flash")
_MORE_IS_BETTER = frozenset({"accuracy"})


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


@dataclass(frozen=True)
class Sweep(Shown):
    """The configurations of a sweep, failed ones included.

    Attributes:
        rows: in the order of recipes, MACs, system configurations and memory modes.
        metric: what ``accuracy`` is.
        notes: what else the user should know, one sentence each.
    """

    rows: tuple[Row, ...]
    metric: str
    notes: tuple[str, ...] = ()

    def frame(self) -> Any:
        """A ``pandas.DataFrame`` with a line for each row; a list of dicts where there is no pandas."""
        lines = [row.to_dict() for row in self.rows]
        try:
            import pandas
        except ImportError:
            return lines
        return pandas.DataFrame(lines)

    def pareto(self, *criteria: str) -> tuple[Row, ...]:
        """Rows that no other is better than in one of the columns and as good in the rest; failed ones are left out.

        Args:
            criteria: columns; by default ``CRITERIA``: time, memories, accuracy and operators left on the CPU. Of the
                accuracy more is better, of all others less.

        Raises:
            ValueError: there is no such column with numbers.
        """
        costs = [(row, _costs(row, criteria or CRITERIA)) for row in self.rows if row.figures is not None]
        return tuple(row for row, cost in costs if not any(_dominates(other, cost) for _, other in costs))

    def plot(self, x: str = "milliseconds", y: Sequence[str] = ("sram_bytes", "flash_bytes", "accuracy")) -> Any:
        """A Plotly figure: a point for each row by ``x`` and each of ``y``, and the Pareto front of each pair.

        ``show()`` shows it, ``write_html("sweep.html")`` writes it into a file that needs nothing else.

        Raises:
            ValueError: there is no such column with numbers, or no row has figures.
            ImportError: Plotly is not installed.
        """
        from arm_recipes.sweeping.picture import picture

        return picture(self, x, y)

    def to_dict(self) -> dict[str, Any]:
        """Rows and notes as dicts, lists, str and numbers, ready for JSON."""
        rows = [plain(row.to_dict()) for row in self.rows]
        return {"metric": self.metric, "rows": rows, "notes": list(self.notes)}

    def _sections(self) -> Iterator[Section]:
        done = [row for row in self.rows if row.figures is not None]
        front = set(self.pareto())
        head = (*_COLUMNS, self.metric, "on CPU")
        if done:
            rows = [_cells(row, "*" if row in front else "") for row in done]
            yield f"{len(done)} configurations; none is better in all than one with *", [head, *rows]
        failed = [row for row in self.rows if row.figures is None]
        if failed:
            yield f"{len(failed)} failed", [_failure(row) for row in failed]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]


def value(row: Row, column: str) -> Any:
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


def _costs(row: Row, criteria: Sequence[str]) -> tuple[float, ...]:
    """The less the better; an accuracy that was not measured is the worst."""
    costs = []
    for column in criteria:
        found = value(row, column)
        if column in _MORE_IS_BETTER:
            found = float("inf") if found is None else -found
        costs.append(float(found))
    return tuple(costs)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _cells(row: Row, mark: str) -> tuple[str, ...]:
    figures = row.figures
    assert figures is not None
    return (
        mark,
        row.recipe,
        row.target,
        row.system_config,
        row.memory_mode,
        f"{figures.cycles:,}",
        f"{figures.milliseconds:.3f}",
        size(figures.sram_bytes) + (" (too much)" if figures.sram_exceeded else ""),
        size(figures.dram_bytes),
        size(figures.flash_bytes),
        "" if row.accuracy is None else f"{row.accuracy:.4g}",
        str(row.cpu_operators or ""),
    )


def _failure(row: Row) -> tuple[str, ...]:
    return row.recipe, row.target, row.system_config, row.memory_mode, (row.error or "").partition("\n")[0]
