"""``prepare_qat``: a model to train as the integer program computes it."""

from __future__ import annotations

from typing import Any

from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_backend_core.quantization.fake_quant.ranges import Mode
from arm_recipes._internal.messages import quiet
from arm_recipes.pipeline.export import check_recipe
from arm_recipes.pipeline.pipeline import Progress
from arm_recipes.qat.prepared import Prepared
from arm_recipes.samples import inputs
from arm_recipes.stages.capture.capture import Capture
from arm_recipes.stages.quantize import FastQuantizeStage
from arm_recipes.stages.train import BATCH_NORM_STEPS, trainable


def prepare_qat(
    model: Any,
    recipe: ExportRecipe,
    samples: Any = None,
    *,
    ranges: Mode = "learned",
    batch_norm_steps: int = BATCH_NORM_STEPS,
    strict: bool | None = None,
    progress: bool = True,
) -> Prepared:
    """Prepare a model for quantization-aware training.

    Args:
        model: as for ``export``, of one method. It is trained itself, not a copy.
        recipe: an integer recipe from ``ExportRecipe.get_recipe``.
        samples: as of ``export``: what ranges begin with; the first one's shapes are those that
            ``.export()`` compiles for, unless it is given others. None: those of ``calibration_samples=`` of the
            recipe.
        ranges: "learned" makes the bounds of activations parameters, "follow" lets them go after what batches show.
        batch_norm_steps: training steps up to which batch norms normalize by the statistics of the batch and update the
            running ones; from then on these stay as they are. 0 leaves them alone from the beginning.
        strict: as for ``export``.
        progress: show a progress bar while samples run.

    Returns:
        a module to call and to train as the model; ``.export()`` gives the program.

    Raises:
        ValueError: the recipe does not quantize, or not by a quantizer of this project; no samples, or none that the
            model takes; several methods; a model that is quantized already.
        TypeError: ``model`` or ``recipe`` is something else.
        ExportError: the model raises while it is traced.
    """
    check_recipe(recipe, "prepare_qat")
    quantization = recipe.quantization_recipe
    if quantization is None or not quantization.quantizers:
        raise ValueError(
            f"recipe: {recipe.name} does not quantize, so that there is nothing to train for: take one of INT8, A8W4 "
            "or A16W8"
        )
    stage = FastQuantizeStage(quantization, Capture(strict), Progress(progress).calibration)
    if not stage.is_ours:
        raise ValueError(
            "recipe: training takes the one quantizer of a recipe of ArmRecipeType, without passes of your own around"
        )
    models = inputs.models_by_method(model)
    loader = None
    if samples is None and quantization.calibration_inputs_fn is not None:
        loader = getattr(quantization.calibration_inputs_fn, "loader", None)
        first: Any = next(iter(quantization.calibration_inputs_fn()))
        samples = [first if first.keywords else inputs.without_labels(next(iter(models.values())), tuple(first))]
    if samples is None and not all(isinstance(each, ExportedProgram) for each in models.values()):
        raise ValueError(
            "samples is missing: give prepare_qat a list of input tuples, [(x,)], or the recipe calibration_samples="
        )
    with quiet():
        module = trainable(models)
        given = inputs.resolve_loaders(samples)
        examples = inputs.examples_by_method(given, models)
        (found,) = examples.values()
        notes = inputs.batch_notes(given if loader is None else loader, models, examples)
        return Prepared(module, stage, found, recipe, notes=notes, ranges=ranges, batch_norm_steps=batch_norm_steps)
