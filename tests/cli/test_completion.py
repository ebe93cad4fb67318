"""Shell completion scripts: bash executes its script; zsh, if installed, only checks the syntax of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from arm_recipes.cli.main import main

_COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
function_name=$(complete -p arm-recipes | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function_name arm-recipes "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


def _write_script(shell: str, folder: Path) -> Path:
    script = folder / f"completion.{shell}"
    assert main(["completion", shell, "-o", str(script)]) == 0
    return script


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("co", "compare completion"),
        ("export --sr", "--sram-budget"),
        ("export mo", "model.pt2"),
        ("export model.pt2 --recipe ethosu_u85", "ethosu_u85_int8 ethosu_u85_a8w4 ethosu_u85_a16w8"),
        ("export model.pt2 --recipe TOSA_I", "TOSA_INT8"),
        ("export model.pt2 --board alif-e7", "alif-e7-hp alif-e7-he"),
        ("export model.pt2 --optimise p", "performance"),
        ("export model.pt2 --calibration-samples sam", "samples.npz"),
        ("completion ", "bash zsh"),
    ],
)
def test_bash_completes(words: str, completions: str, tmp_path: Path) -> None:
    for name in ("model.pt2", "samples.npz"):
        (tmp_path / name).touch()
    script = _write_script("bash", tmp_path)
    command = ["bash", "-c", _COMPLETE, "bash", str(script), "arm-recipes", *words.split(" ")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == completions
    assert done.stderr == ""


def test_the_script_for_zsh_describes_the_options(tmp_path: Path) -> None:
    script = _write_script("zsh", tmp_path)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#compdef arm-recipes")
    assert "--sram-budget" in text
    assert "ethosu_u85_int8" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(script)], check=True)
