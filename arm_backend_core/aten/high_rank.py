"""Rank reduction: rewrite operators on tensors that have more dimensions than TOSA's limit, six.

Example: a video model partitions windows with a view of eight dimensions, a permutation and another view.

- Permutation: dimensions that stay adjacent merge into one. If more than six remain, the permutation is split into
  several.
- Elementwise operator: neighbouring dimensions merge into one if the same operands broadcast along them. Example:
  adding the relative positions of a video's patches.
- Softmax or reduction along one dimension: the dimensions before it merge into one, and the dimensions after it into
  another. Example: RAFT's weights of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import eliminate_dead_code, insert_call
from arm_backend_core.ops import movement
from arm_backend_core.permutation import merge_axes
from arm_backend_core.tosa.graph import prod
from arm_backend_core.tosa.operators import LEVEL_8K

aten = torch.ops.aten
_VIEWS = movement.reshape.overloads
_COPIES = (aten.clone.default, aten.contiguous.default)
#: Operators whose second argument is the dimension, or the list of dimensions, along which they work.
_AXIS_OPS = (aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)


def reduce_ranks(module: GraphModule) -> None:
    """Rewrite operators on high-rank tensors to fewer dimensions where a rule applies; merge consecutive views."""
    high_rank = [node for node in module.graph.nodes if any(map(_is_high_rank, (node, *node.all_input_nodes)))]
    for node in high_rank:
        with node.graph.inserting_before(node):
            rule = (
                _lower_rank_of_permute
                if node.target in movement.permute.overloads
                else _lower_rank_of_axis_operator
                if node.target in _AXIS_OPS
                else _lower_rank_of_elementwise
            )
            if (value := rule(node)) is not None:
                node.replace_all_uses_with(insert_call(node, aten.reshape.default, value, list(node.meta["val"].shape)))
                node.graph.erase_node(node)
    for node in module.graph.nodes if high_rank else ():
        while node.target in _VIEWS and node.args[0].target in (*_VIEWS, *_COPIES) and _is_high_rank(node.args[0]):
            # The composition may not be expressible as a view of the source, so it is a reshape.
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (node.args[0].args[0], list(node.meta["val"].shape))
    if high_rank:
        eliminate_dead_code(module.graph)


def _is_high_rank(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > LEVEL_8K.max_rank


def _lower_rank_of_permute(node: Node) -> Node | None:
    value, dims = cast(Any, node.args)
    shape = value.meta["val"].shape
    for sizes, order in _split_permutation(shape, [dim % len(shape) for dim in dims]):
        value = insert_call(
            node, aten.permute.default, insert_call(node, aten.reshape.default, value, list(sizes)), list(order)
        )
    return value


def _lower_rank_of_axis_operator(node: Node) -> Node | None:
    """Rewrite an operator along one dimension on [before, dimension, after]; None for several dimensions."""
    value, dims, *rest = cast(Any, node.args)
    shape, axes = value.meta["val"].shape, [dims] if isinstance(dims, int) else dims
    if len(axes or ()) != 1:
        return None
    dim = axes[0] % len(shape)
    flat = insert_call(node, aten.reshape.default, value, [prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])])
    return insert_call(node, node.target, flat, 1 if axes is not dims else [1], *rest, **node.kwargs)


def _lower_rank_of_elementwise(node: Node) -> Node | None:
    """Rewrite an elementwise operator: merge runs of dimensions along which the same operands broadcast."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    shape = node.meta["val"].shape
    operands = [source for source in node.all_input_nodes if source.meta["val"].dim()]
    aligned = {x: (1,) * (len(shape) - x.meta["val"].dim()) + tuple(x.meta["val"].shape) for x in operands}
    runs: list[list[int]] = []
    for dim, size in enumerate(shape):
        non_unit = [other for other in runs[-1] if shape[other] != 1] if runs else []
        joins = size == 1 or not non_unit or all((a[dim] == 1) == (a[non_unit[-1]] == 1) for a in aligned.values())
        runs = [*runs[:-1], [*runs[-1], dim]] if runs and joins else [*runs, [dim]]
    if len(runs) > LEVEL_8K.max_rank:
        return None
    reshaped = {
        x: insert_call(node, aten.reshape.default, x, [prod(sizes[dim] for dim in run) for run in runs])
        for x, sizes in aligned.items()
    }
    result = node.graph.node_copy(node, lambda x: reshaped.get(x, x))
    result.meta["val"] = node.meta["val"].reshape([prod(shape[dim] for dim in run) for run in runs])
    return result


def _split_permutation(shape: Sequence[int], order: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the permutation ``order`` into pairs of a reshape and a permutation of at most six dimensions."""
    sizes, order = merge_axes(shape, order)
    while len(order) > LEVEL_8K.max_rank:
        candidates = []
        for previous, dim in pairwise(order):  # each step moves ``dim`` behind ``previous``, so that these two merge
            step = [other for other in range(len(order)) if other != dim]
            step.insert(step.index(previous) + 1, dim)
            candidates.append(
                (merge_axes([sizes[other] for other in step], [step.index(other) for other in order]), step)
            )
        remaining, step = min(candidates, key=lambda candidate: len(candidate[0][1]))
        yield merge_axes(sizes, step)
        sizes, order = remaining
    yield sizes, tuple(order)
