"""Rows of figures, one for each benchmark case: the JSON Lines file, the command-line arguments, and the table."""

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
    """Read the rows of JSON Lines files, in order."""
    lines = (line for file in files for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines if line.strip()]


def index_rows(fields: Sequence[str], file: Path) -> dict[tuple[str, ...], Row]:
    """Index the rows of a file by the given fields. A later row replaces an earlier one; a missing file has no rows."""
    return {tuple(row[field] for field in fields): row for row in (read_rows(file) if file.is_file() else ())}


def add_row(file: Path | None, row: Row) -> None:
    """Append a row to a file, unless ``file`` is None."""
    if file is not None:
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def parse_printed_row(output: str) -> Row | None:
    """Parse the row in the last line of a process's output; None if that line is not a row."""
    try:
        row = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def main(
    description: str | None,
    measure: Callable[..., Row],
    format_table: Callable[[Iterable[Row]], str],
    *,
    has_cache: bool = False,
    **cases: Sequence[str],
) -> None:
    """Measure all combinations of ``cases``, or write the table of earlier measurements.

    Args:
        description: help text of the command.
        measure: measures a combination, given one value of each of ``cases`` (and ``--folder``, see ``has_cache``).
        format_table: formats rows as Markdown.
        has_cache: whether ``measure`` also takes the folder in which ``tune`` caches programs.
        cases: argument name -> its possible values.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in cases.items():
        parser.add_argument(f"--{name}", nargs="+", default=values, choices=values)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to which rows are appended")
    parser.add_argument(
        "--table", type=Path, help="write a table of earlier measurements to this file, and measure nothing"
    )
    if has_cache:
        parser.add_argument("--folder", type=Path, help="folder in which tune caches programs")
    arguments = parser.parse_args()
    if arguments.table is not None:
        arguments.table.write_text(format_table(read_rows(arguments.out)))
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in itertools.product(*(getattr(arguments, name) for name in cases)):
        row = measure(*case, arguments.folder) if has_cache else measure(*case)
        print(json.dumps(row), flush=True)
        add_row(arguments.out, row)
