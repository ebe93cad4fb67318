"""What benchmarks with a row of figures for each case have in common: the file of rows, arguments, and the table."""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(*files: Path) -> list[Row]:
    """The rows of files in order."""
    lines = (line for file in files for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines if line.strip()]


def rows_by(fields: Sequence[str], file: Path) -> dict[tuple[str, ...], Row]:
    """The rows of a file, none if it is not there yet, by some of their fields; the last one counts."""
    return {tuple(row[field] for field in fields): row for row in (read_rows(file) if file.is_file() else ())}


def add_row(file: Path | None, row: Row) -> None:
    """Write a row behind those of a file, if there is one to write to."""
    if file is not None:
        with file.open("a") as sink:
            sink.write(json.dumps(row) + "\n")


def printed_row(output: str) -> Row | None:
    """The row that a process printed last, None if that is none."""
    try:
        row = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def main(
    description: str | None,
    measured: Callable[..., Row],
    table: Callable[[Iterable[Row]], str],
    *,
    keeps: bool = False,
    **cases: Sequence[str],
) -> None:
    """Measure each case, or write the table of what was measured.

    Args:
        measured: called with one of each of ``cases``, and with ``--folder`` if it ``keeps`` what it tried.
        table: the rows as Markdown.
        cases: what can be chosen from, by the name of the argument.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in cases.items():
        parser.add_argument(f"--{name}", nargs="+", default=values, choices=values)
    parser.add_argument("--out", type=Path, required=True, help="rows, one line of JSON each; added to")
    parser.add_argument("--table", type=Path, help="write the rows as a table, measure nothing")
    if keeps:
        parser.add_argument("--folder", type=Path, help="where what was tried is kept")
    given = parser.parse_args()
    if given.table is not None:
        given.table.write_text(table(read_rows(given.out)))
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in itertools.product(*(getattr(given, name) for name in cases)):
        row = measured(*case, given.folder) if keeps else measured(*case)
        print(json.dumps(row), flush=True)
        add_row(given.out, row)
