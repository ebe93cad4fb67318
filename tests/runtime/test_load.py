"""Errors of ``load`` name the file and describe other kinds of files; ``run`` takes inputs, not a whole sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, Inputs, ProgramError, export, load
from tests.small_models import Small, images


@pytest.fixture(scope="module", name="result")
def _result() -> ExportResult:
    return export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), images(1))


def test_errors_name_the_file(tmp_path: Path, result: ExportResult) -> None:
    path = result.save(tmp_path / "model.pte")
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    for data, message in ((content[:-2000], "truncated: "), (b"", "truncated: "), (bytes(damaged), "damaged: ")):
        path.write_bytes(data)
        with pytest.raises(ProgramError, match=f"^'{path}': {message}"):
            load(path)
        with pytest.raises(ProgramError, match=f"^{message}"):
            load(data)
    path.write_bytes(content)
    (tmp_path / "other.tosa.pte").write_bytes(b"")
    with pytest.raises(ProgramError, match=f"^'{tmp_path / 'other.tosa.pte'}': truncated"):
        load(path, reference=tmp_path / "other.tosa.pte")
    with pytest.raises(ProgramError, match=f"^'{tmp_path}' is a directory; give the path of a .pte file"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing.pte"):
        load(tmp_path / "nothing.pte")


def test_files_of_other_kinds_are_described(tmp_path: Path) -> None:
    model = Small().eval()
    saved, weights, graph = tmp_path / "model.pt2", tmp_path / "weights.pth", tmp_path / "model.onnx"
    torch.export.save(torch.export.export(model, images(1)[0]), saved)
    torch.save(model.state_dict(), weights)
    graph.write_bytes(b"an ONNX model")
    for path, description in (
        (saved, r"a model saved by torch.export.save; compile it: arm_recipes.export\(path, recipe\)"),
        (weights, r"weights alone \(a state dict\); build the model, and call model.load_state_dict\(torch.load"),
        (graph, "an ONNX model; start from the PyTorch model"),
    ):
        with pytest.raises(ProgramError, match=f"^'{path}': not an ExecuTorch program .*; it is {description}"):
            load(path)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (images(1)[0], r"got a tuple: call run\(\*sample\)"),
        (list(images(1)[0]), r"got a list: call run\(\*sample\)"),
        (images(2), r"got a list of samples: call run\(\*samples\[i\]\) for each of them"),
        ({"x": images(1)[0][0]}, r"got a dict: call run\(\*\*sample\)"),
    ],
)
def test_run_refuses_a_whole_sample(sample: Any, message: str, result: ExportResult) -> None:
    for run in (result.run, result.program().run):
        with pytest.raises(ValueError, match=f"'forward' {message}$"):
            run(sample)
    with pytest.raises(ValueError, match=r"got a Inputs: call run\(\*sample, \*\*sample.keywords\)"):
        result.program().run(Inputs(*images(1)[0]))


def test_run_accepts_a_tuple_that_is_an_input() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    x = torch.ones(1, 4)
    result = export(Pair(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [((x, x),)])
    assert torch.equal(result.run((x, x)), 2 * x)


@pytest.mark.parametrize(
    ("convert", "remedy"),
    [
        (lambda x: x.double(), r"; pass x.float\(\)"),
        (lambda x: x[0], r": the batch dimension is missing; pass x.unsqueeze\(0\)"),
        (lambda x: x.permute(0, 2, 3, 1), r": the channels are last; pass x.permute\(0, 3, 1, 2\)"),
    ],
)
def test_mismatching_input_is_refused_with_a_remedy(convert: Any, remedy: str, result: ExportResult) -> None:
    with pytest.raises(ValueError, match=rf"^input 0 \('x'\) must be float32.*; got .*\]{remedy}$"):
        result.run(convert(images(1)[0][0]))
