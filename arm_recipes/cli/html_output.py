"""``--html`` of several commands: the argument, and its checks before the work starts."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_writable
from arm_recipes._internal.messages import INSTALL_PLOTLY
from arm_recipes.cli.parser import OUTPUT

if TYPE_CHECKING:
    from arm_recipes.cli.parser import Parser


def add_html(parser: Parser, content: str) -> None:
    """Add the argument ``--html``. The help says that the page shows ``content``, for example "the report"."""
    parser.group(OUTPUT).add_argument(
        "--html", type=Path, metavar="FILE", help=f"write {content} to this HTML file (needs Plotly)"
    )


def check_html(args: argparse.Namespace) -> Path | None:
    """Check that the page of ``--html`` can be written, and return its absolute path; None without the argument.

    Raises:
        ValueError: Plotly is not installed, or the file cannot be written.
    """
    if args.html is None:
        return None
    if importlib.util.find_spec("plotly") is None:
        raise ValueError(f"--html: Plotly is not installed: {INSTALL_PLOTLY}")
    return check_writable(args.html)
