"""Edge manager passes: edit the operators at delegate boundaries after lowering.

They are the ``edge_manager_transform_passes`` of a recipe. They edit nodes in place and return no passes, because
ExecuTorch retraces every method, including delegates, to apply a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExportedProgram
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from arm_backend_core.aten.functionalize import drop_final_copies
from arm_backend_core.nodes import is_float, is_integer, operator_name
from arm_recipes._internal.messages import warn


def remove_io_casts(manager: EdgeProgramManager) -> Sequence[Any]:
    """Remove quantize after inputs and dequantize before outputs, so that the program takes and returns integers.

    Scale, zero point, range and dtype are stored in the program as constant methods such as ``forward_input0_scale``,
    with the names of ExecuTorch's ``quantize_io_pass``. Inputs that are not quantized (token indices, a boolean mask)
    are unchanged. A float input or output that a CPU operator also uses stays float, with a warning.
    """
    from executorch.exir.passes.quantize_io_pass import quantize_input, quantize_output

    for method in sorted(manager.methods):
        program = manager.exported_program(method)
        for index, node in enumerate(_user_inputs(program)):
            if _joined_quantize(node):
                _publish(manager, method, "input", index, quantize_input(program, index))
            elif is_float(node):
                others = ", ".join(sorted({operator_name(user) for user in node.users})) or "nothing"
                what = f"input {index} ('{node.name}') of '{method}'"
                warn(f"quantized_io: {what} stays float; it is used by {others}")
        specs = program.graph_signature.output_specs
        buffers = sum(spec.kind is OutputKind.BUFFER_MUTATION for spec in specs)
        for index, (_, value) in enumerate(outputs_of(program)):
            position = buffers + index
            if not isinstance(value, Node):
                continue
            if value.target is _DEQUANTIZE:
                _publish(manager, method, "output", index, quantize_output(program, position))
                value = program.graph.output_node().args[0][position]
                specs[position].arg = TensorArgument(name=value.name)
            elif is_float(value):
                warn(f"quantized_io: output {index} of '{method}' stays float; it comes from {operator_name(value)}")
        program.graph_module.recompile()
    return []


def store_initial_state(manager: EdgeProgramManager) -> Sequence[Any]:
    """Store the initial values of mutated buffers in the program.

    ExecuTorch omits them by default: a counter with the initial value 5 would start with uninitialized memory.
    """
    for method in manager.methods:
        signature = manager.exported_program(method).graph_signature
        written = set(signature.buffers_to_mutate.values())
        for node in manager.exported_program(method).graph.nodes:
            if node.op == "placeholder" and signature.inputs_to_buffers.get(node.name) in written:
                node.meta["et_init_buffer"] = True
    return []


def lower_integer_remainder(manager: EdgeProgramManager) -> Sequence[Any]:
    """Rewrite integer ``remainder`` on the CPU to x - floor(x / y) * y.

    ExecuTorch's ``remainder`` kernels return the sign of x for integers: -3 % 2 is 1 in PyTorch and -1 in ExecuTorch.
    """
    aten = exir_ops.edge.aten
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        found = [node for node in module.graph.nodes if node.target in (aten.remainder.Scalar, aten.remainder.Tensor)]
        for node in found:
            x, y = node.args
            value = node.meta["val"]
            if not is_integer(node):
                continue
            with module.graph.inserting_before(node):
                if not isinstance(y, Node):
                    y = module.graph.call_function(aten.full.default, ([], y), {"dtype": value.dtype})
                    y.meta = {**node.meta, "val": value.new_full((), node.args[1])}
                down = module.graph.call_function(aten.div.Tensor_mode, (x, y), {"rounding_mode": "floor"})
                whole = module.graph.call_function(aten.mul.Tensor, (down, y))
            down.meta, whole.meta = dict(node.meta), dict(node.meta)
            node.target, node.args = aten.sub.Tensor, (x, whole)
        module.recompile()
    return []


def remove_redundant_copies(manager: EdgeProgramManager) -> Sequence[Any]:
    """Remove redundant copies of the new values of mutated inputs and buffers.

    If ExecuTorch retraces a method, each mutation becomes a copy on the CPU before the final write.
    """
    for method in manager.methods:
        program = manager.exported_program(method)
        drop_final_copies(program.graph)
        results = program.graph.output_node().args[0]
        for spec, value in zip(program.graph_signature.output_specs, results, strict=True):
            if isinstance(value, Node):
                spec.arg.name = value.name
        program.graph_module.recompile()
    return []


def use_cortex_m_quantize(manager: EdgeProgramManager) -> Sequence[Any]:
    """Replace quantize and dequantize outside the delegates by the ``cortex_m`` operators of firmware.

    Operators without such a kernel (per-channel weights of a CPU operator; floating-point types other than float32)
    keep ExecuTorch's operators, which the partitioner has loaded.
    """
    from arm_recipes.stages.edge import cortex_m

    operators = {_QUANTIZE: cortex_m.QUANTIZE, _DEQUANTIZE: cortex_m.DEQUANTIZE}
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        for node in module.graph.nodes:
            # The operators have the same arguments and results, so the node's metadata stays valid.
            if node.target not in operators or node.kwargs or node.args[5] not in cortex_m.DTYPES:
                continue
            real = node.args[0] if node.target is _QUANTIZE else node
            if real.meta["val"].dtype is torch.float32:
                node.target = operators[node.target]
        module.recompile()
    return []


_QUANTIZE = exir_ops.edge.quantized_decomposed.quantize_per_tensor.default
_DEQUANTIZE = exir_ops.edge.quantized_decomposed.dequantize_per_tensor.default


def _user_inputs(program: ExportedProgram) -> list[Node]:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes[name] for name in program.graph_signature.user_inputs if name in nodes]


def outputs_of(program: ExportedProgram) -> list[tuple[str, Any]]:
    """Names and values of a program's outputs: the new values of mutated inputs, then the model's outputs.

    The new values of mutated buffers come first in the graph's output, but are not returned.
    """
    values = program.graph.output_node().args[0]
    found: list[tuple[str, Any]] = []
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            found.append((f"{spec.target}_written", value))
        elif spec.kind is not OutputKind.BUFFER_MUTATION:
            found.append((f"output{len(found)}", value))
    return found


def _joined_quantize(node: Node) -> bool:
    """Whether all users of an input quantize it with the same parameters; then merges duplicates into the first."""
    users = list(node.users)
    if not users or any(user.target is not _QUANTIZE or user.args != users[0].args for user in users):
        return False
    first = users[0]
    for other in users[1:]:
        other.replace_all_uses_with(first)
        node.graph.erase_node(other)
    return True


def _publish(manager: EdgeProgramManager, method: str, side: str, index: int, parameters: Sequence[Any]) -> None:
    from executorch.exir.passes.quantize_io_pass import get_config_method_name
    from executorch.exir.tensor import scalar_type_enum

    scale, zero_point, low, high, dtype = parameters
    values = {
        "scale": scale,
        "zp": zero_point,
        "quant_min": low,
        "quant_max": high,
        "dtype": scalar_type_enum(dtype),
    }
    if manager._config_methods is None:
        manager._config_methods = {}
    for key, value in values.items():
        manager._config_methods[get_config_method_name(method, side, index, key)] = value
