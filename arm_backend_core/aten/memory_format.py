"""Memory formats of program inputs and mutated buffers.

A channels_last input has the NHWC order that TOSA convolutions take, so it needs no TRANSPOSE.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from arm_backend_core.nodes import boundary_dim_order, dim_order_of, is_dequantize, is_quantize
from arm_backend_core.permutation import identity, inverse
from arm_backend_core.program import store_of


def normalize_memory_formats(program: ExportedProgram) -> None:
    """Set the strides in the metadata of inputs and mutated buffers to the strides at run time."""
    _normalize_inputs(program)
    _normalize_mutated_buffers(program)


def _normalize_inputs(program: ExportedProgram) -> None:
    """Make inputs contiguous or channels_last, as ExecuTorch's runtime requires.

    The sample input of the export may have other strides. Examples: transposed tensors, and
    ``image.permute(2, 0, 1)[None]``, whose dimension 0 has the stride C, and not H * W * C.
    """
    user_inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        meta = node.meta.get("val")
        if node.name in user_inputs and isinstance(meta, torch.Tensor):
            order = dim_order_of(meta)
            stored = torch.empty_like(meta.permute(order), memory_format=torch.contiguous_format)
            node.meta["val"] = stored.permute(inverse(order))
    for node in program.graph.nodes:
        if node.op == "call_function" and (is_quantize(node) or is_dequantize(node)):
            source = node.args[0]
            if source.op == "placeholder" or boundary_dim_order(source) != identity(source.meta["val"].dim()):
                node.meta["val"] = torch.empty_like(source.meta["val"], dtype=node.meta["val"].dtype)


def _normalize_mutated_buffers(program: ExportedProgram) -> None:
    """Make mutated buffers contiguous, as delegate results are: the runtime copies only between equal dim orders."""
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    buffers = program.graph_signature.inputs_to_buffers
    for node in program.graph.find_nodes(op="placeholder"):
        name = buffers.get(node.name)
        if name in mutated:
            store = store_of(program, name)
            store[name] = store[name].contiguous()
            node.meta["val"] = node.meta["val"].contiguous()
