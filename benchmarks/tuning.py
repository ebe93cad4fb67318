"""What a search for precisions gains within a tenth more cycles, beside random choice and exact output layers.

    python benchmarks/tuning.py --out rows.jsonl [--models tiny_vit ...] [--recipes ETHOSU_U85_INT8 ...]
    python benchmarks/tuning.py --out rows.jsonl --table benchmarks/tuning.md    # write the table, measure nothing

Samples: six calibrate, six choose, six others judge. Figures are the SQNR in dB of the quantized programs in PyTorch
on those that judge, and Vela's cycles; the chosen program is executed on the emulator too.
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
_BUDGET, _DRAWS, _EACH = 1.1, 3, 6


def measured(name: str, recipe_name: str, folder: Path | None) -> dict[str, Any]:
    """One model for one NPU."""
    from arm_recipes import ArmRecipeType, ExportRecipe, tune
    from arm_recipes.explore.sweep.result_store import ResultStore
    from arm_recipes.explore.sweep.sweep import capture_model
    from arm_recipes.explore.tune.data_split import split_samples
    from arm_recipes.explore.tune.plan_evaluator import PlanEvaluator
    from tests.models import zoo

    entry = zoo.build(name, samples=3 * _EACH)
    samples, held = entry.samples[: 2 * _EACH], entry.samples[2 * _EACH :]
    recipe: Any = ExportRecipe.get_recipe(ArmRecipeType[recipe_name])
    start = time.perf_counter()
    options: dict[str, Any] = {"budget": {"cycles": _BUDGET}, "test_samples": held, "cache_dir": folder}
    found = tune(entry.model, recipe, samples, **options, progress=False)
    seconds = time.perf_counter() - start
    program, given, examples, _ = capture_model(entry.model, samples, "tune")
    trial = PlanEvaluator(
        program, recipe, "INT8", split_samples(program, recipe, examples, given, held, None), ResultStore(folder)
    )
    modules = [module for region in found.regions for module in region.modules]
    limit = _BUDGET * found.base.cost.value("cycles")
    plain = dict.fromkeys(modules, "INT8")

    def figures(exact: Iterable[str]) -> tuple[float, int]:
        plan = {**plain, **dict.fromkeys(exact, "A16W8")}
        (price,) = trial.estimate_costs([plan])
        if isinstance(price, str):
            raise RuntimeError(price)
        return trial.rate_on_test_samples(plan).sqnr, price.value("cycles")

    last = modules[-1:]
    drawn = [_random(found.regions, figures, limit, seed) for seed in range(_DRAWS)]
    return {
        "model": name,
        "recipe": recipe_name,
        "seconds": round(seconds, 1),
        "int8": [found.base.sqnr, found.base.cost.cycles],
        "a16w8": figures(modules),
        "tuned": [found.chosen.sqnr, found.chosen.cost.cycles],
        "verified": found.verified,
        "output_layer": figures(last),
        "random": drawn,
        "by_parts": _by_parts(found, limit),
        "half": _half(found),
    }


def _by_parts(found: Tuned, limit: float) -> float:
    """Of the dB between INT8 and A16W8 what the best choice reaches, if what regions do, measured alone, added up.

    Regions become exact in the order of what they gain for their price, the last one in part (the fractional knapsack,
    which no choice of whole regions exceeds), and what gains and costs nothing does too; A16W8's own error stays. By
    the samples that choose, with which regions' errors are measured.
    """
    (whole,) = (c for c in found.candidates if c.precisions == {"": "A16W8"})
    low, high = found.base.search_accuracy, whole.search_accuracy
    left = 10 ** (-low / 10) - 10 ** (-high / 10)
    room = limit - found.base.cost.value("cycles")
    gains = [
        (region.share * left, region.extra_costs["A16W8"]) for region in found.regions if "A16W8" in region.extra_costs
    ]
    for gain, paid in sorted(gains, key=lambda item: item[1] / max(item[0], 1e-30)):
        part = min(1.0, room / paid) if paid > 0 else 1.0
        left, room = left - part * gain, room - part * paid
    return (-10 * math.log10(left + 10 ** (-high / 10)) - low) / (high - low)


def _half(found: Tuned) -> float:
    """Cycles, relative to INT8, of the cheapest program that was made and has half of the dB, as they are judged."""
    (whole,) = (c for c in found.candidates if c.precisions == {"": "A16W8"})
    wanted = (found.base.sqnr + whole.sqnr) / 2
    return min(c.cost.value("cycles") for c in found.candidates if c.sqnr >= wanted) / found.base.cost.value("cycles")


def _random(regions: Sequence[Any], figures: Any, limit: float, seed: int) -> tuple[float, int]:
    """Regions in a random order, as many as the budget takes: by halving, as each program takes a second."""
    order = list(regions)
    random.Random(seed).shuffle(order)
    low, high = 0, len(order)
    best: tuple[float, int] = figures(())
    while low < high:
        middle = (low + high + 1) // 2
        made = figures(module for region in order[:middle] for module in region.modules)
        if made[1] <= limit:
            low, best = middle, made
        else:
            high = middle - 1
    return best


def table(found: Iterable[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        *("# Precisions within a tenth more cycles", "", "Written by `tuning.py`; README.md says what was found.", ""),
        "| model | recipe | INT8 dB | A16W8 dB (cycles) | tuned dB (cycles) | of the dB between | by parts "
        "| half of it takes | executed "
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
            f"{row['by_parts']:.0%}",
            f"{row['half']:.2f}x" if "half" in row else "",
            verified,
            relative(row["output_layer"]),
            relative(mean),
            f"{row['seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    rows.main(__doc__, measured, table, keeps=True, models=MODELS, recipes=RECIPES)
