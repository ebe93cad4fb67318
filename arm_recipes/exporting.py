"""``export``: from a model and a recipe to a program for the target, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.export import ExportRecipe, RecipeType

from arm_recipes import inputs, layouts
from arm_recipes.files import check_writable
from arm_recipes.garbage import old_objects_apart
from arm_recipes.messages import noting, quiet, warn
from arm_recipes.pipeline import Pipeline
from arm_recipes.result import ExportResult
from arm_recipes.runtime.plugin import library
from arm_recipes.sizes import Sized, Sizes, expanded

if TYPE_CHECKING:
    from arm_recipes.caching.export import CachedExport


def export(
    model: Any,
    recipe: ExportRecipe,
    example_inputs: Any = None,
    *,
    output: str | Path | None = None,
    dynamic_shapes: Any = None,
    sizes: Sizes | None = None,
    constant_methods: dict[str, Any] | None = None,
    strict: bool | None = None,
    channels_last: bool = False,
    verify: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> ExportResult:
    """Turn a model into a program for the target of ``recipe``.

    The model comes back as it was: weights, buffers, and the training flag of every module.

    Args:
        model: an ``nn.Module``, a ``GraphModule``, an ``ExportedProgram``, the path of a saved one, or a dict
            of these by method name. A module in training mode is exported in evaluation mode, with a warning.
            What is quantized already is not quantized again.
        recipe: from ``ExportRecipe.get_recipe`` or ``ExportRecipe.combine``.
        example_inputs: samples: a list of input tuples (or one tuple, or one tensor), of dicts of keyword inputs or
            of ``Inputs``, any other iterable of them, a function that returns one, or a ``DataLoader``; for several
            methods a dict of these. Inputs are tensors or NumPy arrays; numbers, booleans, strings and None become
            constants of the program. The first sample is captured; all of them calibrate, unless the recipe has
            calibration data. An ``ExportedProgram`` brings its own.
        output: where to write the ``.pte``; checked before any work starts.
        dynamic_shapes: as ``torch.export.export`` takes them, by method if there are several. Arm targets are compiled
            for fixed shapes, so ``sizes`` must say which.
        sizes: sizes of the dimensions by their names, ``{"batch": [1, 8], "seq": [16, 64]}``: each combination becomes
            a method of its own; all have scales and weights in common. ``run`` takes the smallest that fits.
        constant_methods: values that the program returns by name.
        strict: how ``torch.export`` captures. None: without ``strict``, and with it if that fails.
        channels_last: let the program take inputs of four dimensions, (N, C, H, W), as they lie in
            ``torch.channels_last``, however the samples lie: the NPU computes so, and an input that lies otherwise is
            turned around first. The report tells what that costs.
        verify: run the first example inputs of each method, four at most, and compare every delegate for an Ethos-U
            with the TOSA reference model, number by number. It takes that model's time, about a second a sample
            for MobileNetV2, and a C++ compiler the first time.
        cache_dir: a folder where programs are kept, made if it is not there. An export of what was exported before
            takes its program from there: the captured graph with its lines and weights, samples, calibration data,
            recipe, versions and this package's sources are the same to the last bit. The model is captured, and the
            samples are read, to find that out. Each program is one file, which may be deleted at any time.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        the program and its report.

    Raises:
        ValueError: the model's inputs, the dynamic shapes or the output path cannot be used.
        TypeError: ``model`` or ``recipe`` is something else.
        ExportError: a stage failed, for example because the model raises while it is traced, or ``require_runnable``
            found operators without a kernel; names the module or operator and the line. A NoisyError: rounding leaves
            less of a result than ``min_sqnr``. A BudgetError: it needs more than ``sram_budget`` or ``flash_budget``.
        ArmBackendError: compilation failed, or ``require_full_delegation`` found operators on the CPU.
        RunError: ``verify``, and this machine cannot run the program. A difference is an ExportError.
    """
    check_recipe(recipe)
    if output is not None:
        check_writable(output)
    if verify:
        library()  # now: an export may take minutes
    models = inputs.models_by_method(model)
    example_inputs = inputs.with_loaders(example_inputs)
    examples = inputs.examples_by_method(example_inputs, models)
    notes = [] if sizes or dynamic_shapes else inputs.batch_notes(example_inputs, models, examples)
    sized: dict[str, Sized] = {}
    if sizes is not None:
        models, examples, sized = expanded(models, examples, dynamic_shapes, sizes)
        dynamic_shapes = None
    if channels_last:
        models, examples = layouts.channels_last(models, examples)
    if _only_arm(recipe):
        inputs.check_static(models, dynamic_shapes)

    from arm_recipes.stages.budgets import budgets

    cache = None
    if cache_dir is not None:
        from arm_recipes.caching.export import CachedExport

        cache = CachedExport(cache_dir, recipe, models, examples, sized, constant_methods)
    pipeline = Pipeline(
        recipe if cache is None else cache.recipe,
        models,
        examples,
        dynamic_shapes=dynamic_shapes,
        constant_methods=constant_methods,
        strict=strict,
        progress=progress,
        sized=sized,
    )
    result = _run(pipeline, models, notes, cache)
    for budget in budgets(recipe):
        budget.check(result)
    if verify:
        from arm_recipes.verify import check

        check(result, examples)
    if output is not None:
        result.save(output)
    return result


def _run(
    pipeline: Pipeline, models: dict[str, inputs.Model], told: list[str], cache: CachedExport | None = None
) -> ExportResult:
    """The export itself, or what the cache has of it; ``told`` is what there is to say about its inputs."""
    from arm_backend_core import events

    notes = list(told)
    with old_objects_apart(), quiet(), inputs.evaluation_mode(models) as training, events.record() as log:
        if training:
            which = ", ".join(f"'{method}'" for method in training)
            notes.append(f"the model of {which} is in training mode; it is exported in evaluation mode")
        for note in notes:
            warn(note)
        if cache is not None:
            found = cache.find(pipeline, notes, make=lambda: _run(pipeline, models, told))
            if found is not None:
                return found
        with noting() as said:
            pipeline.run()
    result = pipeline.result(log.rejected, [*notes, *log.notes])
    if cache is not None:
        cache.keep(result, said)
    return result


def check_recipe(recipe: Any) -> None:
    """Find what is no recipe.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(recipe, RecipeType):
        raise TypeError(f"recipe: got the type {recipe.name}; pass ExportRecipe.get_recipe({recipe})")
    if not isinstance(recipe, ExportRecipe):
        order = "the order is export(model, recipe, example_inputs)"
        raise TypeError(f"recipe must be an ExportRecipe, got {type(recipe).__name__}; {order}")


def _only_arm(recipe: ExportRecipe) -> bool:
    partitioners = (recipe.lowering_recipe.partitioners if recipe.lowering_recipe else None) or []
    if isinstance(partitioners, dict):
        partitioners = [partitioner for group in partitioners.values() for partitioner in group]
    modules = [type(partitioner).__module__ for partitioner in partitioners]
    return bool(modules) and all(module.startswith("arm_backend_core.") for module in modules)
