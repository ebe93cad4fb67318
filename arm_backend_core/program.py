"""Reading and rewriting an ExportedProgram. What is not public API of ExecuTorch is used in this module alone."""

from __future__ import annotations

import builtins
import copy
import keyword
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from arm_backend_core.aten.constants import attribute
from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum
from arm_backend_core.nodes import drop_unread, evaluated, is_constant, is_dequantize, is_quantize
from arm_backend_core.targets.compile_spec import TosaCompileSpec

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager

Tensors = dict[str, Any]


def constants_of(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Tensors of the placeholders that are parameters, buffers or lifted constants, unless the program writes them."""
    written = set(program.graph_signature.buffers_to_mutate.values())
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    tensors: dict[Node, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            store: dict[str, Any] = program.state_dict if spec.target in program.state_dict else program.constants
            if spec.target not in written and spec.target in store and spec.arg.name in nodes:
                tensors[nodes[spec.arg.name]] = store[str(spec.target)]
    return tensors


def copied(program: ExportedProgram) -> ExportedProgram:
    """A program with graph, signature and tables of weights of its own; the weights are shared."""
    module, signature = copied_module(program.graph_module), copy.deepcopy(program.graph_signature)
    return with_parts(program, module, signature, dict(program.state_dict), dict(program.constants))


def with_parts(
    program: ExportedProgram, module: GraphModule, signature: ExportGraphSignature, state: Tensors, constants: Tensors
) -> ExportedProgram:
    """``program`` with these parts in place of its own; their Python code is written when it is asked for."""
    twin = copy.copy(program)
    twin._graph_module = _LazyGraphModule(module, module.graph)
    twin._graph_module.meta.update(module.meta)
    twin._graph_signature, twin._state_dict, twin._constants = signature, state, constants
    twin.validate()
    return twin


def copied_module(module: GraphModule) -> GraphModule:
    """A module with a graph of its own, every node with its name; parameters and submodules are shared."""
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, values))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for node, twin in values.items():
        # A new node is not given the name of a Python builtin, but an input may be called "input".
        twin.name = node.name
    result = _LazyGraphModule(module, graph)
    result.meta.update(module.meta)
    return result


def inputs_of(program: ExportedProgram) -> list[Node]:
    """What a caller gives to the program, in order."""
    held = {
        *program.graph_signature.inputs_to_parameters,
        *program.graph_signature.inputs_to_buffers,
        *program.graph_signature.inputs_to_lifted_tensor_constants,
    }
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name not in held]


def simplify_call(program: ExportedProgram) -> None:
    """Remove inputs that are numbers, strings or None: the graph has them as constants, and nothing reads the inputs.

    The containers of inputs or outputs are forgotten where something was removed, or where they are of a class that
    ExecuTorch cannot write down.
    """
    specs = program.graph_signature.input_specs
    constants = {spec.arg.name for spec in specs if isinstance(spec.arg, ConstantArgument)}
    top, *others = program.module_call_graph
    assert top.signature is not None
    signature = top.signature
    if constants:
        specs[:] = [spec for spec in specs if spec.arg.name not in constants]
        for node in list(program.graph.nodes):
            if node.op == "placeholder" and node.name in constants:
                program.graph.erase_node(node)
        program.graph_module.recompile()
    if constants or not _is_written(signature.in_spec):
        left = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
        flat = pytree.tree_structure((tuple(left), {}))
        signature = replace(signature, in_spec=flat, forward_arg_names=left)
    if not _is_written(signature.out_spec):
        flat = pytree.tree_structure(tuple(range(signature.out_spec.num_leaves)))
        signature = replace(signature, out_spec=flat)
    program._module_call_graph = [replace(top, signature=signature), *others]


def _is_written(spec: pytree.TreeSpec) -> bool:
    try:
        pytree.treespec_dumps(spec)
    except NotImplementedError:
        return False
    return True


def store_named_data(manager: EdgeProgramManager, key: str, data: bytes) -> None:
    """Put data into the program that a runtime reads only when it is asked for ``key``."""
    manager._named_data_store.add_named_data(key, data)


def with_tosa_delegates(
    manager: ExecutorchProgramManager, graphs: Mapping[bytes, bytes], named_data: Mapping[str, bytes]
) -> bytes:
    """A program like that of ``manager``, with TOSA flatbuffers in place of the payloads that were made from them.

    Args:
        graphs: checksum of a payload, as its compile spec has it -> flatbuffer.
        named_data: replaces what has the same key.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize._serialize import serialize_for_executorch
    from executorch.exir.schema import BackendDelegateInlineData

    program = copy.deepcopy(manager.executorch_program)
    for plan in program.execution_plan:
        for delegate in plan.delegates:
            check = next((spec.value for spec in delegate.compile_specs if spec.key == CHECKSUM_KEY), None)
            if check is None:  # another backend's
                continue
            flatbuffer = graphs[bytes(check)]
            program.backend_delegate_data[delegate.processed.index] = BackendDelegateInlineData(flatbuffer)
            delegate.id, delegate.compile_specs = TosaCompileSpec.backend_id, [checksum(flatbuffer)]
    store = NamedDataStore()
    present = manager._named_data
    if present is not None:
        kept = {key: entry for key, entry in present.pte_data.items() if key not in named_data}
        store.merge_named_data_store(replace(present, pte_data=kept))
    for key, data in named_data.items():
        store.add_named_data(key, data)
    emitted, named = replace(manager._emitter_output, program=program), store.get_named_data_store_output()
    pte, _ = serialize_for_executorch(emitted, ExecutorchBackendConfig(), manager._data_serializer, named)
    return bytes(pte)


def drop_assertions(program: ExportedProgram) -> None:
    """Remove checks of types at casts and of values (``one_hot``, inverses), which ExecuTorch has none of."""
    graph = program.graph_module.graph
    aten = torch.ops.aten
    for check in (aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._linalg_check_errors.default):
        for node in graph.find_nodes(op="call_function", target=check):
            graph.erase_node(node)


def lift_constants(program: ExportedProgram) -> None:
    """Turn get_attr constants that a pass has added into placeholders in front of the inputs, as the signature wants.

    ExecuTorch's own pass (``lift_constant_tensor_pass``) gives those of a program without inputs each other's names.
    """
    graph, specs = program.graph_module.graph, program.graph_signature.input_specs
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode([node.meta.get("val") for node in placeholders])
    place = next((i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    first = next(x for x in graph.nodes if x in placeholders[place:] or x.op not in ("placeholder", "get_attr"))
    for node in graph.find_nodes(op="get_attr"):
        tensor = attrgetter(str(node.target))(program.graph_module)
        if not isinstance(tensor, torch.Tensor):
            continue
        node.op, node.target = "placeholder", f"_lifted_constant_{len(program.state_dict)}"
        node.meta["val"] = mode.from_tensor(tensor, static_shapes=True) if mode else tensor
        node.meta["val"].constant = tensor
        first.prepend(node)
        specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(node.name), node.target, persistent=True))
        program.state_dict[node.target] = tensor
        place += 1
    program.graph_module.recompile()


def compute_constant_outputs(program: ExportedProgram) -> bool:
    """Compute what the program returns of constants alone; what is left of it is a copy.

    ExecuTorch ends the process, or fails, for some that PyTorch takes: ``logsumexp`` of a scalar, ``interpolate``.

    Returns:
        Whether there was any.
    """
    graph, values = program.graph_module.graph, dict[Node, Any](constants_of(program))
    for node in graph.nodes:
        if node.op == "call_function" and is_constant(node, values) and not (is_quantize(node) or is_dequantize(node)):
            values[node] = None  # computed where it is returned
    output = graph.output_node()
    returned = [node for node in output.all_input_nodes if node.op == "call_function" and node in values]
    for node, value in [(node, _computed(node, values)) for node in returned]:
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        with graph.inserting_before(node):
            constant = attribute(program.graph_module, f"{node.name}_value", value.new_empty(value.shape).copy_(value))
            duplicate = graph.call_function(torch.ops.aten.clone.default, (constant,))
        traced = node.meta["val"]  # strides of dimensions with one element may be out of order there
        duplicate.meta = {**node.meta, "val": traced.new_empty(traced.shape)}
        constant.meta["val"] = duplicate.meta["val"]
        node.replace_all_uses_with(duplicate)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = duplicate.name
    drop_unread(graph)
    return bool(returned)


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    if values[node] is None:
        values[node] = evaluated(node, lambda x: _computed(x, values))
    return values[node]


def avoid_builtin_names(program: ExportedProgram) -> None:
    """Rename inputs called ``input`` and the like: fx renames them when it copies a graph, the signature would not."""
    placeholders = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if hasattr(builtins, node.name) or keyword.iskeyword(node.name):
            node._rename(f"{node.name}_1")
            spec.arg.name = node.name


def split_dequantize(program: ExportedProgram) -> None:
    """Give every reader its own dequantize node, so that none is torn between a delegate and the CPU."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_dequantize(node):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                copy = graph.node_copy(node)
            user.replace_input_with(node, copy)
