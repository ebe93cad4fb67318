"""Result of ``advice``: changes that lower cycles or memory, with their estimated costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arm_backend_core.format_count import format_count
from arm_recipes._internal.rendering import Renderable, Section, format_bytes

#: Largest relative difference of costs that is ignored.
_NEGLIGIBLE = 0.005


@dataclass(frozen=True)
class Cost:
    """Vela's estimate for one inference.

    Attributes:
        cycles: cycles of the inference.
        sram_bytes: SRAM of the NPU: scratch, and the constants if the memory mode places them there.
        dram_bytes: constants and working memory in DRAM.
        flash_bytes: stored constants; 0 if the system keeps them in DRAM.
    """

    cycles: int
    sram_bytes: int
    dram_bytes: int
    flash_bytes: int

    @property
    def dram_and_flash_bytes(self) -> int:
        """Bytes of DRAM and flash."""
        return self.dram_bytes + self.flash_bytes

    @property
    def components(self) -> tuple[int, int, int]:
        """Cycles, bytes of SRAM, bytes of DRAM and flash."""
        return self.cycles, self.sram_bytes, self.dram_and_flash_bytes


@dataclass(frozen=True)
class Advice:
    """A change that was compiled, with its cost.

    Attributes:
        change: argument of ``get_recipe``, or a change of the model.
        now: cost of the program, or of an isolated layer, before the change.
        then: the same cost after the change.
        module, source: module and source line of the layer; empty for a change of the whole program.
        note: drawback or requirement of the change.
    """

    change: str
    now: Cost
    then: Cost
    module: str = ""
    source: str = ""
    note: str = ""

    @property
    def saves(self) -> bool:
        """Whether the change saves more than 0.5 % of cycles or SRAM."""
        pairs = zip(self.now.components[:2], self.then.components[:2], strict=True)
        return any(changed < (1 - _NEGLIGIBLE) * current for current, changed in pairs)

    @property
    def is_better(self) -> bool:
        """Whether the change saves cycles or SRAM, and increases no cost by more than 0.5 %."""
        return self.saves and not self.is_trade_off

    @property
    def is_trade_off(self) -> bool:
        """Whether the change saves cycles or SRAM, but increases cycles, SRAM, or DRAM and flash by more than 0.5 %."""
        pairs = zip(self.now.components, self.then.components, strict=True)
        return self.saves and any(changed > (1 + _NEGLIGIBLE) * current for current, changed in pairs)


@dataclass(frozen=True)
class AdviceList(Renderable):
    """Changes that lower the cost, and trade-offs, sorted by decreasing savings of cycles.

    Attributes:
        items: the changes and trade-offs (``Advice.is_trade_off``).
        tried: number of changes that were compiled.
        notes: the RAM that ``quantized_io=True`` saves; changes that could not be tried or save nothing, with the
            reason.
    """

    items: tuple[Advice, ...]
    tried: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def sections(self) -> Iterator[Section]:
        """Yield headings with their rows, for text and HTML."""
        head = ("change", "cycles", "", "SRAM", "", "flash and DRAM", "layer", "note")
        rows = [_advice_cells(item) for item in self.items if not item.is_trade_off]
        yield f"{len(rows)} of {self.tried} changes lower the cost", [head, *rows] if rows else [("none",)]
        rows = [_advice_cells(item) for item in self.items if item.is_trade_off]
        if rows:
            yield f"{format_count(len(rows), 'trade-off')}: lower one cost and raise another", [head, *rows]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]


def _advice_cells(item: Advice) -> tuple[str, ...]:
    current, changed = item.now, item.then
    return (
        item.change,
        f"{current.cycles:,} to {changed.cycles:,}",
        _relative_change(current.cycles, changed.cycles),
        f"{format_bytes(current.sram_bytes)} to {format_bytes(changed.sram_bytes)}",
        _relative_change(current.sram_bytes, changed.sram_bytes),
        f"{format_bytes(current.dram_and_flash_bytes)} to {format_bytes(changed.dram_and_flash_bytes)}",
        item.module,
        item.note,
    )


def _relative_change(current: int, changed: int) -> str:
    return f"{(changed - current) / current:+.1%}" if current else ""
