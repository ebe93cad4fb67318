"""Tries what could make a program cheaper, with Vela, and tells what it would give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_recipes.explore.advice.result import Advice, AdviceList, Cost
from arm_recipes.explore.sweep.compile import LoweredDelegate, compile_delegates, sum_figures
from arm_recipes.explore.sweep.lowered import describe_delegate, lower_program

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_backend_core.events import Delegate
    from arm_backend_core.partitioner import EthosUPartitioner
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec
    from arm_recipes.explore.sweep.rows import Figures

_Units = tuple[Sequence[LoweredDelegate], Sequence["np.ndarray[Any, Any]"]]


def advise(
    recipe: ExportRecipe | None, delegates: Sequence[Delegate], programs: Mapping[str, ExportedProgram]
) -> AdviceList:
    """Compile a program for Ethos-U anew, with one change at a time.

    Args:
        recipe: that the program was exported with.
        programs: by method, quantized, before they were lowered.

    Raises:
        ValueError: the recipe is not for an Ethos-U, or nothing of the program runs there.
    """
    partitioner = _partitioner_of(recipe)
    known = [delegate for delegate in delegates if delegate.vela is not None]
    if partitioner is None:
        raise ValueError("advice is for programs of Ethos-U recipes: others have no estimates of cycles and memory")
    if not known:
        raise ValueError(
            "advice is for what runs on the NPU, and nothing of this program does: report.cpu_operators says why"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about programs that nobody gets
        return _advised(recipe, partitioner, known, programs)


def _advised(
    recipe: ExportRecipe | None,
    partitioner: EthosUPartitioner,
    delegates: Sequence[Delegate],
    programs: Mapping[str, ExportedProgram],
) -> AdviceList:
    from arm_recipes.explore.advice.channels import try_fewer_channels

    spec: Any = partitioner.compile_spec
    loops = partitioner.loops
    trial = _Trial(spec, delegates, loops)
    for options in _other_options(spec):
        trial.options(options)
    for method, program in programs.items():
        trial.per_tensor_weights(program, f" of '{method}'" if len(programs) > 1 else "", alone=len(programs) == 1)
    channels, notes = try_fewer_channels(recipe, spec, programs)
    tried = [*trial.tried, *channels]
    better = sorted((item for item in tried if item.is_better), key=lambda item: item.then.cycles - item.now.cycles)
    return AdviceList(tuple(better), len(tried), (*trial.notes, *notes))


def _partitioner_of(recipe: ExportRecipe | None) -> EthosUPartitioner | None:
    from arm_backend_core.partitioner import EthosUPartitioner

    lowering = recipe.lowering_recipe if recipe is not None else None
    partitioners: Any = (lowering.partitioners if lowering is not None else None) or []
    if isinstance(partitioners, dict):
        partitioners = [each for group in partitioners.values() for each in group]
    return next((each for each in partitioners if isinstance(each, EthosUPartitioner)), None)


def _other_options(spec: EthosUCompileSpec) -> Iterator[dict[str, Any]]:
    """What to try beside the memory mode and the flags that there are."""
    from arm_backend_core.targets import vela_config

    for mode in vela_config.sections(spec.config_ini, vela_config.MEMORY):
        if mode != spec.memory_mode:
            yield {"memory_mode": mode}
    if spec.optimise != "size":  # where that was chosen, it gives what there is, and is no advice
        yield {"optimise": "size"}


#: Vela's names of where constants lie. What is on the chip is SRAM: Vela counts it apart.
_MEMORIES = {"OnChipFlash": "SRAM", "OffChipFlash": "flash", "Dram": "DRAM"}


class _Trial:
    """Compiles with changes, and keeps what comes of it."""

    def __init__(self, spec: EthosUCompileSpec, delegates: Sequence[Delegate], loops: LoopRolling) -> None:
        self._spec, self._loops = spec, loops
        units = [describe_delegate(delegate) for delegate in delegates]
        self._units: _Units = units, [np.frombuffer(delegate.tosa, np.uint8) for delegate in delegates]
        self._now = _cost(sum_figures([delegate.vela for delegate in delegates if delegate.vela is not None]))
        self.tried: list[Advice] = []
        self.notes: list[str] = []

    def options(self, changed: Mapping[str, Any]) -> None:
        """Other options of the recipe, with the same graphs; those that the system does not have are left out."""
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        given = self._spec
        options: dict[str, Any] = {"memory_mode": given.memory_mode, "optimise": given.optimise, **changed}
        rest: dict[str, Any] = {"extra_flags": given.extra_flags, "config_ini": given.config_ini}
        try:
            spec = EthosUCompileSpec(given.accelerator, given.system_config, **rest, **options)
        except ValueError:
            return
        words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        self._try(words, spec, self._units, _what_it_takes(given, spec))

    def per_tensor_weights(self, program: ExportedProgram, of: str, *, alone: bool) -> None:
        """One scale for all channels of each weight."""
        from arm_recipes.explore.advice.weights import use_per_tensor_scales

        changed = use_per_tensor_scales(program)
        if changed is None:
            return
        if not alone:
            self.notes.append(f"per_channel=False{of}: the program has several methods, whose weights belong together")
            return
        below = lower_program(changed, self._spec.target, self._loops)
        if isinstance(below, str):
            self.notes.append(f"per_channel=False: {below}")
            return
        self._try(
            "per_channel=False", self._spec, (below.delegates, below.arrays(self._spec)), "less accurate: compare"
        )

    def _try(self, change: str, spec: EthosUCompileSpec, units: _Units, note: str) -> None:
        _, figures = compile_delegates(0, spec, units[0], *units[1])
        if isinstance(figures, str):
            self.notes.append(f"{change}: {figures.partition(chr(10))[0]}")
        else:
            self.tried.append(Advice(change, self._now, _cost(figures), note=note))


def _cost(figures: Figures) -> Cost:
    return Cost(figures.cycles, figures.sram_bytes, figures.dram_bytes, figures.flash_bytes)


def _what_it_takes(now: EthosUCompileSpec, then: EthosUCompileSpec) -> str:
    """What another memory mode asks of the system, in words."""
    if then.memory_mode == now.memory_mode:
        return ""
    told = []
    before, after = (_MEMORIES.get(spec.configuration.const_memory, "other memory") for spec in (now, then))
    if before != after:
        told.append(f"constants in {after}{', besides' * (after == 'SRAM')}, not in {before}")
    if then.configuration.arena_on_second_port and not now.configuration.arena_on_second_port:
        told.append("the working memory is DRAM, with an SRAM as cache")
    return "; ".join(told)
