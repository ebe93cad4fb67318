"""Data split of a precision search: calibration, search and test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram

from arm_recipes.comparison.accuracy import Evaluator
from arm_recipes.comparison.samples import prepare_samples
from arm_recipes.explore.sweep.quantize_and_lower import METHOD
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.samples.calibration import Calibration
from arm_recipes.samples.call_inputs import Inputs, InputSignature
from arm_recipes.types import Metric


@dataclass(frozen=True)
class DataSplit:
    """Calibration, search and test samples.

    The parts that come from the argument ``samples`` of ``tune`` are disjoint. Exception: without ``test_samples``, and
    if only one of ``samples`` does not calibrate, this sample is both a search and a test sample.

    Attributes:
        calibration: samples that calibrate activation ranges.
        search_evaluator: evaluator on the search samples, by which the search selects programs.
        test_evaluator: evaluator on the test samples, for the reported accuracy. It is ``search_evaluator`` if there
            is only one sample for both.
    """

    calibration: list[Inputs]
    search_evaluator: Evaluator
    test_evaluator: Evaluator

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples by part: "calibration", "search" and "test"."""
        parts = {
            "calibration": self.calibration,
            "search": self.search_evaluator.samples,
            "test": self.test_evaluator.samples,
        }
        return {name: len(part) for name, part in parts.items()}

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        if self.test_evaluator is not self.search_evaluator:
            return []
        count = len(self.search_evaluator.samples)
        described = "the sample" if count == 1 else f"the {count} samples"
        return [
            f"accuracy is measured on {described} by which the search selected the program, because there are too few "
            "samples to hold some out. Give at least four samples, or separate test samples as test_samples="
        ]


def split_samples(
    program: ExportedProgram,
    recipe: ArmRecipe,
    examples: Sequence[Inputs],
    originals: Sequence[Any],
    test_samples: Any,
    metric: Metric | None,
) -> DataSplit:
    """Split the samples: every second one calibrates, and the others are alternately search and test samples.

    If the recipe has calibration samples, none of ``examples`` calibrates. With ``test_samples``, all ``examples`` that
    do not calibrate are search samples.

    Args:
        program: captured model.
        recipe: recipe to tune.
        examples: samples in the form of the model's inputs.
        originals: the same samples in the form in which the user passed them.
        test_samples: separate test samples. With None, some of ``examples`` are test samples.
        metric: accuracy metric; None for the SQNR.

    Raises:
        ValueError: there are too few samples, or a sample does not match the model.
    """
    source = recipe.options.get("calibration_samples")
    evaluation = slice(None) if source is not None else slice(1, None, 2)
    if not examples[evaluation]:
        raise ValueError(
            "samples: there is one, which cannot both calibrate and test; give more, or give calibration samples to "
            "get_recipe(..., calibration_samples=...)"
        )
    input_signature = InputSignature.from_program(program)
    calibration = list(examples[::2] if source is None else Calibration(source).rebatch(input_signature))
    evaluation_samples, evaluation_originals = examples[evaluation], originals[evaluation]
    if test_samples is not None:
        prepared = prepare_samples(input_signature, METHOD, test_samples, None, metric, argument="test_samples")
        search = Evaluator(program, evaluation_samples, evaluation_originals, metric)
        return DataSplit(calibration, search, Evaluator(program, prepared.samples, prepared.originals, metric))
    search = Evaluator(program, evaluation_samples[::2], evaluation_originals[::2], metric)
    test = (
        Evaluator(program, evaluation_samples[1::2], evaluation_originals[1::2], metric)
        if len(evaluation_samples) > 1
        else search
    )
    return DataSplit(calibration, search, test)
