"""Search for the best whole program along a path of precision plans.

The path starts with the cheapest precision of each region. Each step gives one region a more accurate precision
(``convex_hull``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from arm_recipes._internal.messages import progress_bar
from arm_recipes.explore.tune import convex_hull, goals
from arm_recipes.explore.tune.candidate import Candidate, CandidatePool
from arm_recipes.explore.tune.regions import PrecisionPlan, Region, with_region_precision

#: Maximum number of programs along the path whose costs are evenly spaced.
_MAX_SPREAD_PROGRAMS = 8
#: Maximum number of programs in the bisection around the goal.
_MAX_BISECTION_PROGRAMS = 6
#: Maximum number of programs that ``_fill_budget`` compiles.
_MAX_FILL_PROGRAMS = 8


class ProgramSearch:
    """Compiles whole programs, and selects the best.

    Args:
        pool: candidates of the search.
        precisions: precisions to choose from.
        base_plan: plan of the recipe itself.
        goal: goal on the search samples.
        cost_kind: kind of cost that orders the path. The search minimizes it if the goal has a required accuracy.
        progress: show a progress bar.
    """

    def __init__(
        self,
        pool: CandidatePool,
        precisions: Sequence[str],
        base_plan: PrecisionPlan,
        goal: goals.Goal,
        cost_kind: str,
        progress: bool,
    ) -> None:
        self._pool, self._precisions, self._base_plan = pool, precisions, base_plan
        self._goal, self._cost_kind, self._shows_progress = goal, cost_kind, progress

    def search_along_hull(
        self, start: Mapping[Region, convex_hull.PrecisionChoice], steps: list[convex_hull.PrecisionStep]
    ) -> None:
        """Compile four groups of programs.

        - Programs with one precision for all modules.
        - Programs along the path whose costs are evenly spaced.
        - Programs of a bisection between two of these. It searches for the first program on the path that reaches the
          required accuracy or, if the goal has only limits, for the first program that exceeds a limit.
        - If the goal has only limits: programs with further steps that use up the budget.

        Args:
            start: cheapest choice of each region.
            steps: steps of the path, in order.
        """
        plans = convex_hull.cumulative_plans(self._base_plan, start, steps)
        costs = [sum(choice.extra_cost for choice in start.values())]
        for step in steps:
            costs.append(costs[-1] + step.extra_cost)
        for precision in self._precisions:
            self._pool.compile(dict.fromkeys(self._base_plan, precision))
        indices = convex_hull.pick_evenly_spaced(costs, _MAX_SPREAD_PROGRAMS)
        for i in progress_bar(indices, "compiling", "program", shown=self._shows_progress, count=len(indices)):
            self._pool.compile(plans[i])
        candidates = {i: self._pool.find(plans[i]) for i in indices}
        low, high = self._bracket(candidates)
        for _ in range(_MAX_BISECTION_PROGRAMS):
            if high is None or low is None or high - low < 2:
                break
            middle = (low + high) // 2
            candidate = self._pool.compile(plans[middle])
            if candidate is not None and self._is_past_goal(candidate):
                high = middle
            elif candidate is not None:
                low = middle
            else:
                break
        if self._goal.min_accuracy is None and low is not None:
            self._fill_budget(plans[low], steps[low:])

    def _is_past_goal(self, candidate: Candidate) -> bool:
        """Whether a candidate reaches the required accuracy; if none is required, whether it exceeds a limit."""
        if self._goal.min_accuracy is not None:
            return self._goal.is_accurate_enough(candidate.search_accuracy)
        return not self._goal.is_within_limits(candidate.cost)

    def _bracket(self, candidates: Mapping[int, Candidate | None]) -> tuple[int | None, int | None]:
        """Return the lower and the upper index between which the bisection searches.

        The upper index belongs to the first candidate that is past the goal (``_is_past_goal``), the lower index to the
        last candidate before it. An index is None if there is no such candidate.
        """
        evaluated = {i: candidate for i, candidate in candidates.items() if candidate is not None}
        high = next((i for i, candidate in evaluated.items() if self._is_past_goal(candidate)), None)
        low = max((i for i in evaluated if high is None or i < high), default=None)
        return low, high

    def _fill_budget(self, plan: PrecisionPlan, steps: Sequence[convex_hull.PrecisionStep]) -> None:
        """Add further steps until the budget is used up or ``_MAX_FILL_PROGRAMS`` programs were compiled.

        Each iteration adds a fraction of the affordable steps. The fraction doubles if the new program is better, and
        halves otherwise. The cost of a step includes casts at the region's borders. Two adjacent regions with the same
        precision need no cast between them, so several steps together cost less than the sum of their costs.
        """
        current, remaining, fraction = self._pool.find(plan), list(steps), 0.5
        limit = next((x.maximum for x in self._goal.limits if x.kind == self._cost_kind), math.inf)
        for _ in range(_MAX_FILL_PROGRAMS):
            selected = (
                []
                if current is None
                else convex_hull.select_affordable(remaining, limit - current.cost.value(self._cost_kind), fraction)
            )
            if current is None or not selected:
                return
            changed = plan
            for step in selected:
                changed = with_region_precision(changed, step.region, step.choice.precision)
            candidate = self._pool.compile(changed)
            is_affordable = candidate is not None and self._goal.is_within_limits(candidate.cost)
            if candidate is not None and is_affordable and candidate.search_accuracy > current.search_accuracy:
                plan, current, fraction = changed, candidate, min(2 * fraction, 1.0)
                remaining = [step for step in remaining if step not in selected]
            else:
                fraction /= 2
                remaining = remaining if len(selected) > 1 else [step for step in remaining if step is not selected[0]]

    def select_best(self) -> Candidate:
        """Select the best candidate by its accuracy on the search samples.

        - With a required accuracy: the cheapest candidate that reaches it within the limits.
        - Otherwise, or if there is none: the most accurate candidate within the limits.
        - If no candidate is within the limits: the candidate with the lowest cost of the first limit's kind.
        """
        candidates = self._pool.candidates
        affordable = [c for c in candidates if self._goal.is_within_limits(c.cost)]
        accurate = [c for c in affordable if self._goal.is_accurate_enough(c.search_accuracy)]
        if self._goal.min_accuracy is not None and accurate:
            return min(accurate, key=lambda c: (c.cost.value(self._cost_kind), -c.search_accuracy))
        if affordable:
            return max(affordable, key=lambda c: (*self._accuracy_key(c), -c.cost.value(self._cost_kind)))
        limit = self._goal.limits[0]
        return min(candidates, key=lambda c: c.cost.value(limit.kind))

    def _accuracy_key(self, candidate: Candidate) -> tuple[float, float]:
        result = self._pool.evaluate_on_search_samples(candidate)
        return result.metric, result.sqnr
