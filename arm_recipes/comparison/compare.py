"""``compare``: a program beside its model in floating point, or beside another program."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import Sums, added, decibels, lost
from arm_recipes._internal.messages import progress_bar, quiet
from arm_recipes.comparison.accuracy import Accuracy, Metric, by_labels, by_metric
from arm_recipes.comparison.advice import Facts, Weights
from arm_recipes.comparison.dispatch import run_all
from arm_recipes.comparison.interpreter_plan import Evaluation, NoPlan, Plan, Row, dequantized
from arm_recipes.comparison.result import WORST, Comparison, LayerGap, OutputGap, OwnLoss
from arm_recipes.comparison.samples import Samples, samples_of, samples_of_program
from arm_recipes.comparison.worker_job import Job, ProgramSpec, SampleResult, WorkItem, effects_of
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.report.record import MethodReport
from arm_recipes.runtime.load import load
from arm_recipes.runtime.program import Program
from arm_recipes.stages.quantize import FloatProgram

__all__ = ["Metric", "compare", "compare_with_model"]

#: Samples that show what a layer alone does to the output.
_FEW = 4
#: The graph that is compared with is that of the model rewritten, which errs in the last bits of float32.
_SAME = 80.0


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
    _check(metric, layers, workers)
    with quiet():
        record = _method(result, method)
        _check_unchanged(result, method)
        given = samples_of(result.patterns[method], method, samples, labels, metric)
        side, notes = _side(result, record, layers)
        expected: Sequence[list[Any] | None] = [None] * len(given.inputs)
        count = _count(layers, side.plan is not None, len(given.inputs))
        original = result.float_reference.float_programs.get(method)
        if side.plan is None:
            expected = _outputs_of_model(result, method, given)
        else:
            notes += _differences_of_graph(side.plan, original, given)
        pairs = zip(given.inputs, expected, strict=True)
        items = [WorkItem(index, inputs, index < count, right) for index, (inputs, right) in enumerate(pairs)]
        found = _run(Job(side, None), items, workers, progress)
        rows = _layers(side, found, original, given.inputs[:count])
    names = [info.name for info in record.outputs]
    return Comparison(
        program=_short(result.report.recipe),
        reference="the model",
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_outputs(names, found),
        layers=tuple(rows),
        accuracy=_accuracy(given, labels, metric, found, result.out_specs.get(method)),
        seconds=time.perf_counter() - start,
        notes=(*notes, *_notes(found)),
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
    """Compare two programs as they run on this machine: ``b`` beside ``a``.

    Args:
        a: what ``export`` returned, or a saved program: a path, bytes, or a loaded one, which is loaded anew. Layers
            are compared where both are exports of one model; they are found by their names.
        b: the second program, as ``a``.
        samples: inputs of the model, as real numbers where a program has ``quantized_io``.
        labels: as for ``ExportResult.compare``.
        metric: as for ``ExportResult.compare``.
        method: as for ``ExportResult.compare``.
        layers: as for ``ExportResult.compare``.
        workers: as for ``ExportResult.compare``.
        progress: as for ``ExportResult.compare``.

    Raises:
        ValueError: an argument cannot be used, or the programs do not take the same inputs.
        RunError: this machine cannot run one of them.
    """
    start = time.perf_counter()
    _check(metric, layers, workers)
    with quiet():
        (one, first), (other, second) = (_program(x, name, method, layers) for x, name in ((a, "a"), (b, "b")))
        _check_alike(one, other)
        export = next((x for x in (a, b) if isinstance(x, Artifact)), None)
        if export is None:
            given = samples_of_program(one.inputs, method, samples, labels, metric)
        else:
            given = samples_of(export.patterns[method], method, samples, labels, metric)
        both = one.plan is not None and other.plan is not None
        count = _count(layers, both, len(given.inputs))
        items = [WorkItem(index, inputs, index < count) for index, inputs in enumerate(given.inputs)]
        found = _run(Job(other, one), items, workers, progress)
    names = [info.name for info in other.outputs]
    notes = list(dict.fromkeys((*first, *second, *_notes(found))))
    if layers and not both:
        notes.append("layers are not compared: that takes two exports, a saved program has no record of its layers")
    return Comparison(
        program=_name(b),
        reference=_name(a),
        method=method,
        samples=len(items),
        layer_samples=count,
        outputs=_outputs(names, found),
        layers=tuple(_layers_of_both(other, found)),
        accuracy=_accuracy(given, labels, metric, found, export.out_specs.get(method) if export else None),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _count(layers: bool | int, can: bool, samples: int) -> int:
    """How many samples layers are compared with."""
    if not can:
        return 0
    return samples if layers is True else min(layers, samples)


def _check(metric: Any, layers: Any, workers: Any) -> None:
    if not isinstance(layers, int) or layers < 0:
        raise ValueError(f"layers: {layers!r} is neither a bool nor a number of samples")
    if metric is not None and not callable(metric):
        raise ValueError(f"metric: {metric!r} is not callable; give a function of outputs and a sample, or None")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers: {workers!r} is no number of processes; give 1 or more, or None")


def _check_unchanged(result: Artifact, method: str) -> None:
    changed = result.float_reference.changed_tensors(method)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(
            f"the model has been changed since the export: '{changed[0]}'{more} was written, so that nothing is left "
            "to compare the program with. Compare before you go on training, or export again"
        )


def _check_alike(a: ProgramSpec, b: ProgramSpec) -> None:
    if len(a.inputs) != len(b.inputs):
        raise ValueError(
            f"b: '{b.method}' takes {len(b.inputs)} inputs, that of a takes {len(a.inputs)}: give two programs of one "
            "model"
        )
    told = [[tuple(getattr(info, "shape", ())) for info in side.outputs] for side in (a, b)]
    if told[0] != told[1]:
        one, other = (", ".join(str(list(shape)) for shape in shapes) or "nothing" for shapes in told)
        raise ValueError(f"b: '{b.method}' returns {other}, that of a {one}: give two programs of one model")


def _method(result: Artifact, method: str) -> MethodReport:
    found = {record.name: record for record in result.report.methods}
    if method in found:
        return found[method]
    sized = result.sized.get(method)
    hint = f"it has a method for each size: {', '.join(sized.methods)}" if sized else f"it has: {', '.join(found)}"
    raise ValueError(f"method: the program has no '{method}'; {hint}")


def _side(result: Artifact, record: MethodReport, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    """The program with what is known of its layers, and notes."""
    from arm_backend_core.partitioner import _ArmPartitioner

    method, made = record.name, result.float_reference
    exported, original = result.exported_programs[method], made.float_programs.get(method)
    side = ProgramSpec(result.buffer, method, record.inputs, record.outputs, None, ())
    try:
        plan = Plan.of(exported, original.floats if original is not None else {})
    except NoPlan as reason:
        note = f"layers are not compared: the captured program has {reason}"
        return side, [note] if layers else []
    states = {name: node for node, name in exported.graph_signature.inputs_to_buffers.items()}
    plan.held |= {states[name]: tensor for name, tensor in made.states[method].items()}
    side, notes = replace(side, plan=plan), []
    if original is None and plan.is_quantized:
        notes.append(
            "the model came quantized: what it is compared with has its quantized weights, and no other rounding"
        )
    ours = next((x for x in made.partitioners.get(method, ()) if isinstance(x, _ArmPartitioner)), None)
    if layers and ours is not None and record.delegates:
        from arm_recipes.comparison.intermediate_outputs import taps

        found, more = taps(exported, ours, record.delegates, (row.name for row in plan.rows))
        side, notes = replace(side, taps=tuple(found)), [*notes, *more]
    return side, notes


def _program(given: Any, argument: str, method: str, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    if isinstance(given, Artifact):
        return _side(given, _method(given, method), layers)
    if not isinstance(given, (Program, str, Path, bytes)):
        raise ValueError(
            f"{argument}: must be what export returned, or a program: a path, bytes or what load returned; got "
            f"{type(given).__name__}"
        )
    program = given if isinstance(given, Program) else load(given)
    signature = program.signature(method)
    return ProgramSpec(program.data, method, signature.inputs, signature.outputs, None, ()), []


def _name(given: Any) -> str:
    if isinstance(given, Artifact):
        return _short(given.report.recipe)
    return f"'{given}'" if isinstance(given, (str, Path)) else "a program"


def _short(recipe: str) -> str:
    return recipe.removeprefix("arm_recipes_").upper()


def _run(job: Job, items: Sequence[WorkItem], workers: int | None, progress: bool) -> list[SampleResult]:
    def mark(made: Iterable[Any]) -> Iterable[Any]:
        return progress_bar(made, "comparing", "sample", shown=progress, count=len(items))

    return run_all(job, items, workers, mark)


# -- what the model gives --------------------------------------------------------------------------------------------


def _outputs_of_model(result: Artifact, method: str, given: Samples) -> list[list[Any] | None]:
    """Of the captured program, as PyTorch runs it; new values of inputs that it writes are not compared."""
    original = result.float_reference.float_programs.get(method)
    captured = result.exported_programs[method] if original is None else original.program
    model = copy.deepcopy(captured).module(check_guards=False)
    count = len(_method(result, method).outputs)
    found: list[list[Any] | None] = []
    for sample in given.samples:
        with torch.no_grad():
            outputs = [
                x.clone() if isinstance(x, torch.Tensor) else x
                for x in pytree.tree_leaves(model(*sample, **sample.keywords))
            ]
        found.append([None] * (count - len(outputs)) + outputs)
    return found


def _differences_of_graph(plan: Plan, original: FloatProgram | None, given: Samples) -> list[str]:
    """A note if the graph that layers are compared in gives other numbers than the model that was captured."""
    if original is None or plan.has_state:
        return []
    try:
        captured = Plan.of(original.program)
    except NoPlan:
        return []
    outputs = []
    for one in (captured, plan):
        evaluation = Evaluation(one)
        with torch.no_grad():
            for _ in evaluation.run(given.inputs[0]):
                pass
        outputs.append(evaluation.outputs)
    gaps = [Sums.of(x, y).gap.sqnr for x, y in zip(*outputs, strict=True) if isinstance(x, torch.Tensor)]
    worst = min(gaps, default=_SAME)
    if worst >= _SAME:
        return []
    return [f"the model's graph, rewritten to be quantized, is {worst:.1f} dB from the model itself in floating point"]


# -- figures ---------------------------------------------------------------------------------------------------------


def _outputs(names: Sequence[str], found: Sequence[SampleResult]) -> tuple[OutputGap, ...]:
    made = []
    for index, name in enumerate(names):
        parts = [one.sums[index] for one in found if index in one.sums]
        made.append(OutputGap(name, added(parts).gap if parts else None))
    return tuple(made)


def _notes(found: Sequence[SampleResult]) -> list[str]:
    different = dict.fromkeys(name for one in found for name in one.different)
    return [
        f"delegate '{name}' gives other numbers than its TOSA graph, which the figures of its layers are from: export "
        "with verify=True, which names the first"
        for name in different
    ]


def _layer(row: Row, parts: Sequence[Sums], told: frozenset[str]) -> LayerGap:
    return LayerGap(
        name=row.node,
        operator=row.operator,
        module=row.module,
        source=row.source,
        dtype=row.dtype,
        scale=row.grid.scale if row.grid else None,
        zero_point=row.grid.zero_point if row.grid else None,
        moves=row.is_data_movement,
        value_source="program" if row.name in told else "PyTorch",
        gap=added(parts).gap,
    )


def _layers(
    side: ProgramSpec,
    found: Sequence[SampleResult],
    original: FloatProgram | None,
    inputs: Sequence[Sequence[torch.Tensor]],
) -> list[LayerGap]:
    plan = side.plan
    if plan is None:
        return []
    effects = _effects(plan, found, inputs)
    told, ranges = side.told, original.ranges if original is not None else {}
    made = []
    for row in plan.rows:
        parts = [one.layers[row.name] for one in found if row.name in one.layers]
        if not parts:
            continue
        layer = _layer(row, parts, told)
        losses = lost(one.losses[row.name] for one in found if row.name in one.losses)
        if row.grid is not None and losses.count:
            weights = tuple(_weights(plan, name, original) for name in row.weights)
            seen = ranges.get(row.name)
            own = OwnLoss(
                sqnr=decibels(losses.signal, losses.noise),
                max_error=losses.largest,
                clipped=losses.clipped / losses.count,
                range=row.grid.bounds,
                values=(losses.low, losses.high),
                calibrated=seen,
                p999=losses.usual,
                output=effects.get(row.name),
                advice=Facts(losses, row.grid, row.is_fixed, seen, weights, row.readers).advice,
            )
            layer = replace(layer, own=own, weights=weights)
        made.append(layer)
    return made


def _effects(plan: Plan, found: Sequence[SampleResult], inputs: Sequence[Sequence[torch.Tensor]]) -> dict[str, float]:
    """SQNR of the first output where only one layer is quantized, for those that lose most by themselves."""
    if plan.has_state:
        return {}
    lost_by = {row: lost(one.losses[row.name] for one in found if row.name in one.losses) for row in plan.rows}
    own = {row: decibels(losses.signal, losses.noise) for row, losses in lost_by.items() if losses.count}
    rows = sorted(own, key=lambda row: own[row])[:WORST]
    sums: dict[str, list[Sums]] = {row.name: [] for row in rows}
    for sample in inputs[:_FEW]:
        for name, part in effects_of(plan, rows, sample).items():
            sums[name].append(part)
    return {name: added(parts).gap.sqnr for name, parts in sums.items() if parts}


def _weights(plan: Plan, name: str, original: FloatProgram | None) -> Weights:
    step, real = dequantized(plan, name)
    right = plan.floats[name]
    least, most = step.args[-3:-1]
    known = {} if original is None else original.program.graph_signature.inputs_to_parameters
    node = name.removesuffix("_quantized")
    node = node if node in known else node.rstrip("_")  # one that a batch normalization was folded into
    return Weights(
        known.get(node, node), most - least + 1, "per_channel" in str(step.target), Sums.of(right, real).gap.sqnr
    )


def _layers_of_both(side: ProgramSpec, found: Sequence[SampleResult]) -> list[LayerGap]:
    made, told = {}, side.told
    for row in side.plan.rows if side.plan is not None else ():
        parts = [one.layers[row.node] for one in found if row.node in one.layers]
        if parts:
            made[row.node] = _layer(row, parts, told)
    return list(made.values())


def _accuracy(
    given: Samples, labels: Any, metric: Metric | None, found: Sequence[SampleResult], spec: Any
) -> Accuracy | None:
    right, other = (
        [_structured(x, spec) for x in side] for side in ([f.right for f in found], [f.given for f in found])
    )
    if metric is not None:
        return by_metric(metric, right, other, given.given)
    if given.labels is None:
        return None
    first = next((i for i, x in enumerate(pytree.tree_leaves(right[0])) if isinstance(x, torch.Tensor)), 0)
    scores = ([pytree.tree_leaves(x)[first] for x in side] for side in (right, other))
    return by_labels(given.labels, *scores, wrapped=given.wrapped)


def _structured(outputs: list[Any], spec: Any) -> Any:
    """Outputs as the model returns them; new values of inputs that it writes come first, and are left out."""
    if spec is None:
        return outputs[0] if len(outputs) == 1 else outputs
    return pytree.tree_unflatten(outputs[len(outputs) - spec.num_leaves :], spec)
