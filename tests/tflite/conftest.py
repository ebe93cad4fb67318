"""Prints a table of the networks that were compared with TFLM, with ``--verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

#: Property of a test report with its counts: (operator, type, core of Vela) -> count by column.
COUNTS = "compared with TFLM"
#: "known kinds" counts programs that a deviation of ``deviations.py`` affects.
_COLUMNS = ("programs", "known kinds", "not compiled", "values", "different")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts of all tests, including those of pytest-xdist's processes."""
    if not config.getoption("verify"):
        return
    rows: dict[str, Counter[str]] = {}
    for key, counts in _recorded(terminalreporter):
        rows.setdefault(key, Counter()).update(counts)
    if not rows:
        return
    terminalreporter.section(COUNTS)
    total: Counter[str] = Counter()
    terminalreporter.line(_line("network", _COLUMNS))
    for key, counts in rows.items():
        total.update(counts)
        terminalreporter.line(_line(key, [f"{counts[column]:,}" for column in _COLUMNS]))
    terminalreporter.line(_line("all", [f"{total[column]:,}" for column in _COLUMNS]))


def _recorded(terminalreporter: Any) -> Iterator[tuple[str, dict[str, int]]]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, recorded in getattr(report, "user_properties", ()):
                if name == COUNTS:
                    yield from recorded.items()


def _line(key: str, cells: Any) -> str:
    return f"{key:<32}" + "".join(f"{cell:>16}" for cell in cells)
