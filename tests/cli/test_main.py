"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch

import arm_recipes
from arm_backend_core.ops.catalog import aten_entries
from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes.cli.main import main
from tests.small_models import Small, Sorting, images, vectors


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


def test_boards(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boards"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^alif-e7-hp +ethos-u55-256 +400 +Ethos_U55_Alif_HP +Shared_Sram +6,656.0 KiB", printed, re.M)
    assert main(["boards", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)["boards"]}
    assert records["himax-we2"]["sram_bytes"] == 2432 * 1024
    assert records["himax-we2"]["flash_bytes"] is None
    assert records["himax-we2"]["sources"]["sram"].startswith("https://")
    output = small.with_name("out.pte")
    assert main(["export", str(small), "--recipe", "ETHOSU_U55_INT8", "--board", "himax-we2", "-o", str(output)]) == 0
    assert "ethos-u55-64, Ethos_U55_Himax_WE2, Shared_Sram" in capsys.readouterr().out


def test_export_prints_the_report_and_writes_the_program(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = small.with_name("out.pte")
    arguments = ["export", str(small), "--recipe", "ETHOSU_U85_INT8", "--macs", "512", "-o", str(output)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "ethos-u85-512" in printed.out
    assert "warning: calibration used only one sample" in printed.err
    assert f"wrote {output}" in printed.err
    assert output.read_bytes()[4:6] == b"ET"


def test_json_and_the_default_output(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(small), "--recipe", "TOSA_INT8", "--json", "--per-tensor", "--quantized-io"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["methods"][0]["inputs"][0]["dtype"] == "int8"
    assert small.with_suffix(".pte").stat().st_size == report["program_bytes"]


@pytest.mark.parametrize("source", ["samples.npz", "folder", "given_samples:made"])
def test_calibration_from_files_equals_calibration_from_samples(
    source: str, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = images(4)
    arrays = np.concatenate([sample[0].numpy() for sample in samples])
    monkeypatch.chdir(small.parent)
    np.savez("samples.npz", arrays)
    Path("folder").mkdir()
    for index, array in enumerate(arrays):
        np.save(f"folder/{index}.npy", array)
    Path("given_samples.py").write_text(
        "import numpy\n\ndef made():\n    return [(x[None],) for x in numpy.load('samples.npz')['arr_0']]\n"
    )
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, calibration_samples=samples)
    assert main(["export", str(small), "--recipe", "tosa-int8", "--calibration-samples", source]) == 0
    assert "4 samples" in capsys.readouterr().out
    assert small.with_suffix(".pte").read_bytes() == export(str(small), recipe).buffer


def test_run_prints_and_writes_what_python_gets(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = export(str(small), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP))
    program, arrays, output = small.with_suffix(".pte"), small.with_name("x.npz"), small.with_name("y.npz")
    result.save(program)
    samples = images(3)
    np.savez(arrays, np.stack([sample[0].numpy() for sample in samples]))
    assert main(["run", str(program), "--inputs", str(arrays), "--json", "-o", str(output)]) == 0
    rows = json.loads(capsys.readouterr().out)["outputs"]
    (written,) = np.load(output).values()
    for row, sample, array in zip(rows, samples, written, strict=True):
        expected = result.run(*sample)
        assert np.array_equal(array, expected.numpy())
        assert row["max"] == expected.max().item()
        assert row["first"] == expected.flatten()[:8].tolist()
    assert main(["run", str(program), "--inputs", str(arrays)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_sweep_with_several_macs_and_memory_modes(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--memory-mode", "Sram_Only", "--memory-mode", "Shared_Sram"]
    arguments = ["sweep", str(small), "--recipe", "ethosu-u55-int8", "--macs", "64", "--macs", "128", *modes]
    picture = small.with_name("sweep.html")
    with joblib.parallel_config(n_jobs=1):
        assert main([*arguments, "--json", "--html", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["macs"], row["memory_mode"]) for row in rows} == {
        (64, "Sram_Only"),
        (64, "Shared_Sram"),
        (128, "Sram_Only"),
        (128, "Shared_Sram"),
    }
    assert "plotly" in picture.read_text()


def test_sweep_of_the_default_recipes_skips_npus_without_the_macs(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_sweep(_program: object, recipes: object, _samples: object, **options: object) -> str:
        return f"swept {recipes} with macs={options['macs']}"

    monkeypatch.setattr(arm_recipes, "sweep", fake_sweep)
    assert main(["sweep", str(small), "--macs", "512"]) == 0  # an Ethos-U55 has at most 256
    assert capsys.readouterr().out == "swept None with macs=[512]\n"


def test_export_writes_etrecord_bundled_program_and_page(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(small.with_name("x.npy"), images(2)[0][0].numpy())
    page = small.with_name("report.html")
    options = [
        "--etrecord",
        "--bundled-samples",
        str(small.with_name("x.npy")),
        "--html",
        str(page),
        "--sram-budget",
        "1MiB",
    ]
    assert main(["export", str(small), "--recipe", "ethosu_u55_int8", *options]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    for suffix in (".pte", ".etrecord", ".bpte"):
        assert small.with_suffix(suffix).stat().st_size > 0
    assert "plotly" in page.read_text()


def test_an_exceeded_budget_exits_with_1(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(small), "--recipe", "ethosu_u55_int8", "--sram-budget", "16"]) == 1
    assert "sram_budget" in capsys.readouterr().err
    assert not small.with_suffix(".pte").exists()


def test_compare_with_the_model_and_with_another_program(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, labels, page = small.with_name("x.npz"), small.with_name("labels.npy"), small.with_name("page.html")
    samples = images(4)
    np.savez(arrays, np.concatenate([sample[0].numpy() for sample in samples]))
    result = export(str(small), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8))
    outputs = [result.run(*sample).flatten(1) for sample in samples]
    np.save(labels, torch.cat(outputs).argmax(1).numpy())
    given = ["--samples", str(arrays), "--json"]
    told = ["compare", str(small), "--recipe", "tosa-int8", *given, "--html", str(page)]
    assert main(told) == 0
    found = json.loads(capsys.readouterr().out)
    expected = result.compare(samples, workers=1)
    assert found["samples"] == 4
    assert found["sqnr"] == pytest.approx(expected.sqnr)
    assert [layer["name"] for layer in found["layers"]] == [layer.name for layer in expected.layers]
    assert "Accuracy of" in page.read_text()
    a, b = small.with_name("a.pte"), small.with_name("b.pte")
    result.save(a)
    export(str(small), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)).save(b)
    assert main(["compare", str(a), str(b), *given]) == 0
    assert json.loads(capsys.readouterr().out)["sqnr"] == pytest.approx(found["sqnr"], abs=3)


def test_export_with_labels(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, labels = small.with_name("x.npz"), small.with_name("labels.npz")
    samples = images(4)
    np.savez(arrays, np.concatenate([sample[0].numpy() for sample in samples]))
    model = torch.export.load(str(small)).module(check_guards=False)
    predictions = torch.cat([model(*sample).flatten(1) for sample in samples]).argmax(1).numpy()
    np.savez(labels, labels=predictions, others=predictions)
    command = ["export", str(small), "--recipe", "tosa-int8", "--labels", str(labels), "--json"]
    assert main([*command, "--calibration-samples", str(arrays)]) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert (accuracy["reference"], accuracy["items"]) == (1.0, 4)
    assert main(command) == 2
    assert "--labels needs the samples that the labels belong to" in capsys.readouterr().err


def test_inspect_writes_its_result_to_the_output_file(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, result = small.with_suffix(".pte"), small.with_name("result.json")
    export(str(small), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)).save(program)
    assert main(["inspect", str(program), "--json"]) == 0
    printed = capsys.readouterr().out
    assert main(["inspect", str(program), "--json", "-o", str(result)]) == 0
    assert result.read_text(encoding="utf-8") == printed
    assert capsys.readouterr() == ("", f"wrote {result}\n")
    assert main(["inspect", str(program), "-o", str(program)]) == 2
    assert f"cannot write '{program}'" in capsys.readouterr().err


def test_the_output_may_have_the_name_of_an_argument_that_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "-o", "recipes"]) == 0
    assert main(["completion", "bash", "-o", "bash"]) == 0
    assert Path("recipes").read_text().strip()
    assert Path("bash").read_text().strip()


def test_a_program_with_dynamic_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, arrays = tmp_path / "dynamic.pt2", tmp_path / "x.npy"
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    torch.export.save(torch.export.export(Small().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes), str(path))
    np.save(arrays, np.random.default_rng(0).normal(size=(5, 4, 3, 8, 8)).astype("float32"))
    assert main(["export", str(path), "--recipe", "TOSA_INT8"]) == 2
    message = capsys.readouterr().err
    name = message.split("--sizes ")[1].split("=")[0]
    arguments = ["export", str(path), "--recipe", "TOSA_INT8", "--sizes", f"{name}=1,4"]
    assert main([*arguments, "--calibration-samples", str(arrays)]) == 0
    program = arm_recipes.load(path.with_suffix(".pte"))
    assert list(program.methods) == [f"forward__{name}_1", f"forward__{name}_4"]


def test_firmware_writes_a_folder(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, folder, arrays = small.with_suffix(".pte"), small.with_name("firmware"), small.with_name("x.npy")
    export(str(small), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8)).save(program)
    np.save(arrays, images(1)[0][0].numpy())
    assert main(["firmware", str(program), "-o", str(folder), "--samples", str(arrays), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cases"] == 1
    assert sorted([*told["files"], "firmware.json"]) == sorted(
        str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()
    )


def _parse_strict_json(text: str) -> Any:
    """Parse one JSON document; NaN and Infinity, which only Python reads, raise."""

    def refused(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


def test_nan_is_a_string_in_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, arrays = small.with_suffix(".pte"), small.with_name("x.npy")
    export(str(small), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)).save(program)
    np.save(arrays, np.full((1, 3, 8, 8), np.nan, np.float32))
    assert main(["run", str(program), "--inputs", str(arrays), "--json"]) == 0
    assert _parse_strict_json(capsys.readouterr().out)["outputs"][0]["first"] == ["NaN"] * 4
    assert main(["compare", str(program), str(program), "--samples", str(arrays), "--json"]) == 0
    assert _parse_strict_json(capsys.readouterr().out)["sqnr"] == "NaN"


def test_a_disk_that_is_full_exits_with_1(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arm_recipes.result.write_file_atomically", full)
    assert main(["export", str(small), "--recipe", "TOSA_FP"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_compare_of_two_programs_refuses_recipe_options(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(small.with_name("x.npy"), images(1)[0][0].numpy())
    given = ["compare", str(small), str(small), "--samples", str(small.with_name("x.npy"))]
    for option in (["--macs", "128"], ["--calibration-samples", "a:b"], ["--per-tensor"]):
        assert main([*given, *option]) == 2
        assert f"{option[0]} is a recipe option, and both programs are compiled already" in capsys.readouterr().err


def test_no_command_overwrites_its_input(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, arrays, both = str(small), small.with_name("x.npy"), str(small.with_name("both"))
    np.save(arrays, images(1)[0][0].numpy())
    tuned = small.with_name("tuned.json")
    tuned.write_text('{"recipe": "TOSA_FP", "options": {}}')
    named_pte = Path(shutil.copy(small, small.with_suffix(".pte")))
    before = [path.read_bytes() for path in (small, arrays, tuned)]
    for arguments in (
        ["export", model, "--recipe", "TOSA_FP", "-o", model],
        ["export", model, "--recipe", "TOSA_FP", "--html", f"{small.parent}/./{small.name}"],
        ["export", model, "--recipe", "TOSA_FP", "-o", both, "--html", both],
        ["export", model, "--recipe", "TOSA_FP", "--bundled-samples", str(arrays), "-o", str(arrays)],
        ["run", model, "--inputs", str(arrays), "-o", str(arrays)],
        ["compare", model, "--recipe", "TOSA_FP", "--samples", str(arrays), "--html", model],
        ["export", model, "--tuned", str(tuned), "--html", str(tuned)],
        ["compare", model, "--tuned", str(tuned), "--samples", str(arrays), "--html", str(tuned)],
        ["sweep", model, "--recipe", "ethosu_u55_int8", "--html", model],
        ["run", model, "--inputs", str(arrays), "--ptd", str(tuned), "-o", str(tuned)],
        ["compare", model, "--recipe", "TOSA_FP", "--samples", str(arrays), "--html", both, "-o", both],
        ["tune", model, "--recipe", "ethosu_u55_int8", "--config-ini", str(tuned), "--save", str(tuned)],
        ["export", str(named_pte), "--recipe", "TOSA_FP"],
    ):
        assert main(arguments) == 2
        assert "cannot write '" in capsys.readouterr().err
    assert [path.read_bytes() for path in (small, arrays, tuned)] == before


def test_a_page_without_plotly_is_an_error_before_the_work(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "plotly" else find(name, *_))
    model, arrays, page = str(small), small.with_name("x.npy"), str(small.with_name("page.html"))
    np.save(arrays, images(1)[0][0].numpy())
    for arguments in (
        ["export", model, "--recipe", "TOSA_FP"],
        ["compare", model, "--recipe", "TOSA_FP", "--samples", str(arrays)],
        ["sweep", model, "--recipe", "ethosu_u55_int8"],
        ["tune", model, "--recipe", "ethosu_u55_int8"],
    ):
        assert main([*arguments, "--html", page]) == 2
        assert "--html: Plotly is not installed: pip install 'arm-recipes[charts]'" in capsys.readouterr().err
    assert not small.with_suffix(".pte").exists()


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert f"torch {torch.__version__}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "saved", "message"),
    [
        ("model.pt", torch.nn.Linear(2, 2), "a pickled object of the class torch.nn.modules.linear.Linear"),
        ("weights.pt", torch.nn.Linear(2, 2).state_dict(), "weights alone (a state dict)"),
        ("checkpoint.pt", {"epoch": 3, "model": torch.nn.Linear(2, 2).state_dict()}, "weights alone (a state dict)"),
        ("model.onnx", None, "an ONNX model"),
        ("model.pte", None, "an already compiled program"),
    ],
)
def test_error_names_the_kind_of_an_unsupported_file(
    name: str, saved: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    torch.save(saved, path)
    assert main(["export", str(path), "--recipe", "TOSA_FP"]) == 2
    said = capsys.readouterr().err
    assert f"'{path}' is not a program saved by torch.export.save, but {message}" in said
    assert "torch.export.save(torch.export.export(model.eval(), example_inputs), 'model.pt2')" in said


def test_error_names_torchscript(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.pt"
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(path))
    assert main(["export", str(path), "--recipe", "TOSA_FP"]) == 2
    assert "a TorchScript archive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--recipe", "TOSA_FP", "--calibration-samples", "random:samples"],
            "TOSA_FP: unknown argument 'calibration_samples'",
        ),
        (
            ["--recipe", "TOSA_INT8", "--calibration-samples", "none.npz"],
            "--calibration-samples: there is no 'none.npz'",
        ),
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


def test_error_names_the_nearest_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "m.pt2", "--recipe", "ethos_u85_int8"])
    assert "no recipe 'ethos_u85_int8'; did you mean 'ETHOSU_U85_INT8'?" in capsys.readouterr().err


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


def test_operators_command_lists_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(aten_entries())} operators" in lines
    relu = next(line for line in lines if line.startswith("aten.relu.default "))
    assert "int lowering: table  quantization: " in relu


_ERRORS = """
import contextlib, io, sys
from arm_recipes.cli.main import main

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
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "executorch", "torchao", "numpy"}})
print(*loaded)
"""


def test_help_and_errors_do_not_import_pytorch(small: Path, tmp_path: Path) -> None:
    weights, text = tmp_path / "weights.pt", tmp_path / "notes.txt"
    torch.save({"a": 1}, weights)
    text.write_text("no archive")
    model = str(small)
    assert main(["operators"]) == 0
    cases: list[tuple[list[str], int]] = [
        (["--help"], 0),
        (["export", "--help"], 0),
        (["recipes"], 0),
        (["boards"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["export", model, "--recipe", "NO_SUCH_RECIPE"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--macs", "512"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--macs", "many"], 2),
        (["export", model, "--recipe", "ETHOSU_U55_INT8", "--macs", "512"], 2),
        (["export", model, "--recipe", "ETHOSU_U85_INT8", "--memory-mode", "None"], 2),
        (["export", model, "--recipe", "ETHOSU_U85_INT8", "--board", "none"], 2),
        (["export", model, "--recipe", "ETHOSU_U85_INT8", "--extra-flags=--no-such-flag"], 2),
        (["export", model, "--recipe", "TOSA_FP", "--dump-dir", f"{text}/below"], 2),
        (["export", model, "--recipe", "TOSA_FP", "-o", "/nowhere/out.pte"], 2),
        (["export", "/nowhere/model.pt2", "--recipe", "TOSA_FP"], 2),
        (["export", str(weights), "--recipe", "TOSA_FP"], 2),
        (["export", str(text), "--recipe", "TOSA_FP"], 2),
        (["--version"], 0),
        (["recipes", "--json"], 0),
        (["operators"], 0),  # kept from above
        (["run", "/nowhere/model.pte", "--inputs", str(tmp_path)], 2),
        (["run", model, "--inputs", "module:function", "-o", "/nowhere/out.npz"], 2),
        (["compare", model, "--samples", "a:b"], 2),
        (["compare", model, model, "--samples", "a:b", "--recipe", "TOSA_INT8"], 2),
        (["compare", model, "--samples", "nowhere", "--recipe", "TOSA_INT8"], 2),
        (["firmware", "/nowhere/model.pte", "-o", str(tmp_path / "firmware")], 2),
        (["sweep", model, "--recipe", "TOSA_INT8"], 2),
        (["sweep", model, "--macs", "100"], 2),
        (["sweep", model, "--samples", "nowhere"], 2),
        (["inspect", "/nowhere/model.pte"], 2),
        (["inspect", str(text)], 2),
        (["completion", "bash"], 0),
        (["export", model, "--recipe", "TOSA_INT8", "--calibration-samples", "absent:f"], 2),
    ]
    script = _ERRORS.format(cases=cases)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split(), done.stderr) == ([], "")
