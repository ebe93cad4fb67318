"""Lifted constants: turn the parameters, buffers and constants of a program into attributes of its module, and back.

Between ``unlift`` and ``lift``, nodes of the graph write the new values of buffers (``write_buffer_mutations``). State
then carries over from one calibration sample to the next.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.graph_edits import add_buffer
from arm_backend_core.nodes import PARAMETER
from arm_backend_core.program import TENSOR_KINDS, TensorIdentity, replace_parts, store_of, tensor_identity


def unlift(
    program: ExportedProgram, states: dict[TensorIdentity, Tensor]
) -> tuple[dict[str, InputSpec], dict[Node, TensorIdentity]]:
    """Turn the placeholders of parameters, buffers and constants into attributes of the program's module.

    Args:
        program: its graph is edited.
        states: {identity of a buffer: copy of the buffer}. The function adds missing buffers. The copy becomes the
            module's attribute. A buffer without elements is not copied.

    Returns:
        {attribute name: input spec}, and {node of an attribute: identity of its tensor}.
    """
    module, graph = program.graph_module, program.graph
    placeholders = graph.find_nodes(op="placeholder")
    first_operation = next(node for node in graph.nodes if node.op != "placeholder")
    specs, tensor_ids = {}, {}
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind not in TENSOR_KINDS:
            continue
        tensor = store_of(program, str(spec.target))[str(spec.target)].detach()
        tensor_ids[node] = key = tensor_identity(tensor)
        if spec.kind is InputKind.BUFFER:  # the program may write the buffer: calibration writes to a copy
            tensor = states.setdefault(key, tensor.clone()) if tensor.numel() else tensor
        node.target = add_buffer(module, node.name, tensor)
        node.op = "get_attr"
        node.meta[PARAMETER] = spec.kind is InputKind.PARAMETER
        first_operation.prepend(node)
        specs[str(node.target)] = spec
    return specs, tensor_ids


def write_buffer_mutations(program: ExportedProgram, specs: dict[str, InputSpec]) -> None:
    """Add nodes that write the new values of buffers at the end of the graph: state carries over to the next sample."""
    attributes = {node.target: node for node in program.graph.find_nodes(op="get_attr")}
    buffers = {spec.target: attributes[name] for name, spec in specs.items()}
    output = program.graph.output_node()
    for spec, value in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            with program.graph.inserting_before(output):
                write = program.graph.call_function(torch.ops.aten.copy_.default, (buffers[spec.target], value))
            write.meta["val"] = value.meta["val"]


def return_buffer_mutations(program: ExportedProgram) -> None:
    """Undo ``write_buffer_mutations``: return the new values of buffers, in order, before the other results."""
    output = program.graph.output_node()
    writes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    results = pytree.tree_leaves(output.args[0])
    output.args = (tuple(write.args[1] for write in writes) + tuple(results[len(writes) :]),)
    for write in writes:
        program.graph.erase_node(write)


def lift(program: ExportedProgram, specs: dict[str, InputSpec], mode: FakeTensorMode | None) -> ExportedProgram:
    """Turn attributes into placeholders again.

    An attribute in ``specs`` gets its input spec back; any other becomes a constant.
    """
    module, graph = program.graph_module, program.graph
    attributes: dict[str, Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        if not isinstance(attrgetter(str(node.target))(module), Tensor):
            continue
        if attributes.setdefault(str(node.target), node) is not node:
            node.replace_all_uses_with(attributes[str(node.target)])
            graph.erase_node(node)
    insertion_point = next(node for node in graph.nodes if node.op != "get_attr")
    inputs, constants = [], dict(program.constants)
    for name in sorted(attributes, key=lambda name: name not in specs):
        node, tensor = attributes[name], attrgetter(name)(module)
        node.op, node.target = "placeholder", node.name
        node.meta["val"] = make_fake(mode, tensor, tensor.dtype)
        insertion_point.prepend(node)
        argument = TensorArgument(node.name)
        if name in specs:
            inputs.append(replace(specs[name], arg=argument))
        else:
            inputs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, name, None))
            constants[name] = tensor.detach()
    used = {spec.target for spec in inputs}
    signature = program.graph_signature
    user_specs = [spec for spec in signature.input_specs if spec.kind not in TENSOR_KINDS]
    results = pytree.tree_leaves(graph.output_node().args[0])
    outputs = [
        # Tensors and computed numbers, such as data-dependent sizes, are nodes. Constant outputs are not.
        replace(spec, arg=replace(spec.arg, name=node.name)) if isinstance(node, Node) else spec
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    state = {name: tensor for name, tensor in program.state_dict.items() if name in used}
    constants = {name: tensor for name, tensor in constants.items() if name in used}
    return replace_parts(program, module, ExportGraphSignature(inputs + user_specs, outputs), state, constants)


def make_fake(mode: FakeTensorMode | None, example: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a fake tensor with the shape and strides of ``example``; without a ``mode``, make a meta tensor.

    It calls the constructor directly, because PyTorch's functions take half a millisecond for a fake tensor.
    """
    empty = torch.empty_strided(example.shape, example.stride(), dtype=dtype, device="meta")
    return empty if mode is None else FakeTensor(mode, empty, example.device)
