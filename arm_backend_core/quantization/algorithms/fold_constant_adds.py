"""Constant folding of additions: x + a + b becomes x + (a + b), for example for two constant embeddings of BERT."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from arm_backend_core.graph_edits import eliminate_dead_code, insert_call
from arm_backend_core.nodes import constant_nodes, is_float

aten = torch.ops.aten


def fold_constant_adds(graph: Graph) -> None:
    """Fold x + a + b with float constants a and b to x + (a + b), which saves an addition and the rounding of x + a.

    Sums are not folded if a + b has more elements than a and more than b, or if another operator also reads x + a.
    """
    sums = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    constants = constant_nodes(graph) if len(sums) > 1 else set[Node]()
    for outer in sums:
        inner, second = _split_terms(outer, constants)
        x, first = _split_terms(inner, constants)
        if inner is None or x is None or first is None or second is None or len(inner.users) > 1:
            continue
        a, b = first.meta["val"], second.meta["val"]
        size = torch.broadcast_shapes(a.shape, b.shape).numel()
        if not a.dtype is b.dtype is outer.meta["val"].dtype or size > max(a.numel(), b.numel()):
            continue
        with graph.inserting_before(outer):
            total = insert_call(outer, aten.add.Tensor, first, second)
            folded = insert_call(outer, aten.add.Tensor, x, total)
        constants.add(total)
        outer.replace_all_uses_with(folded)
    eliminate_dead_code(graph)


def _split_terms(node: Node | None, constants: Collection[Node]) -> tuple[Node | None, Node | None]:
    """Return (computed term, constant term) of a plain sum of both; (None, None) for anything else."""
    if node is None or node.target is not aten.add.Tensor or node.kwargs or not is_float(node):
        return None, None
    terms = [term for term in node.args if isinstance(term, Node)]
    computed = [term for term in terms if term not in constants]
    constant = [term for term in terms if term in constants]
    return (computed[0], constant[0]) if len(computed) == len(constant) == 1 else (None, None)
