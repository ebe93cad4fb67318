"""ETRecord: debug information with which ExecuTorch's Inspector maps events of a run to nodes of the program."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arm_backend_core.nodes import first_result
from arm_recipes.devtools.delegate_calls import DelegateCall

if TYPE_CHECKING:
    import torch
    from executorch.devtools import ETRecord
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

#: Name of the only method that the Inspector reads.
_INSPECTOR_METHOD = "forward"
#: Timestamp of all entries of the ZIP file, so that it is reproducible.
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


def build_etrecord(
    manager: ExecutorchProgramManager,
    method: str,
    program: ExportedProgram,
    calls: Sequence[DelegateCall],
    inputs: Sequence[torch.Tensor] | None = None,
    outputs: Sequence[Sequence[torch.Tensor]] | None = None,
) -> ETRecord:
    """Build the ETRecord of a method. It stores the method as "forward", because the Inspector reads no other name.

    The graph in the record is the captured program, because the edge program already contains delegates.

    Args:
        manager: the emitted ExecuTorch program.
        method: name of the method.
        program: the captured program, a result of ``with_debug_handles``.
        calls: the delegate calls of the method.
        inputs: inputs with which the Inspector executes the graph, to compare its values with events.
        outputs: reference outputs of the program for each sample.
    """
    from executorch.devtools import ETRecord

    delegates: dict[int, Any] = dict(manager.delegate_map[method])
    handles: dict[int, Any] = dict(manager.debug_handle_map[method])
    for instruction in _non_contiguous_instructions(manager, method):
        handles.pop(instruction, None)
    results: dict[int, Any] = dict(manager.instruction_id_to_num_outs_map[method])
    for call in calls:
        handles[call.instruction] = list(call.all_handles)
        mapped = {str(index): list(handles) for index, handles in call.handles.items()}
        delegates[call.instruction] = {**delegates[call.instruction], "delegate_map": mapped}
        if call.groups:
            # Each event inside the delegate has one result. The Inspector reads the number of results of these events
            # from the entry of the delegate call.
            results[call.instruction] = 1
    return ETRecord(
        edge_dialect_program=program,
        _debug_handle_map={_INSPECTOR_METHOD: _with_text_keys(handles)},
        _delegate_map={_INSPECTOR_METHOD: _with_text_keys(delegates)},
        _instruction_id_to_num_outs_map={_INSPECTOR_METHOD: _with_text_keys(results)},
        _representative_inputs=None if inputs is None else list(inputs),
        _reference_outputs=None if outputs is None else {_INSPECTOR_METHOD: [list(each) for each in outputs]},
    )


def _non_contiguous_instructions(manager: ExecutorchProgramManager, method: str) -> list[int]:
    """Indices of the instructions of CPU operators whose result is not contiguous, such as channels_last.

    ETDump does not record the memory layout, so the Inspector would misread these results. After emission, the debug
    handle of a node is the index of its instruction.
    """
    from executorch.exir.delegate import executorch_call_delegate

    return [
        node.meta["debug_handle"]
        for node in manager.exported_program(method).graph.nodes
        if "debug_handle" in node.meta
        and node.target is not executorch_call_delegate
        and (value := first_result(node)) is not None
        and not value.is_contiguous()
    ]


def _with_text_keys(entries: Mapping[int, Any]) -> dict[Any, Any]:
    """Convert keys to strings, as in a record that was read from JSON."""
    return {str(key): value for key, value in entries.items()}


def serialize_etrecord(record: ETRecord) -> bytes:
    """Serialize a record reproducibly: without timestamps, and without PyTorch's counter in names of generated code."""
    original, result = io.BytesIO(), io.BytesIO()
    record.save(original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == f"edge_dialect_exported_program/{_INSPECTOR_METHOD}":
                data = re.sub(rb"<eval_with_key>\.\d+", b"<eval_with_key>", data)
            target.writestr(zipfile.ZipInfo(name, _FIXED_DATE), data)
    return result.getvalue()
