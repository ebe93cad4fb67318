"""RAM that a board needs for this project's programs, beside the SRAM of LiteRT's programs for the same models.

    python benchmarks/ram.py --out rows.jsonl [--models mobilenet_v2 ...] [--targets u55 u85]
    python benchmarks/ram.py --out rows.jsonl --table benchmarks/ram.md

LiteRT's figures are those of ``litert.md``: the tensor arena that Vela plans, without the interpreter of LiteRT for
Microcontrollers.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import litert_models, rows  # noqa: E402
from benchmarks.litert import TARGETS  # noqa: E402
from benchmarks.rows import Row  # noqa: E402

if TYPE_CHECKING:
    from arm_recipes.report.report import Report

_LITERT_TABLE = Path(__file__).with_name("litert.md")
_KIB = 1024


def measure(model: str, target: str) -> Row:
    """Export a model with float and with int8 inputs and outputs, and return the RAM of both programs in bytes."""
    from arm_recipes import ArmRecipeType, ExportRecipe, export

    module, samples = litert_models.build(model)
    configuration = TARGETS[target]
    options: dict[str, Any] = {
        "macs": configuration.macs,
        "system_config": configuration.system_config,
        "memory_mode": configuration.memory_mode,
    }
    row: Row = {"model": model, "target": target}
    for kind, quantized_io in (("float", False), ("int8", True)):
        recipe = ExportRecipe.get_recipe(ArmRecipeType[configuration.recipe], quantized_io=quantized_io, **options)
        row[kind] = count_working_bytes(export(module, recipe, samples, progress=False).report)
    return row


def count_working_bytes(report: Report) -> int:
    """Bytes of RAM of a board without constants that a memory mode places in SRAM; 0 if the RAM is not known."""
    parts = report.ram.parts if report.ram is not None else ()
    return sum(part.bytes for part in parts if part.name != "NPU constants")


def litert_sram() -> dict[tuple[str, str], int]:
    """Model and accelerator -> KiB of SRAM of LiteRT's program, from ``litert.md``."""
    found = re.finditer(
        r"^\| (\w+) \| (ethos-\S+) \|.*?\| ([\d,]+) / ([\d,]+) \| [\d,]+ /", _LITERT_TABLE.read_text(), re.M
    )
    return {(match[1], match[2]): int(match[4].replace(",", "")) for match in found}


def format_table(measured: Iterable[Row]) -> str:
    """Format the rows as Markdown: a row for each model and NPU, and the medians of the ratios."""
    other = litert_sram()
    lines = ["# RAM of a board", "", _ABOUT, ""]
    lines += [
        "| model | NPU | float inputs and outputs | int8 | LiteRT, int8 | int8 / LiteRT |",
        "|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {}
    for row in sorted(measured, key=lambda row: row["target"]):
        accelerator = TARGETS[row["target"]].accelerator
        arena = other[row["model"], accelerator]
        ratio = row["int8"] / _KIB / arena
        ratios.setdefault(accelerator, []).append(ratio)
        cells = (
            row["model"],
            accelerator,
            f"{row['float'] / _KIB:,.1f}",
            f"{row['int8'] / _KIB:,.1f}",
            f"{arena:,}",
            f"{ratio:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for accelerator, values in ratios.items():
        lines.append(f"| **median** | {accelerator} | | | | **{statistics.median(values):.2f}** |")
    return "\n".join(lines) + "\n"


_ABOUT = (
    "KiB of RAM, from the reports of this project's programs, made by `benchmarks/ram.py`: NPU scratch, inputs, "
    "outputs, CPU tensors and ExecuTorch's runtime, without constants that a memory mode places in SRAM. The LiteRT "
    "column is the tensor arena in Vela's summary ([litert.md](litert.md)). The interpreter of LiteRT for "
    "Microcontrollers needs about 2 KiB more (`tflite-micro` for Python reports 2.0 KiB for a program of one operator, "
    "with 64-bit pointers)."
)


if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, models=litert_models.NAMES, targets=list(TARGETS))
