"""Mixed precision by ``tune`` within 10% more cycles, compared with random regions and with an int16 output layer.

    python benchmarks/tuning.py --out rows.jsonl [--models tiny_vit ...] [--recipes ETHOSU_U85_INT8 ...]
    python benchmarks/tuning.py --out rows.jsonl --table benchmarks/tuning.md    # format earlier rows

Six samples calibrate, six are search samples (``tune`` chooses by them), and six are test samples. The figures are
Vela's cycles and the SQNR in dB of PyTorch's quantized graph on the test samples. The emulator also executes the chosen
program.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rows

if TYPE_CHECKING:
    from arm_recipes import Tuned

MODELS = ("mobilenet_v3_small", "efficientnet_b0", "tiny_vit", "tiny_bert")
RECIPES = ("ETHOSU_U55_INT8", "ETHOSU_U85_INT8")
#: Cycles relative to INT8; random choices; samples of each of the three kinds.
_CYCLE_BUDGET, _RANDOM_CHOICES, _SAMPLES_PER_SPLIT = 1.1, 3, 6


def measure(name: str, recipe_name: str, folder: Path | None) -> dict[str, Any]:
    """Measure one model for one NPU, and return its row."""
    from arm_recipes import ArmRecipeType, ExportRecipe, tune
    from arm_recipes.explore.sweep.result_store import ResultStore
    from arm_recipes.explore.sweep.sweep import capture_model
    from arm_recipes.explore.tune.data_split import split_samples
    from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
    from tests.models import zoo

    entry = zoo.build(name, samples=3 * _SAMPLES_PER_SPLIT)
    split = 2 * _SAMPLES_PER_SPLIT
    samples, test_samples = entry.samples[:split], entry.samples[split:]
    recipe: Any = ExportRecipe.get_recipe(ArmRecipeType[recipe_name])
    start = time.perf_counter()
    options: dict[str, Any] = {"budget": {"cycles": _CYCLE_BUDGET}, "test_samples": test_samples, "cache_dir": folder}
    found = tune(entry.model, recipe, samples, **options, progress=False)
    seconds = time.perf_counter() - start
    program, inputs, examples, _ = capture_model(entry.model, samples, "tune")
    data = split_samples(program, recipe, examples, inputs, test_samples, None)
    evaluator = PlanEvaluator(program, recipe, "INT8", data, ResultStore(folder))
    modules = [module for region in found.regions for module in region.modules]
    limit = _CYCLE_BUDGET * found.base.cost.value("cycles")
    int8_plan = dict.fromkeys(modules, "INT8")

    def evaluate(int16_modules: Iterable[str]) -> tuple[float, int]:
        plan = {**int8_plan, **dict.fromkeys(int16_modules, "A16W8")}
        (cost,) = evaluator.estimate_costs([plan])
        if isinstance(cost, str):
            raise RuntimeError(cost)
        return evaluator.evaluate_on_test_samples(plan).sqnr, cost.value("cycles")

    random_choices = [_choose_at_random(found.regions, evaluate, limit, seed) for seed in range(_RANDOM_CHOICES)]
    return {
        "model": name,
        "recipe": recipe_name,
        "seconds": round(seconds, 1),
        "int8": [found.base.sqnr, found.base.cost.cycles],
        "a16w8": evaluate(modules),
        "tuned": [found.chosen.sqnr, found.chosen.cost.cycles],
        "verified": found.verified,
        "output_layer": evaluate(modules[-1:]),
        "random": random_choices,
        "additive_bound": _additive_bound(found, limit),
        "half_gain": _cost_of_half_gain(found),
    }


def _additive_bound(found: Tuned, limit: float) -> float:
    """Upper bound of the gain, as a fraction of the dB between INT8 and A16W8, if noise and costs of regions add up.

    It is the solution of the fractional knapsack problem: regions become int16 in the order of noise per cycle, and the
    last one partly. No choice of whole regions exceeds it. The noise of A16W8 itself remains. All figures are those of
    the search samples, on which ``tune`` measures the noise of regions.
    """
    (a16w8,) = (c for c in found.candidates if c.precisions == {"": "A16W8"})
    low, high = found.base.search_accuracy, a16w8.search_accuracy
    noise = 10 ** (-low / 10) - 10 ** (-high / 10)
    budget = limit - found.base.cost.value("cycles")
    items = [
        (region.share * noise, region.extra_costs["A16W8"]) for region in found.regions if "A16W8" in region.extra_costs
    ]
    for gain, cost in sorted(items, key=lambda item: item[1] / max(item[0], 1e-30)):
        fraction = min(1.0, budget / cost) if cost > 0 else 1.0
        noise, budget = noise - fraction * gain, budget - fraction * cost
    return (-10 * math.log10(noise + 10 ** (-high / 10)) - low) / (high - low)


def _cost_of_half_gain(found: Tuned) -> float:
    """Cycles, relative to INT8, of the cheapest compiled program with half of the gain in dB on the test samples."""
    (a16w8,) = (c for c in found.candidates if c.precisions == {"": "A16W8"})
    target = (found.base.sqnr + a16w8.sqnr) / 2
    return min(c.cost.value("cycles") for c in found.candidates if c.sqnr >= target) / found.base.cost.value("cycles")


def _choose_at_random(regions: Sequence[Any], evaluate: Any, limit: float, seed: int) -> tuple[float, int]:
    """SQNR and cycles with as many regions in int16 as the budget allows, in random order. A binary search finds them.

    A binary search needs few programs, each of which takes a second.
    """
    order = list(regions)
    random.Random(seed).shuffle(order)
    low, high = 0, len(order)
    best: tuple[float, int] = evaluate(())
    while low < high:
        middle = (low + high + 1) // 2
        candidate = evaluate(module for region in order[:middle] for module in region.modules)
        if candidate[1] <= limit:
            low, best = middle, candidate
        else:
            high = middle - 1
    return best


def format_table(found: Iterable[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = [
        *(
            "# Mixed precision within 10% more cycles",
            "",
            "Written by `tuning.py`; README.md explains the figures.",
            "",
        ),
        "| model | recipe | INT8 dB | A16W8 dB (cycles) | tuned dB (cycles) | share of the A16W8 gain | additive bound "
        "| cycles for half of the gain | tuned dB, emulator "
        "| output layer in A16W8 | random, mean of 3 | seconds |",
        "|---" * 12 + "|",
    ]
    for row in found:
        low, cycles = row["int8"]
        high = row["a16w8"][0]

        def relative(figures: Sequence[float], cycles: float = cycles) -> str:
            return f"{figures[0]:.1f} ({figures[1] / cycles:.2f}x)"

        mean = [sum(column) / len(row["random"]) for column in zip(*row["random"], strict=True)]
        share = (row["tuned"][0] - low) / (high - low)
        verified = "" if row["verified"] is None else f"{row['verified']:.1f}"
        cells = (
            row["model"],
            row["recipe"],
            f"{low:.1f}",
            relative(row["a16w8"]),
            relative(row["tuned"]),
            f"{share:.0%}",
            f"{row['additive_bound']:.0%}",
            f"{row['half_gain']:.2f}x" if "half_gain" in row else "",
            verified,
            relative(row["output_layer"]),
            relative(mean),
            f"{row['seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, has_cache=True, models=MODELS, recipes=RECIPES)
