"""What benchmarks with a row of figures for each case have in common: arguments, the file of rows, and the table."""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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
        given.table.write_text(table(map(json.loads, given.out.read_text().splitlines())))
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in itertools.product(*(getattr(given, name) for name in cases)):
        row = measured(*case, given.folder) if keeps else measured(*case)
        print(json.dumps(row), flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
