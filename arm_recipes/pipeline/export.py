"""The export: normalize the arguments, run the pipeline or take the program from the cache, and verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.export import ExportRecipe, RecipeType

from arm_recipes._internal.compile_lock import check_fork, compile_lock
from arm_recipes._internal.frozen_gc import frozen_gc
from arm_recipes._internal.messages import deduplicate_warnings, record_warnings, suppress_warnings, warn
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.pipeline.pipeline import Pipeline
from arm_recipes.recipe.compile_specs import normalize_recipe_name
from arm_recipes.runtime.host_plugin import load_plugin
from arm_recipes.samples import export_arguments, memory_format
from arm_recipes.samples.mismatch import check_arguments
from arm_recipes.samples.shape_variants import ShapeVariants, expand_methods_by_size
from arm_recipes.types import DynamicShapes, Model, Samples, Sizes

if TYPE_CHECKING:
    from arm_recipes.pipeline.cache.lookup import ExportCacheLookup
    from arm_recipes.pipeline.unlowered_programs import UnloweredPrograms


def run_export(
    model: Model,
    recipe: ExportRecipe,
    samples: Samples | None = None,
    *,
    dynamic_shapes: DynamicShapes | None = None,
    sizes: Sizes | None = None,
    constant_methods: dict[str, Any] | None = None,
    strict: bool | None = None,
    channels_last: bool = False,
    verify: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Artifact:
    """Export a model without writing a file. The arguments are those of ``arm_recipes.export``."""
    check_recipe(recipe)
    check_fork()
    if verify:
        load_plugin()  # raises an error without a C++ compiler, before the export, which may take minutes
    models = export_arguments.models_by_method(model)
    samples = export_arguments.resolve_loaders(samples)
    examples = export_arguments.examples_by_method(samples, models)
    for method, method_examples in examples.items():
        check_arguments(models[method], method_examples[0], f"samples[0] of method '{method}'")
    notes = [] if sizes or dynamic_shapes else export_arguments.batch_size_notes(samples, models, examples)
    shape_variants: dict[str, ShapeVariants] = {}
    if sizes is not None:
        models, examples, shape_variants = expand_methods_by_size(models, examples, dynamic_shapes, sizes)
        dynamic_shapes = None
    if channels_last:
        models, examples = memory_format.to_channels_last(models, examples)
    if _uses_only_arm_partitioners(recipe):
        export_arguments.reject_dynamic_shapes(models, dynamic_shapes)

    def attempt(recipe: ExportRecipe) -> Artifact:
        cache = _open_cache(cache_dir, recipe, models, examples, shape_variants, constant_methods)
        pipeline = Pipeline(
            recipe if cache is None else cache.recipe,
            models,
            examples,
            dynamic_shapes=dynamic_shapes,
            constant_methods=constant_methods,
            strict=strict,
            progress=progress,
            shape_variants=shape_variants,
        )
        return _run_or_look_up(pipeline, models, notes, cache)

    with deduplicate_warnings():
        result = _export_within_budgets(recipe, attempt, notes, reuse=cache_dir is None, progress=progress)
    if verify:
        from arm_recipes.pipeline.verify import verify_program

        verify_program(result, examples)
    return result


def _sram_bytes(result: Artifact) -> int:
    return 0 if result.report.ram is None else result.report.ram.sram_bytes


def export_unlowered(
    unlowered: UnloweredPrograms, recipe: ExportRecipe, *, verify: bool = False, progress: bool = True
) -> Artifact:
    """Lower programs that are already captured and quantized.

    Args:
        unlowered: the programs.
        recipe: a recipe that quantizes the model in the same way; see ``retarget.find_quantization_difference``.
        verify: as in ``run_export``.
        progress: as in ``run_export``.
    """
    if verify:
        load_plugin()

    def attempt(recipe: ExportRecipe) -> Artifact:
        return _lower_programs(unlowered, recipe, (), progress)

    with deduplicate_warnings():
        result = _export_within_budgets(recipe, attempt, [], reuse=True, progress=progress)
    if verify:
        from arm_recipes.pipeline.verify import verify_program

        verify_program(result, unlowered.examples)
    return result


def _lower_programs(
    unlowered: UnloweredPrograms, recipe: ExportRecipe, notes: Sequence[str], progress: bool
) -> Artifact:
    from arm_backend_core import compilation_log

    with compile_lock(), frozen_gc(), suppress_warnings(), compilation_log.open_log() as log:
        pipeline = Pipeline.resume(unlowered, recipe, progress=progress)
        pipeline.run(notes)
    return pipeline.create_artifact(log.refused_operators, log.notes)


def _export_within_budgets(
    recipe: ExportRecipe, attempt: Callable[[ExportRecipe], Artifact], notes: list[str], *, reuse: bool, progress: bool
) -> Artifact:
    """Export, and with ``optimise="auto"`` again for less SRAM if the program exceeds ``sram_budget``.

    Args:
        recipe: the recipe.
        attempt: exports with a recipe.
        notes: notes about the arguments; a note on further exports is appended.
        reuse: whether further exports only lower the quantized programs of the first export again. If False, or if the
            first export has no such programs, each further export calls ``attempt``.
        progress: show a progress bar.

    Raises:
        BudgetError: the program exceeds a budget.
    """
    from arm_recipes.pipeline.budgets import budget_passes, recipes_within_budget

    requested, result = recipe, attempt(recipe)
    smaller_recipes = recipes_within_budget(recipe, result)
    unlowered = result.export_objects.unlowered if reuse else None
    note = "compiled again for less SRAM of the NPU: the program with the fewest cycles exceeds sram_budget"
    if smaller_recipes and unlowered is None:
        notes.append(note)
    elif smaller_recipes:
        warn(note)
    for smaller_recipe in smaller_recipes:
        if unlowered is None:
            smaller = attempt(smaller_recipe)
        else:
            smaller = _lower_programs(unlowered, smaller_recipe, [note], progress)
        smaller.requested_recipe = requested
        result = min(result, smaller, key=_sram_bytes)  # if none fits, the error describes the smallest one
        if not any(budget.exceeds_sram(result) for budget in budget_passes(recipe)):
            break
    for budget in budget_passes(recipe):
        budget.check(result, is_limited=bool(smaller_recipes))
    return result


def _open_cache(cache_dir: str | Path | None, *export: Any) -> ExportCacheLookup | None:
    if cache_dir is None:
        return None
    from arm_recipes.pipeline.cache.lookup import ExportCacheLookup

    return ExportCacheLookup(cache_dir, *export)


def _run_or_look_up(
    pipeline: Pipeline,
    models: dict[str, export_arguments.Model],
    input_notes: list[str],
    cache: ExportCacheLookup | None = None,
) -> Artifact:
    """Run the pipeline, or take the artifact from the cache. ``input_notes`` are notes about the arguments."""
    from arm_backend_core import compilation_log

    notes = list(input_notes)
    with (
        compile_lock(),
        frozen_gc(),
        suppress_warnings(),
        export_arguments.evaluation_mode(models) as training,
        compilation_log.open_log() as log,
    ):
        if training:
            method_names = ", ".join(f"'{method}'" for method in training)
            notes.append(f"the model of {method_names} is in training mode; it is exported in evaluation mode")
        for note in notes:
            warn(note)
        if cache is not None:
            cached = cache.look_up(pipeline, notes, run_export=lambda: _run_or_look_up(pipeline, models, input_notes))
            if cached is not None:
                return cached
        with record_warnings() as warnings:
            pipeline.run(notes)
    result = pipeline.create_artifact(log.refused_operators, log.notes)
    if cache is not None:
        cache.store(result, warnings)
    return result


def check_recipe(recipe: Any, function: str = "export") -> None:
    """Check the type of the argument ``recipe``.

    Args:
        recipe: the argument.
        function: name of the called function, for the message.

    Raises:
        TypeError: ``recipe`` is not an ``ExportRecipe``.
    """
    if isinstance(recipe, RecipeType):
        raise TypeError(f"recipe: got the type {recipe.name}; pass ExportRecipe.get_recipe({recipe})")
    if isinstance(recipe, str):
        raise TypeError(f"recipe: got the name {recipe!r}; {_advise_recipe(recipe)}")
    if not isinstance(recipe, ExportRecipe):
        order = f"the order is {function}(model, recipe, samples)"
        raise TypeError(f"recipe must be an ExportRecipe, got {type(recipe).__name__}; {order}")


def _advise_recipe(name: str) -> str:
    try:
        return f"pass ExportRecipe.get_recipe({normalize_recipe_name(name)!r}, ...)"
    except ValueError as error:
        return f"{error}; pass ExportRecipe.get_recipe(...)"


def _uses_only_arm_partitioners(recipe: ExportRecipe) -> bool:
    partitioners = (recipe.lowering_recipe.partitioners if recipe.lowering_recipe else None) or []
    if isinstance(partitioners, dict):
        partitioners = [partitioner for group in partitioners.values() for partitioner in group]
    modules = [type(partitioner).__module__ for partitioner in partitioners]
    return bool(modules) and all(module.startswith("arm_backend_core.") for module in modules)
