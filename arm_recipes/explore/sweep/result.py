"""What ``sweep`` returns: a row for each configuration, as data, as text, as a frame and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes._internal.rendering import Renderable, Section, format_bytes, to_jsonable
from arm_recipes.explore.sweep.chart import plot_rows
from arm_recipes.explore.sweep.rows import Row, column_value

#: What a front is of where nothing else is said: less is better, of the accuracy more.
CRITERIA = ("milliseconds", "sram_bytes", "dram_bytes", "flash_bytes", "accuracy", "cpu_operators")
_COLUMNS = ("", "recipe", "target", "system", "memory mode", "cycles", "ms", "SRAM", "DRAM", "flash")
_MORE_IS_BETTER = frozenset({"accuracy"})


@dataclass(frozen=True)
class Sweep(Renderable):
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
        rows = [row for row in self.rows if row.figures is not None]
        return plot_rows(rows, self.metric, self.pareto, x, y)

    def to_dict(self) -> dict[str, Any]:
        """Rows and notes as dicts, lists, str and numbers, ready for JSON."""
        rows = [to_jsonable(row.to_dict()) for row in self.rows]
        return {"metric": self.metric, "rows": rows, "notes": list(self.notes)}

    def sections(self) -> Iterator[Section]:
        """Headings with their lines, for text and HTML."""
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


def _costs(row: Row, criteria: Sequence[str]) -> tuple[float, ...]:
    """The less the better; an accuracy that was not measured is the worst."""
    costs = []
    for column in criteria:
        found = column_value(row, column)
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
        format_bytes(figures.sram_bytes) + (" (too much)" if figures.sram_exceeded else ""),
        format_bytes(figures.dram_bytes),
        format_bytes(figures.flash_bytes),
        "" if row.accuracy is None else f"{row.accuracy:.4g}",
        str(row.cpu_operators or ""),
    )


def _failure(row: Row) -> tuple[str, ...]:
    return row.recipe, row.target, row.system_config, row.memory_mode, (row.error or "").partition("\n")[0]
