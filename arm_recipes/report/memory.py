"""Memory usage over time: live tensors in the working memory of an Ethos-U at each operation, as allocated by Vela."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arm_backend_core.backends.ethosu_weights import WEIGHT_COPY_USAGE
from arm_recipes.report.layers import DelegateTrace, Unit

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import TensorAllocation

#: Vela's names of weight buffers end in the index of the operation that reads them.
_BUFFER = re.compile(r"_op(\d+)$")
_CASCADE = "OpCascade"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in working memory.

    Attributes:
        name: name in the TOSA graph, or Vela's name of a weight buffer.
        kind: "input" of the delegate, "result" of an operation, or buffer for "weights".
        module: module that computes the tensor or reads the weights; empty for inputs.
        source: source line that computes the tensor or reads the weights; empty for inputs.
        bytes: allocated bytes; in a cascade, those of the rolling buffer only.
    """

    name: str
    kind: Literal["input", "result", "weights"]
    module: str
    source: str
    bytes: int

    @property
    def where(self) -> str:
        """The module's path, or the name of an input."""
        return self.name if self.kind == "input" else self.module or "(model)"


@dataclass(frozen=True)
class Moment:
    """Memory usage while one operation runs.

    Attributes:
        tensor: name of the operation's result in the TOSA graph.
        module: module of the operation.
        source: source line of the operation.
        bytes: bytes in use, including weight buffers of the next operation. Overlapping tensors count once.
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
        memory: Vela's name of the memory: "Sram", or also "Dram" if the NPU works in both.
        moments: usage at each operation, in execution order.
        bytes: required size of the memory: the largest end address of a tensor.
        peak: live tensors at peak usage, the largest first.
        peak_bytes: bytes in use at the peak; less than ``bytes`` because of fragmentation.
    """

    method: str
    delegate: str
    memory: str
    moments: tuple[Moment, ...]
    bytes: int
    peak: tuple[LiveTensor, ...]
    peak_bytes: int


def method_memory(traces: Iterable[DelegateTrace]) -> Iterator[MemoryOverTime]:
    """Usage of every working memory of all Ethos-U delegates of a method."""
    for trace in traces:
        if trace.record.vela is not None:
            yield from _MemoryTimeline(trace).memories()


class _MemoryTimeline:
    def __init__(self, traced: DelegateTrace) -> None:
        self.traced, self.vela, self.units = traced, traced.vela, traced.units
        self.times = list(self._times())

    def memories(self) -> Iterator[MemoryOverTime]:
        for memory in dict.fromkeys(placed.memory for placed in self.vela.placed):
            placed = [tensor for tensor in self.vela.placed if tensor.memory == memory]
            alive = _live_tensors(placed)
            uses = list(map(_bytes_in_use, alive))
            peak = max(range(len(uses)), key=uses.__getitem__)
            there = sorted(alive[peak], key=lambda tensor: -tensor.bytes)
            yield MemoryOverTime(
                self.traced.method,
                self.traced.record.name,
                memory,
                tuple(self._moments(uses)),
                max(tensor.address + tensor.bytes for tensor in placed),
                tuple(map(self._live, there)),
                uses[peak],
            )

    def _moments(self, uses: Sequence[int]) -> Iterator[Moment]:
        for unit, start, end in zip(self.units, self.times, [*self.times[1:], len(uses)], strict=True):
            used = max(uses[start : max(end, start + 1)], default=0)
            yield Moment(unit.rows[-1].tensor, *self._origin(unit), used)

    def _origin(self, unit: Unit) -> tuple[str, str]:
        origin = self.traced.main_origin(unit.operators)
        return (origin.module, origin.source) if origin is not None else ("", "")

    def _times(self) -> Iterator[int]:
        """The time of each unit on Vela's clock: two ticks after the previous unit, except within a cascade."""
        starts: dict[str, int] = {}
        cascades = set()
        for tensor in self.vela.placed:
            if tensor.usage != WEIGHT_COPY_USAGE:
                starts[tensor.name] = max(tensor.start, starts.get(tensor.name, 0))
            if tensor.usage == _CASCADE:
                cascades.add(tensor.start)
        now = -2
        for unit in self.units:
            first_tick = max((starts[row.tensor] for row in unit.rows if row.tensor in starts), default=-1)
            if first_tick > now or (first_tick == now and now in cascades):
                now = first_tick
            elif now not in cascades or first_tick >= 0:  # the result reuses the address of an older tensor
                now += 2
            yield now

    def _live(self, tensor: TensorAllocation) -> LiveTensor:
        if tensor.name in self.traced.graph.inputs:
            return LiveTensor(tensor.name, "input", "", "", tensor.bytes)
        buffer = _BUFFER.search(tensor.name)
        if buffer is not None and int(buffer[1]) < len(self.units):
            return LiveTensor(tensor.name, "weights", *self._origin(self.units[int(buffer[1])]), tensor.bytes)
        kind: Literal["result", "weights"] = "weights" if tensor.usage == WEIGHT_COPY_USAGE else "result"
        named = (unit for unit in self.units if tensor.name in {row.tensor for row in unit.rows})
        running = self.units[bisect.bisect_right(self.times, tensor.start) - 1]  # for tensors that Vela inserts
        return LiveTensor(tensor.name, kind, *self._origin(next(named, running)), tensor.bytes)


def _live_tensors(placed: Sequence[TensorAllocation]) -> list[list[TensorAllocation]]:
    """The live tensors at each tick of Vela's clock."""
    alive: list[list[TensorAllocation]] = [[] for _ in range(max(tensor.end for tensor in placed) + 1)]
    for tensor in placed:
        for there in alive[tensor.start : tensor.end + 1]:
            there.append(tensor)
    return alive


def _bytes_in_use(alive: Sequence[TensorAllocation]) -> int:
    """Bytes that tensors occupy; overlapping bytes count once."""
    used, end = 0, 0
    for tensor in sorted(alive, key=lambda tensor: tensor.address):
        stop = tensor.address + tensor.bytes
        used += max(stop - max(tensor.address, end), 0)
        end = max(end, stop)
    return used
