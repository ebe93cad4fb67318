"""Output structure of a method: the nested tuples, lists and dicts that contain its outputs.

ExecuTorch stores the treespec of the model's outputs in the program (``ExecutionPlan.container_meta_type``). The
treespec is JSON: a version number and a tree of nodes. Each node has a type, a context (the keys of a dict, as JSON)
and children. Named tuples and dataclasses become tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def unflatten_outputs(outputs: Sequence[Any], encoded: str, mutated_inputs: int) -> Any:
    """Arrange the outputs of a method in the structure of the model's outputs.

    Args:
        outputs: the outputs in the program's order.
        encoded: the treespec in ExecuTorch's JSON; empty if none is recorded.
        mutated_inputs: number of new values of mutated inputs. They precede the model's outputs.

    Returns:
        The structure. If ``encoded`` is empty, damaged, contains an unknown type or has another number of outputs, the
        result is the output itself if there is only one, and a list of the outputs otherwise.
    """
    model_outputs = list(outputs[mutated_inputs:])
    leaves = iter(model_outputs)
    try:
        _, tree = json.loads(encoded)
        structure = _unflatten_node(tree, leaves)
    except (KeyError, RecursionError, StopIteration, TypeError, ValueError):
        structure = leaves  # no treespec, or a damaged one
    if structure is leaves or next(leaves, leaves) is not leaves:
        return model_outputs[0] if len(model_outputs) == 1 else model_outputs
    return structure


def _unflatten_node(node: dict[str, Any], leaves: Iterator[Any]) -> Any:
    """Build the structure of a node of the treespec.

    Raises:
        ValueError: the type of a node is unknown.
    """
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
