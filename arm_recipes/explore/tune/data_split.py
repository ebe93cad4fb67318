"""Which samples calibrate, which ones a search goes by, and which ones neither did: these tell what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram

from arm_recipes.comparison.samples import prepare_samples
from arm_recipes.explore.sweep.lowered import METHOD
from arm_recipes.explore.tune.accuracy import Evaluator, Metric
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.samples.calibration import Calibration
from arm_recipes.samples.sample import Inputs, Pattern


@dataclass(frozen=True)
class DataSplit:
    """The parts of the samples.

    Attributes:
        calibration: that ranges are found with.
        search: programs are chosen by these.
        test: what is told of programs is measured with these; ``search`` itself where there are too few.
    """

    calibration: list[Inputs]
    search: Evaluator
    test: Evaluator

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples each part has."""
        parts = {"calibrated": self.calibration, "chose": self.search.samples, "judged": self.test.samples}
        return {name: len(part) for name, part in parts.items()}

    @property
    def notes(self) -> list[str]:
        """What the user should know of it."""
        if self.test is not self.search:
            return []
        held = len(self.search.samples)
        which = "the sample that did" if held == 1 else f"the {held} samples that did"
        return [
            f"accuracy is that of {which} not calibrate, by which the program was chosen too: there are too few to "
            "keep some apart. Give more samples, four at least, or others as test_samples="
        ]


def split_samples(
    program: ExportedProgram,
    recipe: ArmRecipe,
    examples: Sequence[Inputs],
    given: Sequence[Any],
    held_out: Any,
    metric: Metric | None,
) -> DataSplit:
    """Every second sample calibrates, unless the recipe has samples for that; of the others every second judges.

    Args:
        program: the model, captured.
        examples: the samples as the model takes them. ``given``: as the user gave them.
        held_out: samples of the user's that judge; None for some of ``examples``.

    Raises:
        ValueError: there are too few, or one is not what the model takes.
    """
    source = recipe.options.get("calibration_samples")
    rest = slice(None) if source is not None else slice(1, None, 2)
    if not examples[rest]:
        raise ValueError(
            "samples: there is one, which would calibrate and judge at once; give more, or samples of their own to "
            "get_recipe(..., calibration_samples=...)"
        )
    calibration = list(examples[::2] if source is None else Calibration(source)())
    others, as_given = examples[rest], given[rest]
    if held_out is not None:
        held = prepare_samples(Pattern.of_program(program), METHOD, held_out, None, metric, argument="held_out")
        choosing = Evaluator(program, others, as_given, metric)
        return DataSplit(calibration, choosing, Evaluator(program, held.samples, held.originals, metric))
    choosing = Evaluator(program, others[::2], as_given[::2], metric)
    judging = Evaluator(program, others[1::2], as_given[1::2], metric) if len(others) > 1 else choosing
    return DataSplit(calibration, choosing, judging)
