"""Permutations of dimensions (memory layouts).

Dimension i of the stored tensor is dimension ``layout[i]`` of the program's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

Layout = tuple[int, ...]


@lru_cache(maxsize=65536)
def identity(rank: int) -> Layout:
    """The identity permutation: the program's own dimension order."""
    return tuple(range(rank))


@lru_cache(maxsize=65536)
def compose(first: Layout, second: Layout) -> Layout:
    """The permutation of a TRANSPOSE by ``first`` followed by a TRANSPOSE by ``second``."""
    return tuple(first[i] for i in second)


@lru_cache(maxsize=65536)
def inverse(layout: Layout) -> Layout:
    """The inverse permutation."""
    return tuple(sorted(range(len(layout)), key=layout.__getitem__))


def merge_axes(shape: Sequence[int], perms: Sequence[int]) -> tuple[tuple[int, ...], Layout]:
    """Simplify a transpose: merge dimensions that stay adjacent, and drop dimensions of size 1.

    Args:
        shape: shape of the operand.
        perms: the permutation, as TOSA's attribute ``perms``.

    Returns:
        The simplified shape and permutation: [2, 3, 4, 1] by (0, 3, 1, 2) becomes [24] by (0,).
    """
    runs: list[list[int]] = []
    for axis in (axis for axis in perms if shape[axis] != 1):
        if runs and all(shape[between] == 1 for between in range(runs[-1][-1] + 1, axis)) and axis > runs[-1][-1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    order = sorted(runs)
    return tuple(math.prod(shape[axis] for axis in run) for run in order), tuple(order.index(run) for run in runs)
