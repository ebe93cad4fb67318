"""Call counts: multiply Vela's estimates for a delegate that one inference calls several times (loops)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import VelaEstimates
    from arm_backend_core.compilation_log import DelegateRecord


def set_call_count(record: DelegateRecord, calls: int) -> DelegateRecord:
    """Set the number of calls per inference, and multiply Vela's estimates by it."""
    return replace(record, calls=calls, vela=record.vela and multiply_estimates(record.vela, calls))


def multiply_estimates(vela: VelaEstimates, calls: int) -> VelaEstimates:
    """Multiply estimates of one call by the number of calls: cycles, time, MACs and accesses. Sizes do not change."""
    fields: dict[str, Any] = {
        name: tuple(_multiply_fields(row, calls) for row in getattr(vela, name)) for name in ("layers", "memories")
    }
    if vela.performance is not None:
        cycles, sram_bytes = vela.performance
        fields["performance"] = calls * cycles, sram_bytes
    return replace(cast("VelaEstimates", _multiply_fields(vela, calls)), **fields)


#: Fields of ``VelaEstimates``, ``OperationEstimate`` and ``MemoryUse`` that are sums over all calls.
_ADDITIVE_FIELDS = (
    "cycles",
    "npu_cycles",
    "total_cycles",
    "inference_seconds",
    "macs",
    "access_cycles",
    "bytes_read",
    "bytes_written",
)


def _multiply_fields(row: Any, calls: int) -> Any:
    """Multiply ``_ADDITIVE_FIELDS`` and ``memory_cycles`` of a dataclass of estimates by the number of calls."""
    multiplied: dict[str, Any] = {name: calls * getattr(row, name) for name in _ADDITIVE_FIELDS if hasattr(row, name)}
    if hasattr(row, "memory_cycles"):
        multiplied["memory_cycles"] = tuple((name, calls * cycles) for name, cycles in row.memory_cycles)
    return replace(row, **multiplied)
