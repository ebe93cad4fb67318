"""What the methods of a program have in common: parameters, state, and what their modules compute.

Tensors are the same where they lie in the same memory, modules where they are the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from arm_recipes.messages import ExportError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig

    from arm_recipes.stages.post_training import Observed

#: Where in memory a tensor lies, and how.
Identity = tuple[Hashable, ...]
Place = Node | tuple[Node, Node]
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def identity(tensor: torch.Tensor) -> Identity:
    """The same for two tensors that are one."""
    memory = tensor.untyped_storage().data_ptr()
    return (memory or id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


# -- scales ---------------------------------------------------------------------------------------------------------


def observe_together(observed: Mapping[str, Observed], models: Mapping[str, Any]) -> None:
    """Let one observer see what several methods have in common, so that scales are the same.

    These are their parameters and buffers, and what modules compute that do the same in each, operator by operator.
    """
    from arm_backend_core.quantizer.annotator import connect, unify

    modules = {method: _modules_by_path(models[method]) for method in observed}
    sequences = {method: _sequences(model, modules[method]) for method, model in observed.items()}
    places: dict[Node, Hashable] = {}
    for found in sequences.values():
        for module, nodes in found.items():
            others = [other[module] for other in sequences.values() if module in other]
            if all(_operators(nodes) == _operators(other) for other in others):
                places |= {node: (module, index) for index, node in enumerate(nodes)}
    held = {node: key for model in observed.values() for node, key in model.held.items()}

    def place(where: Place) -> Hashable:
        source, node = (where, None) if isinstance(where, Node) else where
        observer = everything[where]
        if hasattr(observer, "obs_or_fqs"):  # its scale follows from those of others
            return None
        if source in held:
            return "tensor", held[source], type(observer), getattr(observer, "ch_axis", None)
        if node is None:
            return ("result", places[source]) if source in places else None
        return ("operand", places[node], node.all_input_nodes.index(source)) if node in places else None

    everything = {where: observer for model in observed.values() for where, observer in model.observers.items()}
    unify([model.observers for model in observed.values()], place)
    connect(*((model.model, model.observers) for model in observed.values()))


def _modules_by_path(model: Any) -> dict[str, Hashable]:
    """Modules of an nn.Module by path; of a program that was captured elsewhere paths are all that is known."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {path: id(module) for path, module in model.named_modules(remove_duplicate=False)}


def _sequences(model: Observed, modules: Mapping[str, Hashable]) -> dict[Hashable, list[Node]]:
    """Operators with real results, by the module that they are in."""
    from arm_backend_core.nodes import is_float, modules_of

    found: dict[Hashable, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and is_float(node):
            *_, path = ("", *modules_of(node))
            found.setdefault(modules.get(path, path), []).append(node)
    return found


def _operators(nodes: list[Node]) -> list[Any]:
    return [node.target for node in nodes]


# -- state ----------------------------------------------------------------------------------------------------------


def name_state(programs: Mapping[str, ExportedProgram]) -> bool:
    """Give buffers that a program writes one name in all methods that have them, and no other tensor that name.

    ExecuTorch goes by names where methods share state.

    Args:
        programs: are edited; their tensors are still those of the modules.

    Returns:
        Whether methods share any.

    Raises:
        ExportError: a method reads a buffer that another one writes, which would be a constant in it.
    """
    writers: dict[Identity, list[str]] = {}
    for method, program in programs.items():
        for name in written(program):
            writers.setdefault(identity(_store(program, name)[name]), []).append(method)
    shared = False
    taken: dict[str, Identity] = {}
    names: dict[Identity, str] = {}
    for method, program in programs.items():
        renamed = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind not in _HELD:
                continue
            name = str(spec.target)
            key = identity(_store(program, name)[name])
            if key not in writers:
                continue
            if method not in writers[key]:
                raise ExportError(
                    f"method '{method}' reads the buffer '{name}', which method '{writers[key][0]}' writes: it must "
                    "write it too, if only what it holds already (buffer.copy_(buffer.clone()))"
                )
            shared = shared or len(writers[key]) > 1
            if key not in names:
                names[key] = name if name not in taken else f"{method}.{name}"
                taken[names[key]] = key
            renamed[name] = names[key]
        _rename(program, {old: new for old, new in renamed.items() if old != new})
    return shared


def written(program: ExportedProgram) -> set[str]:
    """Buffers that a program writes: in place, or by what it returns."""
    from arm_backend_core.nodes import is_written

    signature = program.graph_signature
    nodes = program.graph.find_nodes(op="placeholder")
    in_place = {signature.inputs_to_buffers.get(node.name) for node in nodes if is_written(node)}
    return {name for name in in_place if name is not None} | set(signature.buffers_to_mutate.values())


def _rename(program: ExportedProgram, names: Mapping[str, str]) -> None:
    for store in (program.state_dict, program.constants):
        for old, tensor in [(old, store.pop(old)) for old in names if old in store]:
            store[names[old]] = tensor
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind in _HELD and spec.target in names:
            spec.target = names[spec.target]
    for result in signature.output_specs:
        if result.kind is OutputKind.BUFFER_MUTATION and result.target in names:
            result.target = names[result.target]


def _store(program: ExportedProgram, name: str) -> dict[str, Any]:
    from arm_backend_core.program import store_of

    return store_of(program, name)


def check_state(programs: Mapping[str, ExportedProgram]) -> None:
    """Compare what methods hold in the buffers that they share, once that is settled.

    Raises:
        ExportError: types or values differ: methods quantize the buffer differently.
    """
    known: dict[str, tuple[str, torch.Tensor]] = {}
    for method, program in programs.items():
        for name in program.graph_signature.buffers_to_mutate.values():
            tensor = _store(program, name)[name]
            other, before = known.setdefault(name, (method, tensor))
            if tensor.dtype is not before.dtype or not tensor.equal(before):
                raise ExportError(
                    f"the buffer '{name}' is {_type(before)} in method '{other}' and {_type(tensor)} in method "
                    f"'{method}', which cannot share it so: a new value that is computed of the old one, element by "
                    "element, makes it int16, and one that is given or constant leaves it as it is; compute it so in "
                    "both (state * 0 + value), or give each a buffer of its own"
                )


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def with_shared_state(config: ExecutorchBackendConfig) -> ExecutorchBackendConfig:
    """A configuration whose memory planning has the buffers of a name lie in one place in all methods.

    Raises:
        ExportError: its planning is another one than ExecuTorch's.
    """
    from executorch.exir.passes import MemoryPlanningPass

    planning = config.memory_planning_pass
    if not isinstance(planning, MemoryPlanningPass):
        raise ExportError(
            "methods share state, which ExecuTorch's MemoryPlanningPass alone can plan; the recipe's "
            f"executorch_backend_config has a {type(planning).__name__}"
        )
    planning = copy.copy(planning)
    planning.share_mutable_buffers, planning.state = True, type(planning.state)()
    return replace(config, memory_planning_pass=planning)
