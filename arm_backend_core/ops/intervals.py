"""Interval arithmetic of integers: how the interval of a result follows from the operands' intervals.

The records of operators hold these rules (``Record.interval``). ``aten/int64_range_analysis`` applies them to a
program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch.fx import Node

from arm_backend_core import compilation_log
from arm_backend_core.nodes import is_dequantize, is_float, overload_of, source_location, source_through

Interval = tuple[int, int]
#: Returns the interval of an operand, which is a node or a Python number. None if the operand is not an integer or its
#: interval is unknown.
IntervalOf = Callable[[Any], Interval | None]
#: Computes the interval of a node's result from those of its operands; None if it is unknown.
IntervalRule = Callable[[Node, IntervalOf], Interval | None]

INT32: Interval = (-(1 << 31), (1 << 31) - 1)
#: Assumed interval of an unknown integer, which is mostly an index or a count. A sum of two such integers fits int32.
ASSUMED_INTERVAL: Interval = (INT32[0] >> 1, INT32[1] >> 1)
#: A product with a constant whose magnitude is below this limit is assumed to be a row offset: row number * width.
_MAX_ROW_WIDTH = 1 << 13
#: Width of the narrowest integer type. A shift by at least the width gives 0 or the sign.
_MIN_INTEGER_BITS = 8
#: Intervals that stand for an omitted bound of ``clamp``.
_NO_LOWER_BOUND, _NO_UPPER_BOUND = ((end, end) for end in (-(1 << 63), (1 << 63) - 1))
INT64: Interval = (_NO_LOWER_BOUND[0], _NO_UPPER_BOUND[1])


def fits_int32(interval: Interval) -> bool:
    """Whether int32 holds every number of ``interval``."""
    return INT32[0] <= interval[0] and interval[1] <= INT32[1]


# -- rules ----------------------------------------------------------------------------------------------------------


def elementwise(rule: Callable[..., Interval]) -> IntervalRule:
    """Build the interval rule of an elementwise function.

    Args:
        rule: a function from the intervals of the arguments, in the order of the schema, to the interval of the result.
    """

    def interval(node: Node, interval_of: IntervalOf) -> Interval | None:
        operands = _operands(node, interval_of)
        return None if operands is None else rule(*operands)

    return interval


def multiplication(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of a product.

    If both operands fit int32, but the product might not, a row offset (see ``_MAX_ROW_WIDTH``) is assumed to be in
    ``ASSUMED_INTERVAL``.
    """
    operands = _operands(node, interval_of)
    if operands is None:
        return None
    interval = multiply(*operands)
    is_row_offset = any(low == high and abs(low) < _MAX_ROW_WIDTH for low, high in operands)
    if is_row_offset and all(map(fits_int32, operands)) and not fits_int32(interval):
        return _assume_interval(node)
    return interval


def _operands(node: Node, interval_of: IntervalOf) -> list[Interval] | None:
    """Intervals of the arguments in the order of the schema.

    None if one of them is unknown, or if there are keyword arguments other than ``alpha`` and ``rounding_mode``.
    """
    if not node.kwargs.keys() <= {"alpha", "rounding_mode"}:
        return None
    arguments = (*node.args, *(x for x in node.kwargs.values() if not isinstance(x, str)))
    operands = [
        (_NO_LOWER_BOUND if i == 1 else _NO_UPPER_BOUND) if x is None else interval_of(x)
        for i, x in enumerate(arguments)
    ]
    known_operands = [x for x in operands if x is not None]
    return known_operands if len(known_operands) == len(operands) else None


def data_movement(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of an operator that only moves elements: the hull of its tensor operands' intervals.

    Arguments that are Python numbers, such as sizes and dimensions, are ignored.
    """
    return _hull_if_known(map(interval_of, node.all_input_nodes))


def any_operand(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of an operator that returns elements of any argument, for example ``maximum``."""
    return _hull_if_known(map(interval_of, node.args))


def where(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of ``torch.where``: the hull of the two arguments after the condition."""
    return _hull_if_known(map(interval_of, node.args[1:]))


def padding(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of a padded tensor: the hull of the operand and the fill value (0 by default)."""
    fill_values = [x for x in (*node.args[2:], *node.kwargs.values()) if isinstance(x, (int, float))]
    return _hull_if_known([interval_of(node.args[0]), interval_of(int(fill_values[0]) if fill_values else 0)])


def reduced_sum(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of a sum over any number of the operand's elements, from one to all."""
    x, count = interval_of(node.args[0]), _count_elements(node)
    return None if x is None else (min(x[0] * count, x[0]), max(x[1] * count, x[1]))


def element_index(node: Node, interval_of: IntervalOf) -> Interval:
    """Interval of an element's index.

    The second argument is the dimension along which the index counts. Without it, the index counts elements of the
    flattened operand.
    """
    return 0, _count_elements(node, *node.args[1:2]) - 1


def values_and_indices(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of an operator with two results: elements of the operand, and their indices.

    The rule is also called with the ``getitem`` node of one result. For the ``getitem`` with index 1, it returns the
    interval of the indices. For the ``getitem`` with index 0, it returns None.
    """
    if node.target is not operator.getitem:
        return data_movement(node, interval_of)
    return (0, _count_elements(node.all_input_nodes[0])) if node.args[1] == 1 else None


def cast_to_integer(node: Node, interval_of: IntervalOf) -> Interval | None:
    """Interval of a cast.

    For floats without a known interval: None if the program returns the result, else ``ASSUMED_INTERVAL``.
    """
    source = node.all_input_nodes[0]
    if not is_float(source):
        return data_movement(node, interval_of)
    is_returned = any(user.op == "output" for user in node.users)
    return _interval_of_floats(source) or (None if is_returned else _assume_interval(node))


def _interval_of_floats(x: Node) -> Interval | None:
    """Integer interval that contains the floats ``x``.

    It is known if a dequantize with one scale, or a ``clamp`` with two finite bounds, computes the floats. Rounding
    functions may follow this operator. Otherwise, the function returns None.
    """
    x = source_through(x, lambda node: _operator_name(node) in ("floor", "ceil", "round", "trunc"))
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
    line = source_location(node)
    operator = f"'aten.{_operator_name(node)}'{line and f' ({line})'}"
    note = f"integer results of {operator} are assumed to be below 2**30 in magnitude"
    compilation_log.current_log().add_notes_once([note])
    return ASSUMED_INTERVAL


def _operator_name(node: Node) -> str:
    overload = overload_of(node.target)
    return "" if overload is None else overload._schema.name.removeprefix("aten::")


def _count_elements(node: Node, dim: Any = None) -> int:
    """Number of elements of the first operand, in total or along ``dim``."""
    x = node.all_input_nodes[0].meta["val"]
    return int(x.numel() if dim is None or not x.dim() else x.shape[dim])


# -- arithmetic -----------------------------------------------------------------------------------------------------


def _hull_if_known(operands: Iterable[Interval | None]) -> Interval | None:
    """Smallest interval that contains all operands; None if one is unknown or there is no operand."""
    intervals = list(operands)
    known = [x for x in intervals if x is not None]
    return hull(*known) if known and len(known) == len(intervals) else None


def hull(*intervals: Interval) -> Interval:
    """Smallest interval that contains all ``intervals``."""
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def multiply(x: Interval, y: Interval) -> Interval:
    """Interval of x * y."""
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def add(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    """Interval of x + alpha * y."""
    low, high = multiply(y, alpha)
    return x[0] + low, x[1] + high


def subtract(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    """Interval of x - alpha * y."""
    return add(x, y, multiply(alpha, (-1, -1)))


def divide(x: Interval, y: Interval) -> Interval:
    """Interval of x / y, rounded in any way. For integers y != 0, the quotient's magnitude is at most that of x."""
    return hull(x, (-x[1], -x[0]))


def clamp(x: Interval, low: Interval = _NO_LOWER_BOUND, high: Interval = _NO_UPPER_BOUND) -> Interval:
    """Interval of min(max(x, low), high)."""
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


def bitwise_and(x: Interval, y: Interval) -> Interval:
    """Interval of x & y. If an operand is non-negative, the result is between 0 and this operand."""
    limits = [high for low, high in (x, y) if low >= 0]
    return (0, min(limits)) if limits else bitwise_or(x, y)


def bitwise_or(x: Interval, y: Interval) -> Interval:
    """Interval of x | y and of x ^ y.

    The result has at most as many bits as the longer operand. It is negative only if an operand can be negative.
    """
    low, high = hull(x, y)
    limit = 1 << max(high.bit_length(), (-1 - low).bit_length() if low < 0 else 0)
    return (-limit if low < 0 else 0), limit - 1


def bitwise_not(x: Interval) -> Interval:
    """Interval of ~x, which is -1 - x."""
    return -1 - x[1], -1 - x[0]


def left_shift(x: Interval, bits: Interval) -> Interval:
    """Interval of x << bits. The result is 0 if ``bits`` is negative or at least the width of the type."""
    if bits[1] < 0 or bits[0] >= 64:
        return 0, 0
    low, high = (min(max(end, 0), 64) for end in bits)
    result = multiply(x, (1 << low, 1 << high))
    return hull(result, (0, 0)) if bits[0] < 0 or bits[1] >= _MIN_INTEGER_BITS else result


def right_shift(x: Interval, bits: Interval) -> Interval:
    """Interval of x >> bits.

    The result is 0 or -1, depending on the sign of x, if ``bits`` is negative or at least the width of the type.
    """
    low, high = (min(max(end, 0), 63) for end in bits)
    if bits[0] < 0:
        high = 63
    ends = [end >> shift for end in x for shift in (low, high)]
    return min(ends), max(ends)
