"""Argument parser of the command line: options in titled groups with their defaults, and errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from arm_backend_core.similar_names import format_suggestion, suggest_name
from arm_recipes.recipe import options

#: Titles of the option groups that several commands have.
SAMPLES, OUTPUT, GENERAL = "samples", "output", "general"
#: Titles of the groups of recipe options: ``{Option.group: title}``. ``Option.group`` names the recipes that accept the
#: option.
OPTION_GROUP_TITLES = {
    "all": "compilation",
    "int": "quantization (INT8, A8W4 and A16W8 recipes)",
    "ethos-u": "NPU (Ethos-U recipes)",
    "ethos-u85": "NPU (Ethos-U recipes)",
    "cortex-m": "CPU (Cortex-M recipes)",
    "cortex-m-cpu": "CPU and memory (Ethos-U and Cortex-M recipes)",
    "tosa": "TOSA and VGF recipes",
    "tosa-fp": "TOSA and VGF recipes",
}


class _HelpFormatter(argparse.HelpFormatter):
    """Formats help: required arguments in the usage line, and the default of each option that takes a value."""

    _one_required: Collection[str] = ()  #: ``dest`` of the arguments in groups that require one of them

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        required_groups = [group for group in groups if group.required]
        self._one_required = {action.dest for group in required_groups for action in group._group_actions}
        shown = [x for x in actions if x.required or not x.option_strings or x.dest in self._one_required]
        all_others = argparse.Action(["options"], "options", nargs=0)
        super().add_usage(usage, [all_others, *shown], required_groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # argparse does not count the second indent of commands
            self._action_max_length += self._indent_increment

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        is_required = action.required or action.dest in self._one_required
        if text is None or not action.option_strings or action.nargs == 0 or is_required or "default" in text:
            return text
        return f"{text}; default: {_format_default(action)}"


def _format_default(action: argparse.Action) -> str:
    default = action.default
    if default == argparse.SUPPRESS:
        default = options.OPTIONS[action.dest].default
    return "none" if default is None else str(default)


class Parser(argparse.ArgumentParser):
    """Parser of the program or of a command."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, add_help=False, **keywords)
        self._groups: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> argparse._ArgumentGroup:
        """Return the option group with this title. It is created if needed."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. Exits with an error if this parser or its commands do not know one of them.

        Unknown options are reported before missing arguments, because a misspelled option may be the reason for a
        missing argument.
        """
        own_words = args or () if self._subparsers is None else takewhile(lambda word: word.startswith("-"), args or ())
        for word in own_words:
            self._check_option(word)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unexpected arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _check_option(self, word: str) -> None:
        """Exit with an error if a word is a long option that the parser does not have."""
        name = word.partition("=")[0]
        known = list(self._option_string_actions)
        if not name.startswith("--") or name == "--" or any(option.startswith(name) for option in known):
            return
        longer = [option for option in known if option.endswith(name.removeprefix("-"))]
        self.error(f"there is no option {name}{format_suggestion(sorted(longer)) or suggest_name(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value!r}{suggest_name(str(value), names) or ';'} choose from {', '.join(names)}"
            )

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, and print one line instead of the whole usage."""
        self.exit(2, f"error: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def check_no_overwrite(args: argparse.Namespace) -> None:
    """Check that a command overwrites neither a file that it reads nor another file that it writes.

    The arguments for files have the type ``Path``, or the metavar FILE or SOURCE. A command writes the files of the
    argument group "output" and reads the other files.

    Raises:
        ValueError: the command would overwrite a file.
    """
    parser = args.commands.choices[args.command]
    actions = [action for action in parser._actions if action.type is Path or action.metavar in ("FILE", "SOURCE")]
    outputs = parser.group(OUTPUT)._group_actions
    seen = set()
    for action in sorted(actions, key=outputs.__contains__):
        path = getattr(args, action.dest, None)
        if path is None:
            continue
        resolved = Path(path).expanduser().resolve()
        if action in outputs and resolved in seen:
            raise ValueError(f"cannot write '{path}': the command reads this file or writes another result to it")
        seen.add(resolved)
