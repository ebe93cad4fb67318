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

#: In the order in which a user comes to need them.
_COMMANDS = (export, run, compare, inspect_program, sweep, tune, firmware, list_recipes)
_CODES = "exit codes: 0 done; 1 the export or the run failed; 2 wrong arguments; 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: done; 1: an export or a run failed; 2: the arguments are wrong (also how argparse exits); 130: interrupted.
    """
    # PyTorch and ExecuTorch take seconds to import: not before the arguments are known to be right.
    given = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if given.quiet else "always", ArmRecipesWarning)
            if given.verbose:
                logging.basicConfig(format="%(message)s")
                LOGGER.setLevel(logging.INFO)
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            given.call(given)
            sys.stdout.flush()
    except BrokenPipeError:  # of "| head": what is left to print has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ArmBackendError, ExportError, RunError, OSError) as error:  # OSError: a disk that is full, for example
        return _said(error, 1)
    except (ValueError, TypeError) as error:
        return _said(error, 2)
    except KeyboardInterrupt:
        return 130
    return 0


def _said(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arm-recipes", description="Compile PyTorch programs for Arm targets, and run them here.", epilog=_CODES
    )
    parser.add_argument("--version", action="version", version=_versions(), help="of this package and its tools")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    for each in commands.choices.values():
        each.add_argument("-q", "--quiet", action="store_true", help="no warnings")
        each.add_argument("-v", "--verbose", action="store_true", help="log what runs, with its time, to stderr")
    return parser


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("arm-recipes", *TOOLS))
