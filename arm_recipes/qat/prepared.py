"""A model that is trained as the integer program computes it, and exported with what the training found."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from executorch.export import ExportRecipe

from arm_recipes._internal.messages import warn
from arm_recipes.api import export
from arm_recipes.samples import inputs
from arm_recipes.samples.sample import Inputs
from arm_recipes.stages.quantize import FastQuantizeStage
from arm_recipes.stages.train import METHOD, FakeQuantizedModel

if TYPE_CHECKING:
    from arm_recipes.result import ExportResult


class Prepared(FakeQuantizedModel):
    """A model, to be trained as it is: it is called as the model is, and gives what the program would.

    See ``FakeQuantizedModel``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stage: FastQuantizeStage,
        examples: Sequence[Inputs],
        recipe: ExportRecipe,
        *,
        notes: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__(model, stage, examples, **settings)
        self._recipe, self._notes = recipe, list(notes)

    def export(self, samples: Any = None, **options: Any) -> ExportResult:
        """The program with the weights and ranges that the training found, as often as you like.

        Args:
            samples: as for ``arm_recipes.export``; the first decides the shapes. None: the samples of
                ``prepare_qat``.
            options: further ones of ``arm_recipes.export``.

        Raises:
            ExportError: as ``arm_recipes.export``, or a parameter holds NaN or an infinity.
        """
        self.reset_state()
        model = self.model if self._device().type == "cpu" else copy.deepcopy(self.model).cpu()
        recipe = replace(self._recipe, quantization_recipe=self.trained_recipe())
        with inputs.evaluation_mode({METHOD: model}):
            result = export(model, recipe, self._examples if samples is None else samples, **options)
        if samples is None:
            for note in self._notes:
                warn(note)
            result.report = replace(result.report, notes=(*self._notes, *result.report.notes))
        return result

    def _constant_parts(self) -> tuple[Any, ...]:
        return *super()._constant_parts(), self._recipe
