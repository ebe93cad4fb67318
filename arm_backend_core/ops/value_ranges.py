"""Value range analysis of integer TOSA values (``find_range``), and their representation as functions of int8.

Quantization parameters bound a tensor by the limits of its type. The operators that compute it often bound it more
tightly: the entries of a TABLE, the bounds of a CLAMP, a sum of values that are not negative. A division, for example,
needs to know that its divisor is positive. ``find_int8_function`` evaluates a value for all 256 int8 numbers, if
the value is an elementwise function of one int8 tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.ops import intervals
from arm_backend_core.ops.intervals import Interval
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, Array, evaluate, find_monotonic_range

#: Maximum number of operators upstream of a value that the analysis visits.
_MAX_OPERATORS = 64
_ALL_INT8 = np.arange(-128, 128).astype(np.int8)


@dataclass(frozen=True)
class Int8Function:
    """A tensor whose elements are a function of the elements of an int8 tensor of the same shape.

    Attributes:
        base: the int8 tensor.
        values: the 256 results, the first for -128; int64.
    """

    base: Value
    values: Array


def find_range(value: Value) -> Interval:
    """The smallest and largest integer that ``value`` can hold."""
    return _RangeFinder().find(value)


class _RangeFinder:
    """Computes ranges of values. Beyond ``_MAX_OPERATORS`` operators, it assumes the range of the type."""

    def __init__(self) -> None:
        self._ranges: dict[Value, Interval] = {}

    def find(self, value: Value) -> Interval:
        """The range of ``value``."""
        if value not in self._ranges:
            low, high = (0, 1) if value.dtype is DType.BOOL else value.dtype.range
            self._ranges[value] = low, high
            known = self._compute(value)
            if known is not None:
                self._ranges[value] = min(max(known[0], low), high), max(min(known[1], high), low)
        return self._ranges[value]

    def _compute(self, value: Value) -> Interval | None:
        op = value.producer
        if value.data is not None:
            return (int(value.data.min()), int(value.data.max())) if value.data.size else None
        if op is None or len(self._ranges) > _MAX_OPERATORS or any(x.dtype.is_float for x in op.inputs):
            return None
        rule = _RANGE_RULES.get(op.kind)
        return rule(op, [self.find(x) for x in op.inputs]) if rule is not None else None


_RangeRule = Callable[[Op, list[Interval]], Interval | None]


def _monotonic_range(op: Op, ranges: list[Interval]) -> Interval | None:
    return find_monotonic_range(op, *ranges[0])


def _table_range(op: Op, ranges: list[Interval]) -> Interval:
    """Range of the entries that the operand's range selects. The result of an int16 TABLE has 7 fractional bits."""
    table, (low, high) = np.asarray(op.attrs["table"], dtype=np.int64), ranges[0]
    if op.inputs[0].dtype is DType.INT8:
        entries = table[low + 128 : high + 129]
        return int(entries.min()), int(entries.max())
    entries = table[(low + 32768) // 128 : -(-(high + 32768) // 128) + 1]
    return int(entries.min()) << 7, int(entries.max()) << 7


def _product_range(op: Op, ranges: list[Interval]) -> Interval:
    low, high = intervals.multiply(*ranges)
    low = 0 if op.inputs[0] is op.inputs[1] else low
    shift = op.attrs["shift"]
    half = 1 << shift >> 1
    return (low + half) >> shift, (high + half) >> shift


def _sum_range(op: Op, ranges: list[Interval]) -> Interval:
    count = op.inputs[0].shape[op.attrs["axis"]]
    return ranges[0][0] * count, ranges[0][1] * count


def _abs_range(op: Op, ranges: list[Interval]) -> Interval:
    low, high = ranges[0]
    return max(low, -high, 0), max(-low, high)


def _hull(op: Op, ranges: list[Interval]) -> Interval:
    """Smallest range that contains the ranges of all operands."""
    return intervals.hull(*ranges)


def _first_operand_range(op: Op, ranges: list[Interval]) -> Interval:
    """Range of the first operand, whose elements the operator moves or selects."""
    return ranges[0]


_RANGE_RULES: dict[str, _RangeRule] = {
    "RESCALE": _monotonic_range,
    "CLAMP": _monotonic_range,
    "TABLE": _table_range,
    "MUL": _product_range,
    "ADD": lambda op, ranges: intervals.add(*ranges),
    "SUB": lambda op, ranges: intervals.subtract(*ranges),
    "MAXIMUM": lambda op, ranges: (max(ranges[0][0], ranges[1][0]), max(ranges[0][1], ranges[1][1])),
    "MINIMUM": lambda op, ranges: (min(ranges[0][0], ranges[1][0]), min(ranges[0][1], ranges[1][1])),
    "ABS": _abs_range,
    "REDUCE_SUM": _sum_range,
    "SELECT": lambda op, ranges: intervals.hull(*ranges[1:]),
    "CONCAT": _hull,
    **dict.fromkeys(("REDUCE_MAX", "REDUCE_MIN", "MAX_POOL2D", "GATHER"), _first_operand_range),
    **dict.fromkeys(("IDENTITY", "RESHAPE", "REVERSE", "SLICE", "TILE", "TRANSPOSE"), _first_operand_range),
}


def find_int8_function(value: Value) -> Int8Function | None:
    """Represent ``value`` as an elementwise function of an int8 tensor; None if it is not one.

    All other operands of the operators between the int8 tensor and ``value`` must be constants of one element. If
    several int8 tensors qualify, the base is the tensor farthest upstream of ``value``.
    """
    bases: dict[Value, Value | None] = {}
    base = _find_base(value, bases)
    return None if base is None else _evaluate_function(value, base)


def _find_base(value: Value, bases: dict[Value, Value | None]) -> Value | None:
    """The int8 tensor that ``value`` is an elementwise function of, or None; ``bases`` caches the results."""
    if value not in bases:
        bases[value] = value if value.dtype is DType.INT8 and value.data is None else None
        op = value.producer
        if op is not None and len(bases) <= _MAX_OPERATORS and _is_elementwise(op):
            inner = {_find_base(x, bases) for x in op.inputs if x.data is None}
            base = inner.pop() if len(inner) == 1 else None
            if base is not None and base.shape == value.shape:
                bases[value] = base
    return bases[value]


def _is_elementwise(op: Op) -> bool:
    """Whether a result element depends on one element of each operand, and all constants have one element."""
    is_integer = not op.output.dtype.is_float and not op.attrs.get("per_channel")
    return op.kind in ELEMENTWISE and is_integer and all(x.size == 1 for x in op.inputs if x.data is not None)


def _evaluate_function(value: Value, base: Value) -> Int8Function | None:
    """Evaluate ``value`` for all values of ``base``; None if an operator between them cannot be evaluated."""
    results: dict[Value, Array] = {base: _ALL_INT8}
    pending = [value]
    while pending:
        x = pending[-1]
        op = x.producer
        if x in results:
            pending.pop()
        elif x.data is not None:
            results[x] = x.data.reshape(-1)
        elif missing := [y for y in (op.inputs if op is not None else []) if y not in results]:
            pending += missing
        else:
            result = None if op is None else evaluate(op, [results[y] for y in op.inputs])
            if result is None:
                return None
            results[x] = np.broadcast_to(result, _ALL_INT8.shape)
    return Int8Function(base, results[value].astype(np.int64))
