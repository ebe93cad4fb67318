"""Coverage of public architectures: whether an export is fully delegated, its SQNR and its time.

    python benchmarks/coverage.py --out rows.jsonl                       # all models, TOSA_FP and TOSA_INT8
    python benchmarks/coverage.py --out rows.jsonl --models torchvision timm/dla34 --recipes ETHOSU_U85_INT8
    python benchmarks/coverage.py --out rows.jsonl --table benchmarks/coverage.md

Each model is exported with each recipe in a new process. Rows that the file already contains are not measured again.
Cells of an existing table for which there is no row are kept. A program is "whole" if it is fully delegated: one
delegate (or any number, if one of them is called repeatedly: a loop), and no operator on the CPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import Row, add_row, index_rows

RECIPES = ("TOSA_FP", "TOSA_INT8", "ETHOSU_U85_INT8", "ETHOSU_U55_INT8")
FIELDS = ("model", "recipe")


def main() -> None:
    """Measure what the arguments select, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to which rows are appended")
    parser.add_argument("--models", nargs="+", default=["all"], help="all, a library, or names")
    parser.add_argument("--recipes", nargs="+", default=RECIPES[:2], choices=RECIPES)
    parser.add_argument(
        "--again", action="store_true", help="repeat measurements that failed or were not fully delegated"
    )
    parser.add_argument("--seconds", type=float, default=240, help="limit for a row")
    parser.add_argument(
        "--gigabytes", type=float, default=8, help="limit of the address space of a measurement, without imports"
    )
    parser.add_argument(
        "--run", type=float, default=math.inf, help="run models of at most this many million parameters"
    )
    parser.add_argument("--table", type=Path, help="write a table of the rows to this file, and measure nothing")
    given = parser.parse_args()
    if given.table:
        before = given.table.read_text() if given.table.exists() else ""
        given.table.write_text(format_table(index_rows(FIELDS, given.out).values(), before))
        return
    _import()
    from benchmarks import coverage_models

    known = index_rows(FIELDS, given.out)
    for name in _names(given.models, coverage_models):
        for recipe in given.recipes:
            row = known.get((name, recipe))
            if row is not None and not (given.again and _status(row) != "whole"):
                continue
            row = {"model": name, "recipe": recipe, **_measure_with_limits(name, recipe, given)}
            add_row(given.out, row)
            print(f"{name:45} {recipe:16} {_status(row):6} {row.get('seconds', 0):6.1f} s  {_remark(row)[:150]}")
            sys.stdout.flush()


def _names(wanted: list[str], models: Any) -> list[str]:
    chosen: list[str] = []
    for word in wanted:
        chosen += [word] if "/" in word else [name for name in models.names() if word in ("all", name.split("/")[0])]
    return chosen


def _import() -> None:
    """Import what all rows need, before the fork. Thread pools do not survive a fork, so torch uses one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    from arm_recipes import ArmRecipeType, export  # noqa: F401
    from tests.models import zoo

    zoo.torchvision()


# --- one row, in a process of its own


def _measure_with_limits(name: str, recipe: str, given: argparse.Namespace) -> Row:
    """Measure in a forked process with a time limit. It sends its row twice: before and after it runs the program."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(name, recipe, given, theirs))
    process.start()
    theirs.close()
    row: Row = {"error": f"not done after {given.seconds:.0f} s"}
    end = time.monotonic() + given.seconds
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            row = ours.recv()
    except EOFError:
        process.join(5)
        if process.exitcode:
            row = row if "seconds" in row else {"error": f"the process ended with {process.exitcode}"}
            row.setdefault("run_error", f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return row


def _measure(name: str, recipe: str, given: argparse.Namespace, to: Connection) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + int(given.gigabytes * 2**30),) * 2)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        import torch

        from arm_recipes import ArmRecipeType, ExportRecipe, export
        from benchmarks import coverage_models

        model, samples = coverage_models.build(name)
        with torch.no_grad():
            expected = _flat(model(*samples[-1]))
        row: Row = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        started = time.perf_counter()
        result = export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), samples[:-1])
        row["seconds"] = round(time.perf_counter() - started, 2)
        report = result.report
        row["delegates"] = len(report.delegates)
        row["loops"] = sum(delegate.calls > 1 for delegate in report.delegates)
        row["cpu"] = [[entry.operator, entry.count, entry.reason] for entry in report.cpu_operators]
    except Exception as error:
        to.send({"error": _first_line(error)})
        return
    to.send(row)
    # Most models have the same quantized graph for Ethos-U, and then the same SQNR (exceptions: ``accuracy.py``).
    if recipe.startswith("TOSA") and row["parameters"] <= given.run * 1e6:
        try:
            row["sqnr"] = sqnr(expected, _flat(result.run(*samples[-1])))
        except Exception as error:
            row["run_error"] = _first_line(error)
        to.send(row)


def _flat(outputs: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return [value for value in pytree.tree_leaves(outputs) if value.is_floating_point()]


def sqnr(expected: list[Any], actual: list[Any]) -> float | None:
    """SQNR in dB, the minimum over the outputs. The signal is an output minus its mean."""
    ratios = []
    for wanted, found in zip(expected, actual, strict=True):
        signal = float((wanted.double() - wanted.double().mean()).square().sum())
        noise = float((wanted.double() - found.double()).square().sum())
        if not math.isfinite(noise) or signal == 0:
            return None
        ratios.append(10 * math.log10(signal / max(noise, signal * 1e-15)))
    return round(min(ratios), 1)


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:400]


# --- the table


def _status(row: Row) -> str:
    if "error" in row:
        return "over" if "M parameters" in row["error"] else "fails"
    return "parts" if row["cpu"] or (row["delegates"] != 1 and not row.get("loops")) else "whole"


def _remark(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    parts = [f"{row['delegates']} delegates"] if row["delegates"] != 1 else []
    parts += [f"{count} {operator}: {reason}" for operator, count, reason in row["cpu"]]
    parts += [f"run: {row['run_error']}"] if "run_error" in row else []
    return f"{row.get('sqnr')} dB " + "; ".join(parts)


def format_table(rows: Iterable[Row], before: str = "") -> str:
    """Format the rows as Markdown: a row per model, then the reasons why programs are not fully delegated.

    Args:
        before: an earlier table, whose other cells are kept.
    """
    rows = [row for row in rows if _status(row) != "over"]
    models, remarks = _read(before)
    for row in rows:
        cells = models.setdefault(row["model"], {})
        cells[row["recipe"]] = _cell(row)
        if "parameters" in row:
            cells[_SIZE] = f"{row['parameters'] / 1e6:.2f}"
        remarks.pop((row["model"], row["recipe"]), None)
        if _status(row) != "whole" or "run_error" in row:
            remarks[row["model"], row["recipe"]] = _remark(row)
    recipes = [recipe for recipe in RECIPES if any(cells.get(recipe) for cells in models.values())]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout
    lines = [
        *_HEAD,
        f"{len(models)} models, written {datetime.now(UTC):%Y-%m-%d} at commit {commit.strip()}.",
        "A model that was whole at an earlier commit was not measured again (`--again` repeats the others).",
        "",
        "| recipe | models | whole | in parts | fail | not measured |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        measured = [cells[recipe] for cells in models.values() if cells.get(recipe)]
        failing, parts = measured.count("fails"), sum("delegates" in cell for cell in measured)
        counts = [len(measured), len(measured) - failing - parts, parts, failing, len(models) - len(measured)]
        lines.append("| " + " | ".join(map(str, [recipe, *counts])) + " |")
    lines += ["", "| " + " | ".join(["model", _SIZE, *recipes]) + " |", "|---" * (len(recipes) + 2) + "|"]
    for name in sorted(models):
        lines.append("| " + " | ".join([name, *(models[name].get(column, "") for column in (_SIZE, *recipes))]) + " |")
    lines += ["", "## What is not whole", ""]
    lines += [
        f"- {model}, {recipe}: {text}" for (model, recipe), text in sorted(remarks.items(), key=lambda x: x[0][0])
    ]
    return "\n".join(lines) + "\n"


def _read(text: str) -> tuple[dict[str, dict[str, str]], dict[tuple[str, str], str]]:
    """Parse an earlier table into cells by model and column, and remarks by model and recipe."""
    models: dict[str, dict[str, str]] = {}
    remarks: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| model |"):
            columns = cells[1:]
        elif columns and line.startswith("| "):
            models[cells[0]] = dict(zip(columns, cells[1:], strict=True))
        elif columns and line.startswith("- "):
            place, remark = line[2:].split(": ", 1)
            model, recipe = place.split(", ")
            remarks[model, recipe] = remark
    return models, remarks


def _cell(row: Row) -> str:
    if "error" in row:
        return "fails"
    exact = f", {row['sqnr']:.1f} dB" if row.get("sqnr") is not None else ""
    parts = f"{row['delegates']} delegates, {sum(entry[1] for entry in row['cpu'])} on the CPU, "
    return ("" if _status(row) == "whole" else parts) + f"{row['seconds']:.1f} s{exact}"


_SIZE = "M parameters"
_HEAD = (
    "# Public architectures",
    "",
    "Written by `coverage.py` in this folder; `coverage_models.py` has the models: every one that torchvision lists",
    "with at most 100 million parameters (`quantized_*`: the float module that is to be quantized), and small",
    "configurations of transformers. timm is no dependency of this project: its models",
    "are measured where it can be imported. Weights are random from a fixed seed, batch normalizations have",
    "statistics of random data, and layer scales, biases and last weights of residual branches are moved away from",
    "zero. Images are small (64x64 where the architecture takes that). Detectors are exported as backbone and heads,",
    "without anchors, non-maximum suppression and region pooling; their region heads take features as inputs.",
    "",
    "A cell has the seconds of the export (one thread, on a machine with other work) and the SQNR of the program's",
    "outputs against PyTorch in floating point: the minimum over the outputs, for one held-out sample. Two samples",
    "calibrated. TOSA programs ran on Arm's reference model. They have no SQNR if running took too long or failed, or",
    "if the model was too large to be run (`--run`).",
    "A cell with seconds alone or with an SQNR is a model without operators on the CPU, in one delegate unless it has",
    "loops.",
    "",
)

if __name__ == "__main__":
    main()
