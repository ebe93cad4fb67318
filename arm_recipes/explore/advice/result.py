"""Result of ``advice``: changes that lower cycles or memory, with their estimated costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arm_recipes._internal.rendering import Renderable, Section, format_bytes


@dataclass(frozen=True)
class Cost:
    """Vela's estimate for one inference.

    Attributes:
        cycles: cycles of the inference.
        sram_bytes: working memory in SRAM. Vela counts constants in SRAM as ``flash_bytes``.
        dram_bytes: constants and working memory in DRAM.
        flash_bytes: constants in flash, or in SRAM.
    """

    cycles: int
    sram_bytes: int
    dram_bytes: int
    flash_bytes: int

    @property
    def dram_and_flash_bytes(self) -> int:
        """Bytes of DRAM and flash."""
        return self.dram_bytes + self.flash_bytes


@dataclass(frozen=True)
class Advice:
    """A change that was compiled, with its cost.

    Attributes:
        change: argument of ``get_recipe``, or a change of the model.
        now, then: cost before and after the change. It is the cost of the program, or of the isolated layer.
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
    def is_better(self) -> bool:
        """Whether the change saves more than 0.5 % of cycles or SRAM."""
        pairs = ((self.now.cycles, self.then.cycles), (self.now.sram_bytes, self.then.sram_bytes))
        return any(changed < 0.995 * current for current, changed in pairs)


@dataclass(frozen=True)
class AdviceList(Renderable):
    """Changes that lower the cost, sorted by decreasing savings of cycles.

    Attributes:
        items: the changes.
        tried: number of changes that were compiled.
        notes: changes that could not be tried, with the reason.
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
        rows = [_advice_cells(item) for item in self.items]
        head = ("change", "cycles", "", "SRAM", "", "flash and DRAM", "layer", "note")
        yield f"{len(rows)} of {self.tried} changes lower the cost", [head, *rows] if rows else [("none",)]
        if self.notes:
            yield "Not tried", [(note,) for note in self.notes]


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
