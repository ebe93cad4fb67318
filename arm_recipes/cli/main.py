"""The command line: ``arm-recipes``, or ``python -m arm_recipes``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import LOGGER, ArmRecipesWarning, ExportError
from arm_recipes._internal.versions import TOOLS, version
from arm_recipes.cli import compare, export, firmware, inspect_program, list_recipes, run, sweep, tune
from arm_recipes.runtime.errors import RunError

#: In the order of a typical workflow.
_COMMANDS = (export, run, compare, inspect_program, sweep, tune, firmware, list_recipes)
_EXIT_CODES = "exit codes: 0 success; 1 export or run failed; 2 invalid arguments; 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit code. 0: success; 1: an export or a run failed; 2: invalid arguments (as argparse); 130: interrupted.
    """
    # Importing PyTorch and ExecuTorch takes seconds: check the arguments first.
    args = _make_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if args.quiet else "always", ArmRecipesWarning)
            if args.verbose:
                logging.basicConfig(format="%(message)s")
                LOGGER.setLevel(logging.INFO)
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            args.call(args)
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


def _print_error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arm-recipes",
        description="Compile PyTorch programs for Arm targets and run them on this machine.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=_format_versions(),
        help="print the versions of this package and its tools, and exit",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_command(commands)
    for command_parser in commands.choices.values():
        command_parser.add_argument("-q", "--quiet", action="store_true", help="suppress warnings")
        command_parser.add_argument("-v", "--verbose", action="store_true", help="log each step and its time to stderr")
    return parser


def _format_versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("arm-recipes", *TOOLS))
