"""``compare``: compare a program with its floating-point model or with another program, by output and by layer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import (
    ErrorSums,
    IsolatedErrorSums,
    decibels,
    sum_errors,
    sum_isolated_errors,
)
from arm_recipes._internal.messages import progress_bar, suppress_warnings
from arm_recipes.comparison.accuracy import (
    Accuracy,
    Metric,
    check_metric,
    compute_metric,
    compute_top1_accuracy,
    run_model,
)
from arm_recipes.comparison.advice import LayerDiagnosis, QuantizedConstant
from arm_recipes.comparison.dispatch import run_samples
from arm_recipes.comparison.interpreter_plan import (
    ComparedTensor,
    InterpreterPlan,
    PlanInterpreter,
    UnsupportedProgramError,
    dequantize_constant,
)
from arm_recipes.comparison.result import WORST_COUNT, Comparison, IsolatedError, LayerGap, OutputGap
from arm_recipes.comparison.samples import ComparisonSamples, prepare_program_samples, prepare_samples
from arm_recipes.comparison.worker_job import ComparisonJob, ProgramSpec, SampleResult, WorkItem, measure_layer_effects
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.report.record import MethodReport
from arm_recipes.runtime.load import load
from arm_recipes.runtime.program import Program
from arm_recipes.stages.quantize import FloatProgram

__all__ = ["Metric", "compare", "compare_with_model"]

#: Number of samples that measure the output SQNR with one quantized layer.
_EFFECT_SAMPLES = 4
#: The reference graph is rewritten for quantization. Its float32 rounding differences stay above this SQNR in dB.
_MIN_GRAPH_SQNR = 80.0


def compare_with_model(
    result: Artifact,
    samples: Any,
    labels: Any,
    metric: Metric | None,
    method: str,
    layers: bool | int,
    workers: int | None,
    progress: bool,
) -> Comparison:
    """See ``ExportResult.compare``."""
    start = time.perf_counter()
    _check_arguments(metric, layers, workers)
    with suppress_warnings():
        record = _find_method(result, method)
        _check_unchanged(result, method)
        prepared = prepare_samples(result.patterns[method], method, samples, labels, metric)
        spec, notes = _program_spec(result, record, layers)
        expected: Sequence[list[Any] | None] = [None] * len(prepared.inputs)
        count = _count_layer_samples(layers, spec.plan is not None, len(prepared.inputs))
        original = result.float_reference.float_programs.get(method)
        if spec.plan is None:
            expected = _run_model(result, method, prepared)
        else:
            notes += _graph_difference_notes(spec.plan, original, prepared)
        pairs = zip(prepared.inputs, expected, strict=True)
        items = [WorkItem(index, inputs, index < count, reference) for index, (inputs, reference) in enumerate(pairs)]
        results = _run_items(ComparisonJob(spec, None), items, workers, progress)
        gaps = _layer_gaps(spec, results, original, prepared.inputs[:count])
    names = [info.name for info in record.outputs]
    return Comparison(
        program=_short_recipe_name(result.report.recipe),
        reference="the model",
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_output_gaps(names, results),
        layers=tuple(gaps),
        accuracy=_accuracy(prepared, labels, metric, results, result.out_specs.get(method)),
        seconds=time.perf_counter() - start,
        notes=(*notes, *_mismatch_notes(results)),
    )


def compare(
    a: Artifact | Program | str | Path | bytes,
    b: Artifact | Program | str | Path | bytes,
    samples: Any,
    labels: Any = None,
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
            again). Layers are compared if both are exports of one model; they are matched by name.
        b: the program to compare, of the same types as ``a``.
        samples: inputs of the model; floating-point values also if a program has ``quantized_io``.
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
            _spec_of_argument(x, name, method, layers) for x, name in ((a, "a"), (b, "b"))
        )
        _check_same_interface(spec_a, spec_b)
        artifact = next((x for x in (a, b) if isinstance(x, Artifact)), None)
        if artifact is None:
            prepared = prepare_program_samples(spec_a.inputs, method, samples, labels, metric)
        else:
            prepared = prepare_samples(artifact.patterns[method], method, samples, labels, metric)
        has_layers = spec_a.plan is not None and spec_b.plan is not None
        count = _count_layer_samples(layers, has_layers, len(prepared.inputs))
        items = [WorkItem(index, inputs, index < count) for index, inputs in enumerate(prepared.inputs)]
        results = _run_items(ComparisonJob(spec_b, spec_a), items, workers, progress)
    names = [info.name for info in spec_b.outputs]
    notes = list(dict.fromkeys((*notes_a, *notes_b, *_mismatch_notes(results))))
    if layers and not has_layers:
        notes.append(
            "layers are not compared: this needs two ExportResults, as a saved program has no record of its layers"
        )
    return Comparison(
        program=_program_name(b),
        reference=_program_name(a),
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_output_gaps(names, results),
        layers=tuple(_program_layer_gaps(spec_b, results)),
        accuracy=_accuracy(prepared, labels, metric, results, artifact.out_specs.get(method) if artifact else None),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _count_layer_samples(layers: bool | int, has_layers: bool, samples: int) -> int:
    """Return the number of samples to compare layers with."""
    if not has_layers:
        return 0
    return samples if layers is True else min(layers, samples)


def _check_arguments(metric: Any, layers: Any, workers: Any) -> None:
    if not isinstance(layers, int) or layers < 0:
        raise ValueError(f"layers: {layers!r} is neither a bool nor a number of samples")
    check_metric(metric)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers: {workers!r} is not a number of processes; give 1 or more, or None")


def _check_unchanged(result: Artifact, method: str) -> None:
    changed = result.float_reference.changed_tensors(method)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(
            f"the model has been changed since the export: '{changed[0]}'{more} was written, so the reference for the "
            "comparison is lost. Compare before you continue training, or export again"
        )


def _check_same_interface(a: ProgramSpec, b: ProgramSpec) -> None:
    if len(a.inputs) != len(b.inputs):
        raise ValueError(
            f"b: '{b.method}' takes {len(b.inputs)} inputs, and that of a takes {len(a.inputs)}; give two programs of "
            "one model"
        )
    shapes_by_program = [[tuple(getattr(info, "shape", ())) for info in spec.outputs] for spec in (a, b)]
    if shapes_by_program[0] != shapes_by_program[1]:
        shapes_a, shapes_b = (
            ", ".join(str(list(shape)) for shape in shapes) or "nothing" for shapes in shapes_by_program
        )
        raise ValueError(
            f"b: '{b.method}' returns {shapes_b}, and that of a returns {shapes_a}; give two programs of one model"
        )


def _find_method(result: Artifact, method: str) -> MethodReport:
    methods = {record.name: record for record in result.report.methods}
    if method in methods:
        return methods[method]
    sized = result.sized.get(method)
    hint = f"it has one method per input size: {', '.join(sized.methods)}" if sized else f"it has: {', '.join(methods)}"
    raise ValueError(f"method: the program has no '{method}'; {hint}")


def _program_spec(result: Artifact, record: MethodReport, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    """Build the spec of an export, with interpreter plan and delegate taps where available, and notes."""
    from arm_backend_core.partitioner import ArmPartitioner

    method, kept = record.name, result.float_reference
    exported, original = result.exported_programs[method], kept.float_programs.get(method)
    spec = ProgramSpec(result.buffer, method, record.inputs, record.outputs, None, ())
    try:
        plan = InterpreterPlan.from_program(exported, original.floats if original is not None else {})
    except UnsupportedProgramError as reason:
        note = f"layers are not compared: the captured program has {reason}"
        return spec, [note] if layers else []
    buffers = {name: node for node, name in exported.graph_signature.inputs_to_buffers.items()}
    plan.constants |= {buffers[name]: tensor for name, tensor in kept.states[method].items()}
    spec, notes = replace(spec, plan=plan), []
    if original is None and plan.is_quantized:
        notes.append(
            "the model was quantized before export: the reference uses its quantized weights, without other rounding"
        )
    partitioner = next((x for x in kept.partitioners.get(method, ()) if isinstance(x, ArmPartitioner)), None)
    if layers and partitioner is not None and record.delegates:
        from arm_recipes.comparison.intermediate_outputs import tap_delegates

        delegate_taps, tap_notes = tap_delegates(
            exported, partitioner, record.delegates, (compared.name for compared in plan.tensors)
        )
        spec, notes = replace(spec, taps=tuple(delegate_taps)), [*notes, *tap_notes]
    return spec, notes


def _spec_of_argument(value: Any, argument: str, method: str, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    if isinstance(value, Artifact):
        return _program_spec(value, _find_method(value, method), layers)
    if not isinstance(value, (Program, str, Path, bytes)):
        raise ValueError(
            f"{argument}: must be an ExportResult or a program (a path, bytes or the result of load), got "
            f"{type(value).__name__}"
        )
    program = value if isinstance(value, Program) else load(value)
    signature = program.signature(method)
    return ProgramSpec(program.data, method, signature.inputs, signature.outputs, None, ()), []


def _program_name(value: Any) -> str:
    if isinstance(value, Artifact):
        return _short_recipe_name(value.report.recipe)
    return f"'{value}'" if isinstance(value, (str, Path)) else "a program"


def _short_recipe_name(recipe: str) -> str:
    return recipe.removeprefix("arm_recipes_").upper()


def _run_items(
    job: ComparisonJob, items: Sequence[WorkItem], workers: int | None, progress: bool
) -> list[SampleResult]:
    def with_progress(results: Iterable[Any]) -> Iterable[Any]:
        return progress_bar(results, "comparing", "sample", shown=progress, count=len(items))

    return run_samples(job, items, workers, with_progress)


# -- reference outputs -----------------------------------------------------------------------------------------------


def _run_model(result: Artifact, method: str, samples: ComparisonSamples) -> list[list[Any] | None]:
    """Run the captured program in PyTorch; written-back inputs are not compared and yield None."""
    original = result.float_reference.float_programs.get(method)
    captured = result.exported_programs[method] if original is None else original.program
    count = len(_find_method(result, method).outputs)
    outputs = map(pytree.tree_leaves, run_model(captured, samples.samples))
    return [[None] * (count - len(leaves)) + leaves for leaves in outputs]


def _graph_difference_notes(
    plan: InterpreterPlan, original: FloatProgram | None, samples: ComparisonSamples
) -> list[str]:
    """Return a note if the graph rewritten for quantization deviates from the captured model in floating point."""
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
    worst = min(gaps, default=_MIN_GRAPH_SQNR)
    if worst >= _MIN_GRAPH_SQNR:
        return []
    return [f"the graph rewritten for quantization has an SQNR of {worst:.1f} dB against the model in floating point"]


# -- figures ---------------------------------------------------------------------------------------------------------


def _output_gaps(names: Sequence[str], results: Sequence[SampleResult]) -> tuple[OutputGap, ...]:
    gaps = []
    for index, name in enumerate(names):
        parts = [result.sums[index] for result in results if index in result.sums]
        gaps.append(OutputGap(name, sum_errors(parts).metrics if parts else None))
    return tuple(gaps)


def _mismatch_notes(results: Sequence[SampleResult]) -> list[str]:
    mismatched = dict.fromkeys(name for result in results for name in result.mismatched)
    return [
        f"delegate '{name}' computes other values than its TOSA graph, the source of its layers' figures; export "
        "with verify=True to find the first operator that differs"
        for name in mismatched
    ]


def _layer_gap(tensor: ComparedTensor, parts: Sequence[ErrorSums], tapped: frozenset[str]) -> LayerGap:
    return LayerGap(
        name=tensor.node,
        operator=tensor.operator,
        module=tensor.module,
        source=tensor.source,
        dtype=tensor.dtype,
        scale=tensor.grid.scale if tensor.grid else None,
        zero_point=tensor.grid.zero_point if tensor.grid else None,
        moves=tensor.is_data_movement,
        value_source="program" if tensor.name in tapped else "PyTorch",
        gap=sum_errors(parts).metrics,
    )


def _layer_gaps(
    spec: ProgramSpec,
    results: Sequence[SampleResult],
    original: FloatProgram | None,
    inputs: Sequence[Sequence[torch.Tensor]],
) -> list[LayerGap]:
    plan = spec.plan
    if plan is None:
        return []
    output_sqnr = _isolated_output_sqnr(plan, results, inputs)
    tapped, ranges = spec.tapped_tensors, original.ranges if original is not None else {}
    gaps = []
    for compared in plan.tensors:
        parts = [result.layers[compared.name] for result in results if compared.name in result.layers]
        if not parts:
            continue
        gap = _layer_gap(compared, parts, tapped)
        errors = _isolated_errors(compared, results)
        if compared.grid is not None and errors.count:
            weights = tuple(_quantized_constant(plan, name, original) for name in compared.weights)
            calibrated = ranges.get(compared.name)
            isolated = IsolatedError(
                sqnr=decibels(errors.signal, errors.noise),
                max_error=errors.max_error,
                clipped=errors.clipped / errors.count,
                range=compared.grid.bounds,
                values=(errors.low, errors.high),
                calibrated=calibrated,
                p999=errors.p999,
                output=output_sqnr.get(compared.name),
                advice=LayerDiagnosis(
                    errors, compared.grid, compared.is_fixed, calibrated, weights, compared.readers
                ).advice,
            )
            gap = replace(gap, isolated=isolated, weights=weights)
        gaps.append(gap)
    return gaps


def _isolated_errors(tensor: ComparedTensor, results: Sequence[SampleResult]) -> IsolatedErrorSums:
    return sum_isolated_errors(result.isolated[tensor.name] for result in results if tensor.name in result.isolated)


def _isolated_output_sqnr(
    plan: InterpreterPlan, results: Sequence[SampleResult], inputs: Sequence[Sequence[torch.Tensor]]
) -> dict[str, float]:
    """Measure the first output's SQNR with one layer quantized, for each of the worst isolated layers."""
    if plan.has_state:
        return {}
    errors_by_tensor = {compared: _isolated_errors(compared, results) for compared in plan.tensors}
    sqnr_by_tensor = {
        compared: decibels(errors.signal, errors.noise) for compared, errors in errors_by_tensor.items() if errors.count
    }
    worst = sorted(sqnr_by_tensor, key=lambda compared: sqnr_by_tensor[compared])[:WORST_COUNT]
    sums: dict[str, list[ErrorSums]] = {compared.name: [] for compared in worst}
    for sample in inputs[:_EFFECT_SAMPLES]:
        for name, part in measure_layer_effects(plan, worst, sample).items():
            sums[name].append(part)
    return {name: sum_errors(parts).metrics.sqnr for name, parts in sums.items() if parts}


def _quantized_constant(plan: InterpreterPlan, name: str, original: FloatProgram | None) -> QuantizedConstant:
    step, dequantized = dequantize_constant(plan, name)
    original_values = plan.float_constants[name]
    least, most = step.args[-3:-1]
    parameters = {} if original is None else original.program.graph_signature.inputs_to_parameters
    node = name.removesuffix("_quantized")
    node = node if node in parameters else node.rstrip("_")  # a batch normalization was folded into it
    return QuantizedConstant(
        parameters.get(node, node),
        most - least + 1,
        "per_channel" in str(step.target),
        ErrorSums.of(original_values, dequantized).metrics.sqnr,
    )


def _program_layer_gaps(spec: ProgramSpec, results: Sequence[SampleResult]) -> list[LayerGap]:
    gaps, tapped = {}, spec.tapped_tensors
    for compared in spec.plan.tensors if spec.plan is not None else ():
        parts = [result.layers[compared.node] for result in results if compared.node in result.layers]
        if parts:
            gaps[compared.node] = _layer_gap(compared, parts, tapped)
    return list(gaps.values())


def _accuracy(
    samples: ComparisonSamples, labels: Any, metric: Metric | None, results: Sequence[SampleResult], spec: Any
) -> Accuracy | None:
    reference, program = (
        [_unflatten_outputs(x, spec) for x in side]
        for side in ([result.reference for result in results], [result.program for result in results])
    )
    if metric is not None:
        return compute_metric(metric, reference, program, samples.originals)
    if samples.labels is None:
        return None
    first = next((i for i, x in enumerate(pytree.tree_leaves(reference[0])) if isinstance(x, torch.Tensor)), 0)
    scores = ([pytree.tree_leaves(x)[first] for x in side] for side in (reference, program))
    return compute_top1_accuracy(samples.labels, *scores, has_padding=samples.has_padding)


def _unflatten_outputs(outputs: list[Any], spec: Any) -> Any:
    """Restore the model's output structure. Written-back inputs come first and are dropped."""
    if spec is None:
        return outputs[0] if len(outputs) == 1 else outputs
    return pytree.tree_unflatten(outputs[len(outputs) - spec.num_leaves :], spec)
