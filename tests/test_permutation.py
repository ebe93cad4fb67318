"""Permutations of dimensions: what numpy's ``transpose`` does is the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from arm_backend_core.permutation import compose, identity, inverse, merge_axes


@pytest.mark.parametrize("rank", range(5))
def test_compose_and_inverse(rank: int) -> None:
    x = np.arange(120)[: [1, 2, 6, 24, 120][rank]].reshape(range(2, rank + 2))
    assert np.array_equal(x.transpose(identity(rank)), x)
    for first, second in itertools.product(itertools.permutations(range(rank)), repeat=2):
        assert np.array_equal(x.transpose(compose(first, second)), x.transpose(first).transpose(second))
        assert compose(first, inverse(first)) == compose(inverse(first), first) == identity(rank)


@pytest.mark.parametrize(
    ("shape", "perms", "merged"),
    [
        ((2, 3, 4), (0, 1, 2), ((24,), (0,))),
        ((2, 3, 4, 5), (0, 2, 3, 1), ((2, 3, 20), (0, 2, 1))),
        ((2, 3, 1, 5), (3, 0, 2, 1), ((6, 5), (1, 0))),  # an axis of size 1 separates nothing
        ((1, 1), (1, 0), ((), ())),
        ((4, 3, 2), (2, 1, 0), ((4, 3, 2), (2, 1, 0))),
    ],
)
def test_merge_axes(
    shape: tuple[int, ...], perms: tuple[int, ...], merged: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert merge_axes(shape, perms) == merged


def test_merged_axes_move_the_elements_in_the_same_order() -> None:
    for shape in itertools.product((1, 2, 3), repeat=4):
        x = np.arange(np.prod(shape)).reshape(shape)
        for perms in itertools.permutations(range(4)):
            merged_shape, merged_perms = merge_axes(shape, perms)
            assert 1 not in merged_shape
            assert np.array_equal(x.reshape(merged_shape).transpose(merged_perms).ravel(), x.transpose(perms).ravel())
