"""ETDump: events of a run in ExecuTorch's runtime, including events inside of delegates."""

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

from arm_recipes.devtools import reading
from arm_recipes.runtime import plugin
from arm_recipes.runtime.ethosu_origins import main_origin

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

    from arm_recipes.devtools.calls import Call

    Array = np.ndarray[Any, Any]

#: Dtypes that ETDump can encode. A file with other dtypes is unreadable.
_LOGGED = frozenset(
    f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
)
#: Alignment of a tensor in the debug buffer, in bytes.
_ALIGNMENT = 64
#: Additional bytes of the debug buffer, beside the known tensors.
_SPARE = 1 << 20


@dataclass(frozen=True)
class _Event:
    """A logged event of an operation: its output, or its start and end in ns with metadata."""

    operation: int
    output: Array | None = None
    start: int = 0
    end: int = 0
    metadata: bytes = b""


def collect_events(call: Call, expected: Mapping[str, torch.Tensor]) -> list[_Event]:
    """Collect the events inside of a delegate.

    The Inspector reads the value of the first event with the handles of a layer, so the event with the output comes
    first.

    Args:
        call: the delegate call.
        expected: PyTorch's values of the layers' nodes, for the same inputs.
    """
    remaining = reading.estimated_intervals(call.record, call.operators)
    logged: list[_Event] = []
    for layer in call.layers:
        candidates = reading.dequantize(layer, call.results[layer.operation])
        array = reading.choose_layout(candidates, expected[layer.node].numpy())
        # ETDump has no float16.
        logged.append(_Event(layer.operation, array.astype(np.float32) if array.dtype == np.float16 else array))
        own = [number for number in remaining if call.handles[number] == layer.handles]
        logged += [
            _event(call, remaining.pop(number)) for number in sorted(own, key=lambda x: (x != layer.operation, x))
        ]
    return [*logged, *(_event(call, span) for span in remaining.values())]


def _event(call: Call, span: reading.Interval) -> _Event:
    number, record = span.operation, call.record
    details = {**span.known, "tosa": record.tosa_operators[number]}
    origin = main_origin(record, number)
    details |= {"module": origin.module, "source": origin.source}
    return _Event(number, None, span.start, span.end, json.dumps(details).encode())


def log_events(logged: Sequence[_Event]) -> None:
    """Log events to the event tracer of the running program, while it executes the delegate."""
    for event in logged:
        if event.output is not None:
            plugin.log_output(event.operation, event.output)
        else:
            plugin.log_duration(event.operation, event.start, event.end, event.metadata)


def parse_metadata(entries: list[str]) -> dict[str, Any]:
    """Parse the metadata of an operation; this is the Inspector's ``delegate_metadata_parser``."""
    known: dict[str, Any] = json.loads(entries[0]) if entries and entries[0] else {}
    return known


def debug_buffer_bytes(manager: ExecutorchProgramManager, method: str, expected: Mapping[str, torch.Tensor]) -> int:
    """Size of the debug buffer for all tensors that the runtime logs and for ``expected``.

    If the buffer is too small, the runtime aborts the process.
    """
    (plan,) = (plan for plan in manager.executorch_program.execution_plan if plan.name == method)
    logged = [index for chain in plan.chains for instruction in chain.instructions for index in _arguments(instruction)]
    tensors = [tensor for index in (*logged, *plan.outputs) for tensor in _tensors(plan.values, index)]
    sizes = [math.prod(tensor.sizes) * get_scalar_type(tensor.scalar_type).itemsize for tensor in tensors]
    sizes += [tensor.numel() * max(tensor.element_size(), 4) for tensor in expected.values()]
    return sum(size + _ALIGNMENT for size in sizes) + _SPARE


def check_loggable(manager: ExecutorchProgramManager, method: str) -> None:
    """Check that the event tracer can log the tensors of a method; otherwise the runtime would abort the process.

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
    logged = [index for chain in plan.chains for instruction in chain.instructions for index in _arguments(instruction)]
    for tensor in (tensor for index in (*logged, *plan.outputs) for tensor in _tensors(plan.values, index)):
        dtype = get_scalar_type(tensor.scalar_type)
        if str(dtype) not in _LOGGED:
            raise ValueError(
                f"'{method}' computes with {dtype} outside of delegates, which ExecuTorch's ETDump cannot encode: "
                "to inspect it, export a float32 model, model.float()"
            )


def _arguments(instruction: Any) -> Iterator[int]:
    yield from getattr(instruction.instr_args, "args", ())


def _tensors(values: Sequence[Any], index: int) -> Iterator[schema.Tensor]:
    value = values[index].val
    if isinstance(value, schema.Tensor):
        yield value
    elif isinstance(value, (schema.TensorList, schema.OptionalTensorList)):
        for item in value.items:
            if item >= 0:
                yield from _tensors(values, item)
