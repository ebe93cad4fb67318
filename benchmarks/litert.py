"""Vela's estimates of this project's programs beside those of LiteRT's, for the same models in the same run.

    python benchmarks/litert.py --out rows.jsonl [--models mobilenet_v2 ...] [--targets u55 u85]
    python benchmarks/litert.py --out rows.jsonl --table benchmarks/litert.md

LiteRT's programs are made by litert-torch and ai-edge-quantizer (``static_wi8_ai8``: full-integer int8, weights per
channel) in a separate virtual environment, which the script creates (--environment). The same Vela, with the same
configuration, compiles both. Rows that the file already contains are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import venv
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: Packages of LiteRT's environment. The models are built there too, with the same versions of ``_SHARED`` as here.
_PACKAGES = ("litert-torch==0.10.0", "ai-edge-quantizer==0.10.0")
_SHARED = ("torch", "torchvision", "transformers")
_LAYERS = 40  #: number of layers in a row: those with the most cycles
Row = dict[str, Any]


class Target(NamedTuple):
    """A target that both compile for.

    Attributes:
        macs: multiply-accumulates in a cycle.
    """

    recipe: str
    accelerator: str
    macs: int
    system_config: str
    memory_mode: str


TARGETS = {
    "u55": Target("ETHOSU_U55_INT8", "ethos-u55-128", 128, "Ethos_U55_High_End_Embedded", "Shared_Sram"),
    "u85": Target("ETHOSU_U85_INT8", "ethos-u85-256", 256, "Ethos_U85_SYS_DRAM_Mid", "Sram_Only"),
}


def main() -> None:
    """Measure what the arguments select, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/litert.jsonl", help="rows, added to")
    parser.add_argument("--models", nargs="+", help="names of benchmarks/litert_models.py (default: all)")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--environment", type=Path, default=ROOT / "build/litert", help="made if it is not there")
    parser.add_argument("--table", type=Path, help="write the rows as a table, measure nothing")
    parser.add_argument("--convert", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--ours", nargs=2, metavar=("MODEL", "TARGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
    elif arguments.ours:
        print(json.dumps(measure_ours(*arguments.ours)))
    elif arguments.table:
        arguments.table.write_text(format_table(_rows(arguments.out)))
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        compare(arguments.models, arguments.targets, environment(arguments.environment), arguments.out)


def _rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def compare(names: Iterable[str] | None, targets: Iterable[str], other: Path, out: Path) -> None:
    """Measure both compilers, one process after the other, and append the rows to a file.

    Args:
        other: Python executable of LiteRT's environment.
    """
    from benchmarks import litert_models

    known = {(row["model"], row["target"]) for row in _rows(out)}
    for name in names or litert_models.NAMES:
        wanted = [target for target in targets if (name, target) not in known]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.tflite"
            failed = _run([str(other), __file__, "--convert", name, str(file)])[1]
            for target in wanted:
                text, error = _run([sys.executable, __file__, "--ours", name, target])
                row: Row = {"model": name, "target": target, **(json.loads(text) if text else {"error": error})}
                row["litert"] = {"error": failed} if failed else compile_by_vela(file, TARGETS[target])
                with out.open("a") as sink:
                    sink.write(json.dumps(row) + "\n")
                print(_summarize(row), flush=True)


def _summarize(row: Row) -> str:
    sides = [row.get("error") or row["ours"]["cycles"], row["litert"].get("error") or row["litert"]["cycles"]]
    return f"{row['model']:20} {row['target']} {sides[0]} {sides[1]}"


def _run(command: list[str]) -> tuple[str, str]:
    """Run a command; return the last line of its output, and the error message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]
    return (done.stdout.strip().splitlines() or [""])[-1], ""


# --- this project


def export_model(name: str, target_name: str) -> tuple[int, Any]:
    """Export a model; return its number of multiply-accumulates and the report."""
    warnings.simplefilter("ignore")
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from arm_recipes import ArmRecipeType, ExportRecipe, export
    from benchmarks import litert_models

    torch.set_num_threads(1)
    model, samples = litert_models.build(name)
    torch.backends.mha.set_fastpath_enabled(False)  # it hides the products of nn.TransformerEncoder
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*samples[0])
    target = TARGETS[target_name]
    options = {"macs": target.macs, "system_config": target.system_config, "memory_mode": target.memory_mode}
    recipe: Any = ExportRecipe.get_recipe(ArmRecipeType[target.recipe], quantized_io=True, **options)
    return counter.get_total_flops() // 2, export(model, recipe, samples, progress=False).report


def measure_ours(name: str, target_name: str) -> Row:
    """Measure a model's program: its figures, and Vela's cycles by layer."""
    macs, report = export_model(name, target_name)
    figures = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    return {
        "macs": macs,
        "ours": {
            "cycles": sum(figure.total_cycles for figure in figures),
            "sram": max((figure.sram_bytes for figure in figures), default=0),
            "bytes": report.program_bytes,
            "cpu": sum(operator.count for operator in report.cpu_operators),
            "npu_macs": sum(figure.macs for figure in figures),
        },
        "layers": [
            [cost.name, cost.source, "+".join(cost.operators), cost.kind, cost.cycles, cost.macs]
            for cost in sorted(report.layers, key=lambda cost: -cost.cycles)[:_LAYERS]
        ],
    }


# --- LiteRT


def environment(folder: Path) -> Path:
    """Path of Python in the environment with LiteRT's converter. Creates the environment if it does not exist.

    Raises:
        subprocess.CalledProcessError: it cannot be made.
    """
    python = folder.absolute() / "bin/python"
    packages = [*_PACKAGES, *(f"{name}=={version(name).partition('+')[0]}" for name in _SHARED)]
    ready = folder / ".ready"
    if not ready.is_file() or ready.read_text() != "\n".join(packages):
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(["sh", "scripts/install_pytorch.sh", str(python)], cwd=ROOT, check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.write_text("\n".join(packages))
    return python


def convert(name: str, path: str) -> None:
    """Write a model as full-integer .tflite; runs in the other environment."""
    import litert_torch
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    from benchmarks import litert_models

    model, samples = litert_models.build(name)
    real = Path(path).with_suffix(".float.tflite")
    litert_torch.convert(model, samples[0]).export(str(real))
    ((signature, names),) = Interpreter(str(real)).get_signature_list().items()
    data = [dict(zip(names["inputs"], map(np.asarray, sample), strict=True)) for sample in samples]
    made = quantizer.Quantizer(str(real))
    made.load_quantization_recipe(recipe.static_wi8_ai8())
    made.quantize(made.calibrate({signature: data})).export_model(path)


def compile_by_vela(file: Path, target: Target) -> Row:
    """Compile a .tflite by Vela, and return Vela's estimates."""
    folder = file.parent / target.accelerator
    command = [sys.executable, "-m", "ethosu.vela", str(file), f"--output-dir={folder}", "--config=Arm/vela.ini"]
    command += [f"--accelerator-config={target.accelerator}", f"--system-config={target.system_config}"]
    command += [f"--memory-mode={target.memory_mode}", "--verbose-performance"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": ((done.stdout + done.stderr).strip().splitlines() or ["nothing"])[-1][:300]}
    with next(folder.glob("*_summary_*.csv")).open() as text:
        (summary,) = csv.DictReader(text)
    with next(folder.glob("*_per-layer.csv")).open() as text:
        rows = sorted(csv.DictReader(text), key=lambda row: -int(row["Op Cycles"]))
    found = re.search(r"CPU operators = +(\d+)", done.stdout)
    return {
        "cycles": int(float(summary["cycles_total"])),
        "sram": int(float(summary["sram_memory_used"]) * 1024),
        "bytes": next(folder.glob("*_vela.tflite")).stat().st_size,
        "cpu": int(found[1]) if found else None,
        "layers": [
            [row["Name"][-60:], row["NNG Operator"], int(row["Op Cycles"]), int(row["MAC Count"])]
            for row in rows[:_LAYERS]
        ],
    }


# --- the table


def format_table(rows: Iterable[Row]) -> str:
    """Format the rows as Markdown: a row for each model and target, and the medians."""
    head = ["# Beside LiteRT", "", _ABOUT, ""]
    head.append(
        "| model | NPU | cycles, ours | LiteRT | ratio | over the MAC limit, ours / LiteRT "
        "| SRAM KiB, ours / LiteRT | bytes, ours / LiteRT | on CPU, ours / LiteRT |"
    )
    lines, ratios = ["|" + "---|" * 9], dict[str, list[float]]()
    for row in sorted(rows, key=lambda row: row["target"]):
        made, other = row.get("ours"), row["litert"]
        start = f"| {row['model']} | {TARGETS[row['target']].accelerator} "
        if made is None or "error" in other:
            lines.append(start + f"| {row.get('error') or ''} {other.get('error') or ''}" + " |" * 7)
            continue
        ratio = made["cycles"] / other["cycles"]
        ratios.setdefault(row["target"], []).append(ratio)
        least = row["macs"] / TARGETS[row["target"]].macs
        cells = (
            f"{made['cycles']:,}",
            f"{other['cycles']:,}",
            f"{ratio:.2f}",
            f"{made['cycles'] / least:.1f} / {other['cycles'] / least:.1f}",
            f"{made['sram'] / 1024:,.0f} / {other['sram'] / 1024:,.0f}",
            f"{made['bytes']:,} / {other['bytes']:,} = {made['bytes'] / other['bytes']:.2f}",
            f"{made['cpu']} / {other['cpu']}",
        )
        lines.append(start + "| " + " | ".join(cells) + " |")
    for target, found in ratios.items():
        worst = f"most {max(found):.2f}, above 1.00: {sum(value > 1.0 for value in found)} of {len(found)}"
        lines.append(
            f"| **median** | {TARGETS[target].accelerator} | | | **{statistics.median(found):.2f}** | {worst} ||||"
        )
    return "\n".join([*head, *lines]) + "\n"


_LIBRARIES = ", ".join(package.replace("==", " ") for package in _PACKAGES)
_CONFIGURATIONS = "; ".join(f"{t.accelerator}: {t.system_config}, {t.memory_mode}" for t in TARGETS.values())
_ABOUT = (
    "Vela's estimates, no measurement of hardware, for programs of this project and of LiteRT (`static_wi8_ai8`; "
    f"{_LIBRARIES}), made by `benchmarks/litert.py`: the same model, four samples to calibrate with, int8 with weights "
    "per channel, inputs and outputs in int8 with the channels last, the same Vela and configuration "
    f"({_CONFIGURATIONS}). The MAC limit is the model's multiply-accumulates divided by those of the NPU in a cycle. "
    "Operators on the CPU count as 0 cycles."
)


if __name__ == "__main__":
    main()
