"""Convolution splitting: a convolution whose channels only SLICEs read becomes one convolution per SLICE.

Attention computes query, key and value by one linear layer and slices its result. On Ethos-U, a SLICE of the channels
of 32 rows takes 32 copies (measured with Vela 5.1 on a layer of width 128: 47,616 cycles on U55-128, 23,936 on
U85-256).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arm_backend_core.tosa.graph import Op, Value, constant, prod
from arm_backend_core.tosa.operators import UNARY
from arm_backend_core.tosa.passes.merge import reshape_groups
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, has_constant_weights

#: (start, size) along one dimension.
Span = tuple[int, int]
#: The multipliers compute this many output channels at once; fewer would leave some idle.
_MIN_CHANNELS = 8


class _PathNode(NamedTuple):
    """An operator between a CONV2D and a SLICE, and the span of its result that the SLICE needs in each dimension."""

    op: Op
    spans: list[Span]


def split_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """SLICE of channels, past data movement and elementwise operators, becomes a CONV2D of those channels alone."""
    path = _find_path(op, rewriter)
    if path is None or not _is_only_sliced(op.inputs[0], rewriter):
        return None
    *steps, (conv, spans) = path
    result = slice_convolution(conv, spans[-1], rewriter)
    for step, spans in reversed(steps):
        result = rewriter.build.emit(step.kind, (result,), step.output.dtype, **slice_attributes(step, spans))
    return result


def _find_path(op: Op, rewriter: Rewriter) -> list[_PathNode] | None:
    """The operators from the SLICE up to a CONV2D of which it takes whole channels; None if there is none."""
    spans: list[Span] | None = list(zip(op.attrs["start"], op.attrs["size"], strict=True))
    value, path = op.inputs[0], []
    while spans is not None and value.producer is not None:
        step = value.producer
        path.append(_PathNode(step, spans))
        if step.kind == "CONV2D":
            return path if _is_splittable(step, spans) else None
        spans = _operand_spans(step, spans)
        if spans is not None:
            value = step.inputs[0]
            spans = spans if rewriter.has_one_use(value) else None
    return None


def _is_only_sliced(value: Value, rewriter: Rewriter) -> bool:
    """Whether only SLICEs read ``value``, and together they are not larger than it."""
    users = rewriter.users(value)
    total = 0
    for user in users or ():
        total += user.output.size
        if user.kind != "SLICE" or total > value.size:
            return False
    return bool(users)


def _operand_spans(op: Op, spans: list[Span]) -> list[Span] | None:
    """The spans of the operand that these spans of the result need; None if they are no spans in each dimension."""
    if op.kind == "TRANSPOSE":
        return [spans[op.attrs["perms"].index(axis)] for axis in range(len(spans))]
    if op.kind == "RESHAPE":
        return _spans_before_reshape(op.inputs[0].shape, op.output.shape, spans)
    return spans if op.kind in UNARY else None


def _spans_before_reshape(before: tuple[int, ...], after: tuple[int, ...], spans: list[Span]) -> list[Span] | None:
    result: list[Span] = [(0, size) for size in before]
    for old, new in reshape_groups(before, after):
        if all(spans[dim] == (0, after[dim]) for dim in new):
            continue
        above_one = [dim for dim in old if before[dim] != 1]
        first, last = 0, 0
        for dim in new:  # the first and last element of the group in the span
            first = first * after[dim] + spans[dim][0]
            last = last * after[dim] + spans[dim][0] + spans[dim][1] - 1
        if len(above_one) != 1 or last - first + 1 != prod(spans[dim][1] for dim in new):
            return None
        result[above_one[0]] = (first, last - first + 1)
    return result


def _is_splittable(conv: Op, spans: list[Span]) -> bool:
    pixels = zip(spans[:-1], conv.output.shape[:-1], strict=True)
    keeps_pixels = all(span == (0, size) for span, size in pixels)
    return keeps_pixels and has_constant_weights(conv) and spans[-1][1] % _MIN_CHANNELS == 0


def slice_convolution(conv: Op, channels: Span, rewriter: Rewriter) -> Value:
    """The convolution for these output channels alone."""
    start, size = channels
    x, *operands = conv.inputs
    parts = [constant(_slice_channels(operand.data, start, size), operand.dtype) for operand in operands]
    return rewriter.build.emit("CONV2D", (x, *parts), conv.output.dtype, **conv.attrs)


def slice_attributes(op: Op, spans: list[Span]) -> dict[str, Any]:
    """The operator's attributes if only these spans of its result are computed."""
    attrs = dict(op.attrs)
    if op.kind == "RESHAPE":
        attrs["shape"] = [size for _, size in spans]
    if attrs.get("per_channel"):
        attrs |= {name: _slice_channels(attrs[name], *spans[-1]) for name in ("multiplier", "shift")}
    return attrs


def _slice_channels(array: Any, start: int, size: int) -> np.ndarray[Any, Any]:
    """Some channels of weights, of a bias (which may be one number for all) or of a multiplier."""
    array = np.asarray(array)
    return array if array.shape[0] == 1 else array[start : start + size]


RULES: dict[str, list[Rule]] = {"SLICE": [split_convolution]}
