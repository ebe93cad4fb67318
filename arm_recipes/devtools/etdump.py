"""ETDump: events of a run in ExecuTorch's runtime, including the operators inside of delegates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from executorch.exir import schema
from executorch.exir.tensor import get_scalar_type

from arm_recipes.devtools import delegate_results
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.command_origins import main_origin

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

    from arm_recipes.devtools.delegate_calls import DelegateCall

    Array = np.ndarray[Any, Any]

#: Dtypes that ETDump can encode. ETDump files with other dtypes are unreadable.
_ETDUMP_DTYPES = frozenset(
    f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
)
#: Alignment of a tensor in the debug buffer, in bytes.
_DEBUG_BUFFER_ALIGNMENT = 64
#: Bytes that are added to the size of the debug buffer as a reserve.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class _LogEvent:
    """A logged event of a TOSA operator of a delegate: its output, or its start and end in ns with metadata."""

    operator_index: int
    output: Array | None = None
    start: int = 0
    end: int = 0
    metadata: bytes = b""


def collect_events(call: DelegateCall, expected: Mapping[str, torch.Tensor]) -> list[_LogEvent]:
    """Collect the events inside of a delegate.

    A ``DebugHandleGroup`` consists of nodes of the captured program that were lowered to one or several TOSA operators.
    The events of these operators have the same debug handles. The Inspector takes the value of the group's last node
    from the first of these events. The event with the output therefore precedes the events with durations.

    Args:
        call: the delegate call.
        expected: ``{node name: value}`` of the last node of each group, computed by PyTorch from the same inputs.
    """
    remaining = delegate_results.estimated_intervals(call.record, call.operators)
    events: list[_LogEvent] = []
    for group in call.groups:
        candidates = delegate_results.dequantize(group, call.results[group.operator_index])
        array = delegate_results.choose_layout(candidates, expected[group.node].numpy())
        # ETDump has no float16.
        events.append(_LogEvent(group.operator_index, array.astype(np.float32) if array.dtype == np.float16 else array))
        group_operators = [number for number in remaining if call.handles[number] == group.handles]
        events += [
            _duration_event(call, remaining.pop(number))
            for number in sorted(group_operators, key=lambda x: (x != group.operator_index, x))
        ]
    return [*events, *(_duration_event(call, span) for span in remaining.values())]


def _duration_event(call: DelegateCall, interval: delegate_results.EstimatedInterval) -> _LogEvent:
    operator_index, record = interval.operator_index, call.record
    details = {**interval.details, "tosa": record.tosa_operators[operator_index]}
    origin = main_origin(record, operator_index)
    details |= {"module": origin.module, "source": origin.source}
    return _LogEvent(operator_index, None, interval.start, interval.end, json.dumps(details).encode())


def log_events(events: Sequence[_LogEvent]) -> None:
    """Log events to the event tracer of the running program. Call this while the program executes the delegate."""
    for event in events:
        if event.output is not None:
            host_backends.log_output(event.operator_index, event.output)
        else:
            host_backends.log_duration(event.operator_index, event.start, event.end, event.metadata)


def parse_metadata(entries: list[str]) -> dict[str, Any]:
    """Parse the metadata of an operator. The Inspector calls this as ``delegate_metadata_parser``."""
    metadata: dict[str, Any] = json.loads(entries[0]) if entries and entries[0] else {}
    return metadata


def debug_buffer_bytes(manager: ExecutorchProgramManager, method: str, expected: Mapping[str, torch.Tensor]) -> int:
    """Size in bytes of a debug buffer for the CPU tensors that the runtime logs, and for the results in ``expected``.

    If the debug buffer is too small, the runtime aborts the process.
    """
    (plan,) = (plan for plan in manager.executorch_program.execution_plan if plan.name == method)
    value_indices = [
        index for chain in plan.chains for instruction in chain.instructions for index in _argument_indices(instruction)
    ]
    tensors = [tensor for index in (*value_indices, *plan.outputs) for tensor in _tensors_of_value(plan.values, index)]
    sizes = [math.prod(tensor.sizes) * get_scalar_type(tensor.scalar_type).itemsize for tensor in tensors]
    sizes += [tensor.numel() * max(tensor.element_size(), 4) for tensor in expected.values()]
    return sum(size + _DEBUG_BUFFER_ALIGNMENT for size in sizes) + _SPARE_BYTES


def check_loggable(manager: ExecutorchProgramManager, method: str) -> None:
    """Check that the event tracer can log the tensors of a method. Otherwise, the runtime would abort the process.

    Raises:
        ValueError: an output is not a tensor, or ETDump cannot encode the dtype of a tensor.
    """
    (plan,) = (plan for plan in manager.executorch_program.execution_plan if plan.name == method)
    for number, index in enumerate(plan.outputs):
        value = plan.values[index].val
        if not isinstance(value, schema.Tensor):
            raise ValueError(
                f"output {number} of '{method}' is of the type {type(value).__name__}; ExecuTorch's ETDump and "
                "Inspector support only tensors as outputs: remove it from the model's outputs"
            )
    value_indices = [
        index for chain in plan.chains for instruction in chain.instructions for index in _argument_indices(instruction)
    ]
    for tensor in (
        tensor for index in (*value_indices, *plan.outputs) for tensor in _tensors_of_value(plan.values, index)
    ):
        dtype = get_scalar_type(tensor.scalar_type)
        if str(dtype) not in _ETDUMP_DTYPES:
            raise ValueError(
                f"'{method}' computes with {dtype} outside of delegates, which ExecuTorch's ETDump cannot encode: "
                "to inspect it, export a float32 model, model.float()"
            )


def _argument_indices(instruction: Any) -> Iterator[int]:
    yield from getattr(instruction.instr_args, "args", ())


def _tensors_of_value(values: Sequence[Any], index: int) -> Iterator[schema.Tensor]:
    value = values[index].val
    if isinstance(value, schema.Tensor):
        yield value
    elif isinstance(value, (schema.TensorList, schema.OptionalTensorList)):
        for item in value.items:
            if item >= 0:
                yield from _tensors_of_value(values, item)
