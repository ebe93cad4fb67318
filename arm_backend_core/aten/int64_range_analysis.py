"""Interval analysis (value range analysis) of int64 values: TOSA has no int64, so delegates compute in int32.

Interval arithmetic over the FX graph decides which int64 values fit int32. Program inputs, counters, and some casts and
products are assumed to stay within 2**30 (``ops/intervals``); the report notes such casts and products. A delegate
computes or reads any other int64 value only if its interval provably fits int32. The operator records have the interval
rules.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from arm_backend_core.nodes import INTERVAL, first_result
from arm_backend_core.ops.catalog import find_entry, find_record
from arm_backend_core.ops.intervals import ASSUMED_INTERVAL, INT32, INT64, Interval, fits_int32
from arm_backend_core.scalar_kind import INTEGER_OR_BOOL, ScalarKind, kind_of

_INT32_OR_NARROWER: dict[Any, Interval] = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)
}


class IntervalAnalysis:
    """Intervals of the integers in a program. Call ``fits_int32`` in program order: it uses results of earlier calls.

    Args:
        constants: values of the constant nodes.
    """

    def __init__(self, constants: Mapping[Node, torch.Tensor]) -> None:
        self._constants = constants
        self._inferred: dict[Node, Interval] = {}

    def fits_int32(self, node: Node) -> bool:
        """Whether int32 holds every element of ``node``'s integer result.

        The method infers the interval of the result, and stores it if it lies in the range of the result's type.
        """
        interval = self._infer_result(node) or INT64
        dtype = getattr(first_result(node), "dtype", None)
        limits = INT64 if dtype is torch.int64 else _INT32_OR_NARROWER.get(dtype, INT32)
        # A result of int32 or a narrower type wraps if it leaves the range of the type: it may then have any value.
        if limits[0] <= interval[0] and interval[1] <= limits[1]:
            self._inferred[node] = interval
        return fits_int32(interval)

    def find_overflowing_operand(self, node: Node) -> Node | None:
        """Find the first operand that does not provably fit int32, so that a delegate would read it modulo 2**32.

        Indices of a gather are exempt, because they lie within the indexed dimension. Operands of casts to int32, int16
        and int8 are exempt, because these casts drop the upper bits anyway.
        """
        record, dtype = find_record(node), getattr(first_result(node), "dtype", None)
        if record is not None and record.is_cast and dtype in (torch.int32, torch.int16, torch.int8):
            return None
        operands = node.args[:1] if record is not None and record.is_gather else node.all_input_nodes
        return next((x for x in operands if isinstance(x, Node) and not fits_int32(self._inferred_interval(x))), None)

    def _inferred_interval(self, node: Node) -> Interval:
        """The inferred interval of an operand, else the interval in its ``meta``, else the interval of int32."""
        return self._inferred.get(node, node.meta.get(INTERVAL, INT32))

    def _operand_interval(self, x: Any) -> Interval | None:
        """Interval of an operand: node, constant or Python integer. None for floating-point and complex numbers."""
        if not isinstance(x, Node):
            return (int(x), int(x)) if isinstance(x, int) else None
        value = self._constants.get(x, x.meta.get("val"))
        if not isinstance(value, torch.Tensor) or kind_of(value.dtype) not in INTEGER_OR_BOOL:
            return None
        if x in self._constants:
            return (int(value.min()), int(value.max())) if value.numel() else (0, 0)
        if kind_of(value.dtype) is ScalarKind.BOOLEAN:
            return 0, 1
        if x.op == "placeholder" and value.dtype is torch.int64:
            return x.meta.get(INTERVAL, ASSUMED_INTERVAL)
        limit = torch.iinfo(torch.int32 if value.dtype is torch.int64 else value.dtype)
        interval = self._infer_result(x) if x.target is operator.getitem else None
        if interval is not None and limit.min <= interval[0] and interval[1] <= limit.max:
            return interval
        return self._inferred.get(x, x.meta.get(INTERVAL, (limit.min, limit.max)))

    def _infer_result(self, node: Node) -> Interval | None:
        """Infer the interval of a result from the intervals of its operands. None if the operator has no rule.

        Args:
            node: the operator, or the ``getitem`` that selects one of its results.
        """
        entry = find_entry(node.all_input_nodes[0] if node.target is operator.getitem else node)
        return None if entry is None or entry.interval is None else entry.interval(node, self._operand_interval)
