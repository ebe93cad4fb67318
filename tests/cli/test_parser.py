"""Parser of the command line: groups, defaults, and errors in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from arm_recipes.cli.main import main, make_parser


def _options() -> Iterator[tuple[str, argparse.Action]]:
    for name, parser in make_parser()[1].choices.items():
        for action in parser._actions:
            if action.option_strings:
                yield name, action


def _help(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_option_has_a_text_and_a_metavar_of_what_it_takes() -> None:
    for command, action in _options():
        assert action.help, (command, action.option_strings)
        if action.nargs != 0 and action.choices is None:
            assert action.metavar, (command, action.option_strings)


@pytest.mark.parametrize("command", list(make_parser()[1].choices))
def test_every_option_with_a_value_states_its_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = re.split(r"\n(?=  -)", _help(command, capsys, monkeypatch))
    for name, action in _options():
        if name != command or action.nargs == 0 or action.required or action.dest in ("recipe", "tuned"):
            continue
        flag = action.option_strings[-1]
        (entry,) = [entry for entry in entries if re.match(rf"  (-\w( [A-Z]+)?, )?{flag}(?![\w-])", entry)]
        assert "default" in entry


def test_help_is_grouped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = _help("export", capsys, monkeypatch)
    assert text.startswith("usage: arm-recipes export [options] (--recipe NAME | --tuned FILE) model\n")
    titles = [line for line in text.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert titles == [
        "positional arguments:",
        "recipe:",
        "NPU (Ethos-U recipes):",
        "CPU and memory (Ethos-U and Cortex-M recipes):",
        "CPU (Cortex-M recipes):",
        "TOSA and VGF recipes:",
        "quantization (INT8, A8W4 and A16W8 recipes):",
        "samples:",
        "compilation:",
        "output:",
        "general:",
    ]
    assert "options:" not in titles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("exprt m.pt2", "COMMAND: there is no 'exprt'; did you mean 'export'? choose from export, run"),
        (
            "export m.pt2 --recipee TOSA_FP",
            "there is no option --recipee; did you mean '--recipe'? (see arm-recipes export",
        ),
        ("export m.pt2", "one of the arguments --recipe --tuned is required (see arm-recipes export --help)"),
        ("export m.pt2 --recipe TOSA_FP --macs many", "--macs: invalid int value: 'many'"),
        ("export m.pt2 --recipe TOSA_FP --steps-per-call x", "--steps-per-call: 'x' is not a number, auto or all"),
        ("export m.pt2 --recipe TOSA_FP --precision A16W8", "'A16W8' is not of the form MODULE=NAME"),
        ("export m.pt2 --recipe TOSA_FP --sizes 1,8", "'1,8' is not of the form NAME=SIZE,SIZE"),
        ("inspect a b", "unexpected arguments: b (see arm-recipes inspect --help)"),
        (
            "export --samples x.npz",
            "there is no option --samples; did you mean '--bundled-samples' or '--calibration-samples'?",
        ),
        ("--verbos export", "there is no option --verbos; did you mean '--version'?"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_repeated_pairs_are_merged() -> None:
    words = ["export", "m.pt2", "--recipe", "tosa-int8", "--precision", "a=A16W8", "--precision", "b.c=FP"]
    args = make_parser()[0].parse_args([*words, "--sizes", "x_0=1,8", "--sizes", "y_1=4"])
    assert args.precisions == {"a": "A16W8", "b.c": "FP"}
    assert args.sizes == {"x_0": [1, 8], "y_1": [4]}
