"""``arm-recipes inspect``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes.cli import arguments

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser("inspect", help="tell what is in a program, and what the firmware must have for it")
    parser.add_argument("program", type=Path, help="a .pte file, or a .tflite that Vela compiled")
    arguments.add_json(parser)
    parser.set_defaults(call=_inspect)


def _inspect(given: argparse.Namespace) -> None:
    from arm_recipes.runtime.inspect import inspect_program

    arguments.print_result(inspect_program(given.program), as_json=given.json)
