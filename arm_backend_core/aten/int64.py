"""Interval analysis (value range analysis) of int64 values: TOSA has no int64, so delegates compute in int32.

Interval arithmetic over the FX graph decides which int64 values fit int32. Program inputs and counters are assumed to
stay within 2**30; the report states this assumption. A delegate computes or reads a value that is derived from them
only if its interval provably fits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.kinds import INTEGER_OR_BOOL, ScalarKind, kind_of
from arm_backend_core.nodes import INTERVAL, first_result, is_dequantize, is_float, overload_of, source_line
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind

Interval = tuple[int, int]
INT32: Interval = (-(1 << 31), (1 << 31) - 1)
#: A product with a constant below this limit is assumed to be a row offset (row number * width).
_MAX_ROW_WIDTH = 1 << 13
#: Assumed for indices, sizes and counts. Twice these values still fit int32.
ASSUMED_INTERVAL: Interval = (INT32[0] >> 1, INT32[1] >> 1)
#: Intervals that stand for an omitted bound of ``clamp``.
_NO_LOWER_BOUND, _NO_UPPER_BOUND = ((end, end) for end in (-(1 << 63), (1 << 63) - 1))


class Intervals:
    """Intervals of the integers in a program. Query nodes in program order: intervals propagate from queried nodes.

    Args:
        constants: values of the constant nodes.
    """

    def __init__(self, constants: Mapping[Node, torch.Tensor]) -> None:
        self._constants = constants
        self._inferred: dict[Node, Interval] = {}

    def fits_int32(self, node: Node) -> bool:
        """Whether int32 holds every element of ``node``'s integer result. Infers and stores the result's interval."""
        interval = self._infer_result(node) or (_NO_LOWER_BOUND[0], _NO_UPPER_BOUND[1])
        fits = _fits_int32(interval)
        # An int32 or narrower result that does not fit wraps: it may have any value of its type.
        if fits or getattr(first_result(node), "dtype", None) is torch.int64:
            self._inferred[node] = interval
        return fits

    def find_overflowing_operand(self, node: Node) -> Node | None:
        """Find the first operand that does not provably fit int32, so that a delegate would read it modulo 2**32.

        Indices are exempt, because they lie within the indexed dimension. Conversions to narrower integers are exempt,
        because they drop the upper bits anyway.
        """
        name, dtype = _operator_name(node), getattr(first_result(node), "dtype", None)
        if name in ("to", "_to_copy") and dtype in (torch.int32, torch.int16, torch.int8):
            return None
        operands = node.args[:1] if name in ("embedding", "index", "gather", "index_select") else node.all_input_nodes
        return next((x for x in operands if isinstance(x, Node) and not _fits_int32(self._inferred_interval(x))), None)

    def _inferred_interval(self, node: Node) -> Interval:
        """The inferred interval of an operand; int32's if there is none."""
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
        if x.target is operator.getitem and x.args[1] == 1 and _operator_name(x.all_input_nodes[0]) == "topk":
            return 0, _count_elements(x.all_input_nodes[0])
        if x.op == "placeholder" and value.dtype is torch.int64:
            return x.meta.get(INTERVAL, ASSUMED_INTERVAL)
        limit = torch.iinfo(torch.int32 if value.dtype is torch.int64 else value.dtype)
        return self._inferred.get(x, x.meta.get(INTERVAL, (limit.min, limit.max)))

    def _infer_result(self, node: Node) -> Interval | None:
        """Infer the interval of a result from those of its operands. None if the operator has no rule."""
        name, record = _operator_name(node), find_record(node)
        if name == "one_hot":
            return 0, 1
        if name in ("to", "_to_copy") and is_float(node.all_input_nodes[0]):
            is_returned = any(user.op == "output" for user in node.users)
            return _interval_of_cast(node.all_input_nodes[0]) or (None if is_returned else _assume_interval(node))
        if name.startswith("arm_backend_core::loop"):  # a loop's integers are assumed to fit, like program inputs
            return ASSUMED_INTERVAL if name.endswith("in") else INT32
        if name in ("argmax", "argmin"):
            return 0, _count_elements(node, *node.args[1:2]) - 1
        if name in ("sum", "cumsum"):
            return _scale_interval(self._operand_interval(node.args[0]), _count_elements(node))
        operands = [self._operand_interval(x) for x in _flatten(node.args)]
        if name in ("constant_pad_nd", "pad"):
            fill_values = [x for x in (*node.args[2:], *node.kwargs.values()) if isinstance(x, (int, float))]
            operands = [
                self._operand_interval(node.args[0]),
                self._operand_interval(int(fill_values[0]) if fill_values else 0),
            ]
        elif record is not None and record.kind is Kind.SHARED:
            # Data movement: numbers among the arguments are positions, not elements.
            operands = [self._operand_interval(x) for x in node.all_input_nodes]
        elif name == "where":
            operands = operands[1:]
        elif name in _INTERVAL_RULES and node.kwargs.keys() <= {"alpha", "rounding_mode"}:
            numbers = (*_flatten(node.args), *(x for x in node.kwargs.values() if not isinstance(x, str)))
            operands = [
                (_NO_LOWER_BOUND if i == 1 else _NO_UPPER_BOUND) if x is None else self._operand_interval(x)
                for i, x in enumerate(numbers)
            ]
            if None in operands:
                return None
            intervals = [x for x in operands if x is not None]
            interval, widths = _INTERVAL_RULES[name](*intervals), [x for x, y in intervals if x == y]
            # Row offsets are assumed to fit, see ``_MAX_ROW_WIDTH``.
            is_row_offset = (
                name == "mul"
                and any(abs(width) < _MAX_ROW_WIDTH for width in widths)
                and all(map(_fits_int32, intervals))
            )
            return _assume_interval(node) if is_row_offset and not _fits_int32(interval) else interval
        elif name not in ("maximum", "minimum"):
            return None
        intervals = [x for x in operands if x is not None]
        return _hull(*intervals) if intervals and len(intervals) == len(operands) else None


def _operator_name(node: Node) -> str:
    overload = overload_of(node.target)
    return "" if overload is None else overload._schema.name.removeprefix("aten::")


def _fits_int32(interval: Interval) -> bool:
    return INT32[0] <= interval[0] and interval[1] <= INT32[1]


def _count_elements(node: Node, dim: Any = None) -> int:
    """Number of elements of the first operand, in total or along ``dim``."""
    x = node.all_input_nodes[0].meta["val"]
    return int(x.numel() if dim is None or not x.dim() else x.shape[dim])


def _interval_of_cast(x: Node) -> Interval | None:
    """Interval of ``x`` cast to integers. None unless ``x`` is the result of a dequantize or of a ``clamp``."""
    while _operator_name(x) in ("floor", "ceil", "round", "trunc"):
        x = x.all_input_nodes[0]
    if is_dequantize(x) and isinstance(x.args[1], float):
        scale, zero_point, qmin, qmax = cast(tuple[float, int, int, int], x.args[1:5])
        return math.floor((qmin - zero_point) * scale), math.ceil((qmax - zero_point) * scale)
    if _operator_name(x) != "clamp":
        return None
    bounds: list[Any] = [*x.args[1:], *x.kwargs.values()]
    is_bounded = len(bounds) == 2 and all(isinstance(bound, (int, float)) and math.isfinite(bound) for bound in bounds)
    return (math.floor(min(bounds)), math.ceil(max(bounds))) if is_bounded else None


def _assume_interval(node: Node) -> Interval:
    """Return ``ASSUMED_INTERVAL`` for the result of ``node``, and add a note about it to the report."""
    line = source_line(node)
    note = f"integer results of 'aten.{_operator_name(node)}'{line and f' ({line})'} are assumed to be below 2**30"
    events.current().add_notes_once([note])
    return ASSUMED_INTERVAL


def _flatten(args: Any) -> list[Any]:
    return [leaf for x in args for leaf in (_flatten(x) if isinstance(x, (list, tuple)) else [x])]


def _hull(*intervals: Interval) -> Interval:
    """Smallest interval that contains all ``intervals``."""
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _scale_interval(x: Interval | None, count: int) -> Interval | None:
    """Interval of a sum of 1 to ``count`` elements of the interval ``x``."""
    return None if x is None else (min(x[0] * count, x[0]), max(x[1] * count, x[1]))


def _multiply_intervals(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _add_intervals(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    low, high = _multiply_intervals(y, alpha)
    return x[0] + low, x[1] + high


def _subtract_intervals(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    return _add_intervals(x, y, _multiply_intervals(alpha, (-1, -1)))


#: Operator -> function from the operands' intervals to the result's. ``alpha`` is a factor of the second operand.
_INTERVAL_RULES: dict[str, Callable[..., Interval]] = {
    "add": _add_intervals,
    "sub": _subtract_intervals,
    "rsub": lambda x, y, alpha=(1, 1): _subtract_intervals(y, x, alpha),
    "mul": _multiply_intervals,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (0, max(abs(x[0]), abs(x[1]))),
    "clamp": lambda x, low=_NO_LOWER_BOUND, high=_NO_UPPER_BOUND: (
        min(max(x[0], low[0]), high[0]),
        min(max(x[1], low[1]), high[1]),
    ),
    "remainder": lambda x, y: _hull((0, 0), y),
    "fmod": lambda x, y: _hull((0, 0), x),
    **dict.fromkeys(("floor_divide", "div"), lambda x, y: _hull(x, (-x[1], -x[0]))),
}
