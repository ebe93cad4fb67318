"""Output structure of a method: tuples, lists and dicts of its outputs, as ExecuTorch records it in the program.

ExecuTorch stores the treespec of the model's outputs (``ExecutionPlan.container_meta_type``) as JSON: a version number
and a tree of nodes with a type, a context (the keys of a dict, as JSON) and children. Named tuples and dataclasses
become tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def unflatten_outputs(outputs: Sequence[Any], encoded: str, leading: int) -> Any:
    """Arrange the outputs of a method in the structure of the model's outputs.

    Args:
        outputs: the outputs in the program's order.
        encoded: the structure as ExecuTorch stores it; empty if none is recorded.
        leading: number of outputs before those of the model: the new values of mutated inputs.

    Returns:
        The structure. If none is recorded, or a type in it is unknown: the output itself if there is one, a list of the
        outputs otherwise.
    """
    returned = list(outputs[leading:])
    leaves = iter(returned)
    try:
        _, tree = json.loads(encoded)
        structure = _unflatten_node(tree, leaves)
    except (KeyError, RecursionError, StopIteration, TypeError, ValueError):
        structure = leaves  # no record, or a damaged one
    if structure is leaves or next(leaves, leaves) is not leaves:
        return returned[0] if len(returned) == 1 else returned
    return structure


def _unflatten_node(node: dict[str, Any], leaves: Iterator[Any]) -> Any:
    """One node of the tree. Raises ValueError for a type that is not known."""
    kind = node["type"]
    if kind is None:
        return next(leaves)
    children = [_unflatten_node(child, leaves) for child in node["children_spec"]]
    match kind:
        case "builtins.tuple":
            return tuple(children)
        case "builtins.list":
            return children
        case "builtins.dict":
            return dict(zip(json.loads(node["context"]), children, strict=True))
    raise ValueError(kind)
