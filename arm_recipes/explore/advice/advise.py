"""Advice: compile an Ethos-U program with one change at a time, and report the changes that lower its cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_recipes._internal.rendering import format_bytes
from arm_recipes.explore.advice.result import Advice, AdviceList, Cost
from arm_recipes.explore.sweep.compile_worker import LoweredDelegate, compile_delegates, sum_estimates
from arm_recipes.explore.sweep.quantize_and_lower import lower_program, make_lowered_delegate

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_backend_core.compilation_log import DelegateRecord
    from arm_backend_core.partitioner import EthosUPartitioner
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec
    from arm_recipes.explore.sweep.rows import ProgramEstimates
    from arm_recipes.runtime.tensor_info import TensorInfo

#: Delegates, and the TOSA flatbuffer of each as an array.
_LoweredDelegates = tuple[Sequence[LoweredDelegate], Sequence["np.ndarray[Any, Any]"]]


def advise(
    recipe: ExportRecipe | None,
    delegates: Sequence[DelegateRecord],
    programs: Mapping[str, ExportedProgram],
    tensors: Sequence[TensorInfo],
) -> AdviceList:
    """Compile an Ethos-U program again, with one change at a time.

    Args:
        recipe: recipe of the export.
        delegates: delegates of the export, with Vela's estimates.
        programs: quantized programs before lowering, by method.
        tensors: inputs and outputs of the program.

    Returns:
        The changes that lower cycles or SRAM, trade-offs included, with their estimated costs.

    Raises:
        ValueError: the recipe is not for an Ethos-U, or no part of the program runs on the NPU.
    """
    partitioner = _find_partitioner(recipe)
    estimated = [delegate for delegate in delegates if delegate.vela is not None]
    if partitioner is None:
        raise ValueError(
            "advice is for programs of Ethos-U recipes: other targets have no estimates of cycles and memory"
        )
    if not estimated:
        raise ValueError(
            "advice is for operators on the NPU, and this program has none: see report.cpu_operators for the reasons"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Warnings about the changed programs do not concern the user.
        advice = _evaluate_changes(recipe, partitioner, estimated, programs)
    has_quantized_io = bool(getattr(recipe, "options", {}).get("quantized_io"))
    notes = () if has_quantized_io else tuple(_describe_float_io(tensors))
    return replace(advice, notes=(*notes, *advice.notes))


def _evaluate_changes(
    recipe: ExportRecipe | None,
    partitioner: EthosUPartitioner,
    delegates: Sequence[DelegateRecord],
    programs: Mapping[str, ExportedProgram],
) -> AdviceList:
    from arm_recipes.explore.advice.channels import try_fewer_channels

    spec: Any = partitioner.compile_spec
    loops = partitioner.loop_rolling
    evaluator = _ChangeEvaluator(spec, delegates, loops)
    for options in _candidate_options(spec):
        evaluator.try_options(options)
    for method, program in programs.items():
        evaluator.try_per_tensor_weights(
            program, f" of '{method}'" if len(programs) > 1 else "", is_only_method=len(programs) == 1
        )
    if len(programs) == 1:
        evaluator.try_sparse_weights(*programs.values())
    else:
        evaluator.notes.append(f"{_SPARSE_WEIGHTS}: not tried, because the methods of the program share weights")
    channels, notes = try_fewer_channels(recipe, spec, programs)
    evaluated = [*evaluator.results, *channels]
    better = sorted((item for item in evaluated if item.saves), key=lambda item: item.then.cycles - item.now.cycles)
    return AdviceList(tuple(better), len(evaluated), (*evaluator.notes, *notes))


def _describe_float_io(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    """Describe the RAM of the float32 inputs and outputs. Vela's estimates do not contain it."""
    count = sum(tensor.nbytes for tensor in tensors if tensor.dtype == "float32")
    if count:
        yield f"quantized_io=True: saves up to {format_bytes(count)} of RAM, the float32 copies of inputs and outputs"


def _find_partitioner(recipe: ExportRecipe | None) -> EthosUPartitioner | None:
    from arm_backend_core.partitioner import EthosUPartitioner

    lowering = recipe.lowering_recipe if recipe is not None else None
    partitioners: Any = (lowering.partitioners if lowering is not None else None) or []
    if isinstance(partitioners, dict):
        partitioners = [each for group in partitioners.values() for each in group]
    return next((each for each in partitioners if isinstance(each, EthosUPartitioner)), None)


def _candidate_options(spec: EthosUCompileSpec) -> Iterator[dict[str, Any]]:
    """Yield recipe options to try: each other memory mode, and optimization for size."""
    from arm_backend_core.targets import vela_config

    for mode in vela_config.list_sections(spec.config_ini, vela_config.MEMORY_MODE):
        if mode != spec.memory_mode:
            yield {"memory_mode": mode}
    if spec.optimise != "size":
        yield {"optimise": "size"}


#: Name of the change "2:4 structured sparsity" in results and notes.
_SPARSE_WEIGHTS = "2:4 sparse weights"
_NO_WEIGHTS = "no convolution or linear layer has 16 or more input channels"
#: ``{Vela's name of the memory that holds the constants: name of this memory in notes}``. Vela calls SRAM that holds
#: constants ``OnChipFlash``.
_CONSTANT_MEMORY_NAMES = {"OnChipFlash": "SRAM", "OffChipFlash": "flash", "Dram": "DRAM"}


class _ChangeEvaluator:
    """Compiles the program with one change at a time, and collects results and notes."""

    def __init__(self, spec: EthosUCompileSpec, delegates: Sequence[DelegateRecord], loops: LoopRolling) -> None:
        self._spec, self._loops = spec, loops
        lowered = [make_lowered_delegate(delegate) for delegate in delegates]
        self._delegates: _LoweredDelegates = lowered, [np.frombuffer(delegate.tosa, np.uint8) for delegate in delegates]
        self._current_cost = _to_cost(
            sum_estimates([delegate.vela for delegate in delegates if delegate.vela is not None])
        )
        self.results: list[Advice] = []
        self.notes: list[str] = []

    def try_options(self, changed: Mapping[str, Any]) -> None:
        """Compile the same graphs with other recipe options. Options that the system does not support are skipped."""
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        current = self._spec
        options: dict[str, Any] = {"memory_mode": current.memory_mode, "optimise": current.optimise, **changed}
        rest: dict[str, Any] = {"extra_flags": current.extra_flags, "config_ini": current.config_ini}
        try:
            spec = EthosUCompileSpec(current.accelerator, current.system_config, **rest, **options)
        except ValueError:
            return
        change = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        self._compile_and_record(change, spec, self._delegates, _memory_requirements(current, spec))

    def try_per_tensor_weights(self, program: ExportedProgram, method_suffix: str, *, is_only_method: bool) -> None:
        """Compile the program with one scale for each weight tensor (``per_channel=False``).

        A program without per-channel weights is not compiled. For a program with several methods, a note is added
        instead, because methods share weights.
        """
        from arm_recipes.explore.advice.per_tensor_weights import use_per_tensor_scales

        changed = use_per_tensor_scales(program)
        if changed is None:
            return
        if not is_only_method:
            self.notes.append(
                f"per_channel=False{method_suffix}: not tried, because the methods of the program share weights"
            )
            return
        self._try_program("per_channel=False", changed, "less accurate: check with compare")

    def try_sparse_weights(self, program: ExportedProgram) -> None:
        """Compile the program with two of each four weights set to 0 (2:4 structured sparsity)."""
        from arm_recipes.explore.advice.sparsity import find_prunable_weights, prune_weights

        changed = prune_weights(program)
        if changed is None:
            reason = "the weights are 2:4 sparse already" if find_prunable_weights(program) else _NO_WEIGHTS
            self.notes.append(f"{_SPARSE_WEIGHTS}: {reason}")
            return
        self._try_program(_SPARSE_WEIGHTS, changed, "requires pruning (compute_sparsity_masks) and fine-tuning")
        if self.results and self.results[-1].change == _SPARSE_WEIGHTS and not self.results[-1].saves:
            then = self.results[-1].then
            self.notes.append(
                f"{_SPARSE_WEIGHTS} save nothing ({self._current_cost.cycles:,} to {then.cycles:,} cycles): neither "
                "multiply-accumulates nor the transfer of weights limits this program"
            )

    def _try_program(self, change: str, program: ExportedProgram, note: str) -> None:
        """Lower and compile a changed program, and record its cost, or why it could not be lowered."""
        lowered = lower_program(program, self._spec.target, self._loops)
        if isinstance(lowered, str):
            self.notes.append(f"{change}: {lowered}")
        else:
            self._compile_and_record(change, self._spec, (lowered.delegates, lowered.arrays(self._spec)), note)

    def _compile_and_record(self, change: str, spec: EthosUCompileSpec, lowered: _LoweredDelegates, note: str) -> None:
        _, estimates = compile_delegates(0, spec, lowered[0], *lowered[1])
        if isinstance(estimates, str):
            self.notes.append(f"{change}: {estimates.partition(chr(10))[0]}")
        else:
            self.results.append(Advice(change, self._current_cost, _to_cost(estimates), note=note))


def _to_cost(estimates: ProgramEstimates) -> Cost:
    return Cost(estimates.cycles, estimates.npu_sram_bytes, estimates.dram_bytes, estimates.flash_bytes)


def _memory_requirements(current: EthosUCompileSpec, changed: EthosUCompileSpec) -> str:
    """Describe what a changed memory mode requires of the system; "" if it requires nothing new."""
    if changed.memory_mode == current.memory_mode:
        return ""
    requirements = []
    before, after = (
        _CONSTANT_MEMORY_NAMES.get(spec.configuration.const_memory, "other memory") for spec in (current, changed)
    )
    if before != after:
        requirements.append(
            f"constants in {after}{', beside the working memory' * (after == 'SRAM')}, instead of {before}"
        )
    if changed.configuration.arena_on_second_port and not current.configuration.arena_on_second_port:
        requirements.append("working memory in DRAM, with SRAM as cache")
    return "; ".join(requirements)
