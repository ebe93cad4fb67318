"""Candidates: programs that the search compiled, with cost and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes._internal.errors import ExportError
from arm_recipes.explore.tune.cost import ProgramCost

if TYPE_CHECKING:
    from arm_recipes.comparison.accuracy import EvaluationResult
    from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
    from arm_recipes.explore.tune.regions import PrecisionPlan


@dataclass(frozen=True)
class Candidate:
    """A program that the search compiled.

    Attributes:
        precisions: ``{module: precision}``, as in the recipe option ``precisions``. The precision of a module applies
            to its submodules without an entry of their own.
        cost: estimated cost.
        sqnr: SQNR in dB of the quantized program in PyTorch, against the floating-point model, on the test samples.
        accuracy: metric on the test samples; SQNR if the user gave no metric.
        search_accuracy: metric on the search samples; SQNR if the user gave no metric.
    """

    precisions: dict[str, str]
    cost: ProgramCost
    sqnr: float
    accuracy: float
    search_accuracy: float


class CandidatePool:
    """The candidates of a search, by precision plan.

    Args:
        evaluator: evaluates plans.
        base_plan: plan of the recipe itself.

    Attributes:
        base: candidate of the recipe itself.

    Raises:
        ExportError: the recipe's own program cannot be compiled.
    """

    def __init__(self, evaluator: PlanEvaluator, base_plan: PrecisionPlan) -> None:
        self._evaluator = evaluator
        self._candidates: dict[tuple[tuple[str, str], ...], Candidate] = {}
        (cost,) = evaluator.estimate_costs([base_plan])
        if isinstance(cost, str):
            raise ExportError(f"the program of {evaluator.recipe.type_name} cannot be compiled: {cost}")
        self.base = self._add(base_plan, cost)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, in the order in which they were compiled."""
        return list(self._candidates.values())

    def find(self, plan: PrecisionPlan) -> Candidate | None:
        """Return the candidate of a plan; None if ``compile`` has not been called with the plan, or returned None."""
        return self._candidates.get(_plan_key(plan))

    def compile(self, plan: PrecisionPlan) -> Candidate | None:
        """Compile a plan and measure its accuracy.

        Returns:
            The candidate; None if the program cannot be compiled, or if more operators stay on the CPU than in the base
            program.
        """
        known = self.find(plan)
        if known is not None:
            return known
        (cost,) = self._evaluator.estimate_costs([plan])
        if isinstance(cost, str) or cost.cpu_operators > self.base.cost.cpu_operators:
            return None
        return self._add(plan, cost)

    def plan_of(self, candidate: Candidate) -> PrecisionPlan:
        """Return the plan of a candidate."""
        return dict(next(key for key, known in self._candidates.items() if known is candidate))

    def evaluate_on_search_samples(self, candidate: Candidate) -> EvaluationResult:
        """Evaluate a candidate on the search samples."""
        return self._evaluator.evaluate_on_search_samples(self.plan_of(candidate))

    def _add(self, plan: PrecisionPlan, cost: ProgramCost) -> Candidate:
        result = self._evaluator.evaluate_on_test_samples(plan)
        settings = self._evaluator.recipe_for_plan(plan).options["precisions"]
        search_accuracy = self._evaluator.evaluate_on_search_samples(plan).metric
        candidate = Candidate(dict(settings), cost, result.sqnr, result.metric, search_accuracy)
        self._candidates[_plan_key(plan)] = candidate
        return candidate


def _plan_key(plan: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(plan.items()))
