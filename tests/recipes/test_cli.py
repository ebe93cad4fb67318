"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arm_backend_core.ops.registry import records
from arm_recipes import ArmRecipeType
from arm_recipes.cli import main
from tests.recipes.models import Small, Sorting, images, vectors


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.pt2"
    torch.export.save(torch.export.export(Small().eval(), images(1)[0]), str(path))
    return path


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    for recipe in ArmRecipeType:
        assert recipe.name in printed
    assert "macs                     an int that the family has" in printed


def test_export_prints_the_report_and_writes_the_program(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = small.with_name("out.pte")
    arguments = ["export", str(small), "--recipe", "ETHOSU_U85_INT8", "--macs", "512", "-o", str(output)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "ethos-u85-512" in printed.out
    assert "warning: calibration saw only one sample" in printed.err
    assert f"wrote {output}" in printed.err
    assert output.read_bytes()[4:6] == b"ET"


def test_json_and_the_default_output(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(small), "--recipe", "TOSA_INT8", "--json", "--per-tensor", "--quantized-io"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["methods"][0]["inputs"][0]["dtype"] == "int8"
    assert small.with_suffix(".pte").stat().st_size == report["program_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "ETHOSU_U55_INT8", "--macs", "512"], "error: macs=512: no ethos-u55 has that many"),
        (["--recipe", "TOSA_FP", "--macs", "512"], "error: TOSA_FP: unknown argument 'macs'"),
        (["--recipe", "ETHOSU_U55_INT8", "--direct-drive"], "error: ETHOSU_U55_INT8: unknown argument 'direct_drive'"),
        (["--recipe", "TOSA_FP", "-o", "/nowhere/out.pte"], "error: cannot write '/nowhere/out.pte'"),
    ],
)
def test_wrong_arguments_exit_with_2(
    small: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(small), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none.pt2"), "--recipe", "TOSA_FP"]) == 2
    assert "error: model: there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["export"], ["export", "m.pt2", "--recipe", "NO_SUCH_RECIPE"]])
def test_argparse_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_failed_export_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sorting.pt2"
    torch.export.save(torch.export.export(Sorting().eval(), vectors(1)[0]), str(path))
    assert main(["export", str(path), "--recipe", "TOSA_FP", "--require-full-delegation"]) == 1
    assert "aten.topk" in capsys.readouterr().err
    assert not path.with_suffix(".pte").exists()


def test_lists_operators_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(records())} operators"
    relu = next(line for line in lines if line.startswith("aten.relu.default "))
    assert "integer: table" in relu


_ERRORS = """
import contextlib, io, sys
from arm_recipes.cli import main

for arguments, code in {cases!r}:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            returned = main(arguments)
        except SystemExit as end:
            returned = end.code
    assert returned == code, (arguments, returned, printed.getvalue())
    if code:
        lines = printed.getvalue().splitlines()
        assert lines[0].startswith(("error: ", "usage: ")) and "error: " in lines[-1], lines
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "executorch", "torchao", "numpy"}})
print(*loaded)
"""


def test_help_and_errors_do_not_wait_for_pytorch(small: Path, tmp_path: Path) -> None:
    weights, text = tmp_path / "weights.pt", tmp_path / "notes.txt"
    torch.save({"a": 1}, weights)
    text.write_text("no archive")
    model = str(small)
    cases: list[tuple[list[str], int]] = [
        (["--help"], 0),
        (["export", "--help"], 0),
        (["recipes"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["export", model, "--recipe", "NO_SUCH_RECIPE"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--macs", "512"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--macs", "many"], 2),
        (["export", model, "--recipe", "ETHOSU_U55_INT8", "--macs", "512"], 2),
        (["export", model, "--recipe", "ETHOSU_U85_INT8", "--memory-mode", "None"], 2),
        (["export", model, "--recipe", "ETHOSU_U85_INT8", "--extra-flags=--no-such-flag"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--dump-dir", f"{text}/below"], 2),
        (["export", model, "--recipe", "TOSA_FP", "-o", "/nowhere/out.pte"], 2),
        (["export", "/nowhere/model.pt2", "--recipe", "TOSA_FP"], 2),
        (["export", str(weights), "--recipe", "TOSA_FP"], 2),
        (["export", str(text), "--recipe", "TOSA_FP"], 2),
        (["inspect", "/nowhere/model.pte"], 2),
        (["inspect", str(text)], 2),
    ]
    script = _ERRORS.format(cases=cases)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split(), done.stderr) == ([], "")
