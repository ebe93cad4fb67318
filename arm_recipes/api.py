"""``export``: compile a PyTorch model for an Arm target in one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from executorch.export import ExportRecipe

from arm_recipes._internal.files import check_writable
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes._internal.unknown_arguments import reject_unknown_arguments
from arm_recipes.pipeline.export import check_recipe, run_export
from arm_recipes.recipe.options import OPTIONS
from arm_recipes.result import ExportResult
from arm_recipes.types import DynamicShapes, Labels, Metric, Model, Samples, Sizes


@reject_unknown_arguments({"example_inputs": "samples"}, {"ExportRecipe.get_recipe(recipe, ...)": OPTIONS})
@shorten_tracebacks
def export(
    model: Model,
    recipe: ExportRecipe,
    samples: Samples | None = None,
    *,
    labels: Labels | bool | None = None,
    metric: Metric | None = None,
    output: str | Path | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    sizes: Sizes | None = None,
    constant_methods: dict[str, Any] | None = None,
    strict: bool | None = None,
    channels_last: bool = False,
    verify: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> ExportResult:
    """Compile a model for the target of ``recipe``.

    Captures the model with ``torch.export``, quantizes it if the recipe says so, delegates what the target supports,
    and emits an ExecuTorch program. The model is not modified: weights, buffers and the training flag of every module
    are the same after the call.

    Args:
        model (nn.Module, GraphModule, ExportedProgram, str, Path or dict): the model to compile. A path names a file
            that ``torch.export.save`` wrote. A dict maps method names to models and compiles a program with several
            methods. A module in training mode is exported in evaluation mode, with a warning. A model that is already
            quantized is not quantized again.
        recipe (ExportRecipe): target, precision and options, from ``ExportRecipe.get_recipe`` or
            ``ExportRecipe.combine``.
        samples (iterable, DataLoader, callable or dict, optional): sample inputs. An iterable of samples, a function
            that returns such an iterable, or a ``DataLoader``. Each sample is a tuple of positional inputs, a dict of
            keyword inputs, or ``Inputs``. A single tuple or tensor is one sample, but a tuple of tuples or dicts is
            several. A dict maps method names to samples.
            The first sample is used to capture the model. All samples calibrate the quantization ranges, unless the
            recipe has ``calibration_samples``. Inputs are tensors or NumPy arrays; numbers, booleans, strings and None
            become constants of the program. Default: the example inputs of an ``ExportedProgram``.
        labels (iterable or True, optional): class labels, one for each batch item of the samples, in their order. The
            report then contains the expected top-1 accuracy: the accuracy of the floating-point model, the accuracy of
            the quantized program, and the difference. Both are computed in PyTorch. True: the labels follow the inputs
            in each sample, as in the batches of a ``DataLoader`` or in ``[(x, label)]``. Default: None, no accuracy.
        metric (callable, optional): ``metric(outputs, sample)`` returns a number, higher is better. The report
            contains the mean of this number over the samples instead of the top-1 accuracy. A sample may have further
            items after the inputs, such as the expected output. ``metric`` receives these items, but the model does
            not.
        output (str or Path, optional): write the ``.pte`` to this path. The path is checked before compilation starts.
        dynamic_shapes (dict, tuple or list, optional): dynamic dimensions, as in ``torch.export.export``; for several
            methods, a dict by method name. Requires ``sizes``, because Arm targets are compiled for fixed shapes.
        sizes (dict, optional): the sizes to compile for, by the name of the dimension, such as
            ``{"batch": [1, 8], "seq": [16, 64]}``. A dimension of an ``ExportedProgram`` is named by the first input
            and axis that have it, such as ``x_0``. Each combination becomes a method. All methods share scales and
            weights. ``run`` selects the smallest method that the inputs fit into, and pads the inputs on request.
        constant_methods (dict, optional): methods that return a constant, as ``{name: value}``.
        strict (bool, optional): the ``strict`` argument of ``torch.export.export``. Default: None, which tries False
            first and True if that fails.
        channels_last (bool): compile for inputs of shape (N, C, H, W) in ``torch.channels_last`` memory format,
            whatever the memory format of the samples. The NPU computes in NHWC, so the program needs no transpose at
            its inputs. Without this option, the report shows the cycles of these transposes. Default: False.
        verify (bool): run up to four samples of each method and compare every Ethos-U delegate with the TOSA reference
            model, bit by bit. For methods that run entirely in int8 kernels on the CPU, such as those of
            ``CORTEX_M_INT8``, compare the outputs with a second implementation of the kernels. This takes about a
            second per sample for MobileNetV2. The first call needs a C++ compiler. Default: False.
        cache_dir (str or Path, optional): a folder that caches compiled programs; it is created if needed. The cache
            key is a digest of the captured graph with its source lines and weights, the samples, the calibration data,
            the recipe, tool versions, and the sources of ``arm_recipes`` and ``arm_backend_core``. Also on a cache hit,
            the call captures the model and reads the samples, because it computes the key from them. Each program is
            one file, which can be deleted at any time.
        progress (bool): show a progress bar if standard error is a terminal. Default: True.

    Returns:
        ExportResult: the program and its report.

    Raises:
        ValueError: the inputs, labels, metric, dynamic shapes or the output path are invalid.
        TypeError: ``model`` or ``recipe`` has the wrong type.
        ExportError: a stage failed, for example because the model raised an exception during tracing. The message
            names the module or operator and the line.
        NotRunnableError: ``require_runnable=True``, and an operator on the CPU has no kernel.
        AccuracyError: the SQNR of an output is below ``min_sqnr``, or it cannot be computed.
        BudgetError: the program exceeds ``sram_budget``, ``flash_budget``, or the size of a memory in the option
            ``memory``.
        VerificationError: ``verify=True``, and a delegate differs from the TOSA reference model, reads uninitialized
            memory or has a data hazard, or the outputs of int8 kernels differ from their second implementation.
        ArmBackendError: compilation failed, or ``require_full_delegation=True`` and operators remain on the CPU.
        RunError: ``verify=True``, and the program cannot run on this machine.

    Example::

        >>> recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=256)
        >>> result = export(model, recipe, [(torch.randn(1, 3, 224, 224),)])
        >>> result.save("model.pte")
    """
    check_recipe(recipe)
    if output is not None:
        check_writable(output)
    labelled = None
    if labels is not None or metric is not None:
        from arm_recipes.comparison.expected_accuracy import separate_labels

        labelled = separate_labels(model, samples, labels, metric, sizes)
    artifact = run_export(
        model if labelled is None else labelled.models,
        recipe,
        samples if labelled is None else labelled.samples,
        dynamic_shapes=dynamic_shapes,
        sizes=sizes,
        constant_methods=constant_methods,
        strict=strict,
        channels_last=channels_last,
        verify=verify,
        cache_dir=cache_dir,
        progress=progress,
    )
    if labelled is not None:
        from arm_recipes.comparison.expected_accuracy import measure_expected_accuracy

        accuracy = measure_expected_accuracy(artifact, labelled)
        artifact.report = replace(artifact.report, accuracy=accuracy)
    result = ExportResult.from_artifact(artifact)
    if output is not None:
        result.save(output)
    return result
