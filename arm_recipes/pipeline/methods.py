"""What the methods of a program have in common: parameters, state, and what their modules compute.

Tensors are the same where they lie in the same memory, modules where they are the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from arm_backend_core.program import Identity, identity, written
from arm_recipes._internal.messages import ExportError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig


_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


# -- scales ---------------------------------------------------------------------------------------------------------


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


def share_state_in_plan(config: ExecutorchBackendConfig) -> ExecutorchBackendConfig:
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
