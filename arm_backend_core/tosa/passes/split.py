"""A convolution whose channels are only read by SLICEs becomes one convolution for each of them.

Attention computes query, key and value by one linear layer and takes it apart. On Ethos-U a SLICE of the channels of 32
rows is 32 copies (measured with Vela 5.1 on a layer of width 128: 47,616 cycles on U55-128, 23,936 on U85-256).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arm_backend_core.tosa.graph import Op, Value, constant, prod
from arm_backend_core.tosa.operators import UNARY
from arm_backend_core.tosa.passes.merge import groups
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule

#: (start, size) along one dimension.
Span = tuple[int, int]
#: Multipliers work on this many output channels at once; thinner slices would leave them idle.
_THINNEST = 8


class _Step(NamedTuple):
    """An operator between a CONV2D and a SLICE, and what the SLICE takes of its result, in each dimension."""

    op: Op
    spans: list[Span]


def split_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """SLICE of channels, behind data movement and elementwise operators, as a CONV2D of those channels alone."""
    path = _path(op, rewriter)
    if path is None or not _taken_apart(op.inputs[0], rewriter):
        return None
    *steps, (conv, spans) = path
    result = convolve_part(conv, spans[-1], rewriter)
    for step, spans in reversed(steps):
        shape = [size for _, size in spans]
        result = rewriter.build.emit(step.kind, (result,), shape, step.output.dtype, **attributes_part(step, spans))
    return result


def _path(op: Op, rewriter: Rewriter) -> list[_Step] | None:
    """The operators from the SLICE up to a CONV2D that it takes whole channels of; None if there is no such CONV2D."""
    spans: list[Span] | None = list(zip(op.attrs["start"], op.attrs["size"], strict=True))
    value, path = op.inputs[0], []
    while spans is not None and value.producer is not None:
        step = value.producer
        path.append(_Step(step, spans))
        if step.kind == "CONV2D":
            return path if _splits(step, spans) else None
        spans = _before(step, spans)
        if spans is not None:
            value = step.inputs[0]
            spans = spans if rewriter.single_use(value) else None
    return None


def _taken_apart(value: Value, rewriter: Rewriter) -> bool:
    """Whether SLICEs alone read ``value``, no more of it than there is."""
    users = rewriter.users(value)
    total = 0
    for user in users or ():
        total += user.output.size
        if user.kind != "SLICE" or total > value.size:
            return False
    return bool(users)


def _before(op: Op, spans: list[Span]) -> list[Span] | None:
    """What of the operand is needed for these spans of the result; None if that is no span in each dimension."""
    if op.kind == "TRANSPOSE":
        return [spans[op.attrs["perms"].index(axis)] for axis in range(len(spans))]
    if op.kind == "RESHAPE":
        return _before_reshape(op.inputs[0].shape, op.output.shape, spans)
    return spans if op.kind in UNARY else None


def _before_reshape(before: tuple[int, ...], after: tuple[int, ...], spans: list[Span]) -> list[Span] | None:
    result: list[Span] = [(0, size) for size in before]
    for old, new in groups(before, after):
        if all(spans[dim] == (0, after[dim]) for dim in new):
            continue
        wide = [dim for dim in old if before[dim] != 1]
        first, last = 0, 0
        for dim in new:  # the first and last element of the group that are taken
            first = first * after[dim] + spans[dim][0]
            last = last * after[dim] + spans[dim][0] + spans[dim][1] - 1
        if len(wide) != 1 or last - first + 1 != prod(spans[dim][1] for dim in new):
            return None
        result[wide[0]] = (first, last - first + 1)
    return result


def _splits(conv: Op, spans: list[Span]) -> bool:
    pixels = zip(spans[:-1], conv.output.shape[:-1], strict=True)
    whole = all(span == (0, size) for span, size in pixels)
    constants = all(operand.data is not None for operand in conv.inputs[1:])
    return whole and constants and spans[-1][1] % _THINNEST == 0


def convolve_part(conv: Op, channels: Span, rewriter: Rewriter) -> Value:
    """The convolution for these output channels alone."""
    start, size = channels
    x, *operands = conv.inputs
    parts = [constant(_part(operand.data, start, size), operand.dtype) for operand in operands]
    shape = (*conv.output.shape[:-1], size)
    return rewriter.build.emit("CONV2D", (x, *parts), shape, conv.output.dtype, **conv.attrs)


def attributes_part(op: Op, spans: list[Span]) -> dict[str, Any]:
    """What an operator has where only these spans of its result are computed."""
    attrs = dict(op.attrs)
    if op.kind == "RESHAPE":
        attrs["shape"] = [size for _, size in spans]
    if attrs.get("per_channel"):
        attrs |= {name: _part(attrs[name], *spans[-1]) for name in ("multiplier", "shift")}
    return attrs


def _part(array: Any, start: int, size: int) -> np.ndarray[Any, Any]:
    """Some channels of weights, of a bias (which may be one number for all), of a multiplier."""
    array = np.asarray(array)
    return array if array.shape[0] == 1 else array[start : start + size]


RULES: dict[str, list[Rule]] = {"SLICE": [split_convolution]}
