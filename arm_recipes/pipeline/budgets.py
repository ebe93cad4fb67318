"""Memory budgets: an export whose program exceeds a budget fails before a file is written.

With ``optimise="auto"``, a program that exceeds the SRAM budget is first compiled again for less SRAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.compilation_log import delegate_record
from arm_recipes._internal.errors import BudgetError
from arm_recipes._internal.executorch_programs import arm_delegates_of, named_data_bytes
from arm_recipes._internal.rendering import as_text, format_bytes
from arm_recipes.pipeline.banked_memory_planning import BankedMemoryPlanner, check_memory_budgets
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.report.memory import iter_memory_usage
from arm_recipes.report.npu_layer_costs import DelegateProfile
from arm_recipes.runtime.ethosu_payload import CACHE_LINE

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.export import ExportRecipe

    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.report.ram import Ram
    from arm_recipes.runtime.tensor_info import TensorInfo

#: The first of two compilations for less SRAM reduces the NPU's memory by (bytes above the budget) / this number.
_FIRST_REDUCTION = 8
#: Number of tensors that an error message lists.
_MAX_LISTED_TENSORS = 6
_RAM_GOAL = 'optimise="ram": Vela cascades layers in stripes, which may take more cycles'
_QUANTIZED_IO = "quantized_io=True: no float copies of inputs and outputs beside their int8 ones"
_SRAM_REMEDIES = (
    "another memory_mode, if the system has DRAM; smaller inputs, or fewer channels in these layers",
    "an export without sram_budget, then result.advice(): it compiles alternatives and shows their SRAM",
)
_CPU_REMEDIES = ("smaller inputs, or fewer channels in the layers with the largest tensors",)


@dataclass(frozen=True)
class CheckBudgets:
    """Edge manager pass: check the SRAM of each delegate and the flash of all delegates.

    ``check`` checks the emitted program. Its RAM outside the delegates is known only after emission.

    Args:
        sram: SRAM budget in bytes, for everything that the board must place in SRAM; None for no limit.
        flash: flash budget in bytes, for the program and its external data; None for no limit.
        optimise: optimization goal of the compile spec. With "auto", a program that exceeds the SRAM budget is compiled
            again (``recipes_within_budget``). Other goals affect only the advice in messages.
        board: name of the board, for messages; None without the option ``board``.
        memory_planner: plans the memories of the option ``memory``, which have budgets; None without the option.
    """

    sram: int | None
    flash: int | None
    optimise: str = "auto"
    board: str | None = None
    memory_planner: BankedMemoryPlanner | None = None

    def __call__(self, manager: EdgeProgramManager) -> Sequence[Any]:
        """Check every method.

        Raises:
            BudgetError: a budget is exceeded; the message names the largest tensors.
        """
        stored_bytes, records = named_data_bytes(manager), []
        for method in sorted(manager.methods):
            for module in arm_delegates_of(manager, method):
                record = delegate_record(module)
                assert record is not None
                stored_bytes += len(module.processed_bytes)
                records.append(record)
                if record.vela is not None and self.sram is not None and record.vela.sram_bytes > self.sram:
                    raise BudgetError(
                        self._sram_message(
                            method, record, record.vela.sram_bytes, [_RAM_GOAL] * (self.optimise == "performance")
                        )
                    )
        self._check_flash(stored_bytes, records, "the delegates alone")
        return []

    def check(self, result: Artifact, *, is_limited: bool = False) -> None:
        """Check the RAM and the size of the emitted program.

        Args:
            result: the program.
            is_limited: whether the recipe of the program is from ``recipes_within_budget``. The message then does not
                advise ``optimise="ram"``.

        Raises:
            BudgetError: a budget is exceeded; the message names the parts of the RAM and the largest tensors.
        """
        ram = result.report.ram
        if ram is not None and self.memory_planner is not None:
            check_memory_budgets(self.memory_planner, ram.bytes_by_memory)
        if ram is not None and self.exceeds_sram(result):
            estimated = [(m.name, d) for m in result.report.methods for d in m.delegates if d.vela is not None]
            method, record = max(
                estimated, key=lambda found: found[1].vela.sram_bytes if found[1].vela else 0, default=("", None)
            )
            tensors = [tensor for m in result.report.methods for tensor in (*m.inputs, *m.outputs)]
            hints = [_RAM_GOAL] * (record is not None and not is_limited and self.optimise in ("auto", "performance"))
            hints += [_QUANTIZED_IO] * any(tensor.dtype.startswith("float") for tensor in tensors)
            raise BudgetError(self._sram_message(method, record, ram.sram_bytes, hints, ram, tensors))
        self._check_flash(result.stored_bytes, result.report.delegates, "the program")

    def exceeds_sram(self, result: Artifact) -> bool:
        """Whether the emitted program needs more SRAM than the budget."""
        ram = result.report.ram
        return ram is not None and self.sram is not None and ram.sram_bytes > self.sram

    def _check_flash(self, stored_bytes: int, records: Sequence[DelegateRecord], subject: str) -> None:
        if self.flash is not None and stored_bytes > self.flash:
            excess = f"{stored_bytes - self.flash:,} B more than {self._describe(self.flash)}"
            raise BudgetError(_flash_message(stored_bytes, excess, records, subject))

    def _describe(self, budget: int) -> str:
        board = "" if self.board is None else f" (board {self.board!r})"
        return f"the budget of {_format_byte_count(budget)}{board}"

    def _sram_message(
        self,
        method: str,
        record: DelegateRecord | None,
        needed: int,
        hints: Sequence[str],
        ram: Ram | None = None,
        tensors: Sequence[TensorInfo] = (),
    ) -> str:
        """The message for a program that needs ``needed`` bytes.

        Args:
            method: method of ``record``.
            record: a delegate that exceeds the budget, or the one that needs the most SRAM; None without an NPU.
            needed: bytes of SRAM.
            hints: remedies that help this program.
            ram: RAM of the emitted program; None if only the NPU's part is known.
            tensors: inputs and outputs of the emitted program.
        """
        assert self.sram is not None
        subject = f"the NPU's part of '{method}'" if ram is None else "the program"
        mode = f" with memory mode {record.vela.memory_mode}" if record is not None and record.vela is not None else ""
        summary = (
            f"sram_budget: {subject} needs {_format_byte_count(needed)} of SRAM{mode}, {needed - self.sram:,} B more "
            f"than {self._describe(self.sram)}"
        )
        sections = list(ram.sections()) if ram is not None else []
        usages = [] if record is None else iter_memory_usage([DelegateProfile(method, record)])
        sram_usage = next((use for use in usages if use.memory == "Sram"), None)
        if sram_usage is not None:
            rows: list[tuple[str, ...]] = [
                (f"{tensor.bytes:,} B", tensor.kind, tensor.where, tensor.source)
                for tensor in sram_usage.peak[:_MAX_LISTED_TENSORS]
            ]
            sections.append(("Live tensors of the NPU at peak SRAM usage:", rows))
        if tensors:
            largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)[:_MAX_LISTED_TENSORS]
            rows = [(f"{tensor.nbytes:,} B", tensor.dtype, tensor.name) for tensor in largest if tensor.nbytes]
            sections.append(("Largest inputs and outputs of the program:", rows))
        remedies: list[tuple[str, ...]] = [
            (remedy,) for remedy in (*hints, *(_CPU_REMEDIES if record is None else _SRAM_REMEDIES))
        ]
        return f"{summary}\n{as_text([*sections, ('To reduce SRAM:', remedies)])}"


def budget_passes(recipe: ExportRecipe) -> Iterator[CheckBudgets]:
    """The budget passes of a recipe."""
    passes = (recipe.lowering_recipe.edge_manager_transform_passes if recipe.lowering_recipe else None) or ()
    return (each for each in passes if isinstance(each, CheckBudgets))


def recipes_within_budget(recipe: ExportRecipe, result: Artifact) -> list[ArmRecipe]:
    """Return recipes for less SRAM of the NPU, if the program of ``optimise="auto"`` exceeds the SRAM budget.

    The first compilation of the delegates cannot respect the whole budget, because the RAM outside the delegates is
    known only afterwards. Each new recipe limits the SRAM of every delegate to fewer bytes than the largest delegate
    took before. A reduction by the excess suffices if the RAM outside the delegates does not change. If the NPU's
    scratch also holds tensors of the CPU, Vela's placement decides how many bytes remain unused between the tensors. A
    smaller reduction may then suffice. It costs fewer cycles, so it is tried first.

    Returns:
        The recipes in the order in which they are to be tried. Empty if the program fits, if it has no NPU part, if the
        recipe is combined or of another package, or if the recipe cannot run again (its samples can be read only once,
        or it trains the model).
    """
    ram, budgets = result.report.ram, [each for each in budget_passes(recipe) if each.optimise == "auto"]
    exceeded = [budget.sram for budget in budgets if budget.sram is not None and budget.exceeds_sram(result)]
    if not isinstance(recipe, ArmRecipe) or not _can_run_again(recipe) or ram is None or not exceeded or not ram.npu:
        return []
    excess = ram.sram_bytes - min(exceeded)
    scratch = max((d.vela.sram_bytes for d in result.report.delegates if d.vela is not None), default=0)
    holds_cpu_tensors = ram.npu_sram_bytes > scratch
    reductions = (excess // _FIRST_REDUCTION, excess) if holds_cpu_tensors else (excess,)
    return [recipe.with_npu_sram(max((scratch - count) // CACHE_LINE * CACHE_LINE, 0)) for count in reductions]


def _can_run_again(recipe: ArmRecipe) -> bool:
    return not recipe.options.get("qat") and not isinstance(recipe.options.get("calibration_samples"), Iterator)


def _flash_message(stored_bytes: int, excess: str, records: Sequence[DelegateRecord], subject: str) -> str:
    summary = (
        f"flash_budget: {subject} take{'s' * (subject == 'the program')} {_format_byte_count(stored_bytes)}, {excess}"
    )
    largest = sorted((row for record in records for row in _constant_sizes(record)), reverse=True)[:_MAX_LISTED_TENSORS]
    rows: list[tuple[str, ...]] = [(f"{count:,} B", module, source) for count, module, source in largest]
    if not records:
        return (
            f"{summary}\n{as_text([('To reduce flash:', [('fewer channels in the layers with the most weights',)])])}"
        )
    advice: list[tuple[str, ...]] = [("4-bit weights (A8W4 recipes), or fewer channels in these layers",)]
    return f"{summary}\n{as_text([('Largest constants, before encoding:', rows), ('To reduce flash:', advice)])}"


def _constant_sizes(record: DelegateRecord) -> Iterator[tuple[int, str, str]]:
    """Yield the bytes of each constant, with the module and source line of its first consumer."""
    traced, seen = DelegateProfile("", record), set[str]()
    for i, operator in enumerate(traced.graph.operators):
        for name in operator.inputs:
            if name not in traced.producers and name not in traced.graph.inputs and name not in seen:
                seen.add(name)
                origin = traced.main_origin([i])
                module, source = (origin.module, origin.source) if origin is not None else ("", "")
                yield traced.graph.tensor_bytes.get(name, 0), module or "(model)", source


def _format_byte_count(count: int) -> str:
    return f"{count:,} B" if count < 10_000 else f"{count:,} B ({format_bytes(count)})"
