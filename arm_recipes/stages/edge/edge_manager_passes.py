"""Edge manager passes: edit the operators outside of delegates after lowering.

A recipe lists these functions as ``edge_manager_transform_passes``. They edit nodes in place and return no passes,
because ExecuTorch retraces every method, including delegates, to apply a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExportedProgram
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from arm_backend_core.aten.functionalize import drop_final_copies
from arm_backend_core.nodes import is_float, is_integer, operator_name
from arm_backend_core.program import update_output_names
from arm_backend_core.targets.cortex_m import Isa
from arm_recipes._internal.messages import warn


def quantize_io(manager: EdgeProgramManager) -> Sequence[Any]:
    """Make inputs and outputs integers: remove quantize operators of inputs, and dequantize operators of outputs.

    Scale, zero point, range and dtype are stored in the program as constant methods such as ``forward_input0_scale``,
    with the names of ExecuTorch's ``quantize_io_pass``. Inputs that are not quantized (token indices, a boolean mask)
    are unchanged. A float input stays float, with a warning, unless all its users quantize it with equal parameters. A
    float output that no dequantize operator computes stays float too, with a warning.
    """
    from executorch.exir.passes.quantize_io_pass import quantize_input, quantize_output

    for method in sorted(manager.methods):
        program = manager.exported_program(method)
        for index, node in enumerate(_user_inputs(program)):
            if _merge_equal_quantizes(node):
                _add_io_constant_methods(manager, method, "input", index, quantize_input(program, index))
            elif is_float(node):
                consumers = ", ".join(sorted({operator_name(user) for user in node.users})) or "nothing"
                description = f"input {index} ('{node.name}') of '{method}'"
                warn(f"quantized_io: {description} stays float; it is used by {consumers}")
        specs = program.graph_signature.output_specs
        buffer_outputs = sum(spec.kind is OutputKind.BUFFER_MUTATION for spec in specs)
        for index, (_, value) in enumerate(program_outputs(program)):
            position = buffer_outputs + index
            if not isinstance(value, Node):
                continue
            if value.target is _DEQUANTIZE:
                _add_io_constant_methods(manager, method, "output", index, quantize_output(program, position))
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

    For integers, the result of ExecuTorch's kernels has the sign of x: -3 % 2 is 1 in PyTorch and -1 in ExecuTorch.
    """
    aten = exir_ops.edge.aten
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        remainders = [
            node for node in module.graph.nodes if node.target in (aten.remainder.Scalar, aten.remainder.Tensor)
        ]
        for node in remainders:
            x, y = node.args
            if not is_integer(node):
                continue
            with module.graph.inserting_before(node):
                if not isinstance(y, Node):
                    y = _make_scalar(y, node)
                quotient = module.graph.call_function(aten.div.Tensor_mode, (x, y), {"rounding_mode": "floor"})
                product = module.graph.call_function(aten.mul.Tensor, (quotient, y))
            quotient.meta, product.meta = dict(node.meta), dict(node.meta)
            node.target, node.args = aten.sub.Tensor, (x, product)
        module.recompile()
    return []


def lower_scaled_addition(manager: EdgeProgramManager) -> Sequence[Any]:
    """Rewrite x + alpha * y on the CPU to a product and a sum if x has one element and y has several.

    With such operands, ExecuTorch's optimized ``add`` kernel multiplies x, not y, by alpha. Edge programs cast both
    operands to the result's type, so the product has this type too.
    """
    aten = exir_ops.edge.aten
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            x, y = node.args
            alpha = node.kwargs.get("alpha", 1)
            if alpha == 1 or not isinstance(y, Node) or x.meta["val"].numel() != 1 or y.meta["val"].numel() == 1:
                continue
            with module.graph.inserting_before(node):
                product = module.graph.call_function(aten.mul.Tensor, (y, _make_scalar(alpha, y)))
            product.meta = dict(y.meta)
            node.args, node.kwargs = (x, product), {}
        module.recompile()
    return []


def lower_shifts(manager: EdgeProgramManager) -> Sequence[Any]:
    """Rewrite the operators of ``x << y`` and ``x >> y`` on the CPU to equivalent operators with kernels in ExecuTorch.

    The operators are equivalent for shifts by 0 or more bits, and by fewer bits than x has. PyTorch does not define the
    results of other shifts.
    """
    aten = exir_ops.edge.aten
    equal_operators = {
        aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
        aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
        aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
        aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    }
    number_shifts = {
        aten.bitwise_left_shift.Scalar_Tensor: aten.bitwise_left_shift.Tensor,
        aten.bitwise_right_shift.Scalar_Tensor: aten.bitwise_right_shift.Tensor,
    }
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        for node in module.graph.nodes:
            if not is_integer(node):
                continue
            node.target = equal_operators.get(node.target, node.target)
            if node.target in number_shifts:
                number, amount = node.args
                with module.graph.inserting_before(node):
                    node.args = (_make_scalar(number, node), amount)
                node.target = number_shifts[node.target]
        module.recompile()
    return []


def _make_scalar(value: Any, like: Node) -> Node:
    """Insert a scalar tensor (shape []) with the value, in the dtype of ``like``'s result."""
    example = like.meta["val"]
    scalar = like.graph.call_function(exir_ops.edge.aten.full.default, ([], value), {"dtype": example.dtype})
    scalar.meta = {**like.meta, "val": example.new_full((), value)}
    return scalar


def remove_redundant_copies(manager: EdgeProgramManager) -> Sequence[Any]:
    """Remove redundant copies of the new values of mutated inputs and buffers.

    If ExecuTorch retraces a method, it inserts a copy on the CPU before the final write of each mutation.
    """
    for method in manager.methods:
        program = manager.exported_program(method)
        drop_final_copies(program.graph)
        update_output_names(program)
        program.graph_module.recompile()
    return []


def dequantize_after_gather(manager: EdgeProgramManager) -> Sequence[Any]:
    """Dequantize the elements that a gather on the CPU (``_GATHERS``) selects, not the whole weight tensor.

    A weight tensor that is dequantized before the gather takes RAM for all its elements in float32. If a consumer
    quantizes the selected elements with the same parameters, they stay integers: quantizing a dequantized integer
    returns this integer.
    """
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        for target in _GATHERS:
            for node in module.graph.find_nodes(op="call_function", target=target):
                weight: Any = node.args[0]
                if weight.target is _DEQUANTIZE and not weight.kwargs:
                    _move_dequantize_after(node, weight)
        module.graph.eliminate_dead_code()
        module.recompile()
    return []


def _move_dequantize_after(gather: Node, dequantize: Node) -> None:
    """Move the dequantize operator of a weight tensor behind a gather.

    A consumer that quantizes with the same parameters is replaced by the gather, which then returns integers.
    """
    arguments: Any = dequantize.args
    weight, *parameters = arguments
    meta, users = dict(gather.meta), list(gather.users)
    gather.args = (weight, *gather.args[1:])
    gather.meta["val"] = meta["val"].to(weight.meta["val"].dtype)
    for user in users:
        if user.target is _QUANTIZE and list(user.args[1:]) == parameters:
            user.replace_all_uses_with(gather)
    if any(user.users or user.op == "output" for user in users):
        with gather.graph.inserting_after(gather):
            values = gather.graph.call_function(_DEQUANTIZE, (gather, *parameters))
        values.meta = meta
        gather.replace_all_uses_with(values, delete_user_cb=lambda user: user in users)


def copy_aliased_outputs(manager: EdgeProgramManager) -> Sequence[Any]:
    """Copy outputs that are inputs, constants or earlier outputs, for ``plan_outputs=False``.

    The application sets the memory of each output. Without the copy, this would also replace the memory of an input
    that is the same tensor as the output: the input would lose its data. If two outputs were one tensor, only the last
    one would be written.
    """
    for method in manager.methods:
        _copy_outputs(manager.exported_program(method), lambda value, seen: value.op == "placeholder" or value in seen)
    return []


def copy_returned_inputs(manager: EdgeProgramManager) -> Sequence[Any]:
    """Copy outputs that are inputs, for ``plan_inputs=False`` with planned outputs.

    Such an output has no planned memory. If a runtime allocates memory for it, as ExecuTorch's Python binding does, the
    input gets the address of this memory, and loses its data.
    """
    for method in manager.methods:
        program = manager.exported_program(method)
        inputs = set(_user_inputs(program))
        _copy_outputs(program, lambda value, _, inputs=inputs: value in inputs)  # type: ignore[misc]
    return []


def _copy_outputs(program: ExportedProgram, needs_copy: Callable[[Node, set[Node]], bool]) -> None:
    """Copy the model's outputs for which ``needs_copy(output, earlier outputs)`` is true."""
    output = program.graph.output_node()
    values, seen = list(output.args[0]), set[Node]()
    for index, (spec, value) in enumerate(zip(program.graph_signature.output_specs, values, strict=True)):
        if spec.kind is not OutputKind.USER_OUTPUT or not isinstance(value, Node):
            continue
        if needs_copy(value, seen):
            tensor = value.meta["val"]
            with program.graph.inserting_before(output):
                copy = program.graph.call_function(
                    exir_ops.edge.dim_order_ops._clone_dim_order.default,
                    (value,),
                    {"dim_order": list(tensor.dim_order())},
                )
            copy.meta = {**value.meta, "val": tensor.clone()}
            values[index] = copy
        seen.add(value)
    output.args = (tuple(values),)
    update_output_names(program)
    program.graph_module.recompile()


def use_cortex_m_quantize(manager: EdgeProgramManager) -> Sequence[Any]:
    """Replace quantize and dequantize outside the delegates by the ``cortex_m`` operators of firmware.

    ``cortex_m`` has no kernels for per-channel parameters, for integers other than int8 and int16, and for
    floating-point types other than float32. Such nodes keep ExecuTorch's ``quantized_decomposed`` operators. ExecuTorch
    finds their out variants, because the partitioner has loaded the library that registers them.
    """
    from arm_backend_core.cortex_m.custom_ops import edge_operator

    operators = {
        _QUANTIZE: edge_operator("quantize_per_tensor"),
        _DEQUANTIZE: edge_operator("dequantize_per_tensor"),
    }
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        for node in module.graph.nodes:
            # The operators have the same arguments and results, so the node's metadata stays valid.
            if node.target not in operators or node.kwargs or node.args[5] not in (torch.int8, torch.int16):
                continue
            float_node = node.args[0] if node.target is _QUANTIZE else node
            if float_node.meta["val"].dtype is torch.float32:
                node.target = operators[node.target]
        module.recompile()
    return []


def use_cortex_m_kernels(isa: Isa, manager: EdgeProgramManager) -> Sequence[Any]:
    """Replace this project's kernel operators by ExecuTorch's ``cortex_m`` operators, with their scratch tensors.

    ExecuTorch's memory plan then includes the scratch memory, so the kernels allocate no memory themselves.
    """
    from arm_backend_core.cortex_m.library_kernels import lower_to_library_kernels

    for method in manager.methods:
        lower_to_library_kernels(manager.exported_program(method).graph_module, isa)
    return []


#: Embeddings and other gathers: operators that only select elements of their first argument.
_GATHERS = (
    exir_ops.edge.aten.embedding.default,
    exir_ops.edge.aten.index.Tensor,
    exir_ops.edge.aten.index_select.default,
    exir_ops.edge.aten.gather.default,
)
_QUANTIZE = exir_ops.edge.quantized_decomposed.quantize_per_tensor.default
_DEQUANTIZE = exir_ops.edge.quantized_decomposed.dequantize_per_tensor.default


def _user_inputs(program: ExportedProgram) -> list[Node]:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes[name] for name in program.graph_signature.user_inputs if name in nodes]


def program_outputs(program: ExportedProgram) -> list[tuple[str, Any]]:
    """Return (name, value) of a program's outputs: the new values of mutated inputs, then the model's outputs.

    In the graph, the new values of mutated buffers come first. A program does not return them.
    """
    values = program.graph.output_node().args[0]
    outputs: list[tuple[str, Any]] = []
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            outputs.append((f"{spec.target}_written", value))
        elif spec.kind is not OutputKind.BUFFER_MUTATION:
            outputs.append((f"output{len(outputs)}", value))
    return outputs


def _merge_equal_quantizes(node: Node) -> bool:
    """Merge the quantize operators of an input.

    Returns:
        Whether the input has quantize operators with equal parameters, and no other users. Otherwise, nothing changes.
    """
    users = list(node.users)
    if not users or any(user.target is not _QUANTIZE or user.args != users[0].args for user in users):
        return False
    first = users[0]
    for other in users[1:]:
        other.replace_all_uses_with(first)
        node.graph.erase_node(other)
    return True


def _add_io_constant_methods(
    manager: EdgeProgramManager, method: str, side: str, index: int, parameters: Sequence[Any]
) -> None:
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
