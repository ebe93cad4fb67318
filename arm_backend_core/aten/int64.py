"""Which int64 values of a program int32 holds too: TOSA has no int64, so delegates compute in int32.

Interval arithmetic over the fx graph. Inputs of the program and counters are taken to stay below 2**30, as the report
says of them; what is computed from them must be shown to fit, for a delegate to compute it or to read it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.kinds import COUNTABLE, ScalarKind, kind_of
from arm_backend_core.nodes import INTERVAL, first_result, is_dequantize, is_float, overload_of, source_line
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind

Interval = tuple[int, int]
INT32: Interval = (-(1 << 31), (1 << 31) - 1)
_ROWS = 1 << 13  #: widths of what rows are counted in
TAKEN: Interval = (INT32[0] >> 1, INT32[1] >> 1)  #: indices, sizes and counts: twofold values fit too
_LEAST, _MOST = ((end, end) for end in (-(1 << 63), (1 << 63) - 1))  #: bounds that are not given


class Intervals:
    """Intervals of the integers in a program, asked for in program order.

    Args:
        constants: values of the nodes that are constant.
    """

    def __init__(self, constants: Mapping[Node, torch.Tensor]) -> None:
        self._constants = constants
        self._known: dict[Node, Interval] = {}

    def fits(self, node: Node) -> bool:
        """Whether int32 holds every element of ``node``'s integer result."""
        interval = self._result(node) or (_LEAST[0], _MOST[1])
        fits = _within(interval)
        if fits or getattr(first_result(node), "dtype", None) is torch.int64:  # a narrower one wraps around
            self._known[node] = interval
        return fits

    def misread(self, node: Node) -> Node | None:
        """The operand, if there is one, of which ``node`` would read other numbers in a delegate: modulo 2**32.

        Indices are within what they index, and conversions to narrower integers drop what is lost.
        """
        name, kind = _name(node), getattr(first_result(node), "dtype", None)
        if name in ("to", "_to_copy") and kind in (torch.int32, torch.int16, torch.int8):
            return None
        read = node.args[:1] if name in ("embedding", "index", "gather", "index_select") else node.all_input_nodes
        return next((x for x in read if isinstance(x, Node) and not _within(self._held(x))), None)

    def _held(self, node: Node) -> Interval:
        """What is known of an operand's integers, else what int32 holds."""
        return self._known.get(node, node.meta.get(INTERVAL, INT32))

    def _of(self, x: Any) -> Interval | None:
        """Elements of an operand; None for floating-point and complex numbers."""
        if not isinstance(x, Node):
            return (int(x), int(x)) if isinstance(x, int) else None
        value = self._constants.get(x, x.meta.get("val"))
        if not isinstance(value, torch.Tensor) or kind_of(value.dtype) not in COUNTABLE:
            return None
        if x in self._constants:
            return (int(value.min()), int(value.max())) if value.numel() else (0, 0)
        if kind_of(value.dtype) is ScalarKind.BOOLEAN:
            return 0, 1
        if x.target is operator.getitem and x.args[1] == 1 and _name(x.all_input_nodes[0]) == "topk":
            return 0, _count(x.all_input_nodes[0])
        if x.op == "placeholder" and value.dtype is torch.int64:
            return x.meta.get(INTERVAL, TAKEN)
        limit = torch.iinfo(torch.int32 if value.dtype is torch.int64 else value.dtype)
        return self._known.get(x, x.meta.get(INTERVAL, (limit.min, limit.max)))

    def _result(self, node: Node) -> Interval | None:
        """The interval of a result from those of the operands; None where no rule tells."""
        name, record = _name(node), find_record(node)
        if name == "one_hot":
            return 0, 1
        if name in ("to", "_to_copy") and is_float(node.all_input_nodes[0]):
            returned = any(user.op == "output" for user in node.users)
            return _of_reals(node.all_input_nodes[0]) or (None if returned else _taken(node))
        if name.startswith("arm_backend_core::loop"):  # a loop's integers are taken to fit, as those of the program are
            return TAKEN if name.endswith("in") else INT32
        if name in ("argmax", "argmin"):
            return 0, _count(node, *node.args[1:2]) - 1
        if name in ("sum", "cumsum"):
            return _scaled(self._of(node.args[0]), _count(node))
        operands = [self._of(x) for x in _leaves(node.args)]
        if name in ("constant_pad_nd", "pad"):
            filled = [x for x in (*node.args[2:], *node.kwargs.values()) if isinstance(x, (int, float))]
            operands = [self._of(node.args[0]), self._of(int(filled[0]) if filled else 0)]
        elif record is not None and record.kind is Kind.SHARED:  # moves data: numbers among its arguments say where
            operands = [self._of(x) for x in node.all_input_nodes]
        elif name == "where":
            operands = operands[1:]
        elif name in _ARITHMETIC and node.kwargs.keys() <= {"alpha", "rounding_mode"}:
            numbers = (*_leaves(node.args), *(x for x in node.kwargs.values() if not isinstance(x, str)))
            operands = [(_LEAST if i == 1 else _MOST) if x is None else self._of(x) for i, x in enumerate(numbers)]
            if None in operands:
                return None
            known = [x for x in operands if x is not None]
            interval, widths = _ARITHMETIC[name](*known), [x for x, y in known if x == y]
            # A row's place is its number times a width.
            counts = name == "mul" and any(abs(width) < _ROWS for width in widths) and all(map(_within, known))
            return _taken(node) if counts and not _within(interval) else interval
        elif name not in ("maximum", "minimum"):
            return None
        known = [x for x in operands if x is not None]
        return _hull(*known) if known and len(known) == len(operands) else None


def _name(node: Node) -> str:
    overload = overload_of(node.target)
    return "" if overload is None else overload._schema.name.removeprefix("aten::")


def _within(interval: Interval) -> bool:
    return INT32[0] <= interval[0] and interval[1] <= INT32[1]


def _count(node: Node, dim: Any = None) -> int:
    """Elements of the first operand, or along one dimension of it."""
    x = node.all_input_nodes[0].meta["val"]
    return int(x.numel() if dim is None or not x.dim() else x.shape[dim])


def _of_reals(x: Node) -> Interval | None:
    """What integers become of real numbers that a quantization or a ``clamp`` bounds, rounded since or not."""
    while _name(x) in ("floor", "ceil", "round", "trunc"):
        x = x.all_input_nodes[0]
    if is_dequantize(x) and isinstance(x.args[1], float):
        scale, zero_point, least, most = cast(tuple[float, int, int, int], x.args[1:5])
        return math.floor((least - zero_point) * scale), math.ceil((most - zero_point) * scale)
    if _name(x) != "clamp":
        return None
    bounds: list[Any] = [*x.args[1:], *x.kwargs.values()]
    known = len(bounds) == 2 and all(isinstance(bound, (int, float)) and math.isfinite(bound) for bound in bounds)
    return (math.floor(min(bounds)), math.ceil(max(bounds))) if known else None


def _taken(node: Node) -> Interval:
    """What the report tells of."""
    line = source_line(node)
    note = f"integers that 'aten.{_name(node)}' gives{line and f' ({line})'} are taken to be below 2**30"
    notes = events.current().notes
    if note not in notes:
        notes.append(note)
    return TAKEN


def _leaves(args: Any) -> list[Any]:
    return [leaf for x in args for leaf in (_leaves(x) if isinstance(x, (list, tuple)) else [x])]


def _hull(*intervals: Interval) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _scaled(x: Interval | None, count: int) -> Interval | None:
    return None if x is None else (min(x[0] * count, x[0]), max(x[1] * count, x[1]))


def _product(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _sum(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    low, high = _product(y, alpha)
    return x[0] + low, x[1] + high


def _difference(x: Interval, y: Interval, alpha: Interval = (1, 1)) -> Interval:
    return _sum(x, y, _product(alpha, (-1, -1)))


#: Operators of one or two operands and no other argument, or a factor of the second one.
_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "add": _sum,
    "sub": _difference,
    "rsub": lambda x, y, alpha=(1, 1): _difference(y, x, alpha),
    "mul": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (0, max(abs(x[0]), abs(x[1]))),
    "clamp": lambda x, low=_LEAST, high=_MOST: (min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])),
    "remainder": lambda x, y: _hull((0, 0), y),
    "fmod": lambda x, y: _hull((0, 0), x),
    **dict.fromkeys(("floor_divide", "div"), lambda x, y: _hull(x, (-x[1], -x[0]))),
}
