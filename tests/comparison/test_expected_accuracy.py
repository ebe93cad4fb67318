"""Labels and metric of an export: the report has the accuracy of model and quantized program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from tests.small_models import Small, images

SAMPLES = images(16)
INPUTS = torch.cat([x for (x,) in SAMPLES])


def _labels() -> Tensor:
    """The model's own predictions, apart from the last four items: an accuracy of 75 %."""
    with torch.no_grad():
        labels: Tensor = Small().eval()(INPUTS).argmax(1)
    labels[-4:] = (labels[-4:] + 1) % 4
    return labels


LABELS = _labels()
PAIRS = [(x, label) for (x,), label in zip(SAMPLES, LABELS, strict=True)]


def _export(samples: Any, recipe: ArmRecipeType = ArmRecipeType.TOSA_INT8, **options: Any) -> ExportResult:
    return export(Small().eval(), ExportRecipe.get_recipe(recipe), samples, progress=False, **options)


def _predictions(program: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([program(x).argmax(1) for (x,) in SAMPLES])


def test_the_report_has_the_accuracy_of_model_and_quantized_program() -> None:
    result = _export(SAMPLES, labels=LABELS)
    accuracy: Any = result.report.accuracy
    predictions = _predictions(result.exported_programs["forward"].module(check_guards=False))
    assert accuracy.reference == 0.75
    assert accuracy.program == float((predictions == LABELS).double().mean())
    assert accuracy.items == 16
    assert accuracy.drop == accuracy.reference - accuracy.program
    assert result.report.to_dict()["accuracy"]["reference"] == 0.75
    assert "75.00 % of the floating-point model" in str(result.report)
    assert f"{100 * accuracy.drop:.2f} points" in str(result.report)
    assert _export(SAMPLES).report.accuracy is None


@pytest.mark.parametrize(
    ("samples", "labels"),
    [
        (PAIRS, True),
        ([(x, int(label)) for x, label in PAIRS], True),
        (iter(PAIRS), True),
        (lambda: iter(SAMPLES), LABELS.tolist()),
        (SAMPLES, iter(LABELS)),
        (DataLoader(TensorDataset(INPUTS, LABELS), batch_size=1, shuffle=True), True),
        (DataLoader(TensorDataset(INPUTS), batch_size=1), LABELS.numpy()),
        ({"forward": PAIRS}, True),
    ],
    ids=["pairs", "numbers", "iterator", "function", "iterator of labels", "loader", "loader and labels", "by method"],
)
def test_forms_of_labels(samples: Any, labels: Any) -> None:
    accuracy: Any = _export(samples, labels=labels).report.accuracy
    assert (accuracy.reference, accuracy.items) == (0.75, 16)


def test_padding_of_the_last_batch_does_not_count() -> None:
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=5)
    accuracy: Any = _export(loader, labels=True).report.accuracy
    assert (accuracy.reference, accuracy.items) == (0.75, 16)


def test_a_metric() -> None:
    def correct(outputs: Tensor, sample: Any) -> float:
        return float(outputs.argmax(1) == sample[1])

    accuracy: Any = _export(PAIRS, metric=correct).report.accuracy
    assert (accuracy.metric, accuracy.reference, accuracy.agreeing) == ("correct", 0.75, None)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.ETHOSU_U55_INT8])
def test_accuracy_on_float_and_ethosu_targets(recipe: ArmRecipeType) -> None:
    accuracy: Any = _export(PAIRS, recipe, labels=True).report.accuracy
    assert accuracy.reference == 0.75
    assert recipe is not ArmRecipeType.TOSA_FP or accuracy.drop == 0


def test_the_page_states_the_accuracy() -> None:
    result = _export(PAIRS, labels=True)
    text = result.report.page().text
    assert "75.00 % of the floating-point model" in text


def test_a_program_from_the_cache(tmp_path: Any) -> None:
    results = [_export(PAIRS, labels=True, cache_dir=tmp_path) for _ in range(2)]
    assert results[1].report.cached
    assert results[0].report.accuracy == results[1].report.accuracy


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (PAIRS, {}, r"2 inputs; the model takes x; if labels follow the inputs, pass labels=True to export\(\)"),
        (SAMPLES, {"labels": True}, r"labels=True: the samples have no labels; give integers after the inputs"),
        (SAMPLES, {"labels": [1, 2]}, "labels: there are 2, but 16 samples have 16 items"),
        (SAMPLES, {"labels": False}, "labels=False: give class labels, True for"),
        (SAMPLES, {"labels": torch.rand(16)}, "must be integer class indices, got torch.float32"),
        (SAMPLES, {"metric": 1}, "metric: 1 is not callable"),
        (None, {"labels": LABELS}, "labels: needs samples"),
        (SAMPLES, {"labels": LABELS, "sizes": {"x": [1]}}, "labels: needs a program with one method"),
        (
            DataLoader(TensorDataset(INPUTS), batch_size=1, shuffle=True),
            {"labels": LABELS},
            "the DataLoader shuffles its samples.*labels=True",
        ),
    ],
)
def test_labels_that_do_not_fit(samples: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _export(samples, **options)


def test_a_captured_model_and_pairs() -> None:
    captured = torch.export.export(Small().eval(), SAMPLES[0])
    with pytest.raises(ValueError, match=r"2 inputs; the model takes x; .*labels=True"):
        export(captured, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), PAIRS, progress=False)


def test_compare_takes_the_labels_of_samples() -> None:
    accuracy: Any = _export(SAMPLES).compare(PAIRS, labels=True, layers=False, progress=False).accuracy
    assert accuracy.reference == 0.75
