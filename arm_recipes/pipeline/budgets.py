"""Budgets of memory: a program that needs more is an error before anything of it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.executorch_programs import delegates_of, named_data_bytes
from arm_recipes._internal.messages import BudgetError
from arm_recipes._internal.rendering import as_text, format_bytes
from arm_recipes.report.layers import DelegateTrace
from arm_recipes.report.memory import method_memory

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.export import ExportRecipe

    from arm_backend_core.backends.payload import VelaFigures
    from arm_backend_core.events import Delegate
    from arm_recipes._internal.rendering import Section
    from arm_recipes.pipeline.artifact import Artifact

#: Tensors that an error names.
_NAMED = 6


@dataclass(frozen=True)
class CheckBudgets:
    """Edge manager pass: what each method needs of SRAM, and what the delegates take of flash.

    Args:
        sram: bytes for the working memory of the NPU, as Vela counts them; None for any.
        flash: bytes for the program with all that is stored beside it; None for any.
        optimise: what the program is compiled for, with this budget of SRAM in view.
    """

    sram: int | None
    flash: int | None
    optimise: str = "auto"

    def __call__(self, manager: EdgeProgramManager) -> Sequence[Any]:
        """Check every method.

        Raises:
            BudgetError: one needs more; names the tensors.
        """
        stored, records = named_data_bytes(manager), []
        for method in sorted(manager.methods):
            for module in delegates_of(manager, method):
                record: Delegate = module.meta["arm_delegate"]
                stored += len(module.processed_bytes)
                records.append(record)
                if record.vela is not None and self.sram is not None and record.vela.sram_bytes > self.sram:
                    raise BudgetError(_sram(method, record, record.vela, self.sram, self.optimise))
        self._check_flash(stored, records, "the delegates alone")
        return []

    def check(self, result: Artifact) -> None:
        """Check the size of the program that was made.

        Raises:
            BudgetError: it is larger.
        """
        self._check_flash(result.stored_bytes, result.report.delegates, "the program")

    def _check_flash(self, stored: int, records: Sequence[Delegate], what: str) -> None:
        if self.flash is not None and stored > self.flash:
            raise BudgetError(_flash(stored, self.flash, records, what))


def budget_passes(recipe: ExportRecipe) -> Iterator[CheckBudgets]:
    """Those that a recipe has."""
    passes = (recipe.lowering_recipe.edge_manager_transform_passes if recipe.lowering_recipe else None) or ()
    return (each for each in passes if isinstance(each, CheckBudgets))


def _sram(method: str, record: Delegate, vela: VelaFigures, budget: int, optimise: str) -> str:
    text = (
        f"sram_budget: '{method}' needs {_bytes(vela.sram_bytes)} of SRAM with memory mode {vela.memory_mode}, "
        f"{vela.sram_bytes - budget:,} more than the {_bytes(budget)} that there are"
    )
    used = next((use for use in method_memory(method, [record]) if use.memory == "Sram"), None)
    sections: list[Section] = []
    if used is not None:
        rows: list[tuple[str, ...]] = [
            (f"{tensor.bytes:,} B", tensor.kind, tensor.where, tensor.source) for tensor in used.peak[:_NAMED]
        ]
        sections.append(("In it where most is in use:", rows))
    sections.append(
        (
            "To need less:",
            [
                *[('optimise="size": Vela computes layers in parts, which may take more cycles',)]
                * (optimise == "performance"),
                ("another memory_mode, where the system has a DRAM; a smaller input, or fewer channels in these",),
                ("result.advice(), without sram_budget, compiles for what there is and tells what each would need",),
            ],
        )
    )
    return f"{text}\n{as_text(sections)}"


def _flash(stored: int, budget: int, records: Sequence[Delegate], what: str) -> str:
    text = f"flash_budget: {what} take{'s' * (what == 'the program')} {_bytes(stored)}, "
    text += f"{stored - budget:,} more than the {_bytes(budget)} that there are"
    largest = sorted((row for record in records for row in _weights(record)), reverse=True)[:_NAMED]
    rows: list[tuple[str, ...]] = [(f"{count:,} B", module, source) for count, module, source in largest]
    advice: list[tuple[str, ...]] = [("weights of four bits (A8W4 recipes), or fewer channels in these layers",)]
    return f"{text}\n{as_text([('Largest constants, before they are encoded:', rows), ('To need less:', advice)])}"


def _weights(record: Delegate) -> Iterator[tuple[int, str, str]]:
    """Bytes of each constant, with module and line of what reads it first."""
    traced, seen = DelegateTrace("", record), set[str]()
    for i, operator in enumerate(traced.graph.operators):
        for name in operator.inputs:
            if name not in traced.producers and name not in traced.graph.inputs and name not in seen:
                seen.add(name)
                origin = traced.main_origin([i])
                module, source = (origin.module, origin.source) if origin is not None else ("", "")
                yield traced.graph.bytes.get(name, 0), module or "(model)", source


def _bytes(count: int) -> str:
    return f"{count:,} B" if count < 10_000 else f"{count:,} B ({format_bytes(count)})"
