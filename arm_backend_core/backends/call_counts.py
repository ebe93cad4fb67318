"""Vela's figures of a delegate that one inference calls several times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import VelaFigures
    from arm_backend_core.events import Delegate


def set_call_count(record: Delegate, calls: int) -> Delegate:
    """What is told of a delegate that one inference calls so often."""
    return replace(record, calls=calls, vela=record.vela and multiply_figures(record.vela, calls))


def multiply_figures(vela: VelaFigures, calls: int) -> VelaFigures:
    """Figures of so many calls: Vela estimates one."""
    rows: dict[str, Any] = {
        name: tuple(_multiply_row(row, calls) for row in getattr(vela, name)) for name in ("layers", "memories")
    }
    return replace(cast("VelaFigures", _multiply_row(vela, calls)), **rows)


#: Of Vela's figures for a delegate, an operation or a memory, those that add up from call to call.
_ADDITIVE = (
    "cycles",
    "npu_cycles",
    "total_cycles",
    "inference_seconds",
    "macs",
    "access_cycles",
    "bytes_read",
    "bytes_written",
)


def _multiply_row(row: Any, calls: int) -> Any:
    """Figures of so many calls."""
    more: dict[str, Any] = {name: calls * getattr(row, name) for name in _ADDITIVE if hasattr(row, name)}
    if hasattr(row, "memory_cycles"):
        more["memory_cycles"] = tuple((name, calls * cycles) for name, cycles in row.memory_cycles)
    return replace(row, **more)
