"""Compare a program with its floating-point model (``compare_with_model``) or with another program (``compare``)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums, sum_errors
from arm_recipes._internal.messages import progress_bar, suppress_warnings
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes.comparison.accuracy import (
    Accuracy,
    check_metric,
    compute_accuracy,
    run_model,
)
from arm_recipes.comparison.interpreter_plan import InterpreterPlan, UnsupportedProgramError
from arm_recipes.comparison.layer_errors import compute_layer_errors, compute_program_layer_errors
from arm_recipes.comparison.parallel_run import run_samples
from arm_recipes.comparison.plan_interpreter import PlanInterpreter
from arm_recipes.comparison.program_specs import (
    check_same_interface,
    find_method_report,
    make_argument_spec,
    make_export_spec,
    program_name,
)
from arm_recipes.comparison.result import Comparison, OutputComparison
from arm_recipes.comparison.samples import ComparisonSamples, prepare_program_samples, prepare_samples
from arm_recipes.comparison.worker_job import ComparisonJob, SampleResult, WorkItem
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.recipe import precisions
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.runtime.program import Program
from arm_recipes.stages.quantize import FloatProgram
from arm_recipes.types import Labels, Metric, Samples

#: A note is added if the graph that was rewritten for quantization has an SQNR in dB below this value against the
#: captured model. If the two differ by float32 rounding only, the SQNR is higher.
_MIN_GRAPH_SQNR_DB = 80.0


def compare_with_model(
    result: Artifact,
    samples: Samples,
    labels: Labels | None,
    metric: Metric | None,
    method: str,
    layers: bool | int,
    workers: int | None,
    progress: bool,
) -> Comparison:
    """Compare an export with its floating-point model. Arguments: see ``ExportResult.compare``."""
    start = time.perf_counter()
    _check_arguments(metric, layers, workers)
    with suppress_warnings():
        record = find_method_report(result, method)
        _check_model_unchanged(result, method)
        comparison_samples = prepare_samples(result.input_signatures[method], method, samples, labels, metric)
        spec, notes = make_export_spec(result, record, layers)
        expected: Sequence[list[Any] | None] = [None] * len(comparison_samples.inputs)
        count = _count_layer_samples(layers, spec.plan is not None, len(comparison_samples.inputs))
        original = result.float_reference.float_programs.get(method)
        if spec.plan is None:
            expected = _run_model(result, method, comparison_samples)
        else:
            notes += _graph_difference_notes(spec.plan, original, comparison_samples)
        pairs = zip(comparison_samples.inputs, expected, strict=True)
        items = [WorkItem(index, inputs, index < count, reference) for index, (inputs, reference) in enumerate(pairs)]
        results = _run_items(ComparisonJob(spec, None), items, workers, progress)
        precision = _higher_precision(result.recipe)
        gaps = compute_layer_errors(spec, results, original, comparison_samples.inputs[:count], precision)
    names = [info.name for info in record.outputs]
    return Comparison(
        program=program_name(result),
        reference="the model",
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_compute_output_errors(names, results),
        layers=tuple(gaps),
        accuracy=_compute_accuracy(comparison_samples, metric, results, result.out_specs.get(method)),
        seconds=time.perf_counter() - start,
        notes=(*notes, *_mismatch_notes(results)),
    )


def _higher_precision(recipe: object) -> str:
    """Return the precision above int8 that advice on layers suggests; A16W8 if the recipe is not of this package."""
    return precisions.higher_precision(recipe.type_name) if isinstance(recipe, ArmRecipe) else "A16W8"


@shorten_tracebacks
def compare(
    a: Artifact | Program | str | Path | bytes,
    b: Artifact | Program | str | Path | bytes,
    samples: Samples,
    labels: Labels | None = None,
    *,
    metric: Metric | None = None,
    method: str = "forward",
    layers: bool | int = True,
    workers: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare program ``b`` with program ``a``, both executed on this machine.

    Args:
        a: the reference: an ``ExportResult`` or a saved program (a path, bytes or a ``Program``, which is loaded
            again). If ``a`` and ``b`` are both an ``ExportResult``, layers of equal name and shape are compared, too,
            unless a captured program has a loop or branch that the comparison cannot interpret.
        b: the program to compare, of the same types as ``a``.
        samples: inputs of the model, in floating point even if a program has ``quantized_io``.
        labels: as for ``ExportResult.compare``.
        metric: as for ``ExportResult.compare``.
        method: as for ``ExportResult.compare``.
        layers: as for ``ExportResult.compare``.
        workers: as for ``ExportResult.compare``.
        progress: as for ``ExportResult.compare``.

    Raises:
        ValueError: an argument is invalid, or the programs differ in inputs or outputs.
        RunError: this machine cannot run one of the programs.
    """
    start = time.perf_counter()
    _check_arguments(metric, layers, workers)
    with suppress_warnings():
        (spec_a, notes_a), (spec_b, notes_b) = (
            make_argument_spec(x, name, method, layers) for x, name in ((a, "a"), (b, "b"))
        )
        check_same_interface(spec_a, spec_b)
        artifact = next((x for x in (a, b) if isinstance(x, Artifact)), None)
        if artifact is None:
            comparison_samples = prepare_program_samples(spec_a.inputs, method, samples, labels, metric)
        else:
            comparison_samples = prepare_samples(artifact.input_signatures[method], method, samples, labels, metric)
        has_layers = spec_a.plan is not None and spec_b.plan is not None
        count = _count_layer_samples(layers, has_layers, len(comparison_samples.inputs))
        items = [WorkItem(index, inputs, index < count) for index, inputs in enumerate(comparison_samples.inputs)]
        results = _run_items(ComparisonJob(spec_b, spec_a), items, workers, progress)
    names = [info.name for info in spec_b.outputs]
    notes = list(dict.fromkeys((*notes_a, *notes_b, *_mismatch_notes(results))))
    if layers and not (isinstance(a, Artifact) and isinstance(b, Artifact)):
        notes.append(
            "layers are not compared: this needs two ExportResults, as a saved program has no record of its layers"
        )
    return Comparison(
        program=program_name(b),
        reference=program_name(a),
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_compute_output_errors(names, results),
        layers=tuple(compute_program_layer_errors(spec_b, results)),
        accuracy=_compute_accuracy(
            comparison_samples, metric, results, artifact.out_specs.get(method) if artifact else None
        ),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _count_layer_samples(layers: bool | int, has_layers: bool, samples: int) -> int:
    """Return the number of samples to compare layers with."""
    if not has_layers or not layers:
        return 0
    return samples if layers is True else min(layers, samples)


def _check_arguments(metric: Any, layers: Any, workers: Any) -> None:
    if not isinstance(layers, int) or layers < 0:
        raise ValueError(f"layers: {layers!r} is neither a bool nor a number of samples")
    check_metric(metric)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers: {workers!r} is not a number of processes; give 1 or more, or None")


def _check_model_unchanged(result: Artifact, method: str) -> None:
    changed = result.float_reference.changed_tensors(method)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(
            f"the model has been changed since the export: '{changed[0]}'{more} was written, so the reference for the "
            "comparison is lost. Compare before you continue training, or export again"
        )


def _run_items(
    job: ComparisonJob, items: Sequence[WorkItem], workers: int | None, progress: bool
) -> list[SampleResult]:
    def with_progress(results: Iterable[Any]) -> Iterable[Any]:
        return progress_bar(results, "comparing", "sample", shown=progress, count=len(items))

    return run_samples(job, items, workers, with_progress)


def _run_model(result: Artifact, method: str, samples: ComparisonSamples) -> list[list[Any] | None]:
    """Run the model as it was captured, in PyTorch; return the outputs of each sample.

    The exported program first returns the new values of mutated inputs. The model does not return them, so each list
    begins with one None for each of these values. The comparison skips them.
    """
    original = result.float_reference.float_programs.get(method)
    captured = result.exported_programs[method] if original is None else original.program
    count = len(find_method_report(result, method).outputs)
    outputs = map(pytree.tree_leaves, run_model(captured, samples.samples))
    return [[None] * (count - len(leaves)) + leaves for leaves in outputs]


def _graph_difference_notes(
    plan: InterpreterPlan, original: FloatProgram | None, samples: ComparisonSamples
) -> list[str]:
    """Return a note if the graph rewritten for quantization deviates from the captured model.

    Both graphs run the first sample in floating point. Programs with state, and programs that a plan cannot represent,
    are not checked.
    """
    if original is None or plan.has_state:
        return []
    try:
        captured = InterpreterPlan.from_program(original.program)
    except UnsupportedProgramError:
        return []
    outputs = []
    for program in (captured, plan):
        evaluation = PlanInterpreter(program)
        with torch.no_grad():
            for _ in evaluation.run(samples.inputs[0]):
                pass
        outputs.append(evaluation.outputs)
    gaps = [ErrorSums.of(x, y).metrics.sqnr for x, y in zip(*outputs, strict=True) if isinstance(x, torch.Tensor)]
    worst = min(gaps, default=_MIN_GRAPH_SQNR_DB)
    if worst >= _MIN_GRAPH_SQNR_DB:
        return []
    return [f"the graph rewritten for quantization has an SQNR of {worst:.1f} dB against the model in floating point"]


def _compute_output_errors(names: Sequence[str], results: Sequence[SampleResult]) -> tuple[OutputComparison, ...]:
    gaps = []
    for index, name in enumerate(names):
        parts = [result.sums[index] for result in results if index in result.sums]
        gaps.append(OutputComparison(name, sum_errors(parts).metrics if parts else None))
    return tuple(gaps)


def _mismatch_notes(results: Sequence[SampleResult]) -> list[str]:
    mismatched = dict.fromkeys(name for result in results for name in result.mismatched)
    return [
        f"delegate '{name}' computes other values than its TOSA graph, from which the errors of its layers are "
        "computed; export with verify=True to find the first operator that differs"
        for name in mismatched
    ]


def _compute_accuracy(
    samples: ComparisonSamples, metric: Metric | None, results: Sequence[SampleResult], spec: Any
) -> Accuracy | None:
    reference, program = (
        [_unflatten_outputs(x, spec) for x in side]
        for side in ([result.reference for result in results], [result.program for result in results])
    )
    return compute_accuracy(
        reference, program, samples.originals, samples.labels, metric, has_padding=samples.has_padding
    )


def _unflatten_outputs(outputs: list[Any], spec: Any) -> Any:
    """Restore the model's output structure. The new values of mutated inputs come first and are dropped.

    ``spec`` is None for two saved programs. All values are then returned: in a list, or a single value without a list.
    """
    if spec is None:
        return outputs[0] if len(outputs) == 1 else outputs
    return pytree.tree_unflatten(outputs[len(outputs) - spec.num_leaves :], spec)
