"""Dimensions in pieces, and where RESHAPE and TRANSPOSE move them."""

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

#: What moves elements and is followed through.
MOVES = ("RESHAPE", "TRANSPOSE")


class Piece(NamedTuple):
    """``size`` elements of a dimension, ``step`` apart."""

    axis: int
    step: int
    size: int


def moves_to(op: Op, rewriter: Rewriter) -> list[Op]:
    """What moves elements in front of ``op``, each read by the next alone, and ``op``."""
    path = [op]
    while (before := path[0].inputs[0].producer) is not None and before.kind in MOVES:
        if rewriter.users(before.output) != [path[0]]:
            break
        path.insert(0, before)
    return path


def moved(shape: Sequence[int], moves: Sequence[Op]) -> list[Piece] | None:
    """The pieces of what has this shape in the order that they have behind ``moves``."""
    pieces = [Piece(axis, 1, size) for axis, size in enumerate(shape) if size != 1]
    for op in moves:
        if op.kind == "TRANSPOSE":
            parts = parted(pieces, op.inputs[0].shape)
            if parts is None:
                return None
            pieces = [piece for axis in op.attrs["perms"] for piece in parts[axis]]
    return pieces


def parted(pieces: Sequence[Piece], shape: Sequence[int]) -> list[list[Piece]] | None:
    """The pieces that each dimension of ``shape`` has, some of them cut in two; None where they do not fit."""
    waiting, parts = [*pieces][::-1], list[list[Piece]]()
    for size in shape:
        part, left = list[Piece](), size
        while left > 1:
            piece = waiting.pop()
            taken_of_it = gcd(left, piece.size)
            inner = piece.size // taken_of_it
            if taken_of_it not in (left, piece.size):
                return None
            if inner > 1:
                waiting.append(piece._replace(size=inner))
            part.append(piece._replace(step=piece.step * inner, size=taken_of_it))
            left //= taken_of_it
        parts.append(part)
    return parts


def as_made(pieces: list[Piece]) -> list[Piece]:
    """In the order that they have in what they are pieces of."""
    return sorted(pieces, key=lambda piece: (piece.axis, -piece.step))


def places(x: Value, steps: Sequence[Op]) -> Array:
    """Where in ``x`` each element of what ``steps`` move is."""
    indices: Array = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for step in steps:
        moved_on = evaluate(replace(step, output=replace(step.output, dtype=DType.INT32)), [indices])
        assert moved_on is not None, step.kind
        indices = moved_on
    return indices
