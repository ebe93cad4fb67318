"""Expected figures of the zoo's models: size, SQNR, cycles and memory, as last recorded.

``expectations.json`` has a line for every model and recipe; ``make record`` rewrites it. A figure that is better than
the recorded one fails too. Otherwise, a later change could lose the improvement unnoticed. A change that makes a model
smaller, faster or more accurate also updates the file, whose diff shows the improvement.

Weights, samples and calibration use fixed seeds. Between machines, the last bit of PyTorch's floating-point results may
differ, and with it, sometimes, a calibrated scale or a weight by one step. The tolerances allow for that.

Size, cycles and memory of Ethos-U programs depend on Vela. The file has them for each supported release, and ``make
record`` writes those of the installed one. The SQNR is independent of the release, because all alternatives are equal
to the bit, so the file has it once.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from arm_backend_core.workers import vela
from arm_recipes import ArmRecipeType
from tests.models import zoo
from tests.models.exported_models import ExportedModel, precision

FILE = Path(__file__).with_name("expectations.json")
RELATIVE = 0.01
"""Tolerance of counts, relative to the recorded one."""
DECIBELS = 0.3
"""Tolerance of the SQNR, in dB."""

Figures = dict[str, float]
RecordedFigures = dict[str, float | Figures]
"""The figures of one export in the file. Those of Ethos-U are also grouped by release of Vela, as ``vela 5.2``."""

#: Figures that do not depend on the release of Vela.
_RELEASE_INDEPENDENT = ("sqnr_db",)

#: Recipes with recorded figures. Other A8W4 programs have the same graphs or the same weights as these.
RECORDED_RECIPES = [
    recipe
    for recipe in ArmRecipeType
    if recipe is not ArmRecipeType.CORTEX_M_INT8  # has no delegates; see benchmarks/cortex_m.py
    and (precision(recipe) != "A8W4" or recipe.name in ("TOSA_A8W4", "ETHOSU_U85_A8W4"))
]


def measure(model: ExportedModel, recipe: ArmRecipeType) -> Figures:
    """Measure the figures of an export; figures of 0 are omitted.

    ``program_bytes``: size of the ``.pte``. ``sqnr_db``: SQNR of integer programs over the test samples, except for
    VGF, whose results are TOSA's. ``cycles``, ``sram_bytes``, ``dram_bytes``, ``flash_bytes``: Vela's estimates for one
    inference on Ethos-U.
    """
    result = model.result(recipe)
    (delegate,) = result.report.delegates
    figures: Figures = {"program_bytes": len(result.buffer)}
    if precision(recipe) != "FP" and not recipe.name.startswith("VGF"):
        figures["sqnr_db"] = round(model.sqnr(recipe), 2)
    if (vela := delegate.vela) is not None:
        figures |= {"cycles": vela.total_cycles, "sram_bytes": vela.sram_bytes, "dram_bytes": vela.dram_bytes}
        figures["flash_bytes"] = vela.flash_bytes
    return {name: value for name, value in figures.items() if value}


def list_differences(expected: Figures, actual: Figures) -> list[str]:
    """List the figures out of tolerance, and those that only one of the two has, with advice."""
    differences = []
    for name in expected.keys() | actual.keys():
        before, after = expected.get(name), actual.get(name)
        if before is not None and after is not None:
            margin = DECIBELS if name == "sqnr_db" else RELATIVE * before
            if abs(after - before) <= margin:
                continue
        differences.append(f"{name} was {before}, is {after}: if that is meant or better, run `make record`")
    return sorted(differences)


def read_file() -> dict[str, dict[str, RecordedFigures]]:
    """Read the file: model -> recipe -> figures."""
    return json.loads(FILE.read_text())


def select_release(recorded: RecordedFigures, release: vela.Release) -> Figures:
    """Select the figures of one release of Vela, with those that do not depend on it."""
    figures: Figures = {}
    for name, value in recorded.items():
        if not isinstance(value, dict):
            figures[name] = value
        elif name == _name(release):
            figures |= value
    return figures


def update_release(recorded: RecordedFigures, figures: Figures, recipe: str, release: vela.Release) -> RecordedFigures:
    """Replace the figures of one release of Vela in the recorded figures of a recipe."""
    if not recipe.startswith("ETHOSU"):
        return {**figures}
    others = {name: value for name, value in recorded.items() if isinstance(value, dict)}
    others[_name(release)] = {name: value for name, value in figures.items() if name not in _RELEASE_INDEPENDENT}
    shared: RecordedFigures = {name: figures[name] for name in _RELEASE_INDEPENDENT if name in figures}
    return shared | dict(sorted(others.items()))


def read_expected(model: str, recipe: str) -> Figures:
    """Read the expected figures of an export with the installed Vela."""
    return select_release(read_file()[model][recipe], vela.installed_release())


def record(model: str, recipe: str, figures: Figures) -> None:
    """Write the figures of one export into the file, under a lock."""
    with FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        every = json.load(file)
        of_model = every.setdefault(model, {})
        of_model[recipe] = update_release(of_model.get(recipe, {}), figures, recipe, vela.installed_release())
        file.seek(0)
        file.truncate()
        file.write(_text(every))


def _name(release: vela.Release) -> str:
    return "vela " + ".".join(map(str, release))


def _text(every: dict[str, dict[str, RecordedFigures]]) -> str:
    """JSON with a line for each export, in the order of the zoo and of the recipes."""
    models = []
    for model in (name for name in zoo.NAMES if name in every):
        of_model = every[model]
        lines = [f'    "{r.name}": {json.dumps(of_model[r.name])}' for r in ArmRecipeType if r.name in of_model]
        models.append(f'  "{model}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(models) + "\n}\n"
