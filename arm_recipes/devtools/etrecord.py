"""ETRecord: what ExecuTorch's Inspector needs of an export to tell what a runtime's events are about."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arm_backend_core.nodes import first_result
from arm_recipes.devtools.calls import Call

if TYPE_CHECKING:
    import torch
    from executorch.devtools import ETRecord
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

#: The Inspector reads no other method.
_METHOD = "forward"
_DATE = (1980, 1, 1, 0, 0, 0)


def build_etrecord(
    manager: ExecutorchProgramManager,
    method: str,
    program: ExportedProgram,
    calls: Sequence[Call],
    inputs: Sequence[torch.Tensor] | None = None,
    outputs: Sequence[Sequence[torch.Tensor]] | None = None,
) -> ETRecord:
    """The record of a method, under the name that the Inspector reads.

    Its graph is the captured program: that of the edge dialect has delegates in it already.

    Args:
        program: what was lowered, from ``numbered``.
        inputs: what the Inspector runs the graph on, to compare with events.
        outputs: what the program gives, for each of some samples.
    """
    from executorch.devtools import ETRecord

    delegates: dict[int, Any] = dict(manager.delegate_map[method])
    handles: dict[int, Any] = dict(manager.debug_handle_map[method])
    for instruction in _channels_last_calls(manager, method):
        handles.pop(instruction, None)
    results: dict[int, Any] = dict(manager.instruction_id_to_num_outs_map[method])
    for call in calls:
        handles[call.instruction] = list(call.all_handles)
        mapped = {str(operation): list(handles) for operation, handles in call.handles.items()}
        delegates[call.instruction] = {**delegates[call.instruction], "delegate_map": mapped}
        if call.layers:
            results[call.instruction] = 1  # the Inspector takes it for each event inside, too
    return ETRecord(
        edge_dialect_program=program,
        _debug_handle_map={_METHOD: _with_text_keys(handles)},
        _delegate_map={_METHOD: _with_text_keys(delegates)},
        _instruction_id_to_num_outs_map={_METHOD: _with_text_keys(results)},
        _representative_inputs=None if inputs is None else list(inputs),
        _reference_outputs=None if outputs is None else {_METHOD: [list(each) for each in outputs]},
    )


def _channels_last_calls(manager: ExecutorchProgramManager, method: str) -> list[int]:
    """Operators on the CPU whose results are channels_last: ETDump does not tell, the Inspector would misread them."""
    from executorch.exir.delegate import executorch_call_delegate

    return [
        node.meta["debug_handle"]
        for node in manager.exported_program(method).graph.nodes
        if "debug_handle" in node.meta
        and node.target is not executorch_call_delegate
        and (made := first_result(node)) is not None
        and not made.is_contiguous()
    ]


def _with_text_keys(entries: Mapping[int, Any]) -> dict[Any, Any]:
    """As a record is read: a key of JSON is a text."""
    return {str(key): value for key, value in entries.items()}


def serialize_etrecord(record: ETRecord) -> bytes:
    """The file, the same bytes for the same program: without the time, and without PyTorch's count of code it wrote."""
    original, result = io.BytesIO(), io.BytesIO()
    record.save(original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == f"edge_dialect_exported_program/{_METHOD}":
                data = re.sub(rb"<eval_with_key>\.\d+", b"<eval_with_key>", data)
            target.writestr(zipfile.ZipInfo(name, _DATE), data)
    return result.getvalue()
