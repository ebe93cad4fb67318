"""Calibration data: accepted forms, checks on every sample, and the warning about a single one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.export import ExportRecipe, RecipeType
from executorch.export import export as executorch_export
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes import ArmRecipesWarning, ArmRecipeType, export
from arm_recipes.samples.calibration import Calibration
from arm_recipes.stages.quantize import make_quantization_recipe

X = torch.arange(12.0).reshape(4, 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + y


def _recipe(calibration: Any, kind: RecipeType = ArmRecipeType.TOSA_INT8) -> ExportRecipe:
    # The checks belong to the recipe and not to a target, so any quantizer shows them.
    recipe = ExportRecipe.get_recipe(kind)
    assert recipe.quantization_recipe is not None
    (quantizer,) = recipe.quantization_recipe.quantizers or []
    return dataclasses.replace(recipe, quantization_recipe=make_quantization_recipe(quantizer, calibration))


def _export(
    calibration: Any,
    *,
    model: nn.Module | None = None,
    inputs: Any = ((X[:1],),),
    kind: RecipeType = ArmRecipeType.TOSA_INT8,
) -> Any:
    recipe = _recipe(calibration, kind)
    return export((model or nn.Linear(3, 2)).eval(), recipe, list(inputs))


def _generator() -> Iterator[torch.Tensor]:
    yield from X.split(1)


@pytest.mark.parametrize(
    "source",
    [
        [(x,) for x in X.split(1)],
        [[x] for x in X.split(1)],
        X.split(1),
        _generator,
        _generator(),
        lambda: list(X.split(1)),
        DataLoader(TensorDataset(X), batch_size=1),
    ],
)
def test_forms_of_calibration_data(source: Any) -> None:
    calibration = Calibration(source)
    for _ in range(2):  # a program with two methods reads it twice
        samples = [sample for (sample,) in calibration()]
        assert torch.equal(torch.cat(samples), X)


def test_labels_of_a_data_loader_are_left_out() -> None:
    loader = DataLoader(TensorDataset(X, torch.arange(4)), batch_size=1)
    result = _export(loader)
    assert result.report.methods[0].quantization.samples == 4


def test_calibration_sets_the_ranges() -> None:
    """XNNPACK's quantizer: its input scale depends on the samples only, ours on the weights as well."""
    samples = ([(X[:1] * factor,)] * 2 for factor in (1.0, 100.0))
    narrow, wide = (_export(each, kind=XNNPackRecipeType.PT2E_INT8_STATIC_PER_CHANNEL) for each in samples)
    scales = []
    for result in (narrow, wide):
        nodes = result.exported_programs["forward"].graph.nodes
        scales.append(next(node.args[1] for node in nodes if "quantize_per_tensor" in str(node.target)))
    assert scales[1] == pytest.approx(100 * scales[0], rel=1e-5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (iter([]), "calibration has no samples; give at least one tuple"),
        (list, "calibration has no samples"),
        (lambda: 3, "calibration_samples must be an iterable of samples, or a function that returns one; got int"),
        ([(X[:1],), "text"], "calibration sample 1 is of type str; each sample must be a tensor or a tuple"),
        (
            [{"x": X[:1]}],
            "calibration sample 0 has 0 inputs, the model takes 1 by position, and has no keyword input 'x'",
        ),
        ([{1: X[:1]}], "calibration sample 0 is of type dict"),
        (
            [(X[:1],), (X[:2],)],
            r"sample 1, input 0 \('input\w*'\) is float32\[2, 3\], the model takes float32\[1, 3\]: a batch",
        ),
        (
            [(X[0],)],
            r"calibration sample 0, input 0 .* is float32\[3\], .*: the batch dimension is missing",
        ),
        (
            [(X[:1].double(),)],
            r"calibration sample 0, input 0 .* is float64\[1, 3\], .*; pass x.float\(\)",
        ),
        ([(3.0,)], r"calibration sample 0, input 0 .* is of type float, not a tensor"),
    ],
)
def test_wrong_samples_are_named(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _export(source)


def test_samples_with_too_few_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="calibration sample 1 has 1 inputs, the model takes 2"):
        _export([(X[:1], X[:1]), (X[:1],)], model=Two(), inputs=[(X[:1], X[:1])])


def test_wrong_example_inputs_are_named_too() -> None:
    with pytest.raises(ValueError, match=r"calibration sample 1, input 0 .* is float32\[4, 3\], the model takes"):
        _export(None, inputs=[(X[:1],), (X,)])


@pytest.mark.parametrize("source", [[(X[:1],)], None])
def test_one_sample_is_warned_about(source: Any) -> None:
    with pytest.warns(ArmRecipesWarning, match="calibration used only one sample") as caught:
        _export(source)
    assert [w.filename for w in caught if w.category is ArmRecipesWarning] == [__file__]


def test_two_samples_are_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArmRecipesWarning)
        _export([(X[:1],), (X[1:2],)])


@pytest.mark.verify
def test_calibration_checks_work_with_executorchs_own_export() -> None:
    recipe = _recipe([(X[:1], 7)], XNNPackRecipeType.PT2E_INT8_STATIC_PER_CHANNEL)
    with pytest.warns(ArmRecipesWarning, match="only one sample"):
        executorch_export(nn.Linear(3, 2).eval(), [(X[:1],)], recipe)
    recipe = _recipe([(X,)])
    with pytest.raises(ValueError, match="calibration sample 0, input 0"):
        executorch_export(nn.Linear(3, 2).eval(), [(X[:1],)], recipe)
