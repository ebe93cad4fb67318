"""Memory usage over time: tensors that are live in the working memory of an Ethos-U at each operation.

The addresses and lifetimes come from Vela's memory allocation.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arm_backend_core.backends.vela_tables import WEIGHT_COPY_USAGE, operation_ticks
from arm_recipes.report.npu_layer_costs import DelegateProfile, NpuOperation

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import TensorAllocation

#: Vela's names of weight buffers end with the index of the operation that reads the buffer.
_WEIGHT_BUFFER_NAME = re.compile(r"_op(\d+)$")


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is live in working memory.

    Attributes:
        name: name in the TOSA graph, or Vela's name of a weight buffer.
        kind: "input" of the delegate, "result" of an operation, or "weights" for a buffer of weights.
        module: module that computes the tensor or reads the weights; empty for inputs.
        source: source line that computes the tensor or reads the weights; empty for inputs.
        bytes: allocated bytes. For a tensor inside a cascade, this is the size of the rolling buffer, which holds only
            some rows of the tensor at a time.
    """

    name: str
    kind: Literal["input", "result", "weights"]
    module: str
    source: str
    bytes: int

    @property
    def where(self) -> str:
        """The module's path ("(model)" for the top-level model), or the name of an input."""
        return self.name if self.kind == "input" else self.module or "(model)"


@dataclass(frozen=True)
class OperationMemory:
    """Memory usage while one operation runs.

    Attributes:
        tensor: name of the operation's result in the TOSA graph.
        module: module of the operation.
        source: source line of the operation.
        bytes: maximum number of bytes in use, including buffers that already receive the weights of the next
            operation. A byte that several tensors share is counted once.
    """

    tensor: str
    module: str
    source: str
    bytes: int


@dataclass(frozen=True)
class MemoryOverTime:
    """Usage of one memory in one inference of a delegate.

    Attributes:
        method: method of the delegate.
        delegate: name of the delegate.
        memory: Vela's name of the memory, "Sram" or "Dram". A delegate that uses both memories has one
            ``MemoryOverTime`` for each.
        moments: usage at each operation, in execution order.
        bytes: required size of the memory: the largest end address of a tensor.
        peak: live tensors at peak usage, the largest first.
        peak_bytes: bytes in use at the peak. They may be fewer than ``bytes`` because of fragmentation.
    """

    method: str
    delegate: str
    memory: str
    moments: tuple[OperationMemory, ...]
    bytes: int
    peak: tuple[LiveTensor, ...]
    peak_bytes: int


def iter_memory_usage(profiles: Iterable[DelegateProfile]) -> Iterator[MemoryOverTime]:
    """Yield the usage of every working memory of all Ethos-U delegates of a method."""
    for profile in profiles:
        if profile.record.vela is not None:
            yield from _MemoryTimeline(profile).memories()


class _MemoryTimeline:
    """Live tensors of one delegate over time.

    The time is counted in ticks: the unit in which Vela's memory allocation states the lifetimes of tensors.

    Attributes:
        times: tick at which each operation starts.
    """

    def __init__(self, profile: DelegateProfile) -> None:
        self.profile, self.vela, self.npu_operations = profile, profile.vela, profile.npu_operations
        results = ([row.tensor for row in operation.rows] for operation in self.npu_operations)
        self.times = list(operation_ticks(results, self.vela.placed))

    def memories(self) -> Iterator[MemoryOverTime]:
        for memory in dict.fromkeys(placed.memory for placed in self.vela.placed):
            placed = [tensor for tensor in self.vela.placed if tensor.memory == memory]
            live_tensors = _live_tensors(placed)
            bytes_in_use = list(map(_count_bytes_in_use, live_tensors))
            peak = max(range(len(bytes_in_use)), key=bytes_in_use.__getitem__)
            peak_tensors = sorted(live_tensors[peak], key=lambda tensor: -tensor.bytes)
            yield MemoryOverTime(
                self.profile.method,
                self.profile.record.name,
                memory,
                tuple(self._list_moments(bytes_in_use)),
                max(tensor.address + tensor.bytes for tensor in placed),
                tuple(map(self._describe_live_tensor, peak_tensors)),
                bytes_in_use[peak],
            )

    def _list_moments(self, bytes_in_use: Sequence[int]) -> Iterator[OperationMemory]:
        for operation, start, end in zip(
            self.npu_operations, self.times, [*self.times[1:], len(bytes_in_use)], strict=True
        ):
            most_bytes = max(bytes_in_use[start : max(end, start + 1)], default=0)
            yield OperationMemory(operation.rows[-1].tensor, *self._source_of(operation), most_bytes)

    def _source_of(self, operation: NpuOperation) -> tuple[str, str]:
        origin = self.profile.main_origin(operation.operators)
        return (origin.module, origin.source) if origin is not None else ("", "")

    def _describe_live_tensor(self, tensor: TensorAllocation) -> LiveTensor:
        if tensor.name in self.profile.graph.inputs:
            return LiveTensor(tensor.name, "input", "", "", tensor.bytes)
        buffer = _WEIGHT_BUFFER_NAME.search(tensor.name)
        if buffer is not None and int(buffer[1]) < len(self.npu_operations):
            return LiveTensor(
                tensor.name, "weights", *self._source_of(self.npu_operations[int(buffer[1])]), tensor.bytes
            )
        kind: Literal["result", "weights"] = "weights" if tensor.usage == WEIGHT_COPY_USAGE else "result"
        operations_with_result = (
            operation for operation in self.npu_operations if tensor.name in {row.tensor for row in operation.rows}
        )
        # No operation has a result with the name of a tensor that Vela inserted. Take the operation that runs when the
        # tensor becomes live.
        running = self.npu_operations[bisect.bisect_right(self.times, tensor.start) - 1]
        return LiveTensor(tensor.name, kind, *self._source_of(next(operations_with_result, running)), tensor.bytes)


def _live_tensors(placed: Sequence[TensorAllocation]) -> list[list[TensorAllocation]]:
    """The live tensors at each tick."""
    live_at_tick: list[list[TensorAllocation]] = [[] for _ in range(max(tensor.end for tensor in placed) + 1)]
    for tensor in placed:
        for live in live_at_tick[tensor.start : tensor.end + 1]:
            live.append(tensor)
    return live_at_tick


def _count_bytes_in_use(tensors: Sequence[TensorAllocation]) -> int:
    """Number of bytes that tensors occupy. A byte that several tensors share is counted once."""
    used, end = 0, 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.address):
        stop = tensor.address + tensor.bytes
        used += max(stop - max(tensor.address, end), 0)
        end = max(end, stop)
    return used
