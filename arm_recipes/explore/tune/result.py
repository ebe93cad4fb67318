"""Result of ``tune``: the chosen program, all candidates, and the recipe with the chosen precisions."""

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
    """A region of the search: modules that share a precision.

    Attributes:
        module: module that contains all modules of the region.
        modules: modules of the region that have quantized inputs.
        precision: chosen precision.
        share: the region's share of the total noise of all regions, at the recipe's own precision.
        extra_costs: cost of each other precision minus cost of the recipe's own precision, in cycles or in bytes of
            traffic or flash: ``{"A16W8": 5120}``. All other regions have the recipe's own precision. If the region's
            share of the noise is large, the cost is measured again with all other regions at the most accurate
            precision; the smaller value counts. Precisions that were not measured are missing.
    """

    module: str
    modules: tuple[str, ...]
    precision: str
    share: float
    extra_costs: dict[str, int]


@dataclass(frozen=True)
class Tuned(Renderable):
    """The result of a search.

    Attributes:
        best: export of the chosen program.
        recipe: recipe with the chosen precisions. It reproduces ``best`` if it gets the same calibration samples.
        chosen: the chosen candidate.
        base: candidate of the unchanged recipe.
        verified: accuracy of ``best``, executed on this machine; None if it could not be executed.
        candidates: all compiled programs, those with the fewest cycles (or the least traffic) first.
        regions: chosen precision of each region.
        metric: name of the accuracy metric.
        goal: goal of the search.
        reached: whether the chosen program reaches the goal. Its accuracy is ``verified``, or ``chosen.accuracy`` if
            ``verified`` is None.
        samples: number of samples of each part: ``{"calibration": 8, "search": 4, "test": 4}``. If the search
            samples are also the test samples, a note says so.
        notes: notes for the user, one sentence each.
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
        """Pareto-optimal candidates by cost and search accuracy, the cheapest first."""
        frontier: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (_main_cost(c.cost), -c.search_accuracy)):
            if not frontier or candidate.search_accuracy > frontier[-1].search_accuracy:
                frontier.append(candidate)
        return tuple(frontier)

    def save(self, path: str | Path) -> Path:
        """Write the recipe with its precisions, for ``load_recipe`` and ``arm-recipes export --tuned``.

        Raises:
            ValueError: the path is not writable.
        """
        return self.recipe.save(path)

    def plot(self) -> Any:
        """Plot accuracy over cost of all candidates, the Pareto frontier and the chosen candidate with Plotly.

        Raises:
            ImportError: Plotly is not installed.
        """
        title = f"{self.recipe.type_name}: {self.goal}"
        return plot_candidates(self.candidates, self.frontier, self.base, self.chosen, self.metric, title)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes except ``best`` as dicts, lists, strings and numbers, ready for JSON."""
        names = ("chosen", "base", "verified", "candidates", "regions", "metric", "goal", "reached", "samples", "notes")
        return {"recipe": self.recipe.to_dict()} | {name: to_jsonable(getattr(self, name)) for name in names}

    def sections(self) -> Iterator[Section]:
        """Yield headings with their rows, for text and HTML."""
        relative = _main_cost(self.chosen.cost) / max(_main_cost(self.base.cost), 1)
        rows: list[tuple[str, ...]] = [
            ("goal", self.goal + ("" if self.reached else ": not reached")),
            (self.metric, f"{self.chosen.accuracy:.4g}, {self.base.accuracy:.4g} with {self.recipe.type_name} alone"),
            (
                self.chosen.cost.time_kind,
                f"{_main_cost(self.chosen.cost):,}, {relative:.3f} of {self.recipe.type_name}",
            ),
        ]
        rows.append(("samples", ", ".join(f"{count} {part}" for part, count in self.samples.items())))
        if self.verified is not None:
            rows.append(("verified", f"{self.verified:.4g}: exported program, executed"))
        yield "Tuned", rows
        header = (
            "",
            self.base.cost.time_kind,
            "relative",
            "SRAM",
            "flash",
            self.metric,
            "search samples",
            "precisions",
        )
        front = set(map(id, self.frontier))
        marks = {id(candidate): "*" for candidate in self.candidates if id(candidate) in front}
        marks[id(self.chosen)] = "chosen"
        candidate_rows = [_candidate_cells(c, self.base, marks.get(id(c), "")) for c in self.candidates]
        yield f"{len(candidate_rows)} programs (* Pareto-optimal on the search samples)", [header, *candidate_rows]
        changed = [region for region in self.regions if region.share >= 0.001 or any(region.extra_costs.values())]
        changed.sort(key=lambda region: -region.share)
        yield "Regions", [("noise share", "precision", "module", "extra cost"), *map(_region_cells, changed)]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]


def _main_cost(cost: ProgramCost) -> int:
    return cost.value(cost.time_kind)


def _candidate_cells(candidate: Candidate, base: Candidate, mark: str) -> tuple[str, ...]:
    main_cost = _main_cost(candidate.cost)
    return (
        mark,
        f"{main_cost:,}",
        f"{main_cost / max(_main_cost(base.cost), 1):.3f}",
        "" if candidate.cost.sram is None else format_bytes(candidate.cost.sram),
        format_bytes(candidate.cost.flash),
        f"{candidate.accuracy:.4g}",
        f"{candidate.search_accuracy:.4g}",
        _format_precisions(candidate.precisions),
    )


def _format_precisions(precisions: dict[str, str]) -> str:
    if len(precisions) > 3:
        return f"{len(precisions)} settings"
    return ", ".join(f"{module or 'all'}: {name}" for module, name in precisions.items()) or "unchanged recipe"


def _region_cells(region: TunedRegion) -> tuple[str, ...]:
    costs = ", ".join(f"{name} {cost:+,}" for name, cost in region.extra_costs.items())
    return f"{region.share:.1%}", region.precision, region.module or "(model)", costs
