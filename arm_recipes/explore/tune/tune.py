"""``tune``: mixed-precision search for the most accurate program within a budget, or the cheapest accurate one.

1. Divide the model's modules into regions by the noise that they cause at the output. To measure a region at a
   precision, give all other regions the most accurate precision. Noise powers measured this way add up. In an int8
   program, the noise of the other regions would hide the effect of one more accurate region.
2. Measure the cost of each region at each other precision: compile a program that has all other regions at the
   recipe's precision. This cost includes casts at the region's borders. Measure the cost of noisy regions a second
   time, with all other regions at the most accurate precision.
3. Compute the lower convex hull of noise over cost (``convex_hull``) with the costs of the first measurement. If the
   second measurement gave a lower cost for some region, compute another hull with the lower of both costs. Compile
   whole programs along each hull, then bisect around the goal, then add steps that still fit the budget. Casts at
   borders make the costs of regions inexact, so the search compares whole programs by their own accuracy and cost.
4. Export and execute the chosen program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import progress_bar, suppress_warnings
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes._internal.unknown_arguments import reject_unknown_arguments
from arm_recipes.api import export
from arm_recipes.comparison.accuracy import check_metric
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.explore.sweep.sweep import capture_model
from arm_recipes.explore.tune import convex_hull, goals
from arm_recipes.explore.tune.candidate import Candidate, CandidatePool
from arm_recipes.explore.tune.data_split import split_samples
from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
from arm_recipes.explore.tune.program_search import ProgramSearch
from arm_recipes.explore.tune.regions import PrecisionPlan, Region, quantized_modules
from arm_recipes.explore.tune.result import Tuned, TunedRegion
from arm_recipes.explore.tune.sensitivity_analysis import SensitivityAnalysis
from arm_recipes.recipe import precisions as recipe_precisions
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.runtime.errors import RunError
from arm_recipes.samples.export_arguments import check_argument_order
from arm_recipes.types import Budget, Metric, Model, Samples


@reject_unknown_arguments(
    {
        "folder": "cache_dir",
        "held_out": "test_samples",
        "metric_at_least": "min_metric",
        "metric_within": "max_drop",
        "precisions": "candidate_precisions",
    }
)
@shorten_tracebacks
def tune(
    model: Model,
    recipe: ArmRecipe,
    samples: Samples,
    *,
    metric: Metric | None = None,
    budget: Budget | None = None,
    min_metric: float | None = None,
    max_drop: float | None = None,
    candidate_precisions: Sequence[str] | None = None,
    test_samples: Samples | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Search for a precision of each module that optimizes accuracy and cost.

    Args:
        model: as for ``export``, with one method.
        recipe: a quantizing recipe of this package. Its precision is the starting point.
        samples: as for ``export``. Every second sample calibrates, so at least two are needed. If the recipe has the
            option ``calibration_samples``, none of ``samples`` calibrates. The samples that do not calibrate are
            alternately search and test samples. Reported accuracies are measured on the test samples. A sample may have
            extra elements after the inputs, such as labels. The metric receives the whole sample.
        metric: ``metric(outputs, sample)`` returns a number, higher is better; its mean is the accuracy. By default
            the accuracy is the SQNR of the outputs against the floating-point model, in dB.
        budget: upper limits by kind of cost: ``cycles`` and ``sram`` (Ethos-U and Cortex-M), ``flash`` and ``traffic``.
            A float is a factor of the cost of the recipe's own program, as in ``{"cycles": 1.1}``. An int (cycles or
            bytes) or a text such as "512KiB" is absolute. Without any goal, the limit is 1.1 times the cycles of the
            recipe's own program (on targets without estimated cycles: 1.1 times its traffic).
        min_metric: required accuracy. The search looks for the cheapest program that reaches it.
        max_drop: largest accepted loss of accuracy. The required accuracy is the accuracy of the floating-point model
            minus ``max_drop``. It needs ``metric``.
        candidate_precisions: precisions to choose from, of ``arm_recipes.recipe.precisions.PRECISION_NAMES``. The
            default is the recipe's own and A16W8; for VGF also floating point; with a flash limit also A8W4. For a
            Cortex-M, it is the recipe's own and floating point.
        test_samples: separate test samples. All of ``samples`` that do not calibrate are then search samples.
        cache_dir: folder of Vela's estimates and, without ``metric``, accuracies. An interrupted search resumes there.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        The chosen program with all candidates.

    Raises:
        ValueError: an argument is invalid. The message says which one and why.
        TypeError: ``model`` or ``recipe`` has the wrong type.
        ExportError: the model cannot be captured, or the recipe's own program cannot be compiled.
    """
    check_argument_order("tune", "recipe", recipe, samples)
    _check_recipe(recipe)
    goals.check_goal(budget, min_metric, max_drop)
    check_metric(metric)
    if max_drop is not None and metric is None:
        raise ValueError("max_drop: the SQNR of the floating-point model is infinite; use min_metric")
    precisions = _candidate_precisions(recipe, candidate_precisions, budget)
    store = ResultStore(cache_dir)
    with suppress_warnings():
        program, originals, examples, notes = capture_model(model, samples, "tune", metric)
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


def _candidate_precisions(recipe: ArmRecipe, requested: Sequence[str] | None, budget: Budget | None) -> list[str]:
    """Return the precisions to choose from, the recipe's own first."""
    own = recipe_precisions.default_precision(recipe.type_name, per_channel=recipe.options.get("per_channel", True))
    if requested is None:
        candidates = ["A16W8", *(["A8W4"] if budget and "flash" in budget else []), recipe_precisions.FLOAT]
        candidates = [name for name in candidates if name in recipe_precisions.allowed_precisions(recipe.type_name)]
    else:
        candidates = [requested] if isinstance(requested, str) else list(requested)
        problem = recipe_precisions.find_problem({str(i): name for i, name in enumerate(candidates)})
        if problem is not None:
            raise ValueError(f"candidate_precisions: {problem}")
        recipe_precisions.check_precisions(recipe.type_name, candidates)
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
        budget: Budget | None,
        min_metric: float | None,
        max_drop: float | None,
        progress: bool,
    ) -> None:
        self._evaluator, self._precisions, self._shows_progress = evaluator, precisions, progress
        modules = quantized_modules(evaluator.program, evaluator.recipe)
        if not modules:
            raise ValueError("model: no operator is quantized, so there is no precision to choose")
        self._base_precision = precisions[0]
        self._base_plan: PrecisionPlan = dict.fromkeys(modules, self._base_precision)
        self._pool = CandidatePool(evaluator, self._base_plan)
        base_cost, split = self._pool.base.cost, evaluator.split
        self._goal, self._test_goal = (
            goals.make_goal(
                budget, min_metric, max_drop, base=base_cost, float_metric=part.float_metric(), metric=part.metric_name
            )
            for part in (split.search_evaluator, split.test_evaluator)
        )
        # The cost on the hull is flash if flash is the only limited cost, otherwise time (cycles or traffic).
        limited_kinds = {limit.kind for limit in self._goal.limits}
        self._cost_kind = (
            limited_kinds.pop() if len(limited_kinds) == 1 and limited_kinds <= {"flash"} else base_cost.time_kind
        )

    def run(self, notes: Sequence[str]) -> Tuned:
        """Search for the program, export it and run it."""
        precisions_and_plan = self._precisions, self._base_plan
        analysis = SensitivityAnalysis(
            self._evaluator, *precisions_and_plan, self._pool.base.cost, self._cost_kind, self._shows_progress
        )
        program_search = ProgramSearch(
            self._pool, *precisions_and_plan, self._goal, self._cost_kind, self._shows_progress
        )
        regions, noise_of_option = analysis.measure_noise()
        costs_at_base = analysis.measure_costs(noise_of_option)
        lower_costs = costs_at_base | {
            option: min(costs_at_base[option], cost)
            for option, cost in analysis.measure_costs_with_others_at_highest(costs_at_base, noise_of_option).items()
        }
        for costs in (costs_at_base, lower_costs) if lower_costs != costs_at_base else (costs_at_base,):
            choices = {
                region: [
                    convex_hull.PrecisionChoice(name, noise_of_option[region, name], costs[region, name])
                    for name in self._precisions
                    if (region, name) in costs
                ]
                for region in regions
            }
            program_search.search_along_hull(*convex_hull.hull_steps(choices))
        return self._build_result(program_search.select_best(), regions, noise_of_option, lower_costs, list(notes))

    def _build_result(
        self,
        chosen: Candidate,
        regions: Sequence[Region],
        noise_of_option: Mapping[tuple[Region, str], float],
        costs: Mapping[tuple[Region, str], float],
        notes: list[str],
    ) -> Tuned:
        plan = self._pool.plan_of(chosen)
        recipe = self._evaluator.recipe_for_plan(plan)
        best, verified = self._export_and_run(recipe, notes)
        total_noise = sum(noise_of_option[region, self._base_precision] for region in regions) or 1.0
        tuned_regions = [
            TunedRegion(
                region.name,
                region.modules,
                plan[region.modules[0]],
                noise_of_option[region, self._base_precision] / total_noise,
                {name: round(costs[region, name]) for name in self._precisions[1:] if (region, name) in costs},
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
            base=self._pool.base,
            verified=verified,
            candidates=tuple(sorted(self._pool.candidates, key=lambda c: c.cost.value(c.cost.time_kind))),
            regions=tuple(tuned_regions),
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
                f"({accuracy:.4g}): give more samples, or set a slightly stricter goal"
            )
        return "no compiled program reaches the goal; this one comes closest"

    def _export_and_run(self, recipe: ArmRecipe, notes: list[str]) -> tuple[Any, float | None]:
        """Export the program and measure its accuracy, which is None if this machine cannot execute the program."""
        split = self._evaluator.split
        best = export(self._evaluator.program, recipe, split.calibration, progress=False)
        try:
            samples = split.test_evaluator.samples
            bar = progress_bar(samples, "running", "sample", shown=self._shows_progress, count=len(samples))
            outputs = [best.run_dequantized(sample) for sample in bar]
        except (RunError, ArmBackendError) as error:
            notes.append(f"the program was not run: {error}")
            return best, None
        return best, split.test_evaluator.evaluate_outputs(outputs).metric
