"""How tensors lie in memory where delegates begin: a channels_last input is the NHWC that convolutions take."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.aten.int64 import BOUNDARY
from arm_backend_core.nodes import is_dequantize, is_quantize, memory_order
from arm_backend_core.permutation import inverse


def settle_memory_formats(program: ExportedProgram, chosen: Set[Node]) -> None:
    """Make the metadata of what delegates read tell how it lies in memory when the program runs.

    Inputs of the program are channels_last if they were so at capture, and quantizing keeps that. Delegates return
    contiguous tensors. What operators on the CPU return depends on ExecuTorch's later passes (a permute copies there),
    so a result that was not contiguous at capture is copied into a contiguous one before a delegate reads it.

    Args:
        chosen: the nodes that will be delegated.
    """
    _settle_inputs(program)
    _settle_written_buffers(program)
    for node in list(program.graph.nodes):
        meta = node.meta.get("val")
        if node.op != "call_function" or not isinstance(meta, torch.Tensor):
            continue
        source = _kept_format(node)
        if node in chosen:
            node.meta["val"] = meta.contiguous()
        elif source is not None:
            node.meta["val"] = torch.empty_like(source.meta["val"], dtype=meta.dtype)
        elif not meta.is_contiguous():
            _copy_for(node, [user for user in node.users if user in chosen])


def _settle_inputs(program: ExportedProgram) -> None:
    """Make inputs contiguous or channels_last, as ExecuTorch's runtime takes them, whatever the sample's strides were.

    A transposed sample is not; nor is ``image.permute(2, 0, 1)[None]`` by the stride of its first dimension.
    """
    user_inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        meta = node.meta.get("val")
        if node.name in user_inputs and isinstance(meta, torch.Tensor):
            order = memory_order(meta)
            laid = torch.empty_like(meta.permute(order), memory_format=torch.contiguous_format)
            node.meta["val"] = laid.permute(inverse(order))


def _settle_written_buffers(program: ExportedProgram) -> None:
    """Make them contiguous, as what delegates write to them is: the runtime copies between equal formats alone."""
    written = set(program.graph_signature.buffers_to_mutate.values())
    for node in program.graph.find_nodes(op="placeholder"):
        name = program.graph_signature.inputs_to_buffers.get(node.name)
        if name in written:
            store: dict[str, Any] = program.state_dict if name in program.state_dict else program.constants
            store[name] = store[name].contiguous()
            node.meta["val"] = node.meta["val"].contiguous()


def _kept_format(node: Node) -> Node | None:
    """What ``node`` quantizes or casts, if that is an input of the program, or such a node behind one."""
    if not (is_quantize(node) or is_dequantize(node) or node.meta.get(BOUNDARY)):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    return source if source.op == "placeholder" or _kept_format(source) is not None else None


def _copy_for(node: Node, readers: list[Node]) -> None:
    """Give ``readers`` a contiguous copy of ``node``."""
    if not readers:
        return
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    copy.meta |= {**node.meta, "val": node.meta["val"].contiguous(), BOUNDARY: True}
    for user in readers:
        user.replace_input_with(node, copy)
