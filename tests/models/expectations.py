"""What the zoo's models cost and how exact they are, as it was when it was last recorded.

``expectations.json`` has a line for every model and recipe; ``make record`` writes it anew. A figure that is better
than the recorded one fails too: if it did not, a later change could lose what was won and nobody would see it. So
whoever makes a model smaller, faster or more exact records that, and the file's change shows what was won.

Weights, samples and calibration are drawn from fixed seeds. What may still differ between machines is the last bit of
what PyTorch computes in floating point, and with it, now and then, a calibrated scale or a weight by one step: the
tolerances are wide enough for that.

Programs for Ethos-U, their cycles and memory are Vela's: they stand under the release that they are of, for each
of the supported ones. ``make record`` writes those of the installed one. What a program computes does not depend on it,
as all forms that are chosen for it are equal to the bit: the SQNR stands there once.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from arm_backend_core.workers import vela
from arm_recipes import ArmRecipeType
from tests.models import zoo
from tests.models.exported import Exported, precision

FILE = Path(__file__).with_name("expectations.json")
RELATIVE = 0.01
"""How far a count may be from the recorded one, as a share of that."""
DECIBELS = 0.2
"""How far a signal to noise ratio may be from the recorded one."""

Figures = dict[str, float]
Known = dict[str, float | Figures]
"""What the file has of an export; of Ethos-U, figures by release of Vela beside those that do not depend on it."""

#: What a program computes is the same with any release.
_OF_NO_RELEASE = ("sqnr_db",)

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


def known() -> dict[str, dict[str, Known]]:
    """What the file has: model -> recipe -> figures."""
    return json.loads(FILE.read_text())


def of_release(found: Known, release: vela.Release) -> Figures:
    """The figures of an export with a release of Vela; those of other targets do not depend on it."""
    figures: Figures = {}
    for name, value in found.items():
        if not isinstance(value, dict):
            figures[name] = value
        elif name == _name(release):
            figures |= value
    return figures


def with_release(found: Known, figures: Figures, recipe: str, release: vela.Release) -> Known:
    """``found`` with the figures of an export by ``recipe`` with a release of Vela."""
    if not recipe.startswith("ETHOSU"):
        return {**figures}
    others = {name: value for name, value in found.items() if isinstance(value, dict)}
    others[_name(release)] = {name: value for name, value in figures.items() if name not in _OF_NO_RELEASE}
    shared: Known = {name: figures[name] for name in _OF_NO_RELEASE if name in figures}
    return shared | dict(sorted(others.items()))


def recorded(model: str, recipe: str) -> Figures:
    """What is recorded of an export, of Ethos-U with the installed Vela."""
    return of_release(known()[model][recipe], vela.installed_release())


def record(model: str, recipe: str, figures: Figures) -> None:
    """Write the figures of one export into the file; test processes take turns."""
    with FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        every = json.load(file)
        of_model = every.setdefault(model, {})
        of_model[recipe] = with_release(of_model.get(recipe, {}), figures, recipe, vela.installed_release())
        file.seek(0)
        file.truncate()
        file.write(_text(every))


def _name(release: vela.Release) -> str:
    return "vela " + ".".join(map(str, release))


def _text(every: dict[str, dict[str, Known]]) -> str:
    """JSON with a line for each export, in the order of the zoo and of the recipes."""
    models = []
    for model in (name for name in zoo.NAMES if name in every):
        of_model = every[model]
        lines = [f'    "{r.name}": {json.dumps(of_model[r.name])}' for r in ArmRecipeType if r.name in of_model]
        models.append(f'  "{model}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(models) + "\n}\n"
