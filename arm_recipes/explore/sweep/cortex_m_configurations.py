"""Cortex-M processors in a sweep: configurations without an NPU, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.targets.cortex_m import Processor
from arm_recipes.recipe import options
from arm_recipes.recipe.compile_specs import recipe_processor

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.explore.sweep.rows import Row
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.samples.call_inputs import Inputs

CORTEX_M_RECIPE = "CORTEX_M_INT8"
#: Options of ``sweep`` that are passed to the Cortex-M recipe.
_SHARED_OPTIONS = ("calibration_samples", "per_channel")


@dataclass(frozen=True)
class CortexMConfiguration:
    """A Cortex-M without an NPU.

    Attributes:
        processor: the processor.
        megahertz: clock of the processor. If it is None, the row has no inference time.
        options: options of the recipe.
    """

    processor: Processor
    megahertz: float | None
    options: Mapping[str, Any]

    def make_export_recipe(self) -> ExportRecipe:
        """Build the recipe for ``export``."""
        from executorch.export import ExportRecipe

        from arm_recipes.recipe_types import ArmRecipeType

        return ExportRecipe.get_recipe(ArmRecipeType[CORTEX_M_RECIPE], **self.options, require_runnable=False)


def list_cortex_m_configurations(
    cpus: Mapping[str, float | None] | Iterable[str] | str | None, fixed: Mapping[str, Any]
) -> tuple[CortexMConfiguration, ...]:
    """List the configurations of the processors.

    Args:
        cpus: names of processors, or ``{name: clock in MHz}``. None: the recipe's default.
        fixed: options of ``sweep`` that are the same for all configurations.

    Raises:
        ValueError: ``cpus`` is empty, a processor does not exist, or a clock is not positive.
    """
    names = [cpus] if isinstance(cpus, str) else ["auto"] if cpus is None else list(cpus)
    if not names:
        raise ValueError("cpus is empty: give at least one name, or omit it")
    clocks = cpus if isinstance(cpus, Mapping) else {}
    configurations = []
    for name in dict.fromkeys(names):
        clock = clocks.get(name)
        if clock is not None and (isinstance(clock, bool) or not isinstance(clock, (int, float)) or not clock > 0):
            raise ValueError(f"cpus: the clock of {name!r} must be a positive number of MHz, not {clock!r}")
        chosen = {key: fixed[key] for key in _SHARED_OPTIONS if key in fixed} | {"cpu": name}
        processor = recipe_processor(CORTEX_M_RECIPE, options.resolve_options(CORTEX_M_RECIPE, chosen))
        assert processor is not None
        configurations.append(CortexMConfiguration(processor, clock, chosen))
    return tuple(configurations)


def make_cortex_m_rows(
    program: ExportedProgram,
    samples: Sequence[Inputs],
    configurations: Sequence[CortexMConfiguration],
    evaluate: Callable[[Artifact], float],
) -> tuple[list[Row], list[str]]:
    """Export a model for each processor, and make a row of each program.

    Args:
        program: captured model.
        samples: samples in the form of the model's inputs.
        configurations: the processors.
        evaluate: runs a program, and returns its accuracy.

    Returns:
        The rows, and a note for each program that could not be executed.
    """
    from arm_backend_core.errors import ArmBackendError
    from arm_recipes._internal.errors import ExportError
    from arm_recipes.explore.sweep.quantize_and_lower import QuantizedProgram
    from arm_recipes.pipeline.export import export_unlowered
    from arm_recipes.runtime.errors import RunError

    rows: list[Row] = []
    notes: list[str] = []
    quantized: QuantizedProgram | None = None
    for configuration in configurations:
        recipe = configuration.make_export_recipe()
        try:
            quantized = quantized or QuantizedProgram(program, samples, recipe)
            artifact = export_unlowered(quantized.unlowered, recipe, progress=False)
        except (ArmBackendError, ExportError) as error:
            rows.append(_failed_row(configuration, str(error)))
            continue
        accuracy = None
        try:
            accuracy = evaluate(artifact)
        except (ArmBackendError, RunError) as error:
            notes.append(f"the accuracy on {configuration.processor.cpu} was not measured: {error}")
        rows.append(_make_row(configuration, artifact, accuracy))
    return rows, notes


def _make_row(configuration: CortexMConfiguration, artifact: Artifact, accuracy: float | None) -> Row:
    from arm_recipes.explore.sweep.rows import ProgramEstimates

    report = artifact.report
    cycles = sum(method.cpu_cycles or 0 for method in report.methods)
    ram = 0 if report.ram is None else report.ram.sram_bytes
    estimates = ProgramEstimates(
        cycles=cycles,
        npu_cycles=0,
        milliseconds=None if configuration.megahertz is None else cycles / configuration.megahertz / 1e3,
        sram_bytes=ram,
        sram_exceeded=False,
        dram_bytes=0,
        flash_bytes=artifact.stored_bytes,
        fast_scratch_bytes=0,
        npu_ram_bytes=0,
        npu_sram_bytes=0,
        weight_bytes=0,
    )
    on_cpu = sum(operator.count for operator in report.cpu_operators)
    return _row(configuration, estimates=estimates, cpu_operators=on_cpu, accuracy=accuracy, ram_bytes=ram)


def _failed_row(configuration: CortexMConfiguration, error: str) -> Row:
    return _row(configuration, estimates=None, error=error)


def _row(configuration: CortexMConfiguration, **values: Any) -> Row:
    from arm_backend_core.cortex_m.cost.processors import PEAK_MACS, code_variant_of
    from arm_recipes.explore.sweep.rows import Row

    clock = "" if configuration.megahertz is None else f"{configuration.megahertz:g} MHz"
    return Row(
        recipe=CORTEX_M_RECIPE,
        target=configuration.processor.cpu,
        macs=int(PEAK_MACS.of(code_variant_of(configuration.processor))),
        system_config=clock,
        memory_mode="",
        **values,
    )
