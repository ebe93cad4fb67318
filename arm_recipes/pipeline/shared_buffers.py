"""Shared state of methods: mutable buffers that several methods of a program write.

Methods share a buffer if their tensors are the same view of the same memory (``tensor_identity``). The buffer may have
another name in each module. Capture refuses other views of this memory (``stages.capture.buffer_aliases``). Capture
also adds a write of the unchanged value to methods that only read the buffer, because a program stores a buffer without
writes as a constant. Quantization gives the buffer one type and scale in all methods.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from arm_backend_core.program import TENSOR_KINDS, TensorIdentity, mutated_buffers, store_of, tensor_identity
from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.errors import ExportError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig


def unify_buffer_names(programs: Mapping[str, ExportedProgram]) -> bool:
    """Rename mutated buffers so that each has the same, unique name in all methods.

    ExecuTorch identifies shared state by its name.

    Args:
        programs: programs by method name, edited in place. They must hold the modules' own tensors, not copies,
            because a shared buffer is recognized by its memory.

    Returns:
        Whether methods share mutated buffers.
    """
    tensors = {method: _tensor_identities(program) for method, program in programs.items()}
    writers: dict[TensorIdentity, list[str]] = {}
    for method, program in programs.items():
        for name in mutated_buffers(program):
            writers.setdefault(tensors[method][name], []).append(method)
    names: dict[TensorIdentity, str] = {}
    for method, identities in tensors.items():
        for name, identity in identities.items():
            if identity not in writers:
                continue
            if identity not in names:
                used_names = {*names.values(), *_reserved_names(identity, tensors, writers)}
                names[identity] = _choose_unique_name(name, method, used_names)
        renamed = {name: names[identity] for name, identity in identities.items() if identity in names}
        _rename_buffers(programs[method], {old: new for old, new in renamed.items() if old != new})
    return any(len(methods) > 1 for methods in writers.values())


def _tensor_identities(program: ExportedProgram) -> dict[str, TensorIdentity]:
    """Return the identity of each parameter, buffer and constant of a program, by name."""
    names = [str(spec.target) for spec in program.graph_signature.input_specs if spec.kind in TENSOR_KINDS]
    return {name: tensor_identity(store_of(program, name)[name]) for name in names}


def _reserved_names(
    identity: TensorIdentity, tensors: Mapping[str, Mapping[str, TensorIdentity]], writers: Collection[TensorIdentity]
) -> Iterator[str]:
    """Yield the names of tensors that are not renamed, in the methods that use the buffer ``identity``."""
    for identities in tensors.values():
        if identity in identities.values():
            yield from (name for name, other in identities.items() if other != identity and other not in writers)


def _choose_unique_name(name: str, method: str, used_names: Collection[str]) -> str:
    """Return ``name``, ``method.name`` or ``method.name.number``: the first that is not in ``used_names``."""
    candidates = chain([name, f"{method}.{name}"], (f"{method}.{name}.{number}" for number in count(1)))
    return next(candidate for candidate in candidates if candidate not in used_names)


def _rename_buffers(program: ExportedProgram, names: Mapping[str, str]) -> None:
    for store in (program.state_dict, program.constants):
        for old, tensor in [(old, store.pop(old)) for old in names if old in store]:
            store[names[old]] = tensor
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind in TENSOR_KINDS and spec.target in names:
            spec.target = names[spec.target]
    for result in signature.output_specs:
        if result.kind is OutputKind.BUFFER_MUTATION and result.target in names:
            result.target = names[result.target]


def check_shared_buffers(programs: Mapping[str, ExportedProgram]) -> None:
    """After lowering, check that shared buffers have the same dtype and initial value in all methods.

    Raises:
        ExportError: dtypes or values differ, because the methods were quantized separately.
    """
    first_uses: dict[str, tuple[str, torch.Tensor]] = {}
    for method, program in programs.items():
        for name in program.graph_signature.buffers_to_mutate.values():
            tensor = store_of(program, name)[name]
            other, first = first_uses.setdefault(name, (method, tensor))
            if tensor.dtype is not first.dtype or not tensor.equal(first):
                dtypes = dtype_name(first.dtype), dtype_name(tensor.dtype)
                raise ExportError(
                    f"dtype or initial value of the buffer '{name}' differ between method '{other}' ({dtypes[0]}) and "
                    f"method '{method}' ({dtypes[1]}), so they cannot share it: the methods were quantized separately. "
                    "Pass the floating-point models of all methods to one export, with a recipe whose only quantizer "
                    "is of this package; or use separate buffers"
                )


def plan_shared_buffers(config: ExecutorchBackendConfig) -> ExecutorchBackendConfig:
    """Return a configuration that places mutable buffers of the same name at the same address in all methods.

    Raises:
        ExportError: the memory planning pass is not ExecuTorch's.
    """
    from executorch.exir.passes import MemoryPlanningPass

    planning = config.memory_planning_pass
    if not isinstance(planning, MemoryPlanningPass):
        raise ExportError(
            "methods share state, which only ExecuTorch's MemoryPlanningPass supports; the recipe's "
            f"executorch_backend_config has a {type(planning).__name__}"
        )
    planning = copy.copy(planning)
    planning.share_mutable_buffers, planning.state = True, type(planning.state)()
    return replace(config, memory_planning_pass=planning)
