"""The command line: ``arm-recipes``, or ``python -m arm_recipes``."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.errors import ArmRecipesWarning, ExportError
from arm_recipes._internal.files import check_writable, write_file_atomically
from arm_recipes._internal.messages import LOGGER
from arm_recipes._internal.versions import TOOLS, version
from arm_recipes.cli import (
    compare,
    completion,
    export,
    firmware,
    inspect_program,
    list_commands,
    measured,
    run,
    sweep,
    tune,
)
from arm_recipes.cli.arguments import print_written_path
from arm_recipes.cli.parser import GENERAL, Parser, check_no_overwrite
from arm_recipes.runtime.errors import RunError

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands

#: Modules of the commands, in the order of a typical workflow.
_COMMANDS = (export, run, compare, inspect_program, sweep, tune, firmware, measured, list_commands, completion)
_EXIT_CODES = "exit codes: 0 success; 1 export or run failed; 2 invalid arguments; 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit code. 0: success; 1: an export or a run failed, or a file could not be read or written; 2: invalid
        arguments; 130: interrupted.

    Raises:
        SystemExit: argparse printed the help or the versions, or rejected the arguments (with exit code 2).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    # Importing PyTorch and ExecuTorch takes seconds: check the arguments first.
    parser, commands = make_parser()
    args = parser.parse_args(arguments, argparse.Namespace(parser=parser, commands=commands))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if args.quiet else "always", ArmRecipesWarning)
            if args.verbose:
                logging.basicConfig(format="%(message)s")
                LOGGER.setLevel(logging.INFO)
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            _call_command(args)
            sys.stdout.flush()
    except BrokenPipeError:  # for example "| head": nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ArmBackendError, ExportError, RunError, OSError) as error:  # OSError: for example a full disk
        return _print_error(error, 1)
    except (ValueError, TypeError) as error:
        return _print_error(error, 2)
    except KeyboardInterrupt:
        return 130
    return 0


def _call_command(args: argparse.Namespace) -> None:
    """Call the command. For commands with ``add_result_file``, ``-o FILE`` writes the printed result to FILE."""
    check_no_overwrite(args)
    result_file: Path | None = getattr(args, "result_file", None)
    if result_file is None:
        args.call(args)
        return
    target = check_writable(result_file)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args.call(args)
    write_file_atomically(target, printed.getvalue().encode())
    print_written_path(target)


def _print_error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def make_parser() -> tuple[Parser, Commands]:
    """Make the parser of the program, and return it with its commands."""
    parser = Parser(
        prog="arm-recipes",
        description="Compile PyTorch programs for Arm targets and run them on this machine.",
        epilog=_EXIT_CODES,
    )
    general = parser.group(GENERAL)
    _add_help(general)
    general.add_argument(
        "--version",
        action="version",
        version=_format_versions(),
        help="print the versions of this package and its tools, and exit",
    )
    commands = parser.add_subparsers(
        prog=parser.prog, title="commands", dest="command", metavar="COMMAND", required=True
    )
    for command in _COMMANDS:
        command.add_command(commands)
    for command_parser in commands.choices.values():
        general = command_parser.group(GENERAL)
        _add_help(general)
        general.add_argument("-q", "--quiet", action="store_true", help="suppress warnings")
        general.add_argument("-v", "--verbose", action="store_true", help="log each step and its time to stderr")
    return parser, commands


def _add_help(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-h", "--help", action="help", help="show this help and exit")


def _format_versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("arm-recipes", *TOOLS))
