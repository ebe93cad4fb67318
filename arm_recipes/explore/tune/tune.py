"""``tune``: the most exact program within a budget, or the cheapest that is exact enough, found by measurement.

1. The model's modules are divided into regions by the error that each makes of the output, alone at the recipe's
   precision while all others are at the most exact one. So measured errors add up; taken the other way round, from
   the recipe's program with one region made exact, they drown in the noise of the rest.
2. What another precision costs a region is compiled: the recipe's program with this region changed, and the most exact
   one with it and with the recipe's own. Plans are made from either price, as borders are in the first.
3. The best plans for every exchange rate between error and price follow (``path``). Some are made whole, then those
   around the goal, then steps that still fit: borders between regions cost, and only whole programs tell how much.
4. The chosen one is exported and executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import ExportError, progress_bar, quiet
from arm_recipes._internal.old_names import reject_old_names
from arm_recipes.api import export
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.explore.sweep.sweep import captured
from arm_recipes.explore.tune import goals, path
from arm_recipes.explore.tune.accuracy import Metric
from arm_recipes.explore.tune.candidate import Candidate
from arm_recipes.explore.tune.cost import Price
from arm_recipes.explore.tune.data_split import divide
from arm_recipes.explore.tune.evaluator import Trial
from arm_recipes.explore.tune.regions import PrecisionPlan, Region, computing_modules, divided, tree, with_region
from arm_recipes.explore.tune.result import Tuned, TunedRegion
from arm_recipes.recipe import precisions as names
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.runtime.errors import RunError
from arm_recipes.samples.inputs import check_order

#: A region of more than this share of the error is divided, while there are at most so many.
_SHARE, _REGIONS = 0.02, 48
#: A region of less is not worth being made more exact.
_NEGLIGIBLE = 0.002
#: Programs along the path that are made first; those that a search around the goal adds, and those that fill it up.
_SPREAD, _SEARCHED, _FILLED = 8, 6, 8


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
    """Choose a precision for each part of a model, by what it costs and what it gives.

    Args:
        model: as ``export`` takes it; one method.
        recipe: a quantizing one of this package. Its precision is what regions begin with.
        samples: as of ``export``, at least two. Every second one calibrates, unless the recipe has
            the option ``calibration_samples``. Of the others every second one chooses, and the rest judge: accuracies
                that are
            told are measured with these. A sample may have more than the model takes, such as labels, behind the
            inputs: the metric gets it whole.
        metric: ``metric(outputs, sample)`` gives a number, the higher the better; its mean is the accuracy. By default
            that is the signal to noise of the outputs against the model in floating point, in dB.
        budget: limits by name: ``cycles``, ``sram``, ``flash`` (Ethos-U), ``traffic``. A float is a factor of what
            the recipe's own program takes, as in ``{"cycles": 1.1}``; an int, or a text such as "512KiB", is absolute.
            Without any goal: 1.1 times the cycles, or bytes of traffic for other targets.
        min_metric: accuracy that is asked for: the cheapest program that has it is looked for.
        max_drop: the same, given as how far below the model in floating point it may be. Needs ``metric``.
        candidate_precisions: to choose from, of ``arm_recipes.recipe.precisions.NAMES``. By default the recipe's own
            and A16W8, and floating point for VGF; A8W4 too where flash is limited.
        test_samples: samples that judge; then all that do not calibrate choose.
        cache_dir: where what was tried is kept, by content: a search that was ended goes on from there.
        progress: show a progress bar if standard error is a terminal.

    Raises:
        ValueError: an argument cannot be used; the message says which and why.
        ExportError: the model cannot be captured, or the recipe's own program cannot be made.
    """
    check_order("tune", "recipe", recipe, samples)
    _check_recipe(recipe)
    goals.check(budget, min_metric, max_drop)
    if metric is not None and not callable(metric):
        raise ValueError(f"metric: {metric!r} is not callable; give a function of outputs and a sample, or None")
    if max_drop is not None and metric is None:
        raise ValueError("max_drop: the SQNR of the model in floating point is infinite; give min_metric")
    choices = _choices(recipe, candidate_precisions, budget)
    kept = ResultStore(cache_dir)
    with quiet():
        program, given, examples, notes = captured(model, samples, "tune")
        division = divide(program, recipe, examples, given, test_samples, metric)
        trial = Trial(program, recipe, choices[0], division, kept)
        search = _Search(trial, choices, budget, min_metric, max_drop, progress)
        return search.run([*notes, *division.notes])


def _check_recipe(recipe: Any) -> None:
    if not isinstance(recipe, ArmRecipe):
        raise TypeError(f"recipe: must be ExportRecipe.get_recipe(ArmRecipeType....), got {type(recipe).__name__}")
    if recipe.quantization_recipe is None or not recipe.quantization_recipe.quantizers:
        raise ValueError(f"recipe: {recipe.type_name} quantizes nothing; take one for INT8")
    if recipe.options.get("precisions"):
        raise ValueError("recipe: it has precisions already; leave them out, tune chooses them")


def _choices(recipe: ArmRecipe, given: Sequence[str] | None, budget: Mapping[str, Any] | None) -> list[str]:
    """Precisions to choose from, the recipe's own first."""
    own = names.default_precision(recipe.type_name, per_channel=recipe.options.get("per_channel", True))
    if given is None:
        found = ["A16W8", *(["A8W4"] if budget and "flash" in budget else [])]
        found += [names.FLOAT] if names.FLOAT in names.allowed(recipe.type_name) else []
    else:
        found = [given] if isinstance(given, str) else list(given)
        wrong = names.find_problem({str(i): name for i, name in enumerate(found)})
        if wrong is not None:
            raise ValueError(f"candidate_precisions: {wrong}")
        names.check(recipe.type_name, found)
    choices = list(dict.fromkeys([own, *found]))
    if len(choices) == 1:
        raise ValueError(
            f"candidate_precisions: there is nothing to choose: the recipe's own is {own}, name another one"
        )
    return choices


class _Search:
    """One search."""

    def __init__(
        self,
        trial: Trial,
        choices: Sequence[str],
        budget: Mapping[str, Any] | None,
        at_least: float | None,
        within: float | None,
        progress: bool,
    ) -> None:
        self._trial, self._choices, self._shown = trial, choices, progress
        modules = computing_modules(trial.program, trial.recipe)
        if not modules:
            raise ValueError("model: nothing of it is quantized, so there is nothing to choose")
        self._own = choices[0]
        self._finest = min(choices, key=names.NAMES.index)
        self._whole = tree(modules)
        self._base: PrecisionPlan = dict.fromkeys(modules, self._own)
        self._candidates: dict[tuple[tuple[str, str], ...], Candidate] = {}
        base = self._made(self._base)
        if isinstance(base, str):
            raise ExportError(f"the program of {trial.recipe.type_name} cannot be made: {base}")
        self._start = base
        division = trial.division
        self._goal, self._judged = (
            goals.goal(budget, at_least, within, base=base.price, floating=panel.floating(), metric=panel.metric)
            for panel in (division.search, division.test)
        )
        # What is saved in flash is looked for where flash is all that is limited.
        only = {limit.price for limit in self._goal.limits}
        self._currency = only.pop() if len(only) == 1 and only <= {"flash"} else base.price.main

    def run(self, notes: Sequence[str]) -> Tuned:
        """Find the program, export it and run it."""
        shares, errors = self._errors()
        alone = self._prices(errors)
        least = alone | {place: min(alone[place], paid) for place, paid in self._in_company(alone, errors).items()}
        for prices in (alone, least) if least != alone else (alone,):
            found = {
                region: [
                    path.Choice(name, errors[region, name], prices[region, name])
                    for name in self._choices
                    if (region, name) in prices
                ]
                for region in shares
            }
            start, steps = path.steps(found)
            self._along(path.plans(self._base, start, steps), start, steps)
        chosen = self._best()
        plan = self._plan_of(chosen)
        return self._told(chosen, plan, shares, errors, least, list(notes))

    # -- what regions do, each by itself -------------------------------------------------------------------------

    def _errors(self) -> tuple[list[Region], dict[tuple[Region, str], float]]:
        """Regions, and the error of the output that each makes at each precision."""
        exact: PrecisionPlan = dict.fromkeys(self._base, self._finest)
        least = self._trial.rate(exact).noise
        coarsest = max(self._choices, key=names.NAMES.index)

        def noise_of(region: Region, precision: str = coarsest) -> float:
            if precision == self._finest:
                return 0.0
            return max(self._trial.rate(with_region(exact, region, precision)).noise - least, 0.0)

        regions = divided(self._whole, noise_of, share=_SHARE, most=_REGIONS)
        errors = {(region, coarsest): noise for region, noise in regions.items()}
        rest = [(region, name) for region in regions for name in self._choices if name != coarsest]
        for region, name in self._marked(rest, "measuring", "region"):
            errors[region, name] = noise_of(region, name)
        return list(regions), errors

    def _prices(self, errors: Mapping[tuple[Region, str], float]) -> dict[tuple[Region, str], float]:
        """What each precision costs a region beyond the recipe's own; those that gain nothing are left out."""
        total = sum(noise for (_, name), noise in errors.items() if name == self._own)
        base = self._start.price
        found = {(region, self._own): 0.0 for region, name in errors if name == self._own}
        wanted = [
            (region, name)
            for region, name in errors
            if name != self._own
            and (_cheaper(name, self._own) or errors[region, self._own] - errors[region, name] > _NEGLIGIBLE * total)
        ]
        made = self._trial.price(with_region(self._base, region, name) for region, name in wanted)
        for place, price in zip(wanted, made, strict=True):
            if isinstance(price, Price) and price.cpu_operators <= base.cpu_operators:
                found[place] = float(price.of(self._currency) - base.of(self._currency))
        return found

    def _in_company(
        self, alone: Iterable[tuple[Region, str]], errors: Mapping[tuple[Region, str], float]
    ) -> dict[tuple[Region, str], float]:
        """What precisions cost those regions that make some of the error while all others are at the most exact one.

        Alone, int16 in a linear layer behind a function in int8 pays for bringing int8 to int16, and gains nothing.
        """
        total = sum(noise for (_, name), noise in errors.items() if name == self._own)
        places = [place for place in alone if errors[place[0], self._own] > _SHARE * total and place[1] != self._own]
        exact = dict.fromkeys(self._base, self._finest)
        pairs = [(with_region(exact, region, name), with_region(exact, region, self._own)) for region, name in places]
        made = iter(self._trial.price(plan for pair in pairs for plan in pair))
        found = {}
        for place, pair in zip(places, zip(made, made, strict=True), strict=True):
            one, other = pair
            if isinstance(one, Price) and isinstance(other, Price):
                # What int8 costs more among int16 is not saved where that is not there.
                found[place] = max(float(one.of(self._currency) - other.of(self._currency)), 0.0)
        return found

    # -- whole programs ------------------------------------------------------------------------------------------

    def _along(self, plans: list[PrecisionPlan], start: Mapping[Region, path.Choice], steps: list[path.Step]) -> None:
        """Make programs along the path, then around the goal, then with what still fits."""
        paid = [sum(choice.price for choice in start.values())]
        for step in steps:
            paid.append(paid[-1] + step.paid)
        for name in self._choices:
            self._make(dict.fromkeys(self._base, name))
        numbers = path.spread(paid, _SPREAD)
        for i in self._marked(numbers, "compiling", "program"):
            self._make(plans[i])
        made = {i: self._candidates.get(_key(plans[i])) for i in numbers}
        low, high = self._bracket(made)
        for _ in range(_SEARCHED):
            if high is None or low is None or high - low < 2:
                break
            middle = (low + high) // 2
            candidate = self._make(plans[middle])
            if candidate is not None and self._enough(candidate):
                high = middle
            elif candidate is not None:
                low = middle
            else:
                break
        if self._goal.least is None and low is not None:
            self._fill(plans[low], steps[low:])

    def _enough(self, candidate: Candidate) -> bool:
        """Whether to look further down the path: it is exact enough, or costs too much."""
        if self._goal.least is not None:
            return self._goal.exact(candidate.search_accuracy)
        return not self._goal.affordable(candidate.price)

    def _bracket(self, made: Mapping[int, Candidate | None]) -> tuple[int | None, int | None]:
        """The last program before the goal is met, or exceeded, and the first after."""
        known = {i: candidate for i, candidate in made.items() if candidate is not None}
        high = next((i for i, candidate in known.items() if self._enough(candidate)), None)
        low = max((i for i in known if high is None or i < high), default=None)
        return low, high

    def _fill(self, plan: PrecisionPlan, rest: Sequence[path.Step]) -> None:
        """Spend what is left of the budget, on the steps that fit by their prices: more at once where that helped.

        In the price of a step are its borders, which fall away between two of them: several cost less than their sum.
        """
        current, left, part = self._candidates.get(_key(plan)), list(rest), 0.5
        limit = next((x.most for x in self._goal.limits if x.price == self._currency), math.inf)
        for _ in range(_FILLED):
            chosen = [] if current is None else path.fitting(left, limit - current.price.of(self._currency), part)
            if current is None or not chosen:
                return
            changed = plan
            for step in chosen:
                changed = with_region(changed, step.region, step.choice.precision)
            candidate = self._make(changed)
            helps = candidate is not None and self._goal.affordable(candidate.price)
            if candidate is not None and helps and candidate.search_accuracy > current.search_accuracy:
                plan, current, part = changed, candidate, min(2 * part, 1.0)
                left = [step for step in left if step not in chosen]
            else:
                part /= 2
                left = left if len(chosen) > 1 else [step for step in left if step is not chosen[0]]

    def _make(self, plan: PrecisionPlan) -> Candidate | None:
        made = self._made(plan)
        return None if isinstance(made, str) else made

    def _made(self, plan: PrecisionPlan) -> Candidate | str:
        """A program of a plan, or why there is none; one that leaves more to the CPU is none."""
        key = _key(plan)
        if key not in self._candidates:
            (price,) = self._trial.price([plan])
            if isinstance(price, str):
                return price
            if self._candidates and price.cpu_operators > self._start.price.cpu_operators:
                return "it leaves more operators on the CPU"
            judged = self._trial.judge(plan)
            settings = self._trial.planned(plan).options["precisions"]
            searched = self._trial.rate(plan).metric
            self._candidates[key] = Candidate(dict(settings), price, judged.sqnr, judged.metric, searched)
        return self._candidates[key]

    def _best(self) -> Candidate:
        """What was looked for; where nothing is, what comes nearest: by the samples that choose alone."""
        found = list(self._candidates.values())
        affordable = [c for c in found if self._goal.affordable(c.price)]
        exact = [c for c in affordable if self._goal.exact(c.search_accuracy)]
        if self._goal.least is not None and exact:
            return min(exact, key=lambda c: (c.price.of(self._currency), -c.search_accuracy))
        if affordable:
            return max(affordable, key=lambda c: (*self._exactness(c), -c.price.of(self._currency)))
        limit = self._goal.limits[0]
        return min(found, key=lambda c: c.price.of(limit.price))

    def _exactness(self, candidate: Candidate) -> tuple[float, float]:
        rating = self._trial.rate(self._plan_of(candidate))
        return rating.metric, rating.sqnr

    def _plan_of(self, candidate: Candidate) -> PrecisionPlan:
        return dict(next(key for key, found in self._candidates.items() if found is candidate))

    # -- the end -------------------------------------------------------------------------------------------------

    def _told(
        self,
        chosen: Candidate,
        plan: PrecisionPlan,
        regions: Sequence[Region],
        errors: Mapping[tuple[Region, str], float],
        prices: Mapping[tuple[Region, str], float],
        notes: list[str],
    ) -> Tuned:
        recipe = self._trial.planned(plan)
        best, verified = self._verified(recipe, notes)
        total = sum(errors[region, self._own] for region in regions) or 1.0
        rows = [
            TunedRegion(
                region.name,
                region.modules,
                plan[region.modules[0]],
                errors[region, self._own] / total,
                {name: round(prices[region, name]) for name in self._choices[1:] if (region, name) in prices},
            )
            for region in regions
        ]
        accuracy = chosen.accuracy if verified is None else verified
        reached = self._judged.affordable(chosen.price) and self._judged.exact(accuracy)
        if not reached:
            notes.append(self._missed(chosen, accuracy))
        return Tuned(
            best=best,
            recipe=recipe,
            chosen=chosen,
            base=self._start,
            verified=verified,
            candidates=tuple(sorted(self._candidates.values(), key=lambda c: c.price.of(c.price.main))),
            regions=tuple(rows),
            metric=self._goal.metric,
            goal=str(self._judged),
            reached=reached,
            samples=self._trial.division.sizes,
            notes=tuple(notes),
        )

    def _missed(self, chosen: Candidate, accuracy: float) -> str:
        """A note for a goal that was not reached."""
        if self._goal.affordable(chosen.price) and self._goal.exact(chosen.search_accuracy):
            return (
                f"the goal is reached by the samples that chose ({chosen.search_accuracy:.4g}), and not by those that "
                f"judge ({accuracy:.4g}): more samples tell more, or ask for somewhat more than is needed"
            )
        return "no program that was made reaches the goal; this one comes nearest"

    def _verified(self, recipe: ArmRecipe, notes: list[str]) -> tuple[Any, float | None]:
        """The exported program, and its accuracy as it runs."""
        division = self._trial.division
        best = export(self._trial.program, recipe, division.calibration, progress=False)
        try:
            samples = self._marked(division.test.samples, "running", "sample")
            outputs = [best.run_real(sample) for sample in samples]
        except (RunError, ArmBackendError) as error:
            notes.append(f"the program was not run: {error}")
            return best, None
        return best, division.test.rated(outputs).metric

    def _marked(self, items: Sequence[Any], doing: str, unit: str) -> Iterable[Any]:
        return progress_bar(items, doing, unit, shown=self._shown, count=len(items))


def _cheaper(name: str, other: str) -> bool:
    """Whether a precision can be chosen for its price: it is not more exact."""
    return names.NAMES.index(name) > names.NAMES.index(other)


def _key(plan: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(plan.items()))
