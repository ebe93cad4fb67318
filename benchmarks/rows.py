"""Rows of figures in a file: a line of JSON each, added as they are measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
