"""``prepare_qat``: prepare a model for quantization-aware training (QAT) with fake quantization."""

from __future__ import annotations

from typing import Any

from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_backend_core.quantization.fake_quant.learned_step_size import RangeMode
from arm_recipes._internal.compile_lock import compile_lock
from arm_recipes._internal.messages import suppress_warnings
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes.pipeline.export import check_recipe
from arm_recipes.pipeline.progress import Progress
from arm_recipes.qat.prepared import Prepared
from arm_recipes.samples import export_arguments
from arm_recipes.stages.capture.capture import Capture
from arm_recipes.stages.quantize import FastQuantizeStage
from arm_recipes.stages.train import BATCH_NORM_STEPS, model_to_train
from arm_recipes.types import Model, Samples


@shorten_tracebacks
def prepare_qat(
    model: Model,
    recipe: ExportRecipe,
    samples: Samples | None = None,
    *,
    ranges: RangeMode = "learned",
    batch_norm_steps: int = BATCH_NORM_STEPS,
    strict: bool | None = None,
    progress: bool = True,
) -> Prepared:
    """Prepare a model for quantization-aware training.

    Args:
        model: as for ``export``, with one method. The model itself is trained, not a copy.
        recipe: an integer recipe from ``ExportRecipe.get_recipe``.
        samples: as for ``export``. They initialize the activation ranges, unless the recipe has
            ``calibration_samples=``. ``Prepared.export()`` compiles for the shapes of the first sample, unless it gets
            other samples. None: the recipe's ``calibration_samples=``, or the example inputs of an ``ExportedProgram``.
        ranges: "learned" makes the bounds of the activation ranges trainable; "follow" updates the ranges by a moving
            average of the minimum and maximum of each batch.
        batch_norm_steps: number of training steps in which batch norms use batch statistics and update the running
            statistics. After them, the running statistics are frozen. 0 freezes them from the beginning.
        strict: as for ``export``.
        progress: show a progress bar while samples run.

    Returns:
        A module to call and train like the model. Its ``export()`` exports the trained program.

    Raises:
        ValueError: the recipe does not quantize, has custom passes, or does not have exactly one quantizer of this
            package; samples are missing or do not fit the model; the model has several methods or is quantized already;
            ``ranges`` is neither "learned" nor "follow".
        TypeError: ``model`` or ``recipe`` has the wrong type.
        ExportError: the model raises an exception during tracing.
    """
    check_recipe(recipe, "prepare_qat")
    quantization = recipe.quantization_recipe
    if quantization is None or not quantization.quantizers:
        raise ValueError(
            f"recipe: {recipe.name} does not quantize, so there is nothing to train for; use an INT8, A8W4 or A16W8 "
            "recipe"
        )
    stage = FastQuantizeStage(quantization, Capture(strict), Progress(progress).track_calibration)
    if not stage.has_single_arm_quantizer:
        raise ValueError(
            "recipe: training needs the single quantizer of an ArmRecipeType recipe, without custom passes"
        )
    models = export_arguments.models_by_method(model)
    loader = None
    if samples is None and quantization.calibration_inputs_fn is not None:
        loader = getattr(quantization.calibration_inputs_fn, "loader", None)
        first_sample: Any = next(iter(quantization.calibration_inputs_fn()))
        samples = [
            first_sample
            if first_sample.keywords
            else export_arguments.without_labels(next(iter(models.values())), tuple(first_sample))
        ]
    if samples is None and not all(isinstance(value, ExportedProgram) for value in models.values()):
        raise ValueError(
            "samples is missing: give prepare_qat a list of input tuples, [(x,)], or the recipe calibration_samples="
        )
    with compile_lock(), suppress_warnings():
        module = model_to_train(models)
        prepared_samples = export_arguments.resolve_loaders(samples)
        examples = export_arguments.examples_by_method(prepared_samples, models)
        (example_inputs,) = examples.values()
        notes = export_arguments.batch_size_notes(prepared_samples if loader is None else loader, models, examples)
        return Prepared(
            module, stage, example_inputs, recipe, notes=notes, ranges=ranges, batch_norm_steps=batch_norm_steps
        )
