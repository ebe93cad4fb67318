"""``tune``: mixed-precision search for the most accurate program within a budget, or the cheapest accurate one.

1. Divide the model's modules into regions by their output noise. Each region is measured alone at the recipe's
   precision, with all others at the most accurate one; noise powers measured this way add up. Measured the other way
   round (one region made accurate), the effect of a region disappears in the noise of the others.
2. Compile each region with each other precision to get its cost, twice: with all others at the recipe's precision, and
   with all others at the most accurate one. The first cost includes casts at the region's borders, so plans are made
   from either cost.
3. Compute the lower convex hull of noise over cost (``path``). Compile whole programs along it, then bisect around the
   goal, then add steps that still fit the budget. Border casts make the costs of regions inexact, so only whole
   programs decide.
4. Export and execute the chosen program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import ExportError, progress_bar, suppress_warnings
from arm_recipes._internal.old_names import reject_old_names
from arm_recipes.api import export
from arm_recipes.comparison.accuracy import Metric, check_metric
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.explore.sweep.sweep import capture_model
from arm_recipes.explore.tune import goals, path
from arm_recipes.explore.tune.candidate import Candidate
from arm_recipes.explore.tune.cost import ProgramCost
from arm_recipes.explore.tune.data_split import split_samples
from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
from arm_recipes.explore.tune.regions import (
    PrecisionPlan,
    Region,
    build_region_tree,
    quantized_modules,
    subdivide,
    with_region,
)
from arm_recipes.explore.tune.result import Tuned, TunedRegion
from arm_recipes.recipe import precisions as names
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.runtime.errors import RunError
from arm_recipes.samples.inputs import check_order

#: Regions with more than this share of the noise are divided, up to this number of regions.
_MAX_NOISE_SHARE, _MAX_REGIONS = 0.02, 48
#: Improvements of less than this share of the noise are ignored.
_NEGLIGIBLE = 0.002
#: Most programs to compile: along the path, in the bisection around the goal, and to fill up the budget.
_SPREAD_PROGRAMS, _BISECTION_PROGRAMS, _FILL_PROGRAMS = 8, 6, 8


@reject_old_names(
    folder="cache_dir",
    held_out="test_samples",
    metric_at_least="min_metric",
    metric_within="max_drop",
    precisions="candidate_precisions",
)
def tune(
    model: Any,
    recipe: ArmRecipe,
    samples: Any,
    *,
    metric: Metric | None = None,
    budget: Mapping[str, Any] | None = None,
    min_metric: float | None = None,
    max_drop: float | None = None,
    candidate_precisions: Sequence[str] | None = None,
    test_samples: Any = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Search for a precision of each module that optimizes accuracy and cost.

    Args:
        model: as for ``export``; one method.
        recipe: a quantizing recipe of this package. Its precision is the starting point.
        samples: as for ``export``, at least two. Every second sample calibrates, unless the recipe has the option
            ``calibration_samples``. The others alternate between the search and the test of the result: reported
            accuracies are measured on the test samples. A sample may have extra elements after the inputs, such as
            labels; the metric receives the whole sample.
        metric: ``metric(outputs, sample)`` returns a number, higher is better; its mean is the accuracy. By default
            the accuracy is the SQNR of the outputs against the floating-point model, in dB.
        budget: upper limits by kind: ``cycles``, ``sram``, ``flash`` (Ethos-U), ``traffic``. A float is a factor of the
            cost of the recipe's own program, as in ``{"cycles": 1.1}``; an int (cycles or bytes) or a text such as
            "512KiB" is absolute. Default without any goal: 1.1 times the cycles, or the traffic on other targets.
        min_metric: required accuracy; the search looks for the cheapest program that reaches it.
        max_drop: required accuracy as the largest drop below the floating-point model. Needs ``metric``.
        candidate_precisions: precisions to choose from, of ``arm_recipes.recipe.precisions.NAMES``. By default the
            recipe's own and A16W8, for VGF also floating point, and with a flash limit also A8W4.
        test_samples: separate test samples; then all samples that do not calibrate are search samples.
        cache_dir: folder of ratings and figures, addressed by content; an interrupted search resumes from there.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        The chosen program with all candidates.

    Raises:
        ValueError: an argument is invalid; the message says which one and why.
        ExportError: the model cannot be captured, or the recipe's own program cannot be compiled.
    """
    check_order("tune", "recipe", recipe, samples)
    _check_recipe(recipe)
    goals.check_goal(budget, min_metric, max_drop)
    check_metric(metric)
    if max_drop is not None and metric is None:
        raise ValueError("max_drop: the SQNR of the floating-point model is infinite; use min_metric")
    precisions = _candidate_precisions(recipe, candidate_precisions, budget)
    store = ResultStore(cache_dir)
    with suppress_warnings():
        program, originals, examples, notes = capture_model(model, samples, "tune")
        split = split_samples(program, recipe, examples, originals, test_samples, metric)
        evaluator = PlanEvaluator(program, recipe, precisions[0], split, store)
        search = _PrecisionSearch(evaluator, precisions, budget, min_metric, max_drop, progress)
        return search.run([*notes, *split.notes])


def _check_recipe(recipe: Any) -> None:
    if not isinstance(recipe, ArmRecipe):
        raise TypeError(f"recipe: must be ExportRecipe.get_recipe(ArmRecipeType....), got {type(recipe).__name__}")
    if recipe.quantization_recipe is None or not recipe.quantization_recipe.quantizers:
        raise ValueError(f"recipe: {recipe.type_name} does not quantize; use an INT8 recipe")
    if recipe.options.get("precisions"):
        raise ValueError("recipe: it has precisions already; remove them, as tune chooses them")


def _candidate_precisions(
    recipe: ArmRecipe, requested: Sequence[str] | None, budget: Mapping[str, Any] | None
) -> list[str]:
    """Return the precisions to choose from, the recipe's own first."""
    own = names.default_precision(recipe.type_name, per_channel=recipe.options.get("per_channel", True))
    if requested is None:
        candidates = ["A16W8", *(["A8W4"] if budget and "flash" in budget else [])]
        candidates += [names.FLOAT] if names.FLOAT in names.allowed(recipe.type_name) else []
    else:
        candidates = [requested] if isinstance(requested, str) else list(requested)
        problem = names.find_problem({str(i): name for i, name in enumerate(candidates)})
        if problem is not None:
            raise ValueError(f"candidate_precisions: {problem}")
        names.check(recipe.type_name, candidates)
    precisions = list(dict.fromkeys([own, *candidates]))
    if len(precisions) == 1:
        raise ValueError(f"candidate_precisions: nothing to choose from: the recipe's own is {own}; add another one")
    return precisions


class _PrecisionSearch:
    """A precision search: measures regions, compiles programs along the hull and selects the best."""

    def __init__(
        self,
        evaluator: PlanEvaluator,
        precisions: Sequence[str],
        budget: Mapping[str, Any] | None,
        min_metric: float | None,
        max_drop: float | None,
        progress: bool,
    ) -> None:
        self._evaluator, self._choices, self._shows_progress = evaluator, precisions, progress
        modules = quantized_modules(evaluator.program, evaluator.recipe)
        if not modules:
            raise ValueError("model: no operator is quantized, so there is no precision to choose")
        self._base_precision = precisions[0]
        self._finest = min(precisions, key=names.NAMES.index)
        self._root = build_region_tree(modules)
        self._base_plan: PrecisionPlan = dict.fromkeys(modules, self._base_precision)
        self._candidates: dict[tuple[tuple[str, str], ...], Candidate] = {}
        base = self._evaluate(self._base_plan)
        if isinstance(base, str):
            raise ExportError(f"the program of {evaluator.recipe.type_name} cannot be compiled: {base}")
        self._base_candidate = base
        split = evaluator.split
        self._goal, self._test_goal = (
            goals.make_goal(
                budget, min_metric, max_drop, base=base.cost, float_metric=part.float_metric(), metric=part.metric_name
            )
            for part in (split.search_evaluator, split.test_evaluator)
        )
        # With a flash limit alone, cost is flash; otherwise time.
        limited_kinds = {limit.kind for limit in self._goal.limits}
        self._cost_kind = (
            limited_kinds.pop() if len(limited_kinds) == 1 and limited_kinds <= {"flash"} else base.cost.time_kind
        )

    def run(self, notes: Sequence[str]) -> Tuned:
        """Search for the program, export it and run it."""
        regions, errors = self._measure_regions()
        costs_at_base = self._cost_regions(errors)
        lower_costs = costs_at_base | {
            option: min(costs_at_base[option], cost)
            for option, cost in self._costs_among_finest(costs_at_base, errors).items()
        }
        for costs in (costs_at_base, lower_costs) if lower_costs != costs_at_base else (costs_at_base,):
            choices = {
                region: [
                    path.Choice(name, errors[region, name], costs[region, name])
                    for name in self._choices
                    if (region, name) in costs
                ]
                for region in regions
            }
            start, steps = path.hull_steps(choices)
            self._search_path(path.cumulative_plans(self._base_plan, start, steps), start, steps)
        chosen = self._select_best()
        plan = self._plan_of(chosen)
        return self._build_result(chosen, plan, regions, errors, lower_costs, list(notes))

    # -- noise and cost of single regions -----------------------------------------------------------------------

    def _measure_regions(self) -> tuple[list[Region], dict[tuple[Region, str], float]]:
        """Divide the model into regions; return them with the output noise of each at each precision."""
        finest: PrecisionPlan = dict.fromkeys(self._base_plan, self._finest)
        base_noise = self._evaluator.rate_on_search(finest).noise
        coarsest = max(self._choices, key=names.NAMES.index)

        def noise_of(region: Region, precision: str = coarsest) -> float:
            if precision == self._finest:
                return 0.0
            return max(self._evaluator.rate_on_search(with_region(finest, region, precision)).noise - base_noise, 0.0)

        regions = subdivide(self._root, noise_of, share=_MAX_NOISE_SHARE, most=_MAX_REGIONS)
        errors = {(region, coarsest): noise for region, noise in regions.items()}
        remaining = [(region, name) for region in regions for name in self._choices if name != coarsest]
        for region, name in self._with_progress(remaining, "measuring", "region"):
            errors[region, name] = noise_of(region, name)
        return list(regions), errors

    def _cost_regions(self, errors: Mapping[tuple[Region, str], float]) -> dict[tuple[Region, str], float]:
        """Return the extra cost of each precision of a region over the recipe's own; skip precisions without gain."""
        total = sum(noise for (_, name), noise in errors.items() if name == self._base_precision)
        base = self._base_candidate.cost
        costs = {(region, self._base_precision): 0.0 for region, name in errors if name == self._base_precision}
        options = [
            (region, name)
            for region, name in errors
            if name != self._base_precision
            and (
                _is_coarser(name, self._base_precision)
                or errors[region, self._base_precision] - errors[region, name] > _NEGLIGIBLE * total
            )
        ]
        outcomes = self._evaluator.estimate_costs(
            with_region(self._base_plan, region, name) for region, name in options
        )
        for option, outcome in zip(options, outcomes, strict=True):
            if isinstance(outcome, ProgramCost) and outcome.cpu_operators <= base.cpu_operators:
                costs[option] = float(outcome.value(self._cost_kind) - base.value(self._cost_kind))
        return costs

    def _costs_among_finest(
        self, costed: Iterable[tuple[Region, str]], errors: Mapping[tuple[Region, str], float]
    ) -> dict[tuple[Region, str], float]:
        """Return the extra cost of precisions with all other regions at the most accurate one, for noisy regions.

        Among int8 regions, an int16 linear layer after an int8 function pays for the cast and gains nothing.
        """
        total = sum(noise for (_, name), noise in errors.items() if name == self._base_precision)
        options = [
            option
            for option in costed
            if errors[option[0], self._base_precision] > _MAX_NOISE_SHARE * total and option[1] != self._base_precision
        ]
        finest = dict.fromkeys(self._base_plan, self._finest)
        pairs = [
            (with_region(finest, region, name), with_region(finest, region, self._base_precision))
            for region, name in options
        ]
        outcomes = iter(self._evaluator.estimate_costs(plan for pair in pairs for plan in pair))
        costs = {}
        for option, pair in zip(options, zip(outcomes, outcomes, strict=True), strict=True):
            changed, unchanged = pair
            if isinstance(changed, ProgramCost) and isinstance(unchanged, ProgramCost):
                # A negative difference is the cast cost of int8 among int16 regions, no saving elsewhere: clamp to 0.
                costs[option] = max(float(changed.value(self._cost_kind) - unchanged.value(self._cost_kind)), 0.0)
        return costs

    # -- whole programs ------------------------------------------------------------------------------------------

    def _search_path(
        self, plans: list[PrecisionPlan], start: Mapping[Region, path.Choice], steps: list[path.Step]
    ) -> None:
        """Compile programs along the path, then around the goal, then with steps that still fit the budget."""
        costs = [sum(choice.extra_cost for choice in start.values())]
        for step in steps:
            costs.append(costs[-1] + step.extra_cost)
        for name in self._choices:
            self._try_plan(dict.fromkeys(self._base_plan, name))
        indices = path.pick_evenly_spaced(costs, _SPREAD_PROGRAMS)
        for i in self._with_progress(indices, "compiling", "program"):
            self._try_plan(plans[i])
        candidates = {i: self._candidates.get(_plan_key(plans[i])) for i in indices}
        low, high = self._bracket(candidates)
        for _ in range(_BISECTION_PROGRAMS):
            if high is None or low is None or high - low < 2:
                break
            middle = (low + high) // 2
            candidate = self._try_plan(plans[middle])
            if candidate is not None and self._is_past_goal(candidate):
                high = middle
            elif candidate is not None:
                low = middle
            else:
                break
        if self._goal.min_accuracy is None and low is not None:
            self._fill_budget(plans[low], steps[low:])

    def _is_past_goal(self, candidate: Candidate) -> bool:
        """Whether a candidate reaches the required accuracy, or without one exceeds the limits."""
        if self._goal.min_accuracy is not None:
            return self._goal.is_accurate_enough(candidate.search_accuracy)
        return not self._goal.is_within_limits(candidate.cost)

    def _bracket(self, candidates: Mapping[int, Candidate | None]) -> tuple[int | None, int | None]:
        """Return the indices of the last program before the goal is passed and of the first after."""
        evaluated = {i: candidate for i, candidate in candidates.items() if candidate is not None}
        high = next((i for i, candidate in evaluated.items() if self._is_past_goal(candidate)), None)
        low = max((i for i in evaluated if high is None or i < high), default=None)
        return low, high

    def _fill_budget(self, plan: PrecisionPlan, steps: Sequence[path.Step]) -> None:
        """Spend the rest of the budget on steps that fit; double the fraction of steps on success, else halve it.

        The cost of a step includes border casts, which vanish between two changed regions: several steps cost less
        than the sum of their costs.
        """
        current, remaining, fraction = self._candidates.get(_plan_key(plan)), list(steps), 0.5
        limit = next((x.most for x in self._goal.limits if x.kind == self._cost_kind), math.inf)
        for _ in range(_FILL_PROGRAMS):
            selected = (
                []
                if current is None
                else path.select_affordable(remaining, limit - current.cost.value(self._cost_kind), fraction)
            )
            if current is None or not selected:
                return
            changed = plan
            for step in selected:
                changed = with_region(changed, step.region, step.choice.precision)
            candidate = self._try_plan(changed)
            is_affordable = candidate is not None and self._goal.is_within_limits(candidate.cost)
            if candidate is not None and is_affordable and candidate.search_accuracy > current.search_accuracy:
                plan, current, fraction = changed, candidate, min(2 * fraction, 1.0)
                remaining = [step for step in remaining if step not in selected]
            else:
                fraction /= 2
                remaining = remaining if len(selected) > 1 else [step for step in remaining if step is not selected[0]]

    def _try_plan(self, plan: PrecisionPlan) -> Candidate | None:
        outcome = self._evaluate(plan)
        return None if isinstance(outcome, str) else outcome

    def _evaluate(self, plan: PrecisionPlan) -> Candidate | str:
        """Compile and rate a plan; return the reason of failure. A plan with more CPU operators than the base fails."""
        key = _plan_key(plan)
        if key not in self._candidates:
            (cost,) = self._evaluator.estimate_costs([plan])
            if isinstance(cost, str):
                return cost
            if self._candidates and cost.cpu_operators > self._base_candidate.cost.cpu_operators:
                return "it leaves more operators on the CPU"
            rating = self._evaluator.rate_on_test(plan)
            settings = self._evaluator.with_plan(plan).options["precisions"]
            search_accuracy = self._evaluator.rate_on_search(plan).metric
            self._candidates[key] = Candidate(dict(settings), cost, rating.sqnr, rating.metric, search_accuracy)
        return self._candidates[key]

    def _select_best(self) -> Candidate:
        """Select the candidate that reaches the goal on the search samples, or the one that comes closest."""
        candidates = list(self._candidates.values())
        affordable = [c for c in candidates if self._goal.is_within_limits(c.cost)]
        accurate = [c for c in affordable if self._goal.is_accurate_enough(c.search_accuracy)]
        if self._goal.min_accuracy is not None and accurate:
            return min(accurate, key=lambda c: (c.cost.value(self._cost_kind), -c.search_accuracy))
        if affordable:
            return max(affordable, key=lambda c: (*self._accuracy_key(c), -c.cost.value(self._cost_kind)))
        limit = self._goal.limits[0]
        return min(candidates, key=lambda c: c.cost.value(limit.kind))

    def _accuracy_key(self, candidate: Candidate) -> tuple[float, float]:
        rating = self._evaluator.rate_on_search(self._plan_of(candidate))
        return rating.metric, rating.sqnr

    def _plan_of(self, candidate: Candidate) -> PrecisionPlan:
        return dict(next(key for key, known in self._candidates.items() if known is candidate))

    # -- result --------------------------------------------------------------------------------------------------

    def _build_result(
        self,
        chosen: Candidate,
        plan: PrecisionPlan,
        regions: Sequence[Region],
        errors: Mapping[tuple[Region, str], float],
        costs: Mapping[tuple[Region, str], float],
        notes: list[str],
    ) -> Tuned:
        recipe = self._evaluator.with_plan(plan)
        best, verified = self._export_and_run(recipe, notes)
        total_noise = sum(errors[region, self._base_precision] for region in regions) or 1.0
        rows = [
            TunedRegion(
                region.name,
                region.modules,
                plan[region.modules[0]],
                errors[region, self._base_precision] / total_noise,
                {name: round(costs[region, name]) for name in self._choices[1:] if (region, name) in costs},
            )
            for region in regions
        ]
        accuracy = chosen.accuracy if verified is None else verified
        reached = self._test_goal.is_within_limits(chosen.cost) and self._test_goal.is_accurate_enough(accuracy)
        if not reached:
            notes.append(self._missed_goal_note(chosen, accuracy))
        return Tuned(
            best=best,
            recipe=recipe,
            chosen=chosen,
            base=self._base_candidate,
            verified=verified,
            candidates=tuple(sorted(self._candidates.values(), key=lambda c: c.cost.value(c.cost.time_kind))),
            regions=tuple(rows),
            metric=self._goal.metric,
            goal=str(self._test_goal),
            reached=reached,
            samples=self._evaluator.split.sizes,
            notes=tuple(notes),
        )

    def _missed_goal_note(self, chosen: Candidate, accuracy: float) -> str:
        """Explain why the goal was not reached."""
        if self._goal.is_within_limits(chosen.cost) and self._goal.is_accurate_enough(chosen.search_accuracy):
            return (
                f"the goal is reached on the search samples ({chosen.search_accuracy:.4g}) but not on the test samples "
                f"({accuracy:.4g}): give more samples, or require a little more than is needed"
            )
        return "no compiled program reaches the goal; this one comes closest"

    def _export_and_run(self, recipe: ArmRecipe, notes: list[str]) -> tuple[Any, float | None]:
        """Export the program and measure its accuracy on this machine; None if it cannot run."""
        split = self._evaluator.split
        best = export(self._evaluator.program, recipe, split.calibration, progress=False)
        try:
            samples = self._with_progress(split.test_evaluator.samples, "running", "sample")
            outputs = [best.run_real(sample) for sample in samples]
        except (RunError, ArmBackendError) as error:
            notes.append(f"the program was not run: {error}")
            return best, None
        return best, split.test_evaluator.rate_outputs(outputs).metric

    def _with_progress(self, items: Sequence[Any], activity: str, unit: str) -> Iterable[Any]:
        return progress_bar(items, activity, unit, shown=self._shows_progress, count=len(items))


def _is_coarser(name: str, other: str) -> bool:
    """Whether a precision is coarser, so that it may lower the cost."""
    return names.NAMES.index(name) > names.NAMES.index(other)


def _plan_key(plan: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(plan.items()))
