"""Report sections for layer costs and memory usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from arm_recipes._internal.rendering import Section, format_bytes
from arm_recipes.report.layers import LayerCost
from arm_recipes.report.memory import MemoryOverTime

#: Number of layers and of tensors in the printed report.
_COSTLIEST, _LARGEST = 8, 5
_COLUMNS = 48
_BARS = "▁▂▃▄▅▆▇█"


def layer_sections(layers: Sequence[LayerCost], of: str) -> Iterator[Section]:
    """The costliest layers of a method, and the operations that the compiler inserted; ``of`` ends the headings."""
    total = sum(cost.cycles for cost in layers)
    computing = [cost for cost in layers if cost.kind == "layer"]
    costliest = sorted(computing, key=lambda cost: -cost.cycles)[:_COSTLIEST]
    if costliest:
        covered = sum(cost.share for cost in costliest)
        heading = f"Costliest layers{of}: {len(costliest)} of {len(computing)}, {covered:.0%} of {total:,} cycles"
        yield heading, [_HEAD, *map(_layer_row, costliest)]
    between = _inserted_rows([cost for cost in layers if cost.kind != "layer"])
    if between:
        share = sum(cost.share for cost in layers if cost.kind != "layer")
        yield f"Inserted operations{of}: {share:.1%} of the cycles", between


_HEAD = ("cycles", "share", "MAC util.", "read", "written", "bound by", "module", "line")


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
    """One row per kind and reason, most cycles first."""
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


def memory_sections(memories: Sequence[MemoryOverTime], of: str) -> Iterator[Section]:
    """The usage of each working memory of a method over time, and its live tensors at the peak."""
    for used in memories:
        peak = max(used.moments, key=lambda moment: moment.bytes)
        rows: list[tuple[str, ...]] = [("over time", "", "", _bars([moment.bytes for moment in used.moments]))]
        rows += [
            (format_bytes(tensor.bytes), tensor.kind, tensor.where, tensor.source) for tensor in used.peak[:_LARGEST]
        ]
        if len(used.peak) > _LARGEST:
            rest = sum(tensor.bytes for tensor in used.peak[_LARGEST:])
            rows.append((format_bytes(rest), f"in {len(used.peak) - _LARGEST} more", "", ""))
        where = peak.module or "the model"
        total = format_bytes(used.bytes)
        heading = f"{used.memory.upper()} of {used.delegate}{of} over time: {total}, peak in {where}"
        yield heading, rows


def _bars(values: Sequence[int]) -> str:
    """A bar chart of at most ``_COLUMNS`` characters; each bar is the maximum of its values."""
    most = max(values) or 1
    count = min(len(values), _COLUMNS)
    edges = [i * len(values) // count for i in range(count + 1)]
    parts = [max(values[start:end]) for start, end in pairwise(edges)]
    return "".join(_BARS[(len(_BARS) - 1) * part // most] for part in parts)
