"""Lower convex hull of noise over cost: a path of precision plans with increasing cost (Lagrangian relaxation).

The noise power of a plan is approximately the sum of the noise powers of its regions, because the noise of each region
is small and uncorrelated with the others. The cost is approximately a sum over the regions, too. A plan on the hull
therefore belongs to one Lagrange multiplier: each region has the precision that minimizes multiplier * noise + cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arm_recipes.explore.tune.regions import PrecisionPlan, Region, with_region_precision


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision of a region, with its noise and cost.

    Attributes:
        precision: name of the precision.
        noise: power of the noise that the region causes at the model's output, relative to the power of the signal.
        extra_cost: cost of the program if the region has this precision, minus its cost with the recipe's precision.
    """

    precision: str
    noise: float
    extra_cost: float


@dataclass(frozen=True)
class PrecisionStep:
    """A change of one region to a more accurate and more expensive precision.

    Attributes:
        region: the region.
        choice: the new precision.
        noise_reduction: noise with the region's previous precision minus noise with the new one.
        extra_cost: cost with the new precision minus cost with the previous one.
    """

    region: Region
    choice: PrecisionChoice
    noise_reduction: float
    extra_cost: float


def compute_lower_hull(choices: Sequence[PrecisionChoice]) -> list[PrecisionChoice]:
    """Return the choices on the lower convex hull, from the cheapest to the most accurate."""
    hull: list[PrecisionChoice] = []
    for choice in sorted(choices, key=lambda c: (c.extra_cost, c.noise)):
        if hull and choice.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _noise_reduction_per_cost(hull[-2], choice) >= _noise_reduction_per_cost(
            hull[-2], hull[-1]
        ):
            hull.pop()
        hull.append(choice)
    return hull


def _noise_reduction_per_cost(cheaper: PrecisionChoice, dearer: PrecisionChoice) -> float:
    """Return the noise reduction per unit of additional cost."""
    return (cheaper.noise - dearer.noise) / max(dearer.extra_cost - cheaper.extra_cost, 1e-9)


def hull_steps(
    choices: Mapping[Region, Sequence[PrecisionChoice]],
) -> tuple[dict[Region, PrecisionChoice], list[PrecisionStep]]:
    """Return the cheapest choice of each region, and the steps to more accurate choices.

    The steps are sorted by decreasing noise reduction per cost.
    """
    hulls = {region: compute_lower_hull(options) for region, options in choices.items()}
    rated_steps = [
        (
            _noise_reduction_per_cost(before, after),
            PrecisionStep(region, after, before.noise - after.noise, after.extra_cost - before.extra_cost),
        )
        for region, hull in hulls.items()
        for before, after in pairwise(hull)
    ]
    rated_steps.sort(
        key=lambda item: -item[0]
    )  # steps of one region stay in order: their rates decrease along the hull, and the sort is stable
    return {region: hull[0] for region, hull in hulls.items()}, [step for _, step in rated_steps]


def select_affordable(steps: Sequence[PrecisionStep], budget: float, fraction: float = 1.0) -> list[PrecisionStep]:
    """Select steps in order, up to a total cost of ``budget``.

    A step that would exceed the budget is skipped, and so are the later steps of its region.

    Args:
        steps: steps in order of preference.
        budget: total cost that the steps may add.
        fraction: fraction of the selected steps to return, from the first on; at least one step if any is selected.
    """
    selected: list[PrecisionStep] = []
    skipped: set[Region] = set()
    for step in steps:
        if step.region not in skipped and step.extra_cost <= budget:
            selected.append(step)
            budget -= step.extra_cost
        else:
            skipped.add(step.region)
    return selected[: max(1, round(fraction * len(selected)))]


def cumulative_plans(
    base: Mapping[str, str], start: Mapping[Region, PrecisionChoice], steps: Sequence[PrecisionStep]
) -> list[PrecisionPlan]:
    """Return the plans along the path: the cheapest plan, then one plan for each step, with all earlier steps."""
    plan = dict(base)
    for region, choice in start.items():
        plan = with_region_precision(plan, region, choice.precision)
    all_plans = [plan]
    for step in steps:
        plan = with_region_precision(plan, step.region, step.choice.precision)
        all_plans.append(plan)
    return all_plans


def pick_evenly_spaced(costs: Sequence[float], count: int) -> list[int]:
    """Pick the plans that are nearest to evenly spaced costs, always including the first and the last plan.

    Args:
        costs: cost of each plan, in increasing order.
        count: number of evenly spaced costs. Several of them may have the same nearest plan.

    Returns:
        Indices of the plans.
    """
    low, high = costs[0], costs[-1]
    targets = [low + (high - low) * i / max(count - 1, 1) for i in range(count)]
    nearest = {min(range(len(costs)), key=lambda i: abs(costs[i] - cost)) for cost in targets}
    return sorted(nearest | {0, len(costs) - 1})
