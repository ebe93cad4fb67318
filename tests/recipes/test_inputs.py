"""Models and example inputs: the forms that are taken, and the messages for those that are not."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arm_recipes import inputs

X = torch.ones(1, 3)


def _program(model: nn.Module | None = None, **kwargs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model or nn.Linear(3, 2), (X,), **kwargs)


def test_forms_of_a_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    assert inputs.models_by_method(model) == {"forward": model}
    assert inputs.models_by_method({"a": model, "b": model}) == {"a": model, "b": model}
    path = tmp_path / "model.pt2"
    torch.export.save(_program(), str(path))
    for given in (path, str(path)):
        assert isinstance(inputs.models_by_method(given)["forward"], torch.export.ExportedProgram)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({}, ValueError, "model: the dict of methods is empty"),
        ({"not a name": nn.ReLU()}, ValueError, "method name 'not a name' is not an identifier"),
        ({1: nn.ReLU()}, ValueError, "method name 1 is not an identifier"),
        ("/nowhere/model.pt2", ValueError, "model: there is no file '/nowhere/model.pt2'"),
        (nn.ReLU, TypeError, "model: got the class ReLU; pass an instance"),
        (3, TypeError, "model: must be an nn.Module, an ExportedProgram, .*; got int"),
        ([nn.ReLU()], TypeError, "got list"),
    ],
)
def test_a_wrong_model_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inputs.models_by_method(model)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    weights, text, hollow = tmp_path / "weights.pt", tmp_path / "notes.txt", tmp_path / "hollow.pt2"
    torch.save({"a": 1}, weights)
    text.write_text("no archive")
    with zipfile.ZipFile(hollow, "w") as archive:
        archive.writestr("hollow/archive_format", "pt2")
    for path, reason, cause in (
        (weights, ", but another kind of archive", None),
        (text, ": File is not a zip file", zipfile.BadZipFile),
        (hollow, r" \(\w+: ", Exception),
    ):
        with pytest.raises(ValueError, match=f"{path}' is not a program saved by torch.export.save{reason}") as caught:
            inputs.models_by_method(path)
        assert isinstance(caught.value.__cause__, cause or type(None))


@pytest.mark.parametrize("given", [X, (X,), [(X,)], ((X,),), {"forward": [(X,)]}])
def test_forms_of_example_inputs(given: Any) -> None:
    assert inputs.examples_by_method(given, {"forward": nn.ReLU()}) == {"forward": [(X,)]}


def test_containers_of_tensors_are_inputs() -> None:
    sample = ([X, X], {"a": X})
    assert inputs.examples_by_method([sample], {"forward": nn.ReLU()}) == {"forward": [sample]}


def test_a_program_brings_its_own() -> None:
    assert inputs.examples_by_method(None, {"forward": _program()})["forward"] == [(X,)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"example_inputs is missing for method 'forward': give a list of input tuples"),
        ([], "example_inputs of method 'forward' is empty"),
        ({"backward": [(X,)]}, "example_inputs: no method 'backward' in the model; it has 'forward'"),
        ([X], r"example_inputs\[0\] of method 'forward' must be a tuple of the model's inputs, got Tensor"),
        (3, r"example_inputs must be a list of input tuples, \[\(x,\)\]; got int"),
        (
            [(X,), (X, 2)],
            r"example_inputs\[1\]\[1\] of method 'forward' is 2 \(int\); only tensors can be inputs",
        ),
        ([(X, None)], r"example_inputs\[0\]\[1\] .* is None \(NoneType\); only tensors"),
        ([({"a": "text"},)], r"example_inputs\[0\]\[0\]\['a'\] .* is 'text' \(str\); only tensors"),
    ],
)
def test_wrong_example_inputs_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inputs.examples_by_method(given, {"forward": nn.ReLU()})


def test_several_methods_need_a_dict() -> None:
    with pytest.raises(ValueError, match="give a dict of lists of input tuples for 'a', 'b'"):
        inputs.examples_by_method([(X,)], {"a": nn.ReLU(), "b": nn.ReLU()})


def test_a_program_with_keyword_inputs_is_refused() -> None:
    program = torch.export.export(nn.Linear(3, 2), (), {"input": X})
    with pytest.raises(ValueError, match=r"'forward' was captured with keyword inputs \(input\)"):
        inputs.examples_by_method(None, {"forward": program})


def test_dynamic_shapes_are_refused() -> None:
    shapes = ({0: torch.export.Dim("batch", min=2, max=8)},)
    with pytest.raises(ValueError, match=r"dynamic_shapes=.*Arm targets are compiled for fixed shapes"):
        inputs.check_static({"forward": nn.ReLU()}, shapes)
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(2, 3),), dynamic_shapes=shapes)
    with pytest.raises(ValueError, match=r"input 'input' of method 'forward' has the dynamic shape \[s\d+, 3\]"):
        inputs.check_static({"forward": program}, None)
    inputs.check_static({"forward": _program()}, None)


def test_training_flags_are_restored_one_by_one() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()).train()
    model[0].eval()
    with inputs.evaluation_mode({"forward": model, "other": _program()}) as training:
        assert training == ["forward"]
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_training_flags_are_restored_after_an_error() -> None:
    model = nn.ReLU()
    with pytest.raises(KeyError), inputs.evaluation_mode({"forward": model}):
        raise KeyError
    assert model.training
