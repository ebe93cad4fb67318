"""Programs as captured and as emitted; what is no public API of ExecuTorch is used here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from arm_recipes.runtime.whole import PREFIX

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule


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


def store_named_data(manager: EdgeProgramManager, key: str, data: bytes, alignment: int = 1) -> None:
    """Put data into the program that a runtime reads only when it is asked for ``key``."""
    manager._named_data_store.add_named_data(key, data, alignment)


def named_data_bytes(manager: EdgeProgramManager) -> int:
    """Of all data that is put into the program, or beside it, by name."""
    return sum(map(len, manager._named_data_store.buffers))


def lowered_modules(module: GraphModule) -> Iterator[LoweredBackendModule]:
    """Delegates of all backends, those that loops call among them, in the order in which they are called first."""
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    for node in module.graph.find_nodes(op="get_attr"):
        found = getattr(module, str(node.target), None)
        if isinstance(found, LoweredBackendModule):
            yield found
        elif isinstance(found, GraphModule):
            yield from lowered_modules(found)


def delegates_of(manager: EdgeProgramManager, method: str) -> Iterator[LoweredBackendModule]:
    """Our delegates of a method."""
    for module in lowered_modules(manager.exported_program(method).graph_module):
        if "arm_delegate" in (module.meta or {}):
            yield module


def restore_handles(program: ExportedProgram) -> None:
    """Give what stays on the CPU, and others' delegates, debug handles as ours have them: ExecuTorch numbers anew."""
    _restore(program.graph)
    for module in lowered_modules(program.graph_module):
        if "arm_delegate" in (module.meta or {}):
            continue
        ours = _restore(module.original_module.graph)
        told = (module.meta or {}).get("debug_handle_map") or {}
        for operation, handles in told.items():
            told[operation] = tuple(sorted({new for handle in handles for new in ours.get(handle, ())}))


def _restore(graph: Graph) -> dict[int, set[int]]:
    """Returns handles of the program by what nodes had in their place."""
    from arm_backend_core.nodes import handle_of

    restored: dict[int, set[int]] = {}
    for node in graph.nodes:
        before, handle = node.meta.pop("debug_handle", None), handle_of(node)
        if handle is not None:
            node.meta["debug_handle"] = handle
            restored.setdefault(before, set()).add(handle)
    return restored


def set_payload(module: LoweredBackendModule, payload: bytes, compile_specs: list[CompileSpec]) -> None:
    """Give a delegate another payload."""
    module._processed_bytes, module._compile_specs = payload, compile_specs


class _Pieces(list[bytes]):
    """A file whose content stays in the pieces that were written."""

    write = list.append


def pieces_of(manager: ExecutorchProgramManager) -> list[bytes]:
    """The emitted program in pieces of the manager's own memory; it would keep the copy that its ``buffer`` makes."""
    pieces = _Pieces()
    manager.write_to_file(pieces)
    return pieces


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

    from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum
    from arm_backend_core.targets.compile_spec import TosaCompileSpec

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
        kept = {
            key: entry
            for key, entry in present.pte_data.items()
            if key not in named_data and not key.startswith(PREFIX)  # the flatbuffers have their weights inside
        }
        store.merge_named_data_store(replace(present, pte_data=kept))
    for key, data in named_data.items():
        store.add_named_data(key, data)
    emitted, named = replace(manager._emitter_output, program=program), store.get_named_data_store_output()
    pte, _ = serialize_for_executorch(emitted, ExecutorchBackendConfig(), manager._data_serializer, named)
    return bytes(pte)
