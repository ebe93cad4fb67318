"""Helpers to read, copy and rewrite an ExportedProgram."""

from __future__ import annotations

import builtins
import copy
import keyword
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from arm_backend_core.graph_edits import add_buffer_node, eliminate_dead_code
from arm_backend_core.nodes import evaluate_node, is_constant, is_dequantize, is_quantize

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

#: Kinds of graph inputs that are tensors of the model.
TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

Tensors = dict[str, Any]


def constants_of(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Map the placeholders of parameters, constants and buffers to their tensors.

    Buffers that an output of the program updates are left out.
    """
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    tensors: dict[Node, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in TENSOR_KINDS:
            store = store_of(program, str(spec.target))
            if spec.target not in mutated and spec.target in store and spec.arg.name in nodes:
                tensors[nodes[spec.arg.name]] = store[str(spec.target)]
    return tensors


def store_of(program: ExportedProgram, name: str) -> Tensors:
    """The dictionary that holds the parameter, buffer or constant ``name``: ``state_dict`` or ``constants``."""
    return program.state_dict if name in program.state_dict else program.constants


def copy_program(program: ExportedProgram) -> ExportedProgram:
    """Copy graph, signature, and the dictionaries of parameters, buffers and constants; the tensors are shared."""
    signature = program.graph_signature
    specs = ([_copy_spec(spec) for spec in side] for side in (signature.input_specs, signature.output_specs))
    stores = dict(program.state_dict), dict(program.constants)
    return _assemble(program, copy_module(program.graph_module), ExportGraphSignature(*specs), *stores)


def _copy_spec(spec: Any) -> Any:
    """Copy the spec of an input or output, and its argument."""
    result = copy.copy(spec)
    result.arg = copy.copy(spec.arg)
    return result


def replace_parts(
    program: ExportedProgram, module: GraphModule, signature: ExportGraphSignature, state: Tensors, constants: Tensors
) -> ExportedProgram:
    """Copy ``program`` shallowly with another module, signature and tensors, and check the result."""
    result = _assemble(program, module, signature, state, constants)
    result.validate()
    return result


def _assemble(
    program: ExportedProgram, module: GraphModule, signature: ExportGraphSignature, state: Tensors, constants: Tensors
) -> ExportedProgram:
    """Like ``replace_parts``, without the check. fx generates the module's Python code lazily."""
    result = copy.copy(program)
    result._graph_module = _LazyGraphModule(module, module.graph)
    result._graph_module.meta.update(module.meta)
    result._graph_signature, result._state_dict, result._constants = signature, state, constants
    return result


def build_program(program: ExportedProgram, graph: torch.fx.Graph, constants: dict[Node, InputSpec]) -> ExportedProgram:
    """Build a program from a graph.

    Args:
        program: the program that holds the constants.
        graph: the graph of the new program.
        constants: {placeholder of a constant: its input spec in ``program``}. Other placeholders are user inputs.
    """
    placeholders, returned = graph.find_nodes(op="placeholder"), pytree.tree_leaves(graph.output_node().args[0])
    input_specs = [
        replace(constants[node], arg=TensorArgument(node.name))
        if node in constants
        else InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
        for node in placeholders
    ]
    output_specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in returned]
    inputs: tuple[Any, ...] = (tuple(set(placeholders) - constants.keys()), {})
    structure = ModuleCallSignature([], [], pytree.tree_structure(inputs), pytree.tree_structure(tuple(returned)))
    targets = {str(spec.target) for spec in constants.values()}
    all_stores = (program.state_dict, program.constants)
    stores = ({name: value for name, value in store.items() if name in targets} for store in all_stores)
    # ExportedProgram's constructor would generate and compile Python code for every program. Copying ``program`` with
    # another module avoids this.
    result = replace_parts(
        program, _LazyGraphModule(torch.nn.Module(), graph), ExportGraphSignature(input_specs, output_specs), *stores
    )
    result._module_call_graph = [ModuleCallEntry("", structure)]
    result._range_constraints, result._example_inputs = {}, None
    return result


def copy_module(module: GraphModule) -> GraphModule:
    """Copy a module's graph and keep the nodes' names; parameters and submodules are shared."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for node, duplicate in copies.items():
        # fx does not give new nodes names of Python builtins, but an input may be called "input".
        duplicate.name = node.name
    result = _LazyGraphModule(module, graph)
    result.meta.update(module.meta)
    return result


def drop_assertions(program: ExportedProgram) -> None:
    """Remove assertions on types (at casts) and values (``one_hot``, inverses): ExecuTorch lacks their kernels."""
    graph = program.graph_module.graph
    aten = torch.ops.aten
    checks = aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._linalg_check_errors.default
    for check in (*checks, aten._assert_scalar.default):
        for node in graph.find_nodes(op="call_function", target=check):
            graph.erase_node(node)


def lift_constants(program: ExportedProgram) -> None:
    """Lift the ``get_attr`` constants that passes added: turn them into placeholders in front of the user inputs.

    ExecuTorch's own pass (``lift_constant_tensor_pass``) is not used, because it confuses the names of constants in a
    program without inputs.
    """
    graph, specs = program.graph_module.graph, program.graph_signature.input_specs
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode([node.meta.get("val") for node in placeholders])
    index = next((i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    first = next(x for x in graph.nodes if x in placeholders[index:] or x.op not in ("placeholder", "get_attr"))
    for node in graph.find_nodes(op="get_attr"):
        tensor = attrgetter(str(node.target))(program.graph_module)
        if not isinstance(tensor, torch.Tensor):
            continue
        number = next(i for i in count(len(program.state_dict)) if f"_lifted_constant_{i}" not in program.state_dict)
        node.op, node.target = "placeholder", f"_lifted_constant_{number}"
        node.meta["val"] = mode.from_tensor(tensor, static_shapes=True) if mode else tensor
        node.meta["val"].constant = tensor
        first.prepend(node)
        specs.insert(index, InputSpec(InputKind.BUFFER, TensorArgument(node.name), node.target, persistent=True))
        program.state_dict[node.target] = tensor
        index += 1
    program.graph_module.recompile()


def eliminate_dead_constants(program: ExportedProgram) -> None:
    """Remove the parameters, buffers and constants that no node reads. Buffers that the program updates stay."""
    dead = {node.name: node for node in constants_of(program) if not node.users}
    live_specs = []
    for spec in program.graph_signature.input_specs:
        if spec.arg.name not in dead:
            live_specs.append(spec)
            continue
        program.graph.erase_node(dead[spec.arg.name])
        for store in (program.state_dict, program.constants):
            store.pop(str(spec.target), None)
    program.graph_signature.input_specs[:] = live_specs


def fold_constant_outputs(program: ExportedProgram) -> bool:
    """Replace each output that a program computes from constants alone by a copy of its value.

    Otherwise ExecuTorch would run the operators of such an output, and it aborts or fails on some that PyTorch accepts,
    such as ``logsumexp`` of a scalar, or ``interpolate``. Outputs without elements stay, and so do outputs that are
    computed with quantize or dequantize nodes.

    Returns:
        Whether there is an output that is computed from constants alone, without quantize and dequantize nodes. Also
        True if this output stays because it has no elements.
    """
    graph, values = program.graph_module.graph, dict[Node, Any](constants_of(program))
    for node in graph.nodes:
        if node.op == "call_function" and is_constant(node, values) and not (is_quantize(node) or is_dequantize(node)):
            values[node] = None  # evaluated below, only if it is returned
    output = graph.output_node()
    returned = [node for node in output.all_input_nodes if node.op == "call_function" and node in values]
    for node, value in [(node, _evaluate_constant(node, values)) for node in returned]:
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        with graph.inserting_before(node):
            constant = add_buffer_node(
                program.graph_module, f"{node.name}_value", value.new_empty(value.shape).copy_(value)
            )
            duplicate = graph.call_function(torch.ops.aten.clone.default, (constant,))
        traced = node.meta["val"]  # its strides are not copied: those of size-1 dimensions may be out of order
        duplicate.meta = {**node.meta, "val": traced.new_empty(traced.shape)}
        constant.meta["val"] = duplicate.meta["val"]
        node.replace_all_uses_with(duplicate)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = duplicate.name
    eliminate_dead_code(graph)
    return bool(returned)


def _evaluate_constant(node: Node, values: dict[Node, Any]) -> Any:
    if values[node] is None:
        values[node] = evaluate_node(node, lambda x: _evaluate_constant(x, values))
    return values[node]


def update_output_names(program: ExportedProgram) -> None:
    """Update the output names in the signature after nodes were replaced."""
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        spec.arg.name = node.name if isinstance(node, Node) else spec.arg.name


def avoid_builtin_names(program: ExportedProgram) -> None:
    """Rename placeholders whose name is a Python builtin or keyword, for example ``input``.

    fx would rename them when it copies the graph, and the signature would keep the old name.
    """
    placeholders = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if hasattr(builtins, node.name) or keyword.iskeyword(node.name):
            node._rename(f"{node.name}_1")
            spec.arg.name = node.name


def duplicate_dequantize_nodes(program: ExportedProgram) -> None:
    """Give each reader its own dequantize node, so that a delegate and the CPU do not share a dequantize node."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_dequantize(node):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                copy = graph.node_copy(node)
            user.replace_input_with(node, copy)


def user_inputs(program: ExportedProgram) -> list[Node]:
    """Return the placeholders that are not parameters, buffers or constants, in the order of the model's arguments."""
    constants = {
        *program.graph_signature.inputs_to_parameters,
        *program.graph_signature.inputs_to_buffers,
        *program.graph_signature.inputs_to_lifted_tensor_constants,
    }
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name not in constants]


def lowered_modules(module: GraphModule) -> Iterator[LoweredBackendModule]:
    """Delegates of all backends, including those called in loops, in the order of their ``get_attr`` nodes."""
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, LoweredBackendModule):
            yield value
        elif isinstance(value, GraphModule):
            yield from lowered_modules(value)


#: Key of a tensor: (address of its storage, or its ``id`` if it has no memory; storage offset; shape; strides; dtype).
TensorIdentity = tuple[Hashable, ...]


def tensor_identity(tensor: torch.Tensor) -> TensorIdentity:
    """A key that is equal for two tensors if they are the same view of the same memory.

    No two tensors without memory have the same key.
    """
    memory = tensor.untyped_storage().data_ptr()
    return (memory or id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two strided tensors have a byte of memory in common."""
    (start, stop), (other_start, other_stop) = _memory_span(first), _memory_span(second)
    if stop <= other_start or other_stop <= start:
        return False
    # Interleaved views, such as two columns of a matrix, have overlapping spans but no common byte.
    base = min(start, other_start)
    used = torch.zeros(max(stop, other_stop) - base, dtype=torch.bool)
    _view_bytes(used, first, start - base).fill_(True)
    return bool(_view_bytes(used, second, other_start - base).any())


def _memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and one past its last byte; equal if it has no memory."""
    address = tensor.untyped_storage().data_ptr()
    if not address or not tensor.numel():
        return 0, 0
    start = address + tensor.storage_offset() * tensor.itemsize
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start), int(start + (last + 1) * tensor.itemsize)


def _view_bytes(memory: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """View the elements of ``memory`` that represent the bytes of ``tensor``.

    ``memory`` has one element per byte of a range of addresses. ``offset`` is the index of the tensor's first byte.
    """
    # Expanded dimensions (stride 0) are left out, because PyTorch refuses to write to them.
    axes = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    strides = [stride * tensor.itemsize for _, stride in axes]
    return memory.as_strided([*(n for n, _ in axes), tensor.itemsize], [*strides, 1], offset)


def mutated_buffers(program: ExportedProgram) -> set[str]:
    """Names of the buffers that a program mutates, in place or through its outputs."""
    from arm_backend_core.nodes import is_written

    signature = program.graph_signature
    nodes = program.graph.find_nodes(op="placeholder")
    in_place = {signature.inputs_to_buffers.get(node.name) for node in nodes if is_written(node)}
    return {name for name in in_place if name is not None} | set(signature.buffers_to_mutate.values())
