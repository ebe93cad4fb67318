"""Sensitivity analysis: noise and cost of single regions at each precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from arm_recipes._internal.messages import progress_bar
from arm_recipes.explore.tune.cost import ProgramCost
from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
from arm_recipes.explore.tune.regions import (
    PrecisionPlan,
    Region,
    build_region_tree,
    subdivide_by_noise,
    with_region_precision,
)
from arm_recipes.recipe.precisions import PRECISION_NAMES

#: A region that causes more than this share of the total noise is noisy. It is divided if possible. The costs of
#: regions that are still noisy are measured a second time (``measure_costs_with_others_at_highest``).
_MAX_NOISE_SHARE = 0.02
#: Maximum number of regions after all divisions.
_MAX_REGIONS = 48
#: The cost of a higher precision is measured only if this precision removes more than this share of the total noise.
_NEGLIGIBLE_NOISE_SHARE = 0.002

#: A region, and the name of a precision for it.
RegionOption = tuple[Region, str]


class SensitivityAnalysis:
    """Sensitivity analysis: measures noise and cost of the regions of a model, one region at a time.

    Args:
        evaluator: evaluates plans.
        precisions: precisions to choose from, the recipe's own first.
        base_plan: plan of the recipe itself.
        base_cost: cost of that plan.
        cost_kind: kind of cost that is measured.
        progress: show a progress bar.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        precisions: Sequence[str],
        base_plan: PrecisionPlan,
        base_cost: ProgramCost,
        cost_kind: str,
        progress: bool,
    ) -> None:
        self._evaluator, self._precisions, self._shows_progress = evaluator, precisions, progress
        self._base_plan, self._base_cost, self._cost_kind = base_plan, base_cost, cost_kind
        self._base_precision = precisions[0]
        self._highest_precision = min(precisions, key=PRECISION_NAMES.index)

    def measure_noise(self) -> tuple[list[Region], dict[RegionOption, float]]:
        """Divide the model into regions, and measure the output noise of each region at each precision.

        Returns:
            The regions, and the noise by region and precision, minus the noise of the program in which all regions have
            the most accurate precision.
        """
        highest_plan: PrecisionPlan = dict.fromkeys(self._base_plan, self._highest_precision)
        highest_noise = self._evaluator.evaluate_on_search_samples(highest_plan).noise
        lowest_precision = max(self._precisions, key=PRECISION_NAMES.index)

        def noise_of(region: Region, precision: str = lowest_precision) -> float:
            if precision == self._highest_precision:
                return 0.0
            return max(
                self._evaluator.evaluate_on_search_samples(with_region_precision(highest_plan, region, precision)).noise
                - highest_noise,
                0.0,
            )

        root = build_region_tree(tuple(self._base_plan))
        regions = subdivide_by_noise(root, noise_of, share=_MAX_NOISE_SHARE, max_regions=_MAX_REGIONS)
        noise_of_option = {(region, lowest_precision): noise for region, noise in regions.items()}
        remaining = [(region, name) for region in regions for name in self._precisions if name != lowest_precision]
        bar = progress_bar(remaining, "measuring", "region", shown=self._shows_progress, count=len(remaining))
        for region, name in bar:
            noise_of_option[region, name] = noise_of(region, name)
        return list(regions), noise_of_option

    def measure_costs(self, noise_of_option: Mapping[RegionOption, float]) -> dict[RegionOption, float]:
        """Measure the extra cost of each region at each precision: cost minus cost at the recipe's own precision.

        A precision is skipped if it is higher than the recipe's own but hardly lowers the noise
        (``_NEGLIGIBLE_NOISE_SHARE``). It is also skipped if the program cannot be compiled with it, or if it leaves
        more operators on the CPU than the recipe's own precision.
        """
        total = sum(noise for (_, name), noise in noise_of_option.items() if name == self._base_precision)
        costs = {
            (region, self._base_precision): 0.0 for region, name in noise_of_option if name == self._base_precision
        }
        options = [
            (region, name)
            for region, name in noise_of_option
            if name != self._base_precision
            and (
                _is_lower_precision(name, self._base_precision)
                or noise_of_option[region, self._base_precision] - noise_of_option[region, name]
                > _NEGLIGIBLE_NOISE_SHARE * total
            )
        ]
        plans = (with_region_precision(self._base_plan, region, name) for region, name in options)
        outcomes = self._evaluator.estimate_costs(plans)
        for option, outcome in zip(options, outcomes, strict=True):
            if isinstance(outcome, ProgramCost) and outcome.cpu_operators <= self._base_cost.cpu_operators:
                costs[option] = float(outcome.value(self._cost_kind) - self._base_cost.value(self._cost_kind))
        return costs

    def measure_costs_with_others_at_highest(
        self, measured_options: Iterable[RegionOption], noise_of_option: Mapping[RegionOption, float]
    ) -> dict[RegionOption, float]:
        """Measure the extra costs of noisy regions again, with all other regions at the most accurate precision.

        The costs from ``measure_costs`` may be too high: an int16 linear layer among int8 layers needs casts, which it
        does not need among int16 layers.
        """
        total = sum(noise for (_, name), noise in noise_of_option.items() if name == self._base_precision)
        options = [
            option
            for option in measured_options
            if noise_of_option[option[0], self._base_precision] > _MAX_NOISE_SHARE * total
            and option[1] != self._base_precision
        ]
        highest_plan = dict.fromkeys(self._base_plan, self._highest_precision)
        pairs = [
            (
                with_region_precision(highest_plan, region, name),
                with_region_precision(highest_plan, region, self._base_precision),
            )
            for region, name in options
        ]
        outcomes = iter(self._evaluator.estimate_costs(plan for pair in pairs for plan in pair))
        costs = {}
        for option, pair in zip(options, zip(outcomes, outcomes, strict=True), strict=True):
            changed, unchanged = pair
            if isinstance(changed, ProgramCost) and isinstance(unchanged, ProgramCost):
                # A negative difference comes from casts: among int16 regions, a region needs casts at int8, but not at
                # int16. Clamp the difference to 0.
                costs[option] = max(float(changed.value(self._cost_kind) - unchanged.value(self._cost_kind)), 0.0)
        return costs


def _is_lower_precision(name: str, other: str) -> bool:
    """Whether the precision ``name`` is lower than ``other``. A lower precision may lower the cost."""
    return PRECISION_NAMES.index(name) > PRECISION_NAMES.index(other)
