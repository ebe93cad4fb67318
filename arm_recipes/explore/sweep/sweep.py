"""``sweep``: from a model to the figures of every configuration, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import ExportError, progress_bar, quiet, warn
from arm_recipes._internal.old_names import reject_old_names
from arm_recipes._internal.parallel import in_parallel
from arm_recipes.explore.sweep.accuracy import AccuracyMeasurement, Metric
from arm_recipes.explore.sweep.compile import compile_units, key
from arm_recipes.explore.sweep.configurations import Configuration, configurations
from arm_recipes.explore.sweep.lowered import METHOD, Lowered, Precision
from arm_recipes.explore.sweep.result import Sweep
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.explore.sweep.rows import Figures, Row
from arm_recipes.runtime.errors import RunError
from arm_recipes.samples import inputs
from arm_recipes.samples.inputs import check_order
from arm_recipes.samples.sample import Inputs
from arm_recipes.stages.capture.capture import Capture

#: Equal where programs give equal numbers: the precision, and the TOSA graphs.
_Behaviour = tuple[str, tuple[str, ...]]


@reject_old_names(calibration="calibration_samples", folder="cache_dir", tuning="search_alternatives")
def sweep(
    model: Any,
    recipes: Any,
    samples: Any,
    *,
    macs: Any = None,
    system_configs: Any = None,
    memory_modes: Any = None,
    metric: Metric | None = None,
    cache_dir: str | Path | None = None,
    calibration_samples: Any = None,
    per_channel: bool = True,
    search_alternatives: bool = True,
    optimise: str = "auto",
    extra_flags: Sequence[str] | None = None,
    config_ini: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Compile a model for many configurations of Ethos-U NPUs, to choose one.

    The model is captured once, quantized once for each precision and lowered once for each NPU. Forms are chosen for
    each configuration, and Vela compiles them, in parallel, by joblib: in a process for each core, or as
    ``joblib.parallel_config`` says, on a cluster for example. The machines there need this package and Vela.

    Args:
        model: as ``export`` takes it; one method.
        samples: as of ``export``; all have one shape. They calibrate, unless there is
            ``calibration_samples``, and measure the accuracy. A sample may have more than the model takes, such as
            labels,
            behind the inputs: the metric gets it whole.
        macs: numbers of MACs to combine; by default all that Vela has for the NPU.
        memory_modes: memory modes to combine; by default all that Vela has. Impossible combinations are left out.
        system_configs: what is around the NPU: clock, memories and their speed; by default that of each recipe, "all"
            for all in the ``.ini``.
        metric: ``metric(outputs, sample)`` gives a number, the higher the better; its mean is the accuracy. By default
            that is the signal to noise of the outputs against the model in floating point, in dB.
        cache_dir: where finished configurations are kept, by content: graphs, Vela's options and version. A sweep that
            was ended goes on with the others, and a new one makes only what has changed. Failed ones are tried again.
        calibration_samples: option of the recipes.
        per_channel: option of the recipes.
        search_alternatives: option of the recipes.
        optimise: option of the recipes.
        extra_flags: option of the recipes.
        config_ini: option of the recipes.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        a row for each configuration. One that failed has its error in place of figures.

    Raises:
        ValueError: an argument cannot be used; a value of ``macs``, ``system_configs`` or ``memory_modes`` is possible
            with none of the others.
        ExportError: the model cannot be captured.
    """
    fixed = {
        "calibration_samples": calibration_samples,
        "per_channel": per_channel,
        "search_alternatives": search_alternatives,
        "optimise": optimise,
        "extra_flags": extra_flags,
        "config_ini": config_ini,
    }
    varied = {"macs": macs, "system_config": system_configs, "memory_mode": memory_modes}
    if metric is not None and not callable(metric):
        raise ValueError(f"metric: {metric!r} is not callable; give a function of outputs and a sample, or None")
    check_order("sweep", "recipes", recipes, samples)
    chosen = configurations(recipes, varied, fixed)
    kept = ResultStore(cache_dir)
    bar = _Bar(progress)
    with quiet():
        program, given, examples, notes = captured(model, samples, "sweep")
        lowered, precisions = _lowered(program, examples, chosen)
        rate = AccuracyMeasurement(program, examples, given, metric, kept, bar.samples)
        accuracies, unknown = _accuracies(rate, chosen, lowered, precisions)
        figures = _compiled(chosen, lowered, kept, bar)
    rows = [_row(c, lowered[index], figures.get(index), accuracies) for index, c in enumerate(chosen)]
    return Sweep(tuple(rows), rate.name, (*notes, *unknown))


def captured(model: Any, samples: Any, caller: str) -> tuple[ExportedProgram, list[Any], list[Inputs], list[str]]:
    """The model as a program, the samples as they were given and as it takes them, and notes."""
    models = inputs.models_by_method(model)
    if len(models) != 1:
        raise ValueError(f"model: it has the methods {', '.join(models)}; {caller} takes one: model={{'forward': ...}}")
    models = {METHOD: next(iter(models.values()))}
    inputs.check_static(models, None)
    samples = inputs.resolve_loaders(samples)
    given = None if samples is None else inputs.sample_list(METHOD, samples)
    cut = None if given is None else [inputs.without_labels(models[METHOD], sample) for sample in given]
    examples = inputs.examples_by_method(cut, models)[METHOD]
    capture = Capture(None)
    notes = inputs.batch_notes({METHOD: samples}, models, {METHOD: examples})
    with inputs.evaluation_mode(models) as training:
        if training:
            notes.append("the model is in training mode; it is compiled in evaluation mode")
        for note in notes:
            warn(note)
        only = models[METHOD]
        program = only if isinstance(only, ExportedProgram) else capture(METHOD, only, examples[0], None)
        if program is only:
            capture.inspect(METHOD, program, given=True)
    return program, list(examples) if given is None else given, examples, [*notes, *capture.notes]


def _lowered(
    program: ExportedProgram, samples: Sequence[Inputs], chosen: Sequence[Configuration]
) -> tuple[list[Lowered | str], dict[str, Precision]]:
    """For each configuration what Vela is given, or why there is nothing; the quantized programs by precision."""
    precisions: dict[str, Precision | str] = {}
    found: list[Lowered | str] = []
    for configuration in chosen:
        name = configuration.precision
        if name not in precisions:
            try:
                precisions[name] = Precision(program, samples, configuration.export_recipe())
            except (ArmBackendError, ExportError) as error:
                precisions[name] = str(error)
        precision = precisions[name]
        found.append(precision if isinstance(precision, str) else precision.lowered(configuration.spec.target))
    return found, {name: made for name, made in precisions.items() if isinstance(made, Precision)}


def _accuracies(
    rate: AccuracyMeasurement,
    chosen: Sequence[Configuration],
    lowered: Sequence[Lowered | str],
    precisions: dict[str, Precision],
) -> tuple[dict[_Behaviour, float], list[str]]:
    """The accuracy by precision and TOSA graphs, and a note for each that could not be measured."""
    groups: dict[_Behaviour, list[Configuration]] = {}
    for configuration, below in zip(chosen, lowered, strict=True):
        if isinstance(below, Lowered):
            groups.setdefault(_behaviour(configuration, below), []).append(configuration)
    found, notes = {}, []
    for group, members in groups.items():
        try:
            found[group] = rate(precisions[group[0]].program, members)
        except (ArmBackendError, ExportError, RunError) as error:
            which = f"{group[0]} on {', '.join(dict.fromkeys(member.spec.accelerator for member in members))}"
            notes.append(f"the accuracy of {which} was not measured: {error}")
    return found, notes


def _behaviour(configuration: Configuration, lowered: Lowered) -> _Behaviour:
    return configuration.precision, tuple(unit.digest for unit in lowered.units)


def _compiled(
    chosen: Sequence[Configuration], lowered: Sequence[Lowered | str], kept: ResultStore, bar: _Bar
) -> dict[int, Figures | str]:
    """Figures, or errors, by the configuration's number: those that were kept, and Vela's for the others."""
    found: dict[int, Figures | str] = {}
    keys: dict[int, str] = {}
    tasks = []
    for index, (configuration, below) in enumerate(zip(chosen, lowered, strict=True)):
        if isinstance(below, str):
            continue
        keys[index] = key(configuration.spec, below.units)
        figures = kept.figures(keys[index])
        if figures is None:
            tasks.append((index, configuration.spec, below.units, *below.arrays(configuration.spec)))
        else:
            found[index] = figures
    for index, made in bar.configurations(in_parallel(compile_units, tasks), len(tasks)):
        found[index] = made
        if isinstance(made, Figures):
            kept.keep(keys[index], chosen[index], made)
    return found


def _row(
    configuration: Configuration, below: Lowered | str, made: Figures | str | None, accuracies: dict[_Behaviour, float]
) -> Row:
    spec = configuration.spec
    return Row(
        recipe=configuration.recipe,
        target=spec.accelerator,
        macs=configuration.macs,
        system_config=spec.system_config,
        memory_mode=spec.memory_mode,
        figures=made if isinstance(made, Figures) else None,
        cpu_operators=below.cpu_operators if isinstance(below, Lowered) else None,
        accuracy=accuracies.get(_behaviour(configuration, below)) if isinstance(below, Lowered) else None,
        error=below if isinstance(below, str) else made if isinstance(made, str) else None,
    )


class _Bar:
    """Progress bars over what a sweep does; ``shown=False``, or no terminal, shows nothing."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def samples(self, samples: Iterable[Inputs]) -> Iterable[Inputs]:
        """The samples that a program is run with."""
        return progress_bar(samples, "running", "sample", shown=self._shown)

    def configurations(self, made: Iterator[Any], count: int) -> Iterable[Any]:
        """What is compiled, as it comes."""
        return progress_bar(made, "compiling", "configuration", shown=self._shown, count=count)
