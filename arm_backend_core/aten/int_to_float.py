"""Whole numbers that an operator takes as real ones become real numbers in front of it, where it reads no others.

A cast has parameters of its own, so that what reads it is quantized as if the model had cast them itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.batch_norm import call
from arm_backend_core.nodes import constant_nodes, first_result, is_countable
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind


def promote(module: GraphModule) -> None:
    """Cast integers that functions, operators of several tensors and ``cat`` turn into real numbers; not one number."""
    constants = constant_nodes(module.graph)
    for node in list(module.graph.nodes):
        for source in list(_counting(node)):
            if source not in constants or source.meta["val"].numel() > 1:
                with module.graph.inserting_before(node):
                    node.replace_input_with(source, call(node, torch.ops.aten.to.dtype, source, torch.float32))


def _counting(node: Node) -> Iterator[Node]:
    """Operands that are integers or booleans, but for conditions."""
    record, result = find_record(node), first_result(node)
    joins = bool(node.args) and isinstance(node.args[0], (list, tuple))
    if record is not None and result is not None and result.dtype is torch.float32:
        for source in node.all_input_nodes if joins or record.kind is Kind.ELEMENTWISE else ():
            chooses = record.is_select and source is node.args[0]
            if isinstance(source.meta.get("val"), torch.Tensor) and is_countable(source) and not chooses:
                yield source
