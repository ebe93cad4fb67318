"""``flex_attention`` written out: two functions of single numbers, evaluated on tensors of all places at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

aten = torch.ops.aten
_INDEX = torch.ops.higher_order.flat_apply


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *buffers: Tensor,
    score: GraphModule,
    mask: GraphModule,
    scale: float,
    of_score: int,
    read: Sequence[int],
) -> list[Tensor | None]:
    """The operator's results: softmax(score(query @ key^T * scale)) @ value; logarithms of the sums, and the maxima.

    Both logarithms are to the base of 2, as the operator gives them.

    Args:
        query: [batch, heads, L, E]; ``key``, ``value``: [batch or 1, heads or fewer, S, E].
        buffers: what the functions read beside their arguments, the first ``of_score`` of them ``score``.
        read: which results are wanted; the others are None.
    """
    shape = (*query.shape[:3], key.shape[2])
    places = [torch.arange(size).reshape([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(shape)]
    seen = None if _sees_all(mask) else _Vectorized(mask).run(*places, *buffers[of_score:])
    if _is_identity(score) and list(read) == [0]:
        attended = F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)
        return [attended, None, None]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1)) * scale
    scores = _Vectorized(score).run(scores, *places, *buffers[:of_score])
    scores = scores if seen is None else torch.where(seen, scores, -math.inf)
    weights = torch.softmax(scores, -1) if seen is None else aten._safe_softmax(scores, -1)
    results = (
        lambda: torch.matmul(weights.to(query.dtype), value),
        lambda: torch.logsumexp(scores, -1) / math.log(2),
        lambda: scores.amax(-1) / math.log(2),
    )
    return [made() if i in read else None for i, made in enumerate(results)]


class _Vectorized(Interpreter):
    """What is elementwise for each place is so for all of them; ``tensor[place]`` too."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``flat_apply`` is how PyTorch keeps an index that a place computes."""
        if target is _INDEX:
            _, _, function, table, *places = args
            assert function.__name__ == "ModIndex", function
            return table[tuple(places)]
        return super().call_function(target, args, kwargs)


def _is_identity(score: GraphModule) -> bool:
    return _result(score) is next(iter(score.graph.nodes))


def _sees_all(mask: GraphModule) -> bool:
    """Whether it is the mask of those who give none."""
    return _result(mask).target is aten.new_ones.default


def _result(function: GraphModule) -> Node:
    (result,) = function.graph.output_node().all_input_nodes
    return result
