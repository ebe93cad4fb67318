"""``export``: from a model and a recipe to a program for the target, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from executorch.export import ExportRecipe

from arm_recipes._internal.files import check_writable
from arm_recipes._internal.old_names import reject_old_names
from arm_recipes.pipeline.export import check_recipe, run_export
from arm_recipes.result import ExportResult
from arm_recipes.samples.sizes import Sizes


@reject_old_names(example_inputs="samples")
def export(
    model: Any,
    recipe: ExportRecipe,
    samples: Any = None,
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
        samples: samples: a list of input tuples (or one tuple, or one tensor), of dicts of keyword inputs or
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
    artifact = run_export(
        model,
        recipe,
        samples,
        dynamic_shapes=dynamic_shapes,
        sizes=sizes,
        constant_methods=constant_methods,
        strict=strict,
        channels_last=channels_last,
        verify=verify,
        cache_dir=cache_dir,
        progress=progress,
    )
    result = ExportResult.of(artifact)
    if output is not None:
        result.save(output)
    return result
