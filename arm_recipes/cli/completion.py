"""``arm-recipes completion``: scripts that complete commands, options, their values and files in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes.cli import arguments
from arm_recipes.recipe import options
from arm_recipes.recipe.boards import BOARDS
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands

_SHELLS = ("bash", "zsh")
_RECIPE_NAMES = [*SPEC_BUILDERS, *(name.lower() for name in SPEC_BUILDERS)]
#: {argument: values to complete}, for arguments whose values the parser does not restrict by ``choices``.
_VALUES = {
    "recipe": _RECIPE_NAMES,
    "recipes": _RECIPE_NAMES,
    "board": BOARDS,
    "boards": BOARDS,
    "optimise": options.GOALS,
    "mx": options.MX_FORMATS,
    "observer": options.OBSERVER_NAMES,
    "algorithms": (*options.ALGORITHMS, *options.OPT_IN_ALGORITHMS),
}


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands, options and values in bash or zsh",
        description="Print a completion script. "
        "bash: arm-recipes completion bash > ~/.local/share/bash-completion/completions/arm-recipes. "
        "zsh: arm-recipes completion zsh > FOLDER/_arm-recipes, where FOLDER is in $fpath.",
    )
    parser.add_argument("shell", choices=_SHELLS, help="bash or zsh")
    arguments.add_result_file(parser)
    parser.set_defaults(call=_print_script)


def _print_script(args: argparse.Namespace) -> None:
    """Print the script. ``main`` has stored the parsers of the program and of its commands in ``args``."""
    import shtab

    for command_parser in args.commands.choices.values():
        for action in command_parser._actions:
            _complete_values(action, shtab)
    print(shtab.complete(args.parser, args.shell))


def _complete_values(action: Any, shtab: Any) -> None:
    """Set what shtab completes for an argument: names, files or folders."""
    if action.dest in _VALUES:
        action.choices = tuple(_VALUES[action.dest])
    elif action.metavar == "FOLDER":
        action.complete = shtab.DIRECTORY
    elif action.type is Path or action.metavar in ("FILE", "SOURCE"):
        action.complete = shtab.FILE
