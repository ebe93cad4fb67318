"""The reference program of an export: the same program with TOSA graphs in place of compiled payloads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from arm_recipes.runtime.payload_parts import WEIGHTS_PREFIX

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager


def serialize_with_tosa_delegates(
    manager: ExecutorchProgramManager, graphs: Mapping[bytes, bytes], named_data: Mapping[str, bytes]
) -> bytes:
    """Serialize the program of ``manager`` with each compiled payload replaced by its TOSA flatbuffer.

    Args:
        manager: the emitted program.
        graphs: TOSA flatbuffer of each delegate, by the checksum in the delegate's compile specs.
        named_data: named data to add. It replaces entries with the same key.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize._serialize import serialize_for_executorch
    from executorch.exir.schema import BackendDelegateInlineData

    from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum_spec
    from arm_backend_core.targets.compile_spec import TosaCompileSpec

    program = copy.deepcopy(manager.executorch_program)
    for plan in program.execution_plan:
        for delegate in plan.delegates:
            checksum = next((spec.value for spec in delegate.compile_specs if spec.key == CHECKSUM_KEY), None)
            if checksum is None:  # a delegate of another backend
                continue
            flatbuffer = graphs[bytes(checksum)]
            program.backend_delegate_data[delegate.processed.index] = BackendDelegateInlineData(flatbuffer)
            delegate.id, delegate.compile_specs = TosaCompileSpec.backend_id, [checksum_spec(flatbuffer)]
    store = NamedDataStore()
    original_data = manager._named_data
    if original_data is not None:
        entries = {
            key: entry
            for key, entry in original_data.pte_data.items()
            if key not in named_data and not key.startswith(WEIGHTS_PREFIX)  # the flatbuffers contain their weights
        }
        store.merge_named_data_store(replace(original_data, pte_data=entries, external_data={}))
    for key, data in named_data.items():
        store.add_named_data(key, data)
    emitter_output = replace(manager._emitter_output, program=program)
    named_data_output = store.get_named_data_store_output()
    pte, _ = serialize_for_executorch(
        emitter_output, ExecutorchBackendConfig(), manager._data_serializer, named_data_output
    )
    return bytes(pte)
