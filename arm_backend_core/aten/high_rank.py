"""Tensors of more dimensions than TOSA has, where these only say how elements are moved or which of them meet.

Windows are cut out of a video by a view of eight dimensions, a permutation and another view. What stays together is one
dimension, and what is left above six is moved one run of elements at a time. Elementwise operators broadcast along runs
of dimensions, each of which is one too (relative positions of a video's patches); softmax and reductions need but one
before and one behind their own (RAFT's weights of neighbours).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.batch_norm import insert_call
from arm_backend_core.nodes import eliminate_dead_code
from arm_backend_core.permutation import merge_axes
from arm_backend_core.tosa.graph import prod
from arm_backend_core.tosa.operators import LEVEL_8K

aten = torch.ops.aten
_VIEWS = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default),
    *(aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.unsqueeze_copy.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.dims),
)
_COPIES = (aten.clone.default, aten.contiguous.default)
_PERMUTES = (aten.permute.default, aten.permute_copy.default)
_ALONG = (aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)


def reduce_ranks(module: GraphModule) -> None:
    """Write what has too many dimensions with fewer; a view of a view of these reads what that one reads."""
    wide = [node for node in module.graph.nodes if any(map(_is_high_rank, (node, *node.all_input_nodes)))]
    for node in wide:
        with node.graph.inserting_before(node):
            narrow = (
                _reduce_permute
                if node.target in _PERMUTES
                else _reduce_axis_operator
                if node.target in _ALONG
                else _reduce_elementwise
            )
            if (value := narrow(node)) is not None:
                node.replace_all_uses_with(insert_call(node, aten.reshape.default, value, list(node.meta["val"].shape)))
                node.graph.erase_node(node)
    for node in module.graph.nodes if wide else ():
        while node.target in _VIEWS and node.args[0].target in (*_VIEWS, *_COPIES) and _is_high_rank(node.args[0]):
            # A view of the first one need not be one of its source.
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (node.args[0].args[0], list(node.meta["val"].shape))
    if wide:
        eliminate_dead_code(module.graph)


def _is_high_rank(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > LEVEL_8K.max_rank


def _reduce_permute(node: Node) -> Node | None:
    value, dims = cast(Any, node.args)
    shape = value.meta["val"].shape
    for sizes, order in _split_permutation(shape, [dim % len(shape) for dim in dims]):
        value = insert_call(
            node, aten.permute.default, insert_call(node, aten.reshape.default, value, list(sizes)), list(order)
        )
    return value


def _reduce_axis_operator(node: Node) -> Node | None:
    """An operator along one dimension."""
    value, dims, *rest = cast(Any, node.args)
    shape, along = value.meta["val"].shape, [dims] if isinstance(dims, int) else dims
    if len(along or ()) != 1:
        return None
    dim = along[0] % len(shape)
    flat = insert_call(node, aten.reshape.default, value, [prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])])
    return insert_call(node, node.target, flat, 1 if along is not dims else [1], *rest, **node.kwargs)


def _reduce_elementwise(node: Node) -> Node | None:
    """An elementwise operator on operands whose dimensions, as far as each has or lacks them all, are one."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    shape = node.meta["val"].shape
    operands = [source for source in node.all_input_nodes if source.meta["val"].dim()]
    aligned = {x: (1,) * (len(shape) - x.meta["val"].dim()) + tuple(x.meta["val"].shape) for x in operands}
    runs: list[list[int]] = []
    for dim, size in enumerate(shape):
        real = [other for other in runs[-1] if shape[other] != 1] if runs else []
        joined = size == 1 or not real or all((a[dim] == 1) == (a[real[-1]] == 1) for a in aligned.values())
        runs = [*runs[:-1], [*runs[-1], dim]] if runs and joined else [*runs, [dim]]
    if len(runs) > LEVEL_8K.max_rank:
        return None
    narrow = {
        x: insert_call(node, aten.reshape.default, x, [prod(sizes[dim] for dim in run) for run in runs])
        for x, sizes in aligned.items()
    }
    made = node.graph.node_copy(node, lambda x: narrow.get(x, x))
    made.meta["val"] = node.meta["val"].reshape([prod(shape[dim] for dim in run) for run in runs])
    return made


def _split_permutation(shape: Sequence[int], order: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and permutations, one after the other, that ``order`` is made of."""
    sizes, order = merge_axes(shape, order)
    while len(order) > LEVEL_8K.max_rank:
        ways = []
        for before, dim in pairwise(order):  # each goes where it is to be, which joins two at least
            moved = [other for other in range(len(order)) if other != dim]
            moved.insert(moved.index(before) + 1, dim)
            ways.append((merge_axes([sizes[other] for other in moved], [moved.index(other) for other in order]), moved))
        rest, moved = min(ways, key=lambda way: len(way[0][1]))
        yield merge_axes(sizes, moved)
        sizes, order = rest
    yield sizes, tuple(order)
