"""Memory budgets: an export whose program exceeds a budget fails before a file is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.events import delegate_record
from arm_recipes._internal.executorch_programs import delegates_of, named_data_bytes
from arm_recipes._internal.messages import BudgetError
from arm_recipes._internal.rendering import as_text, format_bytes
from arm_recipes.report.layers import DelegateProfile
from arm_recipes.report.memory import method_memory

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.export import ExportRecipe

    from arm_backend_core.backends.payload import VelaEstimates
    from arm_backend_core.events import Delegate
    from arm_recipes._internal.rendering import Section
    from arm_recipes.pipeline.artifact import Artifact

#: Number of tensors that an error message lists.
_MAX_LISTED_TENSORS = 6


@dataclass(frozen=True)
class CheckBudgets:
    """Edge manager pass: check the SRAM of each method and the flash of the delegates.

    Args:
        sram: SRAM budget in bytes, compared with Vela's estimate; None for no limit.
        flash: flash budget in bytes, for the program and its external data; None for no limit.
        optimise: optimization goal of the compile spec, for the advice in messages.
    """

    sram: int | None
    flash: int | None
    optimise: str = "auto"

    def __call__(self, manager: EdgeProgramManager) -> Sequence[Any]:
        """Check every method.

        Raises:
            BudgetError: a budget is exceeded; the message names the largest tensors.
        """
        stored_bytes, records = named_data_bytes(manager), []
        for method in sorted(manager.methods):
            for module in delegates_of(manager, method):
                record = delegate_record(module)
                assert record is not None
                stored_bytes += len(module.processed_bytes)
                records.append(record)
                if record.vela is not None and self.sram is not None and record.vela.sram_bytes > self.sram:
                    raise BudgetError(_sram_message(method, record, record.vela, self.sram, self.optimise))
        self._check_flash(stored_bytes, records, "the delegates alone")
        return []

    def check(self, result: Artifact) -> None:
        """Check the size of the emitted program.

        Raises:
            BudgetError: it exceeds the flash budget.
        """
        self._check_flash(result.stored_bytes, result.report.delegates, "the program")

    def _check_flash(self, stored_bytes: int, records: Sequence[Delegate], subject: str) -> None:
        if self.flash is not None and stored_bytes > self.flash:
            raise BudgetError(_flash_message(stored_bytes, self.flash, records, subject))


def budget_passes(recipe: ExportRecipe) -> Iterator[CheckBudgets]:
    """The budget passes of a recipe."""
    passes = (recipe.lowering_recipe.edge_manager_transform_passes if recipe.lowering_recipe else None) or ()
    return (each for each in passes if isinstance(each, CheckBudgets))


def _sram_message(method: str, record: Delegate, vela: VelaEstimates, budget: int, optimise: str) -> str:
    summary = (
        f"sram_budget: '{method}' needs {_format_byte_count(vela.sram_bytes)} of SRAM with memory mode "
        f"{vela.memory_mode}, {vela.sram_bytes - budget:,} B more than the budget of {_format_byte_count(budget)}"
    )
    sram_usage = next((use for use in method_memory([DelegateProfile(method, record)]) if use.memory == "Sram"), None)
    sections: list[Section] = []
    if sram_usage is not None:
        rows: list[tuple[str, ...]] = [
            (f"{tensor.bytes:,} B", tensor.kind, tensor.where, tensor.source)
            for tensor in sram_usage.peak[:_MAX_LISTED_TENSORS]
        ]
        sections.append(("Live tensors at peak SRAM usage:", rows))
    sections.append(
        (
            "To reduce SRAM:",
            [
                *[('optimise="size": Vela cascades layers in stripes, which may take more cycles',)]
                * (optimise == "performance"),
                ("another memory_mode, if the system has DRAM; smaller inputs, or fewer channels in these layers",),
                ("result.advice(), exported without sram_budget, compiles alternatives and shows their SRAM",),
            ],
        )
    )
    return f"{summary}\n{as_text(sections)}"


def _flash_message(stored_bytes: int, budget: int, records: Sequence[Delegate], subject: str) -> str:
    summary = f"flash_budget: {subject} take{'s' * (subject == 'the program')} {_format_byte_count(stored_bytes)}, "
    summary += f"{stored_bytes - budget:,} B more than the budget of {_format_byte_count(budget)}"
    largest = sorted((row for record in records for row in _constant_sizes(record)), reverse=True)[:_MAX_LISTED_TENSORS]
    rows: list[tuple[str, ...]] = [(f"{count:,} B", module, source) for count, module, source in largest]
    advice: list[tuple[str, ...]] = [("4-bit weights (A8W4 recipes), or fewer channels in these layers",)]
    return f"{summary}\n{as_text([('Largest constants, before encoding:', rows), ('To reduce flash:', advice)])}"


def _constant_sizes(record: Delegate) -> Iterator[tuple[int, str, str]]:
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
