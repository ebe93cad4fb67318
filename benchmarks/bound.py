"""Vela's estimates of this project's programs, compared with a roofline bound, and the cycles by cause.

    python benchmarks/bound.py --out rows.jsonl [--models mobilenet_v2 ...] [--targets u55 u85]
    python benchmarks/bound.py --out rows.jsonl --table benchmarks/bound.md    # format earlier rows

Models and configurations are those of ``litert.py``. The bound is the larger of two numbers: the model's
multiply-accumulates divided by those of the NPU in a cycle, and the access cycles of the slowest memory.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import litert_models, rows
from benchmarks.litert import TARGETS, export_model

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import OperationEstimate

#: NPU operations that compute one result from one element of each operand.
_ELEMENTWISE = frozenset(
    ("Abs", "Add", "Asr", "Clamp", "CLZ", "LUT", "Maximum", "Minimum", "Mul", "Rescale", "Select", "SHL", "Sub")
)
#: NPU operations that move data.
_MOVES = ("MemoryCopy", "Reverse", "Transpose")
_LARGEST_GAPS = 10
Gap = tuple[str, str]


def measure(name: str, target_name: str) -> rows.Row:
    """Export a model, and return the figures of its program."""
    macs, report = export_model(name, target_name)
    estimates = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    shares, waits, memories = Counter[str](), Counter[str](), Counter[str]()
    for figures in estimates:
        memories.update({memory.name: memory.access_cycles for memory in figures.memories})
        for layer in figures.layers:
            shares[_kind(layer)] += layer.cycles
            waits[_slowest_memory(layer)] += max(layer.cycles - layer.npu_cycles, 0)
    layout = sum(cost.cycles for cost in report.layers if cost.kind in ("boundary", "transpose", "conversion"))
    return {
        "model": name,
        "target": target_name,
        "macs": macs,
        "cycles": sum(figures.total_cycles for figures in estimates),
        "npu_cycles": sum(figures.npu_cycles for figures in estimates),
        "memories": memories,
        "shares": shares,
        "waits": waits,
        "layout": layout,
    }


def _kind(layer: OperationEstimate) -> str:
    """Kind of an NPU operation, for the table."""
    name = layer.npu_operator
    if name == "DepthwiseConv2D":
        return "depthwise"
    return "elementwise" if name in _ELEMENTWISE else "moves" if name in _MOVES else "other"


def _slowest_memory(layer: OperationEstimate) -> str:
    return max(layer.memory_cycles, key=lambda item: item[1], default=("", 0))[0]


def _bounds(row: rows.Row) -> tuple[float, str, int]:
    """Cycles of the multiply-accumulates; name and access cycles of the slowest memory."""
    memory = max(row["memories"], key=row["memories"].__getitem__)
    return row["macs"] / TARGETS[row["target"]].macs, memory, row["memories"][memory]


def _ratio(row: rows.Row) -> float:
    mac_cycles, _, memory_cycles = _bounds(row)
    ratio: float = row["cycles"] / max(mac_cycles, memory_cycles)
    return ratio


def format_table(found: Iterable[rows.Row]) -> str:
    """Format the rows as Markdown: a row for each model and NPU, medians, and the causes of the largest gaps."""
    last = {(row["model"], row["target"]): row for row in found}
    ordered = sorted(last.values(), key=lambda row: row["target"])
    lines = ["# Distance to the bound", "", _ABOUT, "", _HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    lines += map(_line, ordered)
    for target in TARGETS:
        ratios = [_ratio(row) for row in ordered if row["target"] == target]
        if ratios:
            median, most = statistics.median(ratios), max(ratios)
            lines.append(
                f"| **median** | {TARGETS[target].accelerator} | | | **{median:.2f}**, most {most:.2f} |" + " |" * 7
            )
    largest = sorted(ordered, key=_ratio, reverse=True)[:_LARGEST_GAPS]
    lines += ["", f"## The {len(largest)} largest gaps", "", "| model | NPU | ratio | cause |", "|---|---|---|---|"]
    for row in largest:
        cause = CAUSES.get((row["model"], row["target"]), "")
        lines.append(f"| {row['model']} | {TARGETS[row['target']].accelerator} | {_ratio(row):.2f} | {cause} |")
    return "\n".join(lines) + "\n"


def _line(row: rows.Row) -> str:
    mac_cycles, memory, memory_cycles = _bounds(row)
    flash = sum(cycles for name, cycles in row["waits"].items() if "Sram" not in name)
    parts = (
        *(row["shares"].get(kind, 0) for kind in ("depthwise", "elementwise", "moves")),
        flash,
        sum(row["waits"].values()) - flash,
        row["layout"],
    )
    cells = (
        row["model"],
        TARGETS[row["target"]].accelerator,
        f"{row['cycles']:,}",
        f"{max(mac_cycles, memory_cycles):,.0f}",
        f"{_ratio(row):.2f}",
        f"{mac_cycles:,.0f}",
        f"{memory_cycles:,} {memory}",
        *(f"{cycles / row['cycles']:.0%}" for cycles in parts),
    )
    return "| " + " | ".join(cells) + " |"


_HEAD = (
    "| model | NPU | cycles | bound | ratio | MAC bound | memory bound | depthwise | elementwise | moves "
    "| waits for flash | waits for SRAM | layout |"
)
_CONFIGURATIONS = "; ".join(f"{t.accelerator}: {t.system_config}, {t.memory_mode}" for t in TARGETS.values())
_ABOUT = (
    "Vela's estimates for this project's programs beside a roofline bound, made by `benchmarks/bound.py` with the "
    f"models and configurations of `litert.py` ({_CONFIGURATIONS}). The bound is the larger of the MAC bound, which is "
    "the model's multiply-accumulates divided by those of the NPU in a cycle, and the memory bound, the access cycles "
    "of the slowest memory. Percentages are of all cycles: of depthwise convolutions, of elementwise operations and of "
    "copies and transposes; cycles that an operation waits for flash or SRAM; and operations that the compiler inserts "
    "to convert layouts and types, at the boundary or inside."
)
#: Found in Vela's estimates by layer.
CAUSES: dict[Gap, str] = {
    ("ds_cnn", "u85"): (
        "Depthwise convolutions of 25 x 5 pixels compute 17 MACs in a cycle, of 256: they are 11% of the MACs and 47% "
        "of the cycles. Other convolutions compute 142."
    ),
    ("tcn", "u85"): "Convolutions of 32 channels on one row of 128 steps compute 106 MACs in a cycle, of 256.",
    ("mobilenet_v3_small", "u85"): (
        "Depthwise convolutions compute 23 MACs in a cycle, of 256 (37% of the cycles). The classifier and the "
        "squeeze-excitation layers have one pixel and compute 14."
    ),
    ("efficientnet_b0", "u85"): (
        "Depthwise convolutions compute 24 MACs in a cycle, of 256 (36% of the cycles); products with the gates of "
        "SiLU and squeeze-excitation take 13%."
    ),
    ("tcn", "u55"): "The five additions of 128 x 32 values take 54% of the cycles, 1.5 for a value.",
    ("transformer_encoder", "u85"): (
        "Elementwise operations of softmax and layer normalization, on int32 and int16, take half of the cycles."
    ),
    ("tiny_bert", "u55"): (
        "U55 has no product of two activations: Vela computes MATMUL by elementwise products and sums, 1.2 MACs in a "
        "cycle, of 128 (38% of the cycles). Layers of 32 tokens wait for flash (24%), and the scratch of 45 KiB has no "
        "room to bring their weights earlier."
    ),
    ("efficientnet_b0", "u55"): (
        "Depthwise convolutions compute 11 MACs in a cycle, of 128 (26% of the cycles); elementwise operations take "
        "16%. Waits for flash are 13%, and were 22% before weights were copied in time."
    ),
    ("shufflenet_v2_x1_0", "u85"): (
        "Channel shuffles are folded into the convolutions, which therefore compute 57% more MACs; depthwise "
        "convolutions compute 19 MACs in a cycle, of 256 (14% of the cycles)."
    ),
    ("transformer_encoder", "u55"): (
        "MATMUL computes 1.2 MACs in a cycle, of 128 (44% of the cycles), as in tiny_bert. Waits for flash are 19%."
    ),
}

if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, models=litert_models.NAMES, targets=tuple(TARGETS))
