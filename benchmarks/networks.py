"""Networks from papers in each precision and on each target: cycles, RAM, SQNR and the slowest layers.

    python benchmarks/networks.py --out rows.jsonl [--networks yolov8 ...] [--recipes ETHOSU_U85_INT8 ...]
    python benchmarks/networks.py --out rows.jsonl --table benchmarks/networks.md

The programs run on this machine, Ethos-U programs on the emulator. SQNR is that of held-out samples against the
floating-point model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import coverage_models, rows, signal_models, vision_models
from benchmarks.ram import count_working_bytes
from benchmarks.rows import Row

CALIBRATION, TEST = 8, 4
"""Numbers of calibration samples and of held-out samples."""

#: Numbers of slowest layers in a row, and of characters of their operators in the table.
_SLOWEST, _NAME_LENGTH = 5, 40

RECIPES: dict[str, dict[str, Any]] = {
    "TOSA_FP": {},
    "TOSA_INT8": {},
    "ETHOSU_U55_INT8": {"macs": 128},
    "ETHOSU_U55_A16W8": {"macs": 128},
    "ETHOSU_U85_INT8": {"macs": 256},
    "ETHOSU_U85_A16W8": {"macs": 256},
    "CORTEX_M_INT8": {},
}
"""Recipes with their options."""


def _noise(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


#: Name -> model and function that draws inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "bc_resnet1": (signal_models.BcResNet, _noise(1, 1, 40, 101)),
    "conv_tasnet": (signal_models.ConvTasNet, _noise(1, 1, 2048)),
    "dtln": (signal_models.Dtln, _noise(1, 8, 512)),
    "ecapa_tdnn": (signal_models.EcapaTdnn, _noise(1, 40, 100)),
    "deepconvlstm": (signal_models.DeepConvLstm, _noise(1, 64, 9)),
    "pointnet": (signal_models.PointNet, _noise(1, 4, 128)),
    "char_cnn": (signal_models.CharCnn, lambda: (torch.randint(0, 96, (1, 320)),)),
    "s4d": (signal_models.S4d, _noise(1, 128, 4)),
    "yolov8": (vision_models.YoloV8, _noise(1, 3, 128, 128)),
    "litehrnet_simcc": (vision_models.LiteHrNetSimCc, _noise(1, 3, 128, 96)),
    "bisenetv2": (vision_models.BiSeNetV2, _noise(1, 3, 128, 128)),
    "rfdn": (vision_models.Rfdn, _noise(1, 3, 48, 48)),
    "nafnet": (vision_models.NafNet, _noise(1, 3, 64, 64)),
}


def measure(network: str, recipe: str) -> Row:
    """Export a network, run the held-out samples, and return the figures."""
    from arm_recipes import ArmRecipeType, ExportRecipe, export

    make, draw = NETWORKS[network]
    torch.manual_seed(0)
    model, samples = coverage_models.initialize(coverage_models.Model(make(), draw), CALIBRATION + TEST)
    row: Row = {"network": network, "recipe": recipe}
    started = time.perf_counter()
    try:
        chosen = ExportRecipe.get_recipe(ArmRecipeType[recipe], **RECIPES[recipe])
        result = export(model, chosen, samples[:CALIBRATION], progress=False)
        row["seconds"] = round(time.perf_counter() - started, 1)
        report = result.report
        row["bytes"] = report.stored_bytes
        row["delegates"] = len(report.delegates)
        row["cpu"] = [[entry.operator, entry.count] for entry in report.cpu_operators]
        row["ram"] = count_working_bytes(report)
        row["cycles"] = sum(cost.cycles for cost in report.layers)
        slowest = sorted(report.layers, key=lambda cost: -cost.cycles)[:_SLOWEST]
        row["slowest"] = [[cost.name, "+".join(cost.operators), cost.cycles] for cost in slowest]
        outputs = result.compare(samples[CALIBRATION:]).outputs
        row["sqnr"] = [round(output.gap.sqnr, 1) for output in outputs if output.gap is not None]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def format_table(measured: Iterable[Row]) -> str:
    """Format the rows as Markdown: a table for each network."""
    lines = ["# Networks from papers", "", _ABOUT]
    by_network: dict[str, dict[str, Row]] = {}
    for row in measured:
        by_network.setdefault(row["network"], {})[row["recipe"]] = row
    for network, by_recipe in by_network.items():
        description = (NETWORKS[network][0].__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += ["", f"## {network}", "", " ".join(description.split()), ""]
        lines += [_HEADER, "|" + "---|" * 6]
        lines += [_line(by_recipe[recipe]) for recipe in RECIPES if recipe in by_recipe]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    if "error" in row:
        return f"| {row['recipe']} | | | | | {row['error']} |"
    total = row["cycles"]
    slowest = [
        f"{name}: {operators.replace('aten.', '')[:_NAME_LENGTH]} ({cycles / total:.0%})"
        for name, operators, cycles in row["slowest"]
        if cycles >= total / 10
    ]
    remarks = [f"{row['delegates']} delegates"] if row["delegates"] > 1 else []
    if row["recipe"] != "CORTEX_M_INT8":
        remarks += [f"on the CPU: {count} {operator}" for operator, count in row["cpu"]]
    cells = (
        row["recipe"],
        f"{total:,}" if total else "",
        f"{row['ram']:,}" if row["ram"] else "",
        f"{row['bytes']:,}",
        ", ".join(f"{value:.1f}" for value in row["sqnr"]),
        "; ".join([*remarks, *slowest]),
    )
    return f"| {' | '.join(cells)} |"


_HEADER = "| recipe | cycles | RAM, bytes | program, bytes | dB | remarks, slowest layers |"
_ABOUT = (
    "Written by `networks.py`. Random weights; samples of noise: "
    f"{CALIBRATION} for calibration, {TEST} held out. dB: SQNR of each output against the floating-point model. The "
    "programs ran, those for Ethos-U on the emulator. Cycles: Vela's estimates for U55-128 and U85-256, and this "
    "project's estimates for a Cortex-M55. RAM: of a board, without constants that a memory mode places in SRAM. "
    "Layers with at least 10% of the cycles are listed. Programs without a remark are one delegate."
)


if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, networks=list(NETWORKS), recipes=list(RECIPES))
