"""Axis splitting: factors of dimensions, and how RESHAPE and TRANSPOSE move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array, evaluate
from arm_backend_core.tosa.passes.rewrite import Rewriter

#: Operators that move elements and are traced.
MOVEMENT_KINDS = ("RESHAPE", "TRANSPOSE")


class Piece(NamedTuple):
    """A factor of a dimension: ``size`` elements of ``axis`` with stride ``step``."""

    axis: int
    step: int
    size: int


def collect_moves(op: Op, rewriter: Rewriter) -> list[Op]:
    """Collect the chain of data movement in front of ``op``, each with one reader, followed by ``op``."""
    path = [op]
    while (before := path[0].inputs[0].producer) is not None and before.kind in MOVEMENT_KINDS:
        if rewriter.users(before.output) != [path[0]]:
            break
        path.insert(0, before)
    return path


def trace_pieces(shape: Sequence[int], moves: Sequence[Op]) -> list[Piece] | None:
    """Trace the pieces of a tensor of this shape through ``moves``; return them in their new order.

    None if a dimension behind a RESHAPE is not a product of whole pieces or factors of them.
    """
    pieces = [Piece(axis, 1, size) for axis, size in enumerate(shape) if size != 1]
    for op in moves:
        if op.kind == "TRANSPOSE":
            parts = split_pieces(pieces, op.inputs[0].shape)
            if parts is None:
                return None
            pieces = [piece for axis in op.attrs["perms"] for piece in parts[axis]]
    return pieces


def split_pieces(pieces: Sequence[Piece], shape: Sequence[int]) -> list[list[Piece]] | None:
    """Distribute pieces over the dimensions of ``shape``, splitting pieces where needed; None if they do not fit."""
    waiting, parts = [*pieces][::-1], list[list[Piece]]()
    for size in shape:
        part, left = list[Piece](), size
        while left > 1:
            piece = waiting.pop()
            factor = gcd(left, piece.size)
            inner = piece.size // factor
            if factor not in (left, piece.size):
                return None
            if inner > 1:
                waiting.append(piece._replace(size=inner))
            part.append(piece._replace(step=piece.step * inner, size=factor))
            left //= factor
        parts.append(part)
    return parts


def sort_pieces(pieces: list[Piece]) -> list[Piece]:
    """Sort pieces by their order in the source tensor."""
    return sorted(pieces, key=lambda piece: (piece.axis, -piece.step))


def source_indices(x: Value, steps: Sequence[Op]) -> Array:
    """Compute for each element of the result of ``steps`` its flat index in ``x``."""
    indices: Array = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for step in steps:
        moved_on = evaluate(replace(step, output=replace(step.output, dtype=DType.INT32)), [indices])
        assert moved_on is not None, step.kind
        indices = moved_on
    return indices
