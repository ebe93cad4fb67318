"""``sweep``: compile one model for many Ethos-U configurations and Cortex-M processors, and collect the estimates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.utils.data import DataLoader

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.compile_lock import compile_lock
from arm_recipes._internal.errors import ExportError
from arm_recipes._internal.messages import progress_bar, suppress_warnings, warn
from arm_recipes._internal.parallel import starmap_unordered
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes._internal.unknown_arguments import reject_unknown_arguments
from arm_recipes.comparison.accuracy import Evaluator, check_metric
from arm_recipes.comparison.samples import check_batches_unchanged
from arm_recipes.explore.sweep.compile_worker import cache_key, compile_delegates
from arm_recipes.explore.sweep.configurations import SweepConfiguration, list_configurations, split_recipes
from arm_recipes.explore.sweep.cortex_m_configurations import list_cortex_m_configurations, make_cortex_m_rows
from arm_recipes.explore.sweep.program_runner import ProgramRunner, compute_cpu_ram
from arm_recipes.explore.sweep.quantize_and_lower import METHOD, LoweredProgram, QuantizedProgram
from arm_recipes.explore.sweep.result import Sweep
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.explore.sweep.rows import ProgramEstimates, Row
from arm_recipes.recipe_types import ArmRecipeType
from arm_recipes.runtime.errors import RunError
from arm_recipes.samples import export_arguments
from arm_recipes.samples.call_inputs import Inputs, as_inputs
from arm_recipes.samples.export_arguments import check_argument_order
from arm_recipes.stages.capture.capture import Capture
from arm_recipes.types import Metric, Model, Samples

#: Precision, and digests of the TOSA graphs. Programs with equal keys have bit-equal results.
_ProgramKey = tuple[str, tuple[str, ...]]


@reject_unknown_arguments(
    {"calibration": "calibration_samples", "folder": "cache_dir", "tuning": "search_alternatives"}
)
@shorten_tracebacks
def sweep(
    model: Model,
    recipes: ArmRecipeType | str | Iterable[ArmRecipeType | str] | None,
    samples: Samples,
    *,
    macs: int | Iterable[int] | None = None,
    system_configs: str | Iterable[str] | None = None,
    memory_modes: str | Iterable[str] | None = None,
    boards: str | Iterable[str] | None = None,
    cpus: Mapping[str, float | None] | Iterable[str] | str | None = None,
    metric: Metric | None = None,
    cache_dir: str | Path | None = None,
    calibration_samples: Samples | None = None,
    per_channel: bool = True,
    search_alternatives: bool = True,
    optimise: str = "auto",
    extra_flags: Sequence[str] | None = None,
    config_ini: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Compile a model for many Ethos-U configurations and Cortex-M processors, to compare them.

    The model is captured once, quantized once per precision (and NPU, if the NPU changes the program), and lowered
    once per precision and NPU. For each configuration, alternatives are chosen, and Vela compiles the result. joblib
    compiles the configurations in parallel, by default in one process per core. ``joblib.parallel_config`` can select
    another backend, for example a cluster. All machines of the cluster need this package and Vela.

    Args:
        model: as for ``export``; one method.
        recipes: Ethos-U recipes and CORTEX_M_INT8, as members of ``ArmRecipeType`` or names. None selects the int8
            recipes of Ethos-U, and CORTEX_M_INT8 if ``cpus`` is given.
        samples: as for ``export``; all samples have the same shape, except for the batches of a ``DataLoader``. The
            accuracy is measured on these samples. They also calibrate, unless ``calibration_samples`` is given. A
            sample may have extra elements after the inputs, such as labels. The metric receives the whole sample.
        macs: MACs per cycle to combine; by default all that Vela supports for the NPU.
        system_configs: system configurations to combine. They describe clock, memories and bandwidth. The default is
            the recipe's; "all" selects all of the ``.ini`` file.
        memory_modes: memory modes to combine; by default all of Vela's. Invalid combinations are skipped.
        boards: names of boards, or "all"; ``arm-recipes boards`` lists them. Each board is combined with each recipe
            for its NPU. The board determines ``macs``, ``system_configs``, ``memory_modes`` and ``config_ini``, which
            must then be omitted.
        cpus: processors for CORTEX_M_INT8: names, or a dict with clocks in MHz:
            ``{"cortex-m4": 120, "cortex-m55": 400}``. The row of a processor with a clock has an inference time. The
            default is the recipe's processor. The cycles are estimates; see ``docs/contributors/cpu_cycles.md`` for
            their errors.
        metric: ``metric(outputs, sample)`` returns a number, higher is better; its mean is the accuracy. By default
            the accuracy is the SQNR of the outputs against the floating-point model, in dB.
        cache_dir: folder of finished configurations and of program outputs. The key of a configuration is a hash of its
            graphs and of Vela's options and version; with ``search_alternatives``, also of this package's sources. An
            interrupted sweep resumes from there, and a new sweep compiles only changed configurations. Failed
            configurations are compiled again.
        calibration_samples: option of the recipes.
        per_channel: option of the recipes.
        search_alternatives: option of the recipes.
        optimise: option of the recipes.
        extra_flags: option of the recipes.
        config_ini: option of the recipes.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        One row for each configuration. The row of a failed configuration has an error instead of estimates.

    Raises:
        ValueError: an argument is invalid, ``cpus`` comes without CORTEX_M_INT8, or a value of ``macs``,
            ``system_configs`` or ``memory_modes`` is valid in no combination.
        TypeError: ``model`` has the wrong type, or ``recipes`` and ``samples`` are swapped.
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
    check_metric(metric)
    check_argument_order("sweep", "recipes", recipes, samples)
    npu_recipes, has_cortex_m = split_recipes(recipes, cpus)
    cortex_m_configurations = list_cortex_m_configurations(cpus, fixed) if has_cortex_m else ()
    named = None if recipes is None else npu_recipes
    requested = list_configurations(named, varied, fixed, boards) if npu_recipes else ()
    store = ResultStore(cache_dir)
    progress_bars = _ProgressBars(progress)
    with suppress_warnings():
        program, originals, examples, notes = capture_model(model, samples, "sweep", metric)
        lowered, quantized = _lower_all(program, examples, requested)
        evaluator = Evaluator(program, examples, originals, metric)
        runner = ProgramRunner(examples, store, progress_bars.track_samples)
        estimates = _compile_all(requested, lowered, store, progress_bars)
        measured, accuracy_notes = _measure_programs(evaluator, runner, requested, lowered, quantized, estimates)
        cpu_rows, cpu_notes = make_cortex_m_rows(
            program,
            examples,
            cortex_m_configurations,
            lambda result: evaluator.evaluate_outputs(runner.execute(result)).metric,
        )
    rows = [
        _make_row(c, lowered[index], estimates.get(index), measured.get(index, (None, None)))
        for index, c in enumerate(requested)
    ]
    return Sweep((*rows, *cpu_rows), evaluator.metric_name, (*notes, *accuracy_notes, *cpu_notes))


def capture_model(
    model: Any, samples: Any, caller: str, metric: Metric | None = None
) -> tuple[ExportedProgram, list[Any], list[Inputs], list[str]]:
    """Capture a model of one method.

    The batches of a ``DataLoader`` get the batch size of the first one, as in ``export``.

    Args:
        model: the argument ``model``.
        samples: the argument ``samples``.
        caller: name of the function in messages.
        metric: metric that gets the samples as the user passed them.

    Returns:
        The program; the samples as the user passed them; the samples in the form of the model's inputs; and notes. For
        a ``DataLoader`` without a metric, both lists of samples are in the form of the model's inputs.

    Raises:
        ValueError: the model has several methods or dynamic shapes, the samples are missing or do not fit the model, or
            ``metric`` would get the outputs of batches that are split, joined or filled up.
        TypeError: ``model`` has the wrong type.
        ExportError: the model cannot be captured.
    """
    models = export_arguments.models_by_method(model)
    if len(models) != 1:
        raise ValueError(f"model: it has the methods {', '.join(models)}; {caller} takes one: model={{'forward': ...}}")
    models = {METHOD: next(iter(models.values()))}
    export_arguments.reject_dynamic_shapes(models, None)
    samples = export_arguments.resolve_loaders(samples)
    originals, examples = _prepare_samples(models, samples, metric)
    capture = Capture(None)
    notes = export_arguments.batch_size_notes({METHOD: samples}, models, {METHOD: examples})
    with compile_lock(), export_arguments.evaluation_mode(models) as training:
        if training:
            notes.append("the model is in training mode; it is compiled in evaluation mode")
        for note in notes:
            warn(note)
        module = models[METHOD]
        program = module if isinstance(module, ExportedProgram) else capture(METHOD, module, examples[0], None)
        if program is module:
            capture.warn_about_training_behavior(METHOD, program, captured_by_user=True)
    return program, originals, examples, [*notes, *capture.notes]


def _prepare_samples(models: Mapping[str, Any], samples: Any, metric: Metric | None) -> tuple[list[Any], list[Inputs]]:
    """Return the samples as the user passed them, and in the form of the model's inputs; see ``capture_model``."""
    if samples is None:
        examples = export_arguments.examples_by_method(None, models)[METHOD]
        return list(examples), examples
    originals = export_arguments.to_sample_list(METHOD, samples)
    without_labels = [export_arguments.without_labels(models[METHOD], sample) for sample in originals]
    if not isinstance(samples, DataLoader):
        return originals, export_arguments.examples_by_method(without_labels, models)[METHOD]
    # Pass an iterator: a list of bare tensors would be refused as ambiguous. Bare tensors of a DataLoader are batches.
    examples = export_arguments.examples_by_method(iter(originals), models, from_loader=True)[METHOD]
    if metric is None:
        return list(examples), examples
    batches = [as_inputs(sample, f"samples[{index}]") for index, sample in enumerate(without_labels)]
    check_batches_unchanged(batches, examples)
    return originals, examples


def _lower_all(
    program: ExportedProgram, samples: Sequence[Inputs], requested: Sequence[SweepConfiguration]
) -> tuple[list[LoweredProgram | str], list[QuantizedProgram | str]]:
    """Lower the model for each configuration.

    Returns:
        The lowered program of each configuration, and its quantized program. An error message replaces a program that
        cannot be lowered or quantized.
    """
    by_precision: dict[str, list[QuantizedProgram]] = {}
    failures: dict[tuple[str, str], str] = {}  # (precision, hardware family) -> message
    lowered: list[LoweredProgram | str] = []
    quantized: list[QuantizedProgram | str] = []
    for configuration in requested:
        name, target = configuration.precision, configuration.spec.target
        programs = by_precision.setdefault(name, [])
        fitting: QuantizedProgram | str | None = next((each for each in programs if each.is_valid_for(target)), None)
        fitting = fitting or failures.get((name, target.family))
        if fitting is None:
            try:
                fitting = QuantizedProgram(program, samples, configuration.make_export_recipe())
                programs.append(fitting)
            except (ArmBackendError, ExportError) as error:
                fitting = failures[name, target.family] = str(error)
        quantized.append(fitting)
        lowered.append(fitting if isinstance(fitting, str) else fitting.lower(target))
    return lowered, quantized


def _measure_programs(
    evaluator: Evaluator,
    runner: ProgramRunner,
    requested: Sequence[SweepConfiguration],
    lowered: Sequence[LoweredProgram | str],
    quantized: Sequence[QuantizedProgram | str],
    estimates: Mapping[int, ProgramEstimates | str],
) -> tuple[dict[int, tuple[float, int]], list[str]]:
    """Measure the accuracy, and compute the RAM that a program needs in addition to the RAM of its delegates.

    Programs with the same TOSA graphs have the same accuracy, so only one of them runs. The memory plan may place CPU
    tensors in the NPU's scratch, where they need no additional RAM. Configurations with equal scratch sizes, and
    equal offsets of inputs and outputs in the scratch, have equal memory plans, so only one of them is exported.

    Returns:
        ``{configuration index: (accuracy, RAM in bytes)}``, and a note for each program that could not be executed.
    """
    indices_by_key: dict[_ProgramKey, list[int]] = {}
    for index, (configuration, program) in enumerate(zip(requested, lowered, strict=True)):
        if isinstance(program, LoweredProgram) and isinstance(estimates.get(index), ProgramEstimates):
            indices_by_key.setdefault(_program_key(configuration, program), []).append(index)
    measured: dict[int, tuple[float, int]] = {}
    notes = []
    for key, indices in indices_by_key.items():
        source = quantized[indices[0]]
        assert isinstance(source, QuantizedProgram)
        by_plan: dict[tuple[str, int], list[int]] = {}
        for index in indices:
            by_plan.setdefault(_memory_plan_key(estimates[index]), []).append(index)
        try:
            programs = [
                runner.compile_first(source.unlowered, [requested[index] for index in group])
                for group in by_plan.values()
            ]
            accuracy = evaluator.evaluate_outputs(runner.execute(programs[0])).metric
        except (ArmBackendError, ExportError, RunError) as error:
            accelerators = dict.fromkeys(requested[index].spec.accelerator for index in indices)
            notes.append(f"the accuracy of {key[0]} on {', '.join(accelerators)} was not measured: {error}")
            continue
        for group, artifact in zip(by_plan.values(), programs, strict=True):
            measured |= dict.fromkeys(group, (accuracy, compute_cpu_ram(artifact.report)))
    return measured, notes


def _program_key(configuration: SweepConfiguration, lowered: LoweredProgram) -> _ProgramKey:
    return configuration.precision, tuple(unit.digest for unit in lowered.delegates)


def _memory_plan_key(estimates: ProgramEstimates | str) -> tuple[str, int]:
    """Return the values that determine the memory plan: ``placement``, and the size of the fast scratch."""
    assert isinstance(estimates, ProgramEstimates)
    return estimates.placement, estimates.fast_scratch_bytes


def _compile_all(
    requested: Sequence[SweepConfiguration],
    lowered: Sequence[LoweredProgram | str],
    store: ResultStore,
    progress_bars: _ProgressBars,
) -> dict[int, ProgramEstimates | str]:
    """Compile programs without stored estimates; return ``{configuration index: estimates or error}``."""
    outcomes: dict[int, ProgramEstimates | str] = {}
    keys: dict[int, str] = {}
    tasks = []
    for index, (configuration, program) in enumerate(zip(requested, lowered, strict=True)):
        if isinstance(program, str):
            continue
        keys[index] = cache_key(configuration.spec, program.delegates)
        estimates = store.load_estimates(keys[index])
        if estimates is None:
            tasks.append((index, configuration.spec, program.delegates, *program.arrays(configuration.spec)))
        else:
            outcomes[index] = estimates
    for index, outcome in progress_bars.track_configurations(starmap_unordered(compile_delegates, tasks), len(tasks)):
        outcomes[index] = outcome
        if isinstance(outcome, ProgramEstimates):
            store.save_estimates(keys[index], requested[index], outcome)
    return outcomes


def _make_row(
    configuration: SweepConfiguration,
    program: LoweredProgram | str,
    outcome: ProgramEstimates | str | None,
    measured: tuple[float, int] | tuple[None, None],
) -> Row:
    spec = configuration.spec
    estimates = outcome if isinstance(outcome, ProgramEstimates) else None
    accuracy, cpu_ram = measured
    ram, exceeds_board = None, False
    if estimates is not None and cpu_ram is not None:
        ram = estimates.npu_ram_bytes + cpu_ram
        # With fast scratch, all other working memory is in DRAM.
        in_sram = estimates.npu_sram_bytes + (0 if estimates.fast_scratch_bytes else cpu_ram)
        exceeds_board = spec.sram_budget is not None and in_sram > spec.sram_budget
    return Row(
        recipe=configuration.recipe,
        target=spec.accelerator,
        macs=configuration.macs,
        system_config=spec.system_config,
        memory_mode=spec.memory_mode,
        estimates=estimates,
        cpu_operators=program.cpu_operators if isinstance(program, LoweredProgram) else None,
        accuracy=accuracy,
        error=program if isinstance(program, str) else outcome if isinstance(outcome, str) else None,
        board=configuration.board,
        ram_bytes=ram,
        exceeds_board=exceeds_board,
    )


class _ProgressBars:
    """Progress bars of a sweep; they are hidden if ``shown`` is False or standard error is not a terminal."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def track_samples(self, samples: Iterable[Inputs]) -> Iterable[Inputs]:
        """Show the progress over the samples of a program."""
        return progress_bar(samples, "running", "sample", shown=self._shown)

    def track_configurations(self, results: Iterator[Any], count: int) -> Iterable[Any]:
        """Show the progress over the compiled configurations."""
        return progress_bar(results, "compiling", "configuration", shown=self._shown, count=count)
