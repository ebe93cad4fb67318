"""Axis splitting: factors of dimensions, and how RESHAPE and TRANSPOSE move them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back

#: Operators that move elements and are traced.
MOVEMENT_KINDS = ("RESHAPE", "TRANSPOSE")


class Piece(NamedTuple):
    """A factor of a dimension: ``size`` elements of ``axis`` with stride ``step``."""

    axis: int
    step: int
    size: int


def collect_moves(op: Op, rewriter: Rewriter) -> list[Op]:
    """Collect the chain of data movement in front of ``op``, each with one reader, followed by ``op``."""
    _, moves = trace_back(
        op.inputs[0], lambda before: before.kind in MOVEMENT_KINDS and rewriter.has_one_use(before.output)
    )
    return [*moves, op]


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
