"""What the zoo's models cost and how exact they are, as it was when it was last recorded.

``expectations.json`` has a line for every model and recipe; ``make record`` writes it anew. A figure that is better
than the recorded one fails too: if it did not, a later change could lose what was won and nobody would see it. So
whoever makes a model smaller, faster or more exact records that, and the file's change shows what was won.

Weights, samples and calibration are drawn from fixed seeds. What may still differ between machines is the last bit of
what PyTorch computes in floating point, and with it, now and then, a calibrated scale or a weight by one step: the
tolerances are wide enough for that. Cycles and memory are Vela's estimates: another version of Vela needs a new record.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from arm_recipes import ArmRecipeType
from tests.models import zoo
from tests.models.exported import Exported, precision

FILE = Path(__file__).with_name("expectations.json")
RELATIVE = 0.01
"""How far a count may be from the recorded one, as a share of that."""
DECIBELS = 0.2
"""How far a signal to noise ratio may be from the recorded one."""

Figures = dict[str, float]

#: Other programs with weights of four bits are made from the graphs of these, or hold the same weights.
GATED = [r for r in ArmRecipeType if precision(r) != "A8W4" or r.name in ("TOSA_A8W4", "ETHOSU_U85_A8W4")]


def figures(model: Exported, recipe: ArmRecipeType) -> Figures:
    """What is recorded of an export.

    ``program_bytes``: size of the ``.pte``. ``sqnr_db``: against floating point over the held-out samples, of integer
    programs but those for VGF, which give what TOSA's give. ``cycles``, ``sram_bytes``, ``dram_bytes``,
    ``flash_bytes``: Vela's estimates for Ethos-U, for one inference. What is 0 is left out.
    """
    result = model.result(recipe)
    (delegate,) = result.report.delegates
    found: Figures = {"program_bytes": len(result.buffer)}
    if precision(recipe) != "FP" and not recipe.name.startswith("VGF"):
        found["sqnr_db"] = round(model.sqnr(recipe), 2)
    if (vela := delegate.vela) is not None:
        found |= {"cycles": vela.total_cycles, "sram_bytes": vela.sram_bytes, "dram_bytes": vela.dram_bytes}
        found["flash_bytes"] = vela.flash_bytes
    return {name: value for name, value in found.items() if value}


def departures(expected: Figures, actual: Figures) -> list[str]:
    """Figures that left their tolerance, or that only one of the two has, each with what to do."""
    found = []
    for name in expected.keys() | actual.keys():
        before, after = expected.get(name), actual.get(name)
        if before is not None and after is not None:
            margin = DECIBELS if name == "sqnr_db" else RELATIVE * before
            if abs(after - before) <= margin:
                continue
        found.append(f"{name} was {before}, is {after}: if that is meant or better, run `make record`")
    return sorted(found)


def recorded() -> dict[str, dict[str, Figures]]:
    """Model -> recipe -> figures."""
    return json.loads(FILE.read_text())


def record(model: str, recipe: str, figures: Figures) -> None:
    """Write the figures of one export into the file; test processes take turns."""
    with FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = json.load(file)
        known.setdefault(model, {})[recipe] = figures
        file.seek(0)
        file.truncate()
        file.write(_text(known))


def _text(known: dict[str, dict[str, Figures]]) -> str:
    """JSON with a line for each export, in the order of the zoo and of the recipes."""
    models = []
    for model in (name for name in zoo.NAMES if name in known):
        of_model = known[model]
        lines = [f'    "{r.name}": {json.dumps(of_model[r.name])}' for r in ArmRecipeType if r.name in of_model]
        models.append(f'  "{model}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(models) + "\n}\n"
