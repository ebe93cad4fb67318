"""Prepared model: a model trained with fake quantization, and exported with the trained weights and ranges."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from executorch.export import ExportRecipe

from arm_recipes._internal.messages import warn
from arm_recipes.api import export
from arm_recipes.samples import export_arguments
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.quantize import FastQuantizeStage
from arm_recipes.stages.train import METHOD, FakeQuantizedModel
from arm_recipes.types import Samples

if TYPE_CHECKING:
    from arm_recipes.result import ExportResult


class Prepared(FakeQuantizedModel):
    """A model with fake quantization. Call and train it like the model. See ``FakeQuantizedModel``.

    In evaluation mode, ``Prepared`` returns the results of the exported quantized graph.
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

    def export(self, samples: Samples | None = None, **options: Any) -> ExportResult:
        """Export the program with the trained weights and ranges. Training may continue after the export.

        Mutated buffers, such as a recurrent state, are first reset to the values that they had in ``prepare_qat``.

        Args:
            samples: as for ``arm_recipes.export``. The first sample determines the shapes. None: the samples of
                ``prepare_qat``.
            options: other keyword arguments of ``arm_recipes.export``.

        Raises:
            ExportError: as for ``arm_recipes.export``, or a parameter is NaN or infinite.
        """
        self.reset_state()
        model = self.model if self._device().type == "cpu" else copy.deepcopy(self.model).cpu()
        recipe = replace(self._recipe, quantization_recipe=self.trained_recipe())
        with export_arguments.evaluation_mode({METHOD: model}):
            result = export(model, recipe, self._examples if samples is None else samples, **options)
        if samples is None:
            for note in self._notes:
                warn(note)
            result.report = replace(result.report, notes=(*self._notes, *result.report.notes))
        return result

    def _objects_shared_by_copies(self) -> tuple[Any, ...]:
        return *super()._objects_shared_by_copies(), self._recipe
