"""How tensors lie in memory where delegates begin: a channels_last input is the NHWC that convolutions take."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.lowering import is_dequantize, is_quantize
from arm_backend_core.passes.int64 import BOUNDARY


def settle_memory_formats(program: ExportedProgram, chosen: Set[Node]) -> None:
    """Make the metadata of what delegates read tell how it lies in memory when the program runs.

    Inputs of the program lie as they were captured, and quantizing keeps that. Delegates return contiguous tensors.
    What operators on the CPU return depends on ExecuTorch's later passes (a permute copies there), so a result that
    was not contiguous at capture is copied into a contiguous one before a delegate reads it.

    Args:
        chosen: the nodes that will be delegated.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor) or meta.is_contiguous():
            continue
        if node in chosen:
            node.meta["val"] = meta.contiguous()
        elif node.op == "call_function" and not _keeps_format(node):
            readers = [user for user in node.users if user in chosen]
            if readers:
                with graph.inserting_after(node):
                    form = {"memory_format": torch.contiguous_format}
                    copy = graph.call_function(torch.ops.aten.clone.default, (node,), form)
                copy.meta |= {**node.meta, "val": meta.contiguous(), BOUNDARY: True}
                for user in readers:
                    user.replace_input_with(node, copy)


def _keeps_format(node: Node) -> bool:
    source = node.args[0] if node.args else None
    return (
        (is_quantize(node) or is_dequantize(node))
        and isinstance(source, Node)
        and (source.op == "placeholder" or _keeps_format(source))
    )
