"""``arm-recipes measured``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_file
from arm_recipes.cli import arguments

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "measured",
        help="show measurements of a device beside the estimates",
        description="Read the lines of JSON that the firmware's self-test prints, from a log of semihosting, UART or "
        "RTT, and show medians beside Vela's estimates.",
    )
    parser.add_argument("log", type=Path, help="file with the output of the self-test; other lines are ignored")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="report of the export, written by 'arm-recipes export --json'"
    )
    arguments.add_json(parser)
    parser.set_defaults(call=_measured)


def _measured(args: argparse.Namespace) -> None:
    check_file(args.log, "log")
    from arm_recipes.report.measurements import compare_measurements, read_measurements

    report: dict[str, Any] = {}
    if args.report is not None:
        check_file(args.report, "--report")
        try:
            report = json.loads(args.report.read_bytes())
            report["methods"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--report: '{args.report}' is not a report of 'arm-recipes export --json'") from None
    arguments.print_result(compare_measurements(read_measurements(args.log), report), as_json=args.json)
