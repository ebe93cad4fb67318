"""Report sections for layer costs and memory usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from arm_recipes._internal.rendering import BAR_CHARACTERS, Section, format_bytes
from arm_recipes.report.memory import MemoryOverTime
from arm_recipes.report.npu_layer_costs import LayerCost

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import VelaEstimates

#: Maximum number of layers, and of tensors of each memory, in the printed report.
_MAX_LAYER_ROWS, _MAX_TENSOR_ROWS = 8, 5
_CHART_COLUMNS = 48


def layer_sections(layers: Sequence[LayerCost], suffix: str) -> Iterator[Section]:
    """Yield a table of the costliest layers of a method, and a table of inserted operations: all kinds except "layer".

    ``LayerCost.kind`` describes the kinds.

    Args:
        layers: layer costs of the method.
        suffix: text at the end of each heading, for example " of 'forward'".
    """
    total = sum(cost.cycles for cost in layers)
    computing = [cost for cost in layers if cost.kind == "layer"]
    costliest = sorted(computing, key=lambda cost: -cost.cycles)[:_MAX_LAYER_ROWS]
    if costliest:
        covered = sum(cost.share for cost in costliest)
        heading = f"Costliest layers{suffix}: {len(costliest)} of {len(computing)}, {covered:.0%} of {total:,} cycles"
        yield heading, [_LAYER_COLUMNS, *map(_layer_row, costliest)]
    inserted_rows = _inserted_rows([cost for cost in layers if cost.kind != "layer"])
    if inserted_rows:
        share = sum(cost.share for cost in layers if cost.kind != "layer")
        yield f"Inserted operations{suffix}: {share:.1%} of the cycles", inserted_rows


def constants_row(estimates: VelaEstimates, *, in_data_file: bool = False) -> tuple[str, str]:
    """The row with the size of the NPU's constants. "OnChipFlash" is Vela's name of the SRAM that holds constants.

    Args:
        estimates: Vela's estimates of the delegate.
        in_data_file: whether the constants are in the data file (``.ptd``) instead of the program.
    """
    if estimates.constant_memory == "OnChipFlash":
        return "constants in SRAM", format_bytes(estimates.flash_bytes)
    if estimates.constant_memory == "Dram":
        return "constants in DRAM", format_bytes(estimates.constant_bytes)
    location = "in the .ptd" if in_data_file else "inside the program"
    return "flash", f"{format_bytes(estimates.flash_bytes)}, constants {location}"


_LAYER_COLUMNS = ("cycles", "share", "MAC util.", "read", "written", "bound by", "module", "line")


def _layer_row(cost: LayerCost) -> tuple[str, ...]:
    return (
        f"{cost.cycles:,}",
        f"{cost.share:.1%}",
        f"{cost.utilization:.1%}",
        format_bytes(cost.bytes_read),
        format_bytes(cost.bytes_written),
        cost.bound,
        cost.name,
        cost.source,
    )


def _inserted_rows(costs: Sequence[LayerCost]) -> list[tuple[str, ...]]:
    """One row for each kind and reason, sorted by decreasing cycles."""
    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault((cost.kind, cost.reason), []).append(cost)
    rows: list[tuple[str, ...]] = []
    for (kind, reason), group in sorted(groups.items(), key=lambda item: -sum(cost.cycles for cost in item[1])):
        names = list(dict.fromkeys(cost.name for cost in group))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        cycles = sum(cost.cycles for cost in group)
        share = sum(cost.share for cost in group)
        rows.append((f"{cycles:,}", f"{share:.1%}", kind, names[0] + more, reason))
    return rows


def memory_sections(memories: Sequence[MemoryOverTime], suffix: str) -> Iterator[Section]:
    """Yield the usage of each working memory of a method over time, with its live tensors at the peak."""
    for memory_usage in memories:
        peak = max(memory_usage.moments, key=lambda moment: moment.bytes)
        rows: list[tuple[str, ...]] = [
            ("over time", "", "", _draw_sparkline([moment.bytes for moment in memory_usage.moments]))
        ]
        rows += [
            (format_bytes(tensor.bytes), tensor.kind, tensor.where, tensor.source)
            for tensor in memory_usage.peak[:_MAX_TENSOR_ROWS]
        ]
        if len(memory_usage.peak) > _MAX_TENSOR_ROWS:
            rest = sum(tensor.bytes for tensor in memory_usage.peak[_MAX_TENSOR_ROWS:])
            rows.append((format_bytes(rest), f"in {len(memory_usage.peak) - _MAX_TENSOR_ROWS} more", "", ""))
        where = peak.module or "the model"
        total = format_bytes(memory_usage.bytes)
        heading = (
            f"{memory_usage.memory.upper()} of {memory_usage.delegate}{suffix} over time: {total}, peak in {where}"
        )
        yield heading, rows


def _draw_sparkline(values: Sequence[int]) -> str:
    """Draw a sparkline of at most ``_CHART_COLUMNS`` characters; each shows the maximum of consecutive values."""
    maximum = max(values) or 1
    count = min(len(values), _CHART_COLUMNS)
    edges = [i * len(values) // count for i in range(count + 1)]
    bar_values = [max(values[start:end]) for start, end in pairwise(edges)]
    return "".join(BAR_CHARACTERS[(len(BAR_CHARACTERS) - 1) * bar_value // maximum] for bar_value in bar_values)
