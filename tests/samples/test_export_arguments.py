"""Models and example inputs: accepted forms, and the errors for others."""

from __future__ import annotations

import copy
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, Inputs, export, load, prepare_qat
from arm_recipes.explore.sweep.sweep import capture_model
from arm_recipes.samples import export_arguments
from arm_recipes.samples.call_inputs import InputSignature, rebatch

X = torch.ones(1, 3)


def _program(model: nn.Module | None = None, **kwargs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model or nn.Linear(3, 2), (X,), **kwargs)


def test_forms_of_a_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    assert export_arguments.models_by_method(model) == {"forward": model}
    assert export_arguments.models_by_method({"a": model, "b": model}) == {"a": model, "b": model}
    path = tmp_path / "model.pt2"
    torch.export.save(_program(), str(path))
    for given in (path, str(path)):
        assert isinstance(export_arguments.models_by_method(given)["forward"], torch.export.ExportedProgram)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({}, ValueError, "model: the dict of methods is empty"),
        ({"not a name": nn.ReLU()}, ValueError, "method name 'not a name' is not an identifier"),
        ({1: nn.ReLU()}, ValueError, "method name 1 is not an identifier"),
        (torch.jit.trace(nn.ReLU(), X), TypeError, "a ScriptModule cannot be captured; pass the nn.Module that it was"),
        ("/nowhere/model.pt2", ValueError, "model: there is no file '/nowhere/model.pt2'"),
        (nn.ReLU, TypeError, "model: got the class ReLU; pass an instance"),
        (3, TypeError, "model: must be an nn.Module, an ExportedProgram, .*; got int"),
        ([nn.ReLU()], TypeError, "got list"),
    ],
)
def test_a_wrong_model_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export_arguments.models_by_method(model)


@torch.no_grad()
def test_weights_quantized_by_torchao_are_dequantized() -> None:
    """INT8 recipes quantize them again, with an error of half a step. The user's model does not change."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(4, 32)
    given = {"one": model, "two": nn.Sequential(model, nn.ReLU())}
    quantize_(model, Int8WeightOnlyConfig())
    plain = export_arguments.models_by_method(given)
    assert type(model[0].weight) is not nn.Parameter
    one, two = (dict(model.named_parameters()) for model in plain.values() if isinstance(model, nn.Module))
    assert one["0.weight"] is two["0.0.weight"]
    assert one["0.bias"] is model[0].bias
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    torch.testing.assert_close(result.run(x), model(x), atol=1e-5, rtol=1e-5)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(x,)])
    assert not result.report.cpu_operators
    torch.testing.assert_close(result.run(x), model(x), atol=0.05, rtol=0)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    weights, text, hollow = tmp_path / "weights.pt", tmp_path / "notes.txt", tmp_path / "hollow.pt2"
    torch.save({"a": 1}, weights)
    text.write_text("no archive")
    with zipfile.ZipFile(hollow, "w") as archive:
        archive.writestr("hollow/archive_format", "pt2")
    for path, reason, cause in (
        (weights, r", but weights alone \(a state dict\)", None),
        (text, ", but File is not a zip file", zipfile.BadZipFile),
        (hollow, r" \(\w+: ", Exception),
    ):
        with pytest.raises(ValueError, match=f"{path}' is not a program saved by torch.export.save{reason}") as caught:
            export_arguments.models_by_method(path)
        assert isinstance(caught.value.__cause__, cause or type(None))


@pytest.mark.parametrize("given", [X, (X,), [(X,)], ((X,),), {"forward": [(X,)]}])
def test_forms_of_example_inputs(given: Any) -> None:
    assert export_arguments.examples_by_method(given, {"forward": nn.ReLU()}) == {"forward": [(X,)]}


def test_containers_of_tensors_are_inputs() -> None:
    sample = ([X, -X], {"a": 2 * X})
    assert export_arguments.examples_by_method([sample], {"forward": nn.ReLU()}) == {"forward": [sample]}


def test_a_program_has_its_example_inputs() -> None:
    assert export_arguments.examples_by_method(None, {"forward": _program()})["forward"] == [(X,)]


def _generator() -> Iterator[Tensor]:
    yield from (X, -X)


@pytest.mark.parametrize(
    "given",
    [
        [(X,), (-X,)],
        [[X], [-X]],
        [Inputs(X), Inputs(-X)],
        [(X.numpy(),), (-X.numpy(),)],
        _generator(),
        _generator,
        DataLoader(TensorDataset(torch.cat([X, -X]), torch.arange(2)), batch_size=1),
    ],
)
def test_forms_of_several_samples(given: Any) -> None:
    first, second = export_arguments.examples_by_method(given, {"forward": nn.ReLU()})["forward"]
    assert torch.equal(first[0], X)
    assert torch.equal(second[0], -X)
    assert len(first) == len(second) == 1


def test_one_array_and_keyword_inputs() -> None:
    (sample,) = export_arguments.examples_by_method(X.numpy(), {"forward": nn.ReLU()})["forward"]
    assert torch.equal(sample[0], X)
    for given in ({"input": X}, Inputs(input=X)):
        (sample,) = export_arguments.examples_by_method([given], {"forward": nn.ReLU()})["forward"]
        assert (len(sample), list(sample.keywords)) == (0, ["input"])
    copied = copy.deepcopy(Inputs(X, a=2))
    assert (repr(copied), copied.keywords) == (f"Inputs({X!r}, a=2)", {"a": 2})


def test_one_tensor_as_two_arguments_is_two_inputs() -> None:
    """torch.export captures both as one input, and the program would ignore the value of the other one."""

    class Difference(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x - 2 * y

    result = export(Difference().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(X, X)])
    assert torch.equal(result.run(X, 3 * X), X - 6 * X)


@dataclass
class _Pair:
    one: Tensor
    other: Tensor | None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"samples is missing for method 'forward': give a list of input tuples"),
        ([], "samples of method 'forward' is empty"),
        (iter(()), "samples of method 'forward' is empty"),
        (
            {"backward": [(X,)]},
            "samples: no method 'backward' in the model; it has 'forward'; keyword inputs go into a list: ",
        ),
        ([X], r"samples\[0\] of method 'forward' must be a tuple of the model's inputs, got Tensor"),
        (3, r"samples of method 'forward' must be a list of input tuples, \[\(x,\)\], .*; got int"),
        ("digits", r"samples of method 'forward' must be a list .*; got str"),
        (lambda: 3, r"samples of method 'forward' must be a list .*; got int"),
        (["text"], r"samples\[0\] of method 'forward' is of type str; each sample must be a tensor or a tuple"),
        ([(X,), {3: X}], r"samples\[1\] of method 'forward' is of type dict; each sample must"),
        (
            [(X,), (X, object())],
            r"samples\[1\]\[1\] of method 'forward' is <object object at .* \(object\); inputs are tensors",
        ),
        ([({"a": {X}},)], r"samples\[0\]\[0\]\['a'\] of method 'forward' is .* \(set\); inputs are tensors"),
        (
            [(np.array(["a"]),)],
            r"samples\[0\]\[0\] of method 'forward' is an array of <U1, which PyTorch does not",
        ),
        ([(X,), (X, 2)], r"samples\[1\] of method 'forward' has 2 inputs, the model takes 1"),
        (
            [(X, 2), (X, 3)],
            r"samples\[1\] .*, input 1 \('\[1\]'\) is 3, but the model was captured with 2",
        ),
        ([(X, 1), (X, True)], r"samples\[1\] .*, input 1 \('\[1\]'\) is True, but the model was captured with 1"),
        ([(X,), (None,)], r"samples\[1\] .*, input 0 \('\[0\]'\) is of type NoneType, not a tensor"),
        ([([X],), ([X, X],)], r"samples\[1\] of method 'forward' has another structure than the inputs"),
        (
            [({"a": X, "b": [X]},), ({"b": [X]},)],
            r"samples\[1\] of method 'forward' has another structure .* captured with: \[0\] has no item 'a'$",
        ),
        (
            [([{"a": X}],), ([{"a": X, "z": X}],)],
            r"captured with: \[0\]\[0\] has an additional item 'z'$",
        ),
        ([({"a": X},), ({"b": X},)], r"captured with: \[0\] has no item 'a'$"),
        ([{"d": {"a": X}}, {"d": {"a": (X,)}}], r"captured with: \['d'\]\['a'\] is a tuple, not a single value$"),
        ([{"d": {"a": [X]}}, {"d": {"a": X}}], r"captured with: \['d'\]\['a'\] is a single value, not a list$"),
        ([(_Pair(X, X),), (_Pair(X, None),)], r"captured with: \[0\] has no item 1$"),
        ([{"a": X}, {"b": X}], r"samples\[1\] .* has the keyword inputs b, the model was captured with a"),
    ],
)
def test_wrong_example_inputs_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_arguments.examples_by_method(given, {"forward": nn.ReLU()})


class _Nested(nn.Module):
    def forward(self, d: dict[str, Any]) -> Tensor:
        return d["k"] - d["j"] * 10 + d["parts"][0]["a"] * 3 - d["parts"][0]["b"] * 0.5


def _nested(seed: int, order: int = 1, **changed: Tensor) -> dict[str, Any]:
    k, j, a, b = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
    items = {"k": k, "j": j, "parts": [dict([("a", a), ("b", b)][::order])]} | changed
    return dict([*items.items()][::order])


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.ETHOSU_U85_INT8], ids=str)
@pytest.mark.parametrize("wrap", [lambda d: Inputs(d), lambda d: Inputs(d=d)], ids=["positional", "keyword"])
def test_dicts_may_have_their_keys_in_any_order(wrap: Any, recipe: ArmRecipeType) -> None:
    ordered, mixed = ([wrap(_nested(seed, order**seed)) for seed in range(6)] for order in (1, -1))
    is_float = recipe is ArmRecipeType.TOSA_FP
    options: list[dict[str, Any]] = [{}, {}, {} if is_float else {"calibration_samples": mixed}]
    results = [
        export(_Nested().eval(), ExportRecipe.get_recipe(recipe, **each), samples)
        for each, samples in zip(options, (ordered, mixed, ordered[:1]), strict=True)
    ]
    reverse = wrap(_nested(7, -1))
    first, *others = (result.run(*reverse, **reverse.keywords) for result in results)
    torch.testing.assert_close(first, _Nested()(_nested(7)), rtol=0, atol=1e-5 if is_float else 0.15)
    assert all(torch.equal(first, other) for other in others)
    compared = [results[0].compare(samples, progress=False).to_dict() for samples in (ordered, mixed)]
    for each in compared:
        each.pop("seconds")
    assert compared[0] == compared[1]


def test_several_methods_need_a_dict() -> None:
    with pytest.raises(ValueError, match="give a dict of lists of input tuples for 'a', 'b'"):
        export_arguments.examples_by_method([(X,)], {"a": nn.ReLU(), "b": nn.ReLU()})


def test_a_program_has_its_keyword_inputs() -> None:
    program = torch.export.export(nn.Linear(3, 2), (), {"input": X})
    (sample,) = export_arguments.examples_by_method(None, {"forward": program})["forward"]
    assert torch.equal(sample.keywords["input"], X)


# Programs with such inputs.


@dataclass
class Settings:
    bias: Tensor
    power: int


class Configured(nn.Module):
    """Takes values that are no tensors by position, by name and inside containers."""

    def forward(
        self, x: Tensor, factor: float, more: dict[str, Any], *, mode: str = "plain", settings: Settings | None = None
    ) -> dict[str, Any]:
        y = x * factor + more["list"][0]
        if mode == "relu":
            y = torch.relu(y)
        if settings is not None:
            y = y**settings.power + settings.bias
        return {"y": y, "factor": factor}


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8], ids=lambda recipe: recipe.name)
def test_inputs_that_are_no_tensors_become_constants(recipe: ArmRecipeType) -> None:
    def given(x: Tensor, bias: Tensor) -> Inputs:
        more = {"list": [-x.numpy(), None], "flag": True}
        return Inputs(x, np.float64(2.5), more, settings=Settings(bias, 2), mode="relu")

    samples = [given(torch.rand(2, 3), torch.rand(3)) for _ in range(4)]
    result = export(Configured().eval(), ExportRecipe.get_recipe(recipe), samples)
    notes = "\n".join(result.report.notes)
    for name, value in (
        ("factor", 2.5),
        ("more_list_1", None),
        ("more_flag", True),
        ("mode", "relu"),
        ("settings_power", 2),
    ):
        assert f"input '{name}' of 'forward' is the constant {value!r} in the program" in notes
    program = load(result.buffer)
    assert [value.name for value in program.inputs] == ["x", "more_list_0", "settings_bias", "mode"][:3]
    x, bias = torch.rand(2, 3), torch.rand(3)
    sample = given(x, bias)
    output = result.run(sample)
    again = result.run(*sample, **sample.keywords)
    expected = torch.relu(x * 2.5 - x) ** 2 + bias
    assert (output["y"] - expected).abs().max() < (0.1 if recipe is ArmRecipeType.TOSA_INT8 else 1e-5)
    assert torch.equal(again["y"], output["y"])
    assert torch.equal(program.execute(x, -x, bias)[0], output["y"])
    assert output["factor"] == 2.5
    with pytest.raises(
        ValueError, match=r"the call of 'forward', input 1 \('factor'\) is 3.0, but the model was captured with 2.5"
    ):
        result.run(x, 3.0, sample[2], **sample.keywords)
    with pytest.raises(ValueError, match="has the keyword inputs none, the model was captured with settings, mode"):
        result.run(*sample)


@pytest.mark.parametrize("batch", [32, 7, 1])
@pytest.mark.parametrize(("captured", "samples"), [(1, 70), (4, 18), (32, 3)])
def test_batches_of_a_data_loader_are_split_or_joined(batch: int, captured: int, samples: int) -> None:
    data = torch.rand(70, 3)
    data[69] *= 100  # in the last, partial batch
    loader = DataLoader(TensorDataset(data, torch.arange(70)), batch_size=batch)
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, calibration_samples=loader)
    result = export(nn.Linear(3, 2).eval(), recipe, [(data[:captured],)])
    quantization = result.report.methods[0].quantization
    assert quantization is not None
    assert quantization.samples == samples
    nodes = result.exported_programs["forward"].graph.nodes
    scale = next(node.args[1] for node in nodes if "quantize_per_tensor" in str(node.target))
    assert scale * 255 > 0.9 * data.max()


def test_a_data_loader_as_example_inputs() -> None:
    data = torch.rand(70, 3)
    loader = DataLoader(TensorDataset(data, torch.arange(70)), batch_size=32)
    result = export(nn.Linear(3, 2).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), loader)
    assert result.inputs[0].shape == (32, 3)
    assert result.report.methods[0].quantization is not None
    assert result.report.methods[0].quantization.samples == 3


def _loader(batch: int | None = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(70, 3), torch.arange(70)), batch_size=batch, **options)


FP = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)


def _batch_warnings(given: Any, model: Any = None, **options: Any) -> list[str]:
    """Return the warnings about batches; the notes of the report must equal them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export(model or nn.Linear(3, 2).eval(), FP, given, **options)
    messages = [str(x.message) for x in caught if "batch" in str(x.message)]
    assert messages == [note for note in result.report.notes if "batch" in note]
    return messages


@pytest.mark.parametrize("given", [_loader, lambda: _loader(), lambda: {"forward": _loader()}])
def test_a_data_loader_that_determines_the_batch_size_is_warned_about(given: Any) -> None:
    (message,) = _batch_warnings(given() if given is not _loader else given)
    assert message.startswith("'forward' is compiled for batch size 32, the batch size of the DataLoader")
    assert "For batch size 1 use DataLoader(..., batch_size=1), or pass one sample as samples" in message


def test_the_remedies_for_batches_of_a_data_loader_give_programs_of_batch_1() -> None:
    assert not _batch_warnings(_loader(1))
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, calibration_samples=_loader())
    result = export(nn.Linear(3, 2).eval(), recipe, torch.rand(1, 3))
    assert result.inputs[0].shape == (1, 3)
    assert not [note for note in result.report.notes if "batch" in note]


@pytest.mark.parametrize(
    "given",
    [[(torch.rand(32, 3),)], torch.rand(32, 3), list(_loader()), _loader(None), _loader(sampler=range(1))],
    ids=["tuple", "tensor", "list", "no batching", "one item"],
)
def test_explicit_batches_are_not_warned_about(given: Any) -> None:
    if isinstance(given, list) and len(given) > 1:
        given = [(x,) for x, _ in given]
    if isinstance(given, DataLoader) and given.batch_size is None:
        given = DataLoader(TensorDataset(torch.rand(4, 32, 3)), batch_size=None)
    assert not _batch_warnings(given)


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        (torch.rand(32, 3), "if it holds 32 samples, pass [(part,) for part in x.split(1)]"),
        (np.ones((4, 3), "float32"), "if it holds 4 samples, pass [(part,) for part in x.split(1)]"),
        ({"forward": torch.rand(3)}, "if it lacks the batch dimension, pass [(x.unsqueeze(0),)]"),
        (torch.rand(2, 5, 3), "x.split(1)]; if it lacks the batch dimension, pass [(x.unsqueeze(0),)]"),
        (torch.rand(1, 3), None),
    ],
)
def test_a_tensor_alone_is_one_sample_and_the_report_says_so(given: Any, remedies: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export(nn.Linear(3, 2).eval(), FP, given)
    notes = [note for note in result.report.notes if "one tensor" in note]
    assert [str(x.message) for x in caught if "one tensor" in str(x.message)] == notes
    assert len(notes) == (remedies is not None)
    if remedies is not None:
        shape = list(result.inputs[0].shape)
        assert notes[0].startswith(
            "the samples of 'forward' are one tensor x, which is used as one sample: the program"
        )
        assert f"takes {shape} in every run" in notes[0]
        assert notes[0].endswith(remedies)


def test_captured_programs_and_named_sizes_are_not_warned_about() -> None:
    program = torch.export.export(nn.Linear(3, 2), (torch.rand(32, 3),))
    assert not _batch_warnings(_loader(), program)
    batch = {"dynamic_shapes": {"input": {0: torch.export.Dim("batch")}}, "sizes": {"batch": [1, 8]}}
    assert not _batch_warnings(_loader(), **batch)


def test_sweeps_and_qat_warn_about_batches() -> None:
    with pytest.warns(ArmRecipesWarning, match="compiled for batch size 32"):
        *_, notes = capture_model(nn.Linear(3, 2), _loader(), "sweep")
    assert "compiled for batch size 32" in notes[0]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, calibration_samples=_loader())
    for prepared in (prepare_qat(nn.Linear(3, 2), recipe, _loader()), prepare_qat(nn.Linear(3, 2), recipe)):
        with pytest.warns(ArmRecipesWarning, match="batch size 32"):
            assert "batch size 32" in prepared.export().report.notes[0]
        assert not [note for note in prepared.export(torch.rand(1, 3)).report.notes if "batch" in note]


@pytest.mark.filterwarnings("ignore")
def test_sweeps_rebatch_a_loader() -> None:
    """70 items in batches of 32 are 2 batches, and a batch of 6 items that is filled up."""
    _, originals, examples, _ = capture_model(nn.Linear(3, 2), _loader(shuffle=True), "sweep")
    assert [sample[0].shape[0] for sample in examples] == [32, 32, 32]
    assert len(originals) == 3
    images: DataLoader[Any] = DataLoader(torch.rand(7, 3), batch_size=4)  # type: ignore[arg-type]
    assert len(capture_model(nn.Linear(3, 2), images, "tune")[2]) == 2
    with pytest.raises(ValueError, match="metric: a batch of the DataLoader, such as the last one, is smaller"):
        capture_model(nn.Linear(3, 2), _loader(), "tune", lambda outputs, sample: 1.0)
    loader = _loader(35)
    _, originals, examples, _ = capture_model(nn.Linear(3, 2), loader, "tune", lambda outputs, sample: 1.0)
    assert [len(batch) for batch in originals] == [2, 2]
    assert [len(sample) for sample in examples] == [1, 1]


def test_rebatch_keeps_inputs_without_a_batch_dimension() -> None:
    input_signature = InputSignature.from_inputs(Inputs(torch.zeros(2, 3), torch.zeros(3)))
    shared = torch.ones(3)
    found = list(rebatch([Inputs(torch.arange(15.0).reshape(5, 3), shared)], input_signature))
    assert [sample[0][:, 0].tolist() for sample in found] == [[0, 3], [6, 9], [12, 12]]
    assert all(torch.equal(sample[1], shared) for sample in found)
    unfit = [Inputs(torch.zeros(5, 4), shared)]
    assert list(rebatch(unfit, input_signature)) == unfit


def test_dynamic_shapes_are_refused() -> None:
    shapes = ({0: torch.export.Dim("batch", min=2, max=8)},)
    with pytest.raises(ValueError, match=r"dynamic_shapes=.*Arm targets are compiled for fixed shapes"):
        export_arguments.reject_dynamic_shapes({"forward": nn.ReLU()}, shapes)
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(2, 3),), dynamic_shapes=shapes)
    with pytest.raises(ValueError, match=r"input 'input' .* has the dynamic shape \[\?, 3\].*--sizes input_0=1,8"):
        export_arguments.reject_dynamic_shapes({"forward": program}, None)
    export_arguments.reject_dynamic_shapes({"forward": _program()}, None)


def test_training_flags_are_restored_one_by_one() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()).train()
    model[0].eval()
    with export_arguments.evaluation_mode({"forward": model, "other": _program()}) as training:
        assert training == ["forward"]
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_training_flags_are_restored_after_an_error() -> None:
    model = nn.ReLU()
    with pytest.raises(KeyError), export_arguments.evaluation_mode({"forward": model}):
        raise KeyError
    assert model.training
