"""Result of ``sweep``: one row for each configuration, as data, text, data frame and chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes._internal.rendering import Renderable, Section, format_bytes, to_jsonable
from arm_recipes.explore.sweep.chart import plot_rows
from arm_recipes.explore.sweep.rows import Row, column_value

#: Default criteria of the Pareto front. Less is better, except for accuracy.
PARETO_CRITERIA = ("milliseconds", "ram_bytes", "sram_bytes", "dram_bytes", "flash_bytes", "accuracy", "cpu_operators")
#: Columns that ``plot`` draws by default, each over the inference time.
_PLOTTED_COLUMNS = ("ram_bytes", "dram_bytes", "flash_bytes", "accuracy")
_TABLE_COLUMNS = ("", "recipe", "target", "system", "memory mode", "cycles", "ms", "RAM", "SRAM", "DRAM", "flash")
_MAXIMIZED_COLUMNS = frozenset({"accuracy"})


@dataclass(frozen=True)
class Sweep(Renderable):
    """The configurations of a sweep, failed ones included.

    Attributes:
        rows: in the order of recipes, MACs, system configurations and memory modes, or of boards and recipes. The
            Cortex-M processors come last.
        metric: name of the accuracy metric.
        notes: notes for the user, one sentence each.
    """

    rows: tuple[Row, ...]
    metric: str
    notes: tuple[str, ...] = ()

    def frame(self) -> Any:
        """Return the rows as ``pandas.DataFrame``, or as a list of dicts if pandas is not installed."""
        rows = [row.to_dict() for row in self.rows]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def pareto(self, *criteria: str) -> tuple[Row, ...]:
        """Return the Pareto-optimal rows, which no other row dominates. Failed configurations are excluded.

        Args:
            criteria: columns; by default time, memories, accuracy and operators on the CPU (``PARETO_CRITERIA``). More
                is better for accuracy; less is better for all other columns.

        Raises:
            ValueError: there is no such numeric column.
        """
        costs = [
            (row, _cost_vector(row, criteria or PARETO_CRITERIA)) for row in self.rows if row.estimates is not None
        ]
        return tuple(row for row, cost in costs if not any(_dominates(other, cost) for _, other in costs))

    def plot(self, x: str = "milliseconds", y: Sequence[str] = _PLOTTED_COLUMNS) -> Any:
        """Plot the rows by ``x`` and each of ``y``, with the Pareto front of each pair.

        ``show()`` displays the Plotly figure; ``write_html("sweep.html")`` writes it to a self-contained file.

        Args:
            x: column of the horizontal axis. If no row has a time, because no clock of a Cortex-M was given, ``cycles``
                replaces ``milliseconds``.
            y: columns of the vertical axes, one subplot each. Columns without values are omitted, and so are columns
                of zeros, unless only these remain.

        Raises:
            ValueError: there is no such numeric column, no row has estimates, or no column of ``y`` has a value.
            ImportError: Plotly is not installed.
        """
        rows = [row for row in self.rows if row.estimates is not None]
        return plot_rows(rows, self.metric, self.pareto, x, y)

    def to_dict(self) -> dict[str, Any]:
        """Return rows and notes as dicts, lists, str and numbers, ready for JSON."""
        rows = [to_jsonable(row.to_dict()) for row in self.rows]
        return {"metric": self.metric, "rows": rows, "notes": list(self.notes)}

    def sections(self) -> Iterator[Section]:
        """Yield headings with their rows, for text and HTML."""
        compiled = [row for row in self.rows if row.estimates is not None]
        front = set(self.pareto())
        head = (*_TABLE_COLUMNS, self.metric, "on CPU")
        if compiled:
            rows = [head, *(_row_cells(row, "*" if row in front else "") for row in compiled)]
            if any(row.board for row in compiled):
                names = ["board", *(row.board or "" for row in compiled)]
                rows = [(mark, name, *cells) for name, (mark, *cells) in zip(names, rows, strict=True)]
            yield f"{len(compiled)} configurations (* Pareto-optimal)", rows
        failed = [row for row in self.rows if row.estimates is None]
        if failed:
            yield f"{len(failed)} failed", [_failure_cells(row) for row in failed]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]


def _cost_vector(row: Row, criteria: Sequence[str]) -> tuple[float, ...]:
    """Return the criteria as costs: less is better. Accuracy is negated. The cost of an unknown value is infinity."""
    costs = []
    for column in criteria:
        cost = column_value(row, column)
        if column in _MAXIMIZED_COLUMNS:
            cost = float("inf") if cost is None else -cost
        costs.append(float("inf") if cost is None else float(cost))
    return tuple(costs)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _row_cells(row: Row, mark: str) -> tuple[str, ...]:
    estimates = row.estimates
    assert estimates is not None
    return (
        mark,
        row.recipe,
        row.target,
        row.system_config,
        row.memory_mode,
        f"{estimates.cycles:,}",
        "" if estimates.milliseconds is None else f"{estimates.milliseconds:.3f}",
        "" if row.ram_bytes is None else format_bytes(row.ram_bytes) + " (exceeds the board)" * row.exceeds_board,
        format_bytes(estimates.sram_bytes) + (" (exceeds limit)" if estimates.sram_exceeded else ""),
        format_bytes(estimates.dram_bytes),
        format_bytes(estimates.flash_bytes),
        "" if row.accuracy is None else f"{row.accuracy:.4g}",
        str(row.cpu_operators or ""),
    )


def _failure_cells(row: Row) -> tuple[str, ...]:
    return row.recipe, row.target, row.system_config, row.memory_mode, (row.error or "").partition("\n")[0]
