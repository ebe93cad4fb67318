"""Per-tensor weight scales: requantize per-channel weights to one scale per tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arm_backend_core.program import constants_of, copy_program, store_of
from arm_recipes._internal.executorch_programs import normalize_call_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_QUANTIZED_DECOMPOSED = torch.ops.quantized_decomposed


def use_per_tensor_scales(program: ExportedProgram) -> ExportedProgram | None:
    """Requantize per-channel weights and biases to one scale per tensor: the largest scale of its channels.

    Returns:
        A changed copy of the program; None if it has no per-channel constants.
    """
    program = copy_program(program)
    normalize_call_signature(program)
    tensors = constants_of(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    is_changed = False
    for node in program.graph.find_nodes(
        op="call_function", target=_QUANTIZED_DECOMPOSED.dequantize_per_channel.default
    ):
        weight, scales, _, axis, low, high, dtype = node.args[:7]
        if weight not in tensors or scales not in tensors:
            continue
        is_changed = True
        channel_scales = tensors[scales].double()
        tensor_scale = float(channel_scales.max())
        broadcast_shape = [1] * tensors[weight].dim()
        broadcast_shape[int(axis)] = -1
        dequantized = tensors[weight].double() * channel_scales.reshape(broadcast_shape)
        name = targets[weight.name]
        rounded = torch.round(dequantized / tensor_scale).clamp(low, high).to(tensors[weight].dtype)
        store = store_of(program, name)
        store[name] = torch.nn.Parameter(rounded, requires_grad=False) if name in program.state_dict else rounded
        with program.graph.inserting_before(node):
            dequantize = program.graph.call_function(
                _QUANTIZED_DECOMPOSED.dequantize_per_tensor.default,
                (weight, tensor_scale, 0, low, high, dtype),
                dict(node.kwargs),
            )
        dequantize.meta = dict(node.meta)
        node.replace_all_uses_with(dequantize)
        program.graph.erase_node(node)
    program.graph_module.recompile()
    return program if is_changed else None
