"""Path of precision plans with increasing cost: the lower convex hull of noise over cost (Lagrangian relaxation).

Noise powers of regions approximately add up, because they are small and uncorrelated; so do costs. The best plans then
share one Lagrange multiplier: each region has the precision that minimizes multiplier * noise + cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arm_recipes.explore.tune.regions import PrecisionPlan, Region, with_region


@dataclass(frozen=True)
class Choice:
    """A precision for a region.

    Attributes:
        precision: name of the precision.
        noise: noise at the output that the region causes, relative to the signal.
        extra_cost: cost relative to the recipe's own precision.
    """

    precision: str
    noise: float
    extra_cost: float


@dataclass(frozen=True)
class Step:
    """A change of one region to a more accurate and more expensive precision."""

    region: Region
    choice: Choice
    noise_reduction: float
    extra_cost: float


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices on the lower convex hull, from the cheapest to the most accurate."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.extra_cost, c.noise)):
        if hull and choice.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _exchange_rate(hull[-2], choice) >= _exchange_rate(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _exchange_rate(cheaper: Choice, dearer: Choice) -> float:
    """Return the noise reduction per cost."""
    return (cheaper.noise - dearer.noise) / max(dearer.extra_cost - cheaper.extra_cost, 1e-9)


def hull_steps(choices: Mapping[Region, Sequence[Choice]]) -> tuple[dict[Region, Choice], list[Step]]:
    """Return the cheapest choice of each region, and the steps from there, largest noise reduction per cost first."""
    hulls = {region: lower_hull(options) for region, options in choices.items()}
    rated_steps = [
        (
            _exchange_rate(before, after),
            Step(region, after, before.noise - after.noise, after.extra_cost - before.extra_cost),
        )
        for region, line in hulls.items()
        for before, after in pairwise(line)
    ]
    rated_steps.sort(key=lambda item: -item[0])  # stable: steps of one region stay in order, as their rates decrease
    return {region: line[0] for region, line in hulls.items()}, [step for _, step in rated_steps]


def select_affordable(steps: Sequence[Step], budget: float, fraction: float = 1.0) -> list[Step]:
    """Select steps in order whose total cost is within ``budget``.

    A skipped step also excludes the later steps of its region.

    Args:
        steps: steps in order of preference.
        budget: total cost that the steps may add.
        fraction: fraction of the selected steps to return, at least one step.
    """
    selected: list[Step] = []
    skipped: set[Region] = set()
    for step in steps:
        if step.region not in skipped and step.extra_cost <= budget:
            selected.append(step)
            budget -= step.extra_cost
        else:
            skipped.add(step.region)
    return selected[: max(1, round(fraction * len(selected)))]


def cumulative_plans(
    base: Mapping[str, str], start: Mapping[Region, Choice], steps: Sequence[Step]
) -> list[PrecisionPlan]:
    """Return the cheapest plan and the plan after each step."""
    plan = dict(base)
    for region, choice in start.items():
        plan = with_region(plan, region, choice.precision)
    all_plans = [plan]
    for step in steps:
        plan = with_region(plan, step.region, step.choice.precision)
        all_plans.append(plan)
    return all_plans


def pick_evenly_spaced(costs: Sequence[float], count: int) -> list[int]:
    """Pick indices of at most ``count`` plans with evenly spaced costs, first and last included."""
    low, high = costs[0], costs[-1]
    targets = [low + (high - low) * i / max(count - 1, 1) for i in range(count)]
    nearest = {min(range(len(costs)), key=lambda i: abs(costs[i] - cost)) for cost in targets}
    return sorted(nearest | {0, len(costs) - 1})
