"""What ``tune`` returns: the program, what it was chosen from, and the recipe to make it again without a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.rendering import Renderable, Section, format_bytes, to_jsonable
from arm_recipes.explore.tune.candidate import Candidate
from arm_recipes.explore.tune.chart import plot_candidates
from arm_recipes.explore.tune.cost import ProgramCost

if TYPE_CHECKING:
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.result import ExportResult


@dataclass(frozen=True)
class TunedRegion:
    """Modules that were given one precision.

    Attributes:
        module: that holds them all.
        modules: that quantize what they read.
        precision: chosen.
        share: of the error that all regions make with the recipe's own precision.
        prices: what each other precision costs here beyond the recipe's own, beside the latter or beside the most exact
            one in all other regions, whichever is less: cycles, or bytes of traffic.
    """

    module: str
    modules: tuple[str, ...]
    precision: str
    share: float
    prices: dict[str, int]


@dataclass(frozen=True)
class Tuned(Renderable):
    """The result of a search.

    Attributes:
        best: the program that was chosen, exported. ``recipe`` makes it again.
        chosen: its row among ``candidates``; ``base``: that of the recipe as it was given.
        verified: accuracy of ``best`` as it ran on this machine; None where it could not.
        candidates: all programs that were made, the cheapest first.
        regions: what was chosen for which part.
        metric: what accuracy is.
        goal: what was looked for; ``reached`` whether it was found, by the samples that judge.
        samples: how many calibrated, chose and judged; ``notes`` say where those that chose judged too.
        notes: what else the user should know, one sentence each.
    """

    best: ExportResult
    recipe: ArmRecipe
    chosen: Candidate
    base: Candidate
    verified: float | None
    candidates: tuple[Candidate, ...]
    regions: tuple[TunedRegion, ...]
    metric: str
    goal: str
    reached: bool
    samples: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """Candidates that no other is as exact as for less, by the samples that choose; the cheapest first."""
        found: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (_time(c.price), -c.search_accuracy)):
            if not found or candidate.search_accuracy > found[-1].search_accuracy:
                found.append(candidate)
        return tuple(found)

    def save(self, path: str | Path) -> Path:
        """Write the recipe with its precisions, for ``load_recipe`` and ``arm-recipes export --tuned``.

        Raises:
            ValueError: nothing can be written there.
        """
        return self.recipe.save(path)

    def plot(self) -> Any:
        """A Plotly figure: accuracy by price of every candidate, the frontier, and what was chosen.

        Raises:
            ImportError: Plotly is not installed.
        """
        title = f"{self.recipe.type_name}: {self.goal}"
        return plot_candidates(self.candidates, self.frontier, self.base, self.chosen, self.metric, title)

    def to_dict(self) -> dict[str, Any]:
        """All but the program as dicts, lists, str and numbers, ready for JSON."""
        names = ("chosen", "base", "verified", "candidates", "regions", "metric", "goal", "reached", "samples", "notes")
        return {"recipe": self.recipe.to_dict()} | {name: to_jsonable(getattr(self, name)) for name in names}

    def sections(self) -> Iterator[Section]:
        """Headings with their lines, for text and HTML."""
        relative = _time(self.chosen.price) / max(_time(self.base.price), 1)
        rows: list[tuple[str, ...]] = [
            ("goal", self.goal + ("" if self.reached else ": not reached")),
            (self.metric, f"{self.chosen.accuracy:.4g}, {self.base.accuracy:.4g} with {self.recipe.type_name} alone"),
            (self.chosen.price.time_kind, f"{_time(self.chosen.price):,}, {relative:.3f} of {self.recipe.type_name}"),
        ]
        rows.append(("samples", ", ".join(f"{count} {did}" for did, count in self.samples.items())))
        if self.verified is not None:
            rows.append(("verified", f"{self.verified:.4g}: the program as it runs"))
        yield "Tuned", rows
        head = ("", self.base.price.time_kind, "relative", "SRAM", "flash", self.metric, "in the search", "precisions")
        front = set(map(id, self.frontier))
        marks = {id(candidate): "*" for candidate in self.candidates if id(candidate) in front}
        marks[id(self.chosen)] = "chosen"
        lines = [_cells(c, self.base, marks.get(id(c), "")) for c in self.candidates]
        yield f"{len(lines)} programs; none with * was less exact than a cheaper one in the search", [head, *lines]
        changed = [region for region in self.regions if region.share >= 0.001 or any(region.prices.values())]
        changed.sort(key=lambda region: -region.share)
        yield "Regions", [("of the error", "precision", "module", "beyond the recipe's own"), *map(_region, changed)]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]


def _time(price: ProgramCost) -> int:
    return price.value(price.time_kind)


def _cells(candidate: Candidate, base: Candidate, mark: str) -> tuple[str, ...]:
    price = candidate.price
    time = _time(price)
    return (
        mark,
        f"{time:,}",
        f"{time / max(_time(base.price), 1):.3f}",
        "" if price.sram is None else format_bytes(price.sram),
        format_bytes(price.flash),
        f"{candidate.accuracy:.4g}",
        f"{candidate.search_accuracy:.4g}",
        _settings(candidate.precisions),
    )


def _settings(precisions: dict[str, str]) -> str:
    if len(precisions) > 3:
        return f"{len(precisions)} settings"
    return ", ".join(f"{module or 'all'}: {name}" for module, name in precisions.items()) or "the recipe's own"


def _region(region: TunedRegion) -> tuple[str, ...]:
    extra = ", ".join(f"{name} {price:+,}" for name, price in region.prices.items())
    return f"{region.share:.1%}", region.precision, region.module or "(model)", extra
