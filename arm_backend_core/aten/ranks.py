"""Tensors of more dimensions than TOSA has, where these only say how elements are to be moved.

Windows are cut out of a video by a view of eight dimensions, a permutation and another view. What stays together is one
dimension, and what is left above six is moved one run of elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.nodes import drop_unread
from arm_backend_core.tosa.graph import prod
from arm_backend_core.tosa.operators import LEVEL_8K

aten = torch.ops.aten
_VIEWS = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default),
    *(aten.flatten.using_ints, aten.unflatten.int),
)
_COPIES = (aten.clone.default, aten.contiguous.default)
_PERMUTES = (aten.permute.default, aten.permute_copy.default)


def lower_ranks(module: GraphModule) -> None:
    """Write permutations of too many dimensions with fewer; a view of such a view reads what that one reads."""
    wide = [node for node in module.graph.nodes if node.target in _PERMUTES and _is_wide(node)]
    for node in wide:
        _replace(node)
    for node in module.graph.nodes if wide else ():
        while node.target in _VIEWS and node.args[0].target in (*_VIEWS, *_COPIES) and _is_wide(node.args[0]):
            # A view of the first one need not be one of its source.
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (node.args[0].args[0], list(node.meta["val"].shape))
    if wide:
        drop_unread(module.graph)


def _is_wide(node: Node) -> bool:
    return cast(int, node.meta["val"].dim()) > LEVEL_8K.max_rank


def _replace(node: Node) -> None:
    value, dims = cast(Any, node.args)
    shape = value.meta["val"].shape

    def call(target: Any, argument: Sequence[int]) -> None:
        nonlocal value
        made = node.graph.call_function(target, (value, list(argument)))
        made.meta = {**node.meta, "val": target(value.meta["val"], list(argument))}
        value = made

    with node.graph.inserting_before(node):
        for sizes, order in _steps(shape, [dim % len(shape) for dim in dims]):
            call(aten.reshape.default, sizes)
            call(aten.permute.default, order)
        call(aten.reshape.default, node.meta["val"].shape)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _steps(shape: Sequence[int], order: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Shapes and permutations, one after the other, that ``order`` is made of."""
    wide = [dim for dim, size in enumerate(shape) if size != 1]
    sizes, order = _merged([shape[dim] for dim in wide], [wide.index(dim) for dim in order if dim in wide])
    while len(order) > LEVEL_8K.max_rank:
        ways = []
        for before, dim in pairwise(order):  # each goes where it is to be, which joins two at least
            moved = [other for other in range(len(order)) if other != dim]
            moved.insert(moved.index(before) + 1, dim)
            ways.append((_merged([sizes[other] for other in moved], [moved.index(other) for other in order]), moved))
        rest, moved = min(ways, key=lambda way: len(way[0][1]))
        yield _merged(sizes, moved)
        sizes, order = rest
    yield sizes, order


def _merged(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same permutation with those dimensions as one that follow each other before and after it."""
    runs: list[list[int]] = []
    for dim in order:
        if runs and runs[-1][-1] + 1 == dim:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return [prod(sizes[dim] for dim in run) for run in sorted(runs)], [sorted(runs).index(run) for run in runs]
