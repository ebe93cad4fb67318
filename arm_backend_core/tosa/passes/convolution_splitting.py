"""Convolution splitting: a convolution becomes one convolution per SLICE if only SLICEs of channels read its result.

Attention computes query, key and value by one linear layer and slices its result. On Ethos-U, a SLICE of channels takes
one copy per row. For a layer with 32 rows and 128 channels, Vela 5.1 estimates 47,616 cycles for the copies on U55-128,
and 23,936 on U85-256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arm_backend_core.tosa.graph import Op, Value, constant, prod
from arm_backend_core.tosa.operators import UNARY
from arm_backend_core.tosa.passes.peephole_movement import reshape_groups
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, has_constant_weights

#: (start, size) of a SLICE along one dimension.
Span = tuple[int, int]
#: The hardware computes this many output channels at once. If the number of channels of a convolution is not a multiple
#: of it, some multipliers are idle.
_CHANNEL_MULTIPLE = 8


class _PathNode(NamedTuple):
    """An operator between a CONV2D and a SLICE.

    Attributes:
        op: the operator.
        spans: the part of its result that the SLICE needs: (start, size) along each dimension.
    """

    op: Op
    spans: list[Span]


def split_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a SLICE of a CONV2D's channels by a CONV2D that computes these channels only.

    TRANSPOSEs, RESHAPEs and elementwise operators of one operand between the two are emitted again for these channels.
    """
    path = _find_path(op, rewriter)
    if path is None or not _is_only_sliced(op.inputs[0], rewriter):
        return None
    *steps, (conv, spans) = path
    result = slice_convolution(conv, spans[-1], rewriter)
    for step, spans in reversed(steps):
        result = rewriter.builder.emit(step.kind, (result,), step.output.dtype, **slice_attributes(step, spans))
    return result


def _find_path(op: Op, rewriter: Rewriter) -> list[_PathNode] | None:
    """The operators before the SLICE ``op``, back to and including a CONV2D; None if they do not meet the conditions.

    The SLICE must read all pixels and a multiple of ``_CHANNEL_MULTIPLE`` channels. The weights must be constant. Each
    value on the path must have one reader, except the operand of the SLICE.
    """
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
    """Whether only SLICEs read ``value``, and their results together are not larger than ``value``."""
    users = rewriter.users(value)
    total = 0
    for user in users or ():
        total += user.output.size
        if user.kind != "SLICE" or total > value.size:
            return False
    return bool(users)


def _operand_spans(op: Op, spans: list[Span]) -> list[Span] | None:
    """The part of the operand that ``spans`` of the result depend on.

    None if it is not one span per dimension, or if ``op`` is neither a TRANSPOSE, a RESHAPE nor in ``UNARY``.
    """
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
        nontrivial_dims = [dim for dim in old if before[dim] != 1]
        first, last = 0, 0
        for dim in new:  # flat indices of the first and the last element within the group
            first = first * after[dim] + spans[dim][0]
            last = last * after[dim] + spans[dim][0] + spans[dim][1] - 1
        if len(nontrivial_dims) != 1 or last - first + 1 != prod(spans[dim][1] for dim in new):
            return None
        result[nontrivial_dims[0]] = (first, last - first + 1)
    return result


def _is_splittable(conv: Op, spans: list[Span]) -> bool:
    pixels = zip(spans[:-1], conv.output.shape[:-1], strict=True)
    keeps_pixels = all(span == (0, size) for span, size in pixels)
    return keeps_pixels and has_constant_weights(conv) and spans[-1][1] % _CHANNEL_MULTIPLE == 0


def slice_convolution(conv: Op, channels: Span, rewriter: Rewriter) -> Value:
    """Emit the convolution for these output channels only."""
    start, size = channels
    x, *operands = conv.inputs
    parts = [constant(_slice_channels(operand.data, start, size), operand.dtype) for operand in operands]
    return rewriter.builder.emit("CONV2D", (x, *parts), conv.output.dtype, **conv.attrs)


def slice_attributes(op: Op, spans: list[Span]) -> dict[str, Any]:
    """Attributes of the operator that computes only these spans of the result."""
    attrs = dict(op.attrs)
    if op.kind == "RESHAPE":
        attrs["shape"] = [size for _, size in spans]
    if attrs.get("per_channel"):
        attrs |= {name: _slice_channels(attrs[name], *spans[-1]) for name in ("multiplier", "shift")}
    return attrs


def _slice_channels(array: Any, start: int, size: int) -> np.ndarray[Any, Any]:
    """Slice channels of a weight, bias, multiplier or shift. An array of one element applies to all channels."""
    array = np.asarray(array)
    return array if array.shape[0] == 1 else array[start : start + size]


RULES: dict[str, list[RewriteRule]] = {"SLICE": [split_convolution]}
