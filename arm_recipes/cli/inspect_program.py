"""``arm-recipes inspect``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes.cli import arguments

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser("inspect", help="show the contents of a program and its requirements on the firmware")
    parser.add_argument("program", type=Path, help=".pte file, or .tflite file compiled by Vela")
    arguments.add_data_file(parser)
    arguments.add_json(parser)
    parser.set_defaults(call=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    from arm_recipes.runtime.inspect import inspect_program

    arguments.print_result(inspect_program(args.program, args.ptd), as_json=args.json)
