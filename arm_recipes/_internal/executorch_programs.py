"""Access to captured and emitted programs, through private attributes of PyTorch and ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Graph
from torch.utils import _pytree as pytree

from arm_backend_core.compilation_log import delegate_record
from arm_backend_core.program import lowered_modules

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule


def normalize_call_signature(program: ExportedProgram) -> None:
    """Change the call signature of a program to one that ExecuTorch can call and serialize.

    Removes inputs that are numbers, strings or None: the graph contains their values as constants and does not read the
    inputs. Then replaces the pytree of the inputs by a flat tuple if an input was removed, or if the pytree contains a
    class that ``treespec_dumps`` cannot serialize. Also replaces the pytree of the outputs if it contains such a class.
    """
    specs = program.graph_signature.input_specs
    constants = {spec.arg.name for spec in specs if isinstance(spec.arg, ConstantArgument)}
    root_call, *others = program.module_call_graph
    assert root_call.signature is not None
    signature = root_call.signature
    if constants:
        specs[:] = [spec for spec in specs if spec.arg.name not in constants]
        for node in list(program.graph.nodes):
            if node.op == "placeholder" and node.name in constants:
                program.graph.erase_node(node)
        program.graph_module.recompile()
    if constants or not _is_serializable(signature.in_spec):
        remaining = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
        flat = pytree.tree_structure((tuple(remaining), {}))
        signature = replace(signature, in_spec=flat, forward_arg_names=remaining)
        program._example_inputs = None  # the example inputs have the structure of the original call
    if not _is_serializable(signature.out_spec):
        flat = pytree.tree_structure(tuple(range(signature.out_spec.num_leaves)))
        signature = replace(signature, out_spec=flat)
    program._module_call_graph = [replace(root_call, signature=signature), *others]


def _is_serializable(spec: pytree.TreeSpec) -> bool:
    try:
        pytree.treespec_dumps(spec)
    except NotImplementedError:
        return False
    return True


def store_named_data(
    manager: EdgeProgramManager, key: str, data: bytes, alignment: int = 1, data_file: str | None = None
) -> None:
    """Store named data in the program, or in the data file (``.ptd``) with the tag ``data_file``.

    A runtime loads it by ``key``.
    """
    manager._named_data_store.add_named_data(key, data, alignment, external_tag=data_file)


def move_named_data(manager: EdgeProgramManager, key: str, data_file: str) -> int:
    """Move named data from the program to the data file with the tag ``data_file``; return the number of bytes."""
    store = manager._named_data_store
    entries = store.external_data.setdefault(data_file, {})
    if key in store.pte_data:
        entries[key] = store.pte_data.pop(key)
    return len(store.buffers[entries[key].buffer_index])


def data_files(manager: ExecutorchProgramManager) -> dict[str, bytes]:
    """Return the data files (``.ptd``) of an emitted program: {tag: content}."""
    return {tag: bytes(content) for tag, content in (manager._tensor_data or {}).items()}


def named_data_bytes(manager: EdgeProgramManager) -> int:
    """Size of all named data of the program, including external data."""
    return sum(map(len, manager._named_data_store.buffers))


def arm_delegates_of(manager: EdgeProgramManager, method: str) -> Iterator[LoweredBackendModule]:
    """Yield the delegates of a method, except delegates that another backend created."""
    for module in lowered_modules(manager.exported_program(method).graph_module):
        if delegate_record(module) is not None:
            yield module


def restore_debug_handles(program: ExportedProgram) -> None:
    """Restore the debug handles that this project assigned (``assign_debug_handles``), after ExecuTorch replaced them.

    Delegates of this project have kept the assigned handles. After this call, CPU operators and delegates of other
    backends have the assigned handles, too.
    """
    _restore_graph_handles(program.graph)
    for module in lowered_modules(program.graph_module):
        if delegate_record(module) is not None:
            continue
        restored = _restore_graph_handles(module.original_module.graph)
        handle_map = (module.meta or {}).get("debug_handle_map") or {}
        for operation, handles in handle_map.items():
            handle_map[operation] = tuple(sorted({new for handle in handles for new in restored.get(handle, ())}))


def _restore_graph_handles(graph: Graph) -> dict[int, set[int]]:
    """Restore the handles of a graph. Returns {ExecuTorch's handle: restored handles of the nodes that had it}."""
    from arm_backend_core.nodes import debug_handle_of

    restored: dict[int, set[int]] = {}
    for node in graph.nodes:
        executorch_handle, handle = node.meta.pop("debug_handle", None), debug_handle_of(node)
        if handle is not None:
            node.meta["debug_handle"] = handle
            restored.setdefault(executorch_handle, set()).add(handle)
    return restored


def set_payload(module: LoweredBackendModule, payload: bytes, compile_specs: list[CompileSpec]) -> None:
    """Replace the payload and the compile specs of a delegate."""
    module._processed_bytes, module._compile_specs = payload, compile_specs


class _ChunkList(list[bytes]):
    """A file-like list that collects the written chunks without joining them."""

    write = list.append


def collect_program_chunks(manager: ExecutorchProgramManager) -> list[bytes]:
    """Return the emitted program in chunks, without a copy. The manager's ``buffer`` property would copy all bytes."""
    chunks = _ChunkList()
    manager.write_to_file(chunks)
    return chunks
