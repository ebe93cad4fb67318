"""The table of networks that were compared with TFLM, under ``--verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

#: Name under which a test records its counts: (operator, type, core of Vela) -> count by column.
COUNTS = "compared with TFLM"
#: Programs of known kinds are those of which a row of ``deviations.py`` says that they may differ.
_COLUMNS = ("programs", "known kinds", "not compiled", "values", "different")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what all tests recorded, those of pytest-xdist's processes too."""
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
