"""A quantized program with one scale for each weight tensor, in place of one for each channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arm_backend_core.program import constants_of, copied, store_of
from arm_recipes._internal.executorch_programs import simplify_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_Q = torch.ops.quantized_decomposed


def use_per_tensor_scales(program: ExportedProgram) -> ExportedProgram | None:
    """The program with weights and biases rounded to the largest scale of their channels; None where it has none."""
    program = copied(program)
    simplify_call(program)
    tensors = constants_of(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    found = False
    for node in program.graph.find_nodes(op="call_function", target=_Q.dequantize_per_channel.default):
        held, scales, _, axis, low, high, dtype = node.args[:7]
        if held not in tensors or scales not in tensors:
            continue
        found = True
        channels = tensors[scales].double()
        largest = float(channels.max())
        along = [1] * tensors[held].dim()
        along[int(axis)] = -1
        real = tensors[held].double() * channels.reshape(along)
        name = targets[held.name]
        rounded = torch.round(real / largest).clamp(low, high).to(tensors[held].dtype)
        store = store_of(program, name)
        store[name] = torch.nn.Parameter(rounded, requires_grad=False) if name in program.state_dict else rounded
        with program.graph.inserting_before(node):
            plain = program.graph.call_function(
                _Q.dequantize_per_tensor.default, (held, largest, 0, low, high, dtype), dict(node.kwargs)
            )
        plain.meta = dict(node.meta)
        node.replace_all_uses_with(plain)
        program.graph.erase_node(node)
    program.graph_module.recompile()
    return program if found else None
