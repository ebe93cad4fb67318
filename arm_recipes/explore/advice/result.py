"""What ``advice`` returns: changes that need fewer cycles or less memory, with what they would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arm_recipes._internal.rendering import Renderable, Section, format_bytes


@dataclass(frozen=True)
class Cost:
    """Vela's estimate: cycles of an inference, and bytes.

    Attributes:
        sram_bytes: of the working memory. Constants that lie in SRAM too are in ``flash_bytes``.
        dram_bytes, flash_bytes: of constants, and of working memory that lies in DRAM.
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
    """A change that was tried.

    Attributes:
        change: an argument of ``get_recipe``, or what to change in the model.
        now, then: what it takes, and what it would take: the program, or that layer alone.
        module, source: of the layer that it is about; empty where it is about the program.
        note: what it costs otherwise.
    """

    change: str
    now: Cost
    then: Cost
    module: str = ""
    source: str = ""
    note: str = ""

    @property
    def is_better(self) -> bool:
        """Whether something that is noticed is won: half a percent of the cycles, or of the memory."""
        pairs = ((self.now.cycles, self.then.cycles), (self.now.sram_bytes, self.then.sram_bytes))
        return any(then < 0.995 * now for now, then in pairs)


@dataclass(frozen=True)
class AdviceList(Renderable):
    """Changes that are better, the one that saves most cycles first.

    Attributes:
        tried: how many changes were compiled.
        notes: what could not be tried, and why.
    """

    items: tuple[Advice, ...]
    tried: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def sections(self) -> Iterator[Section]:
        """Headings with their lines, for text and HTML."""
        rows = [_row(item) for item in self.items]
        head = ("change", "cycles", "", "SRAM", "", "flash and DRAM", "layer", "but")
        yield f"{len(rows)} of {self.tried} changes are better", [head, *rows] if rows else [("none",)]
        if self.notes:
            yield "Not tried", [(note,) for note in self.notes]


def _row(item: Advice) -> tuple[str, ...]:
    now, then = item.now, item.then
    return (
        item.change,
        f"{now.cycles:,} to {then.cycles:,}",
        _change(now.cycles, then.cycles),
        f"{format_bytes(now.sram_bytes)} to {format_bytes(then.sram_bytes)}",
        _change(now.sram_bytes, then.sram_bytes),
        f"{format_bytes(now.dram_and_flash_bytes)} to {format_bytes(then.dram_and_flash_bytes)}",
        item.module,
        item.note,
    )


def _change(now: int, then: int) -> str:
    return f"{(then - now) / now:+.1%}" if now else ""
