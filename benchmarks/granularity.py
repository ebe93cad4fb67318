"""Weight granularity: one scale per tensor, one per channel, or the choice of ``tune`` for each layer.

    python benchmarks/granularity.py --out rows.jsonl [--models resnet18 ...] [--recipes ETHOSU_U85_INT8 ...]
    python benchmarks/granularity.py --out rows.jsonl --table benchmarks/granularity.md    # format earlier rows

Six samples calibrate, six are search samples (``tune`` chooses by them), and six are test samples. The figures are
Vela's cycles, the bytes in flash, and the SQNR in dB of PyTorch's quantized graph on the test samples, in brackets that
of the program on the emulator. Column "chosen": the most accurate program on the search samples that takes at most the
cycles of "per channel". Column "cheapest as accurate": the program with the fewest cycles whose accuracy on the search
samples is at least that of "per channel" and "per tensor".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rows

MODELS = ("resnet18", "mobilenet_v2")
RECIPES = ("ETHOSU_U55_INT8", "ETHOSU_U85_INT8")
COLUMNS = ("per channel", "per tensor", "chosen", "cheapest as accurate")
_PER_TENSOR = "INT8_PER_TENSOR"


def measure(name: str, recipe_name: str, folder: Path | None) -> dict[str, Any]:
    """Measure cycles, bytes and SQNR of both granularities and of the choices of ``tune``."""
    from arm_recipes import ArmRecipeType, ExportRecipe, tune
    from tests.models import zoo

    started = time.perf_counter()
    entry = zoo.build(name, samples=18)
    samples, test_samples = entry.samples[:12], entry.samples[12:]
    recipe: Any = ExportRecipe.get_recipe(ArmRecipeType[recipe_name])
    options: dict[str, Any] = {"candidate_precisions": [_PER_TENSOR], "budget": {"cycles": 1.0}, "cache_dir": folder}
    found = tune(entry.model, recipe, samples, **options, test_samples=test_samples, progress=False)
    (coarse,) = (c for c in found.candidates if c.precisions == {"": _PER_TENSOR})
    best = max(found.base.search_accuracy, coarse.search_accuracy)
    as_accurate = min((c for c in found.candidates if c.search_accuracy >= best), key=lambda c: c.cost.value("cycles"))
    return {
        "model": name,
        "recipe": recipe_name,
        "per channel": [*_figures(found.base), None],
        "per tensor": [*_figures(coarse), None],
        "chosen": [*_figures(found.chosen), found.verified],
        "cheapest as accurate": [*_figures(as_accurate), None],
        "seconds": round(time.perf_counter() - started),
    }


def _figures(candidate: Any) -> tuple[int, int, float]:
    return candidate.cost.value("cycles"), candidate.cost.flash, candidate.sqnr


def format_table(found: Iterable[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = ["# Weight scales per tensor or per channel", ""]
    lines += ["Written by `granularity.py`: cycles, bytes in flash, dB (executed); README.md explains the figures.", ""]
    lines += [f"| model | recipe | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in found:
        cells = [_cell(*row[column]) for column in COLUMNS]
        lines.append(f"| {row['model']} | {row['recipe']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(cycles: int, flash: int, sqnr: float, executed: float | None) -> str:
    shown = "" if executed is None else f" ({executed:.1f})"
    return f"{cycles:,}, {flash:,}, {sqnr:.1f}{shown}"


if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, has_cache=True, models=MODELS, recipes=RECIPES)
