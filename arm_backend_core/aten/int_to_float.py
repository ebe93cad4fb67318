"""Type promotion: insert explicit casts where a float operator reads integers.

The cast gets separate quantization parameters, so the float operator is quantized like one with float operands only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import insert_call
from arm_backend_core.nodes import constant_nodes, first_result, is_integer_or_bool
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind


def promote_integers(module: GraphModule) -> None:
    """Cast integer and boolean operands to float32, except one-element constants.

    Applies to float32 elementwise operators and to float32 operators on a list of tensors (``cat``, ``stack``).
    """
    constants = constant_nodes(module.graph)
    for node in list(module.graph.nodes):
        for source in list(_integer_operands(node)):
            if source not in constants or source.meta["val"].numel() > 1:
                with module.graph.inserting_before(node):
                    node.replace_input_with(source, insert_call(node, torch.ops.aten.to.dtype, source, torch.float32))


def _integer_operands(node: Node) -> Iterator[Node]:
    """Integer and boolean operands that ``promote_integers`` may cast; not the condition of a select."""
    record, result = find_record(node), first_result(node)
    takes_list = bool(node.args) and isinstance(node.args[0], (list, tuple))
    if record is not None and result is not None and result.dtype is torch.float32:
        for source in node.all_input_nodes if takes_list or record.kind is AnnotationKind.ELEMENTWISE else ():
            is_condition = record.is_select and source is node.args[0]
            if isinstance(source.meta.get("val"), torch.Tensor) and is_integer_or_bool(source) and not is_condition:
                yield source
