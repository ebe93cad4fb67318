"""Memory over time: what lies in the working memory of an Ethos-U while each operation runs, as Vela placed it."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arm_backend_core.backends.ethosu_weights import KEPT
from arm_recipes.report.layers import DelegateTrace, Unit

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Placed
    from arm_backend_core.events import Delegate

#: Vela's names for buffers of weights end in the number of the operation that reads them.
_BUFFER = re.compile(r"_op(\d+)$")
_CASCADE = "OpCascade"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in working memory.

    Attributes:
        name: in the TOSA graph; of a buffer that weights are copied to, Vela's own.
        kind: "input" of the delegate, "result" of an operation, or buffer for "weights".
        module, source: of the model: what computes it, or reads the weights; empty for inputs.
        bytes: that it takes there, of its rows only where they are written and read in turns.
    """

    name: str
    kind: Literal["input", "result", "weights"]
    module: str
    source: str
    bytes: int

    @property
    def where(self) -> str:
        """The module, or what stands for it."""
        return self.name if self.kind == "input" else self.module or "(model)"


@dataclass(frozen=True)
class Moment:
    """The memory while an operation runs.

    Attributes:
        tensor: the operation's result, by its name in the TOSA graph.
        module, source: of the model.
        bytes: in use, buffers for the next operation's weights among them. Tensors that share bytes count once.
    """

    tensor: str
    module: str
    source: str
    bytes: int


@dataclass(frozen=True)
class MemoryOverTime:
    """One memory in one inference of a delegate.

    Attributes:
        memory: Vela's name of it: "Sram", or "Dram" where the NPU works in both.
        moments: for each operation, in the order in which they run.
        bytes: that the memory must have for it: up to the last byte of any tensor.
        peak: tensors that are there when most is in use, the largest first.
        peak_bytes: in use then; less than ``bytes`` where gaps are left between tensors.
    """

    method: str
    delegate: str
    memory: str
    moments: tuple[Moment, ...]
    bytes: int
    peak: tuple[LiveTensor, ...]
    peak_bytes: int


def method_memory(method: str, delegates: Iterable[Delegate]) -> tuple[MemoryOverTime, ...]:
    """Every working memory of all Ethos-U delegates of a method."""
    found: list[MemoryOverTime] = []
    for delegate in delegates:
        if delegate.vela is not None:
            found += _MemoryTimeline(DelegateTrace(method, delegate)).memories()
    return tuple(found)


class _MemoryTimeline:
    def __init__(self, traced: DelegateTrace) -> None:
        self.traced, self.vela = traced, traced.vela
        self.units = list(traced.units())
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
        """When each unit runs: two moments later than the one before, but for those of a cascade."""
        starts: dict[str, int] = {}
        cascades = set()
        for tensor in self.vela.placed:
            if tensor.usage != KEPT:
                starts[tensor.name] = max(tensor.start, starts.get(tensor.name, 0))
            if tensor.usage == _CASCADE:
                cascades.add(tensor.start)
        now = -2
        for unit in self.units:
            told = max((starts[row.tensor] for row in unit.rows if row.tensor in starts), default=-1)
            if told > now or (told == now and now in cascades):
                now = told
            elif now not in cascades or told >= 0:  # its result lies where an older one did
                now += 2
            yield now

    def _live(self, tensor: Placed) -> LiveTensor:
        if tensor.name in self.traced.graph.inputs:
            return LiveTensor(tensor.name, "input", "", "", tensor.bytes)
        buffer = _BUFFER.search(tensor.name)
        if buffer is not None and int(buffer[1]) < len(self.units):
            return LiveTensor(tensor.name, "weights", *self._origin(self.units[int(buffer[1])]), tensor.bytes)
        kind: Literal["result", "weights"] = "weights" if tensor.usage == KEPT else "result"
        named = (unit for unit in self.units if tensor.name in {row.tensor for row in unit.rows})
        running = self.units[bisect.bisect_right(self.times, tensor.start) - 1]  # for what Vela puts in between
        return LiveTensor(tensor.name, kind, *self._origin(next(named, running)), tensor.bytes)


def _live_tensors(placed: Sequence[Placed]) -> list[list[Placed]]:
    """The tensors that are there at each moment."""
    alive: list[list[Placed]] = [[] for _ in range(max(tensor.end for tensor in placed) + 1)]
    for tensor in placed:
        for there in alive[tensor.start : tensor.end + 1]:
            there.append(tensor)
    return alive


def _bytes_in_use(alive: Sequence[Placed]) -> int:
    """Bytes of tensors, those that share some counted once."""
    used, end = 0, 0
    for tensor in sorted(alive, key=lambda tensor: tensor.address):
        stop = tensor.address + tensor.bytes
        used += max(stop - max(tensor.address, end), 0)
        end = max(end, stop)
    return used
