"""Which precision to give which region, the more the price may be: the lower hull of error over price.

Errors of regions add up nearly, as they are small and not correlated, and so do prices. Then the best plans are those
of one exchange rate for all regions: each has the precision whose error times the rate plus price is least.
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
        noise: that the output gets from the region.
        extra_cost: beyond that of the precision that the recipe has.
    """

    precision: str
    noise: float
    extra_cost: float


@dataclass(frozen=True)
class Step:
    """A region gets another precision: more exact, and dearer."""

    region: Region
    choice: Choice
    noise_reduction: float
    extra_cost: float


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """Choices that are best at some exchange rate, from the cheapest to the most exact."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.extra_cost, c.noise)):
        if kept and choice.noise >= kept[-1].noise:
            continue
        while len(kept) > 1 and _rate(kept[-2], choice) >= _rate(kept[-2], kept[-1]):
            kept.pop()
        kept.append(choice)
    return kept


def _rate(one: Choice, other: Choice) -> float:
    """Error that is saved for what it costs."""
    return (one.noise - other.noise) / max(other.extra_cost - one.extra_cost, 1e-9)


def hull_steps(choices: Mapping[Region, Sequence[Choice]]) -> tuple[dict[Region, Choice], list[Step]]:
    """The cheapest choice of each region, and steps from there: what gains most for its price comes first."""
    hulls = {region: lower_hull(found) for region, found in choices.items()}
    found = [
        (_rate(before, after), Step(region, after, before.noise - after.noise, after.extra_cost - before.extra_cost))
        for region, line in hulls.items()
        for before, after in pairwise(line)
    ]
    found.sort(key=lambda item: -item[0])  # stable: steps of one region stay in order, their rates fall
    return {region: line[0] for region, line in hulls.items()}, [step for _, step in found]


def select_affordable(rest: Sequence[Step], room: float, part: float = 1.0) -> list[Step]:
    """Steps that cost no more than ``room`` together, those first that gain most for their price.

    Of one region the later steps follow the earlier ones.

    Args:
        part: how many of them, one at least.
    """
    found: list[Step] = []
    left_out: set[Region] = set()
    for step in rest:
        if step.region not in left_out and step.extra_cost <= room:
            found.append(step)
            room -= step.extra_cost
        else:
            left_out.add(step.region)
    return found[: max(1, round(part * len(found)))]


def cumulative_plans(
    base: Mapping[str, str], start: Mapping[Region, Choice], taken: Sequence[Step]
) -> list[PrecisionPlan]:
    """The plan that is cheapest, and those after each step."""
    plan = dict(base)
    for region, choice in start.items():
        plan = with_region(plan, region, choice.precision)
    found = [plan]
    for step in taken:
        plan = with_region(plan, step.region, step.choice.precision)
        found.append(plan)
    return found


def pick_evenly_spaced(prices: Sequence[float], count: int) -> list[int]:
    """Numbers of at most ``count`` plans, first and last among them, whose prices are as far apart as can be."""
    low, high = prices[0], prices[-1]
    wanted = [low + (high - low) * i / max(count - 1, 1) for i in range(count)]
    nearest = {min(range(len(prices)), key=lambda i: abs(prices[i] - price)) for price in wanted}
    return sorted(nearest | {0, len(prices) - 1})
