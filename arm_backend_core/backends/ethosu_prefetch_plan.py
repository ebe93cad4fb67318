"""Plan of the weight prefetch (``ethosu_prefetch``): which weights to copy, where to, and during which earlier kernels.

The reader of a copy is the kernel that reads the copied weights. The planner divides the copies into two classes by the
cycles that they save per byte, and first places the class that saves more per byte. It tries several limits between the
classes, and keeps the best placement. In each class, it places copies by earliest deadline first: in the order of their
readers, each copy as late as possible. It omits a copy if the scratch has no free bytes for it, or if it saves fewer
cycles than ``MIN_SAVED_CYCLES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from arm_backend_core.backends.ethosu_liveness import Ranges

if TYPE_CHECKING:
    import numpy as np

#: Number of slots after which a kernel has certainly ended: two kernels may run at the same time. ``Slot`` is the unit
#: of time.
_IN_FLIGHT = 2
_MIN_PIECE_BYTES = 1024  #: minimum bytes of a DMA (``Piece``), unless the rest of a copy is smaller
#: Minimum number of cycles that a copy saves. Its commands take time, too.
MIN_SAVED_CYCLES = 512
_MAX_ADDRESSES = 8  #: approximate number of addresses that are tried for a copy
_MAX_CANDIDATES = 256  #: maximum number of slots whose weights may be copied
#: Limits between the two classes: 0 is the minimum of the saved cycles per byte of all copies, 1 the maximum.
_DENSITY_LIMITS = (0.0, 1 / 3, 2 / 3)
#: Estimated growth of weights that are encoded again in slices: fraction of their size, and header bytes per slice.
_ENCODING_MARGIN, _HEADER_BYTES = 0.01, 64
_MAX_LEAD = 96  #: maximum number of slots between the start of a DMA and the kernel that reads the copy


class CyclesPerByte(NamedTuple):
    """Cycles per byte of each memory."""

    const_memory: float
    sram: float


class Costs(NamedTuple):
    """Estimated cycles of a layer or of one of its kernels: in total, of the NPU alone, and of memory accesses.

    ``const_memory`` is the memory of the constants: flash, or DRAM on some U65 configurations.
    """

    total: float
    npu: float
    const_memory: float
    sram: float

    def scale(self, share: float) -> Costs:
        """The costs of the fraction ``share`` of the work."""
        return Costs(*(share * cycles for cycles in self))


@dataclass(frozen=True, eq=False)
class Slot:
    """Unit of time of the plan: a kernel that reads weights from flash, or consecutive kernels of a layer that do not.

    Attributes:
        kernels: indices of the kernels.
        layer: id of the layer in Vela's tables; None if Vela names none.
        costs: estimates of the kernels.
        dma_bytes: bytes that Vela's DMAs before and between the kernels read from flash.
        weights: ranges of the constants that the kernel reads from flash; empty if it reads none.
    """

    kernels: tuple[int, ...]
    layer: str | None
    costs: Costs
    dma_bytes: int
    weights: Ranges = ()

    @property
    def weight_bytes(self) -> int:
        """Number of bytes of ``weights``."""
        return sum(end - start for start, end in self.weights)


class Piece(NamedTuple):
    """A DMA that starts with slot ``slot`` and copies bytes [start, end) of the weights.

    ``start`` and ``end`` are offsets in the concatenation of all ranges of the weights.
    """

    slot: int
    start: int
    end: int


class WeightCopy(NamedTuple):
    """The copy of weights that slot ``reader`` reads, at byte ``address`` of the scratch.

    ``wait`` is the number of cycles for which the reader waits for the copy.
    """

    reader: int
    address: int
    pieces: list[Piece]
    wait: float


class PrefetchPlanner:
    """Chooses the weight copies of a program.

    Args:
        slots: the slots, which cover all kernels in order.
        busy: bool array [slots, granules], see ``ethosu_liveness.Liveness``.
        granule: bytes of a granule.
        cycles_per_byte: cycles per byte of the memories.
    """

    def __init__(self, slots: Sequence[Slot], busy: np.ndarray, granule: int, cycles_per_byte: CyclesPerByte) -> None:
        self.slots, self.busy, self.granule, self.cycles_per_byte = slots, busy, granule, cycles_per_byte

    def costs_with_copy(self, index: int) -> Costs:
        """Costs of a slot if it reads its weights from a copy in SRAM, as many bytes as it reads from flash."""
        _, npu, const_memory, sram = self.slots[index].costs
        sram += const_memory * self.cycles_per_byte.sram / self.cycles_per_byte.const_memory
        return Costs(max(npu, sram), npu, 0, sram)

    def saved_cycles(self, copies: Iterable[WeightCopy]) -> float:
        """Cycles that copies save."""
        return sum(self._possible_gain(copy.reader) - copy.wait for copy in copies)

    def with_slices(self, slices: Mapping[int, Sequence[float]]) -> PrefetchPlanner:
        """A planner of the program in which some slots are split.

        Args:
            slices: ``{3: [0.5, 0.5]}`` splits slot 3 into two slots with half of the weights each.
        """
        import numpy as np

        slots = list[Slot]()
        for index, slot in enumerate(self.slots):
            for share in slices.get(index, ()):
                # Each part is padded and has a header.
                length = int(share * slot.weight_bytes * (1 + _ENCODING_MARGIN)) + _HEADER_BYTES
                slots.append(replace(slot, costs=slot.costs.scale(share), weights=((0, length),)))
            if index not in slices:
                slots.append(slot)
        repeats = [len(slices.get(index, ())) or 1 for index in range(len(self.slots))]
        return PrefetchPlanner(slots, np.repeat(self.busy, repeats, axis=0), self.granule, self.cycles_per_byte)

    def choose_copies(self) -> list[WeightCopy]:
        """Choose copies: the best of several placements (see the module's docstring)."""
        candidates = [
            index
            for index, slot in enumerate(self.slots)
            if slot.weights
            and slot.costs.const_memory >= slot.costs.total
            and self._possible_gain(index) >= MIN_SAVED_CYCLES
        ]
        candidates = sorted(sorted(candidates, key=self._possible_gain, reverse=True)[:_MAX_CANDIDATES])
        density = {index: self._possible_gain(index) / self.slots[index].weight_bytes for index in candidates}
        low, high = min(density.values(), default=0.0), max(density.values(), default=0.0)
        # Weights that save at least ``limit`` cycles per byte come first.
        limits = sorted({low + part * (high - low) for part in _DENSITY_LIMITS}) if candidates else []
        # Limits with no candidate between them give equal orders. Each different order is placed once.
        orders = dict.fromkeys(tuple(sorted(candidates, key=lambda index: density[index] < limit)) for limit in limits)
        return max(map(self._place, orders), key=self.saved_cycles, default=[])

    def _possible_gain(self, index: int) -> float:
        return self.slots[index].costs.total - self.costs_with_copy(index).total

    def _idle_cycles(self) -> np.ndarray:
        """Idle cycles of flash during each slot, [slots, 2].

        Column 0 is for a slot that reads its weights from flash, column 1 for a slot that reads a copy in SRAM.
        """
        import numpy as np

        costs = [[slot.costs, self.costs_with_copy(index)] for index, slot in enumerate(self.slots)]
        total, _, const_memory, sram = np.moveaxis(np.array(costs, float), -1, 0)
        idle = np.minimum(
            total - const_memory, (total - sram) / self.cycles_per_byte.sram * self.cycles_per_byte.const_memory
        )
        # A DMA that Vela emitted may run with the kernel before it or with the kernel after it.
        dma = np.array([slot.dma_bytes for slot in self.slots] + [0]) * self.cycles_per_byte.const_memory
        return np.maximum(idle - (dma[:-1] + dma[1:])[:, None], 0.0)

    def _place(self, readers: Sequence[int]) -> list[WeightCopy]:
        """Place copies for ``readers`` in this order.

        Copies for which there is no room, or that save too few cycles, are omitted.
        """
        busy, all_idle, copies = self.busy.copy(), self._idle_cycles(), list[WeightCopy]()
        idle = all_idle[:, 0]
        for reader in readers:
            copy = self._place_copy(reader, busy, idle)
            if copy is None or self._possible_gain(reader) - copy.wait < MIN_SAVED_CYCLES:
                continue
            copies.append(copy)
            idle[reader] = all_idle[reader, 1]
            for piece in copy.pieces:
                idle[piece.slot] -= min((piece.end - piece.start) * self.cycles_per_byte.const_memory, idle[piece.slot])
                start, end = (copy.address + offset for offset in (piece.start, piece.end))
                busy[piece.slot : reader + 1, start // self.granule : -(-end // self.granule)] = True
        return copies

    def _place_copy(self, reader: int, busy: np.ndarray, idle: np.ndarray) -> WeightCopy | None:
        """The copy with the shortest wait; None if there is no room."""
        length, best = self.slots[reader].weight_bytes, None
        count, available = -(-length // self.granule), _first_free_slot(busy, reader)
        for start in _candidate_starts(available, reader, count):
            pieces, exposed = self._schedule(available[start : start + count], idle, reader, length)
            if best is None or exposed * self.cycles_per_byte.const_memory < best.wait:
                best = WeightCopy(reader, start * self.granule, pieces, exposed * self.cycles_per_byte.const_memory)
            if not exposed:
                break
        return best

    def _schedule(self, available: np.ndarray, idle: np.ndarray, reader: int, length: int) -> tuple[list[Piece], int]:
        """Split a copy into pieces that fill the idle time of slots, from the slot before ``reader`` backwards.

        Args:
            available: for each granule of the copy, the first slot that may write it.

        Returns:
            The pieces, and the number of exposed bytes. No idle time hides the DMA of these bytes, which runs right
            before the reader.
        """
        granule, pieces = self.granule, list[Piece]()
        # [first, start, end]: DMAs may write the granules [start, end) from slot ``first`` on.
        left = sorted(_list_runs(available), reverse=True)
        for slot in range(reader - 1, max(reader - 1 - _MAX_LEAD, -1), -1):
            room = int(idle[slot] / self.cycles_per_byte.const_memory) // granule
            for segment in left:
                first, start, end = segment
                taken = min(room, end - start)
                if first <= slot and taken * granule >= min(_MIN_PIECE_BYTES, (end - start) * granule):
                    pieces.append(Piece(slot, start * granule, min((start + taken) * granule, length)))
                    room, segment[1] = room - taken, start + taken
            left = [segment for segment in left if segment[1] < segment[2]]
            if not left:
                break
        exposed = [Piece(reader - 1, start * granule, min(end * granule, length)) for _, start, end in left]
        return [*pieces, *exposed], sum(piece.end - piece.start for piece in exposed)


def _first_free_slot(busy: np.ndarray, reader: int) -> np.ndarray:
    """For each granule, the first slot in which a DMA may write it; ``reader`` if the copy cannot use the granule.

    The DMA's command follows the command of a kernel of its slot. The DMA ends before ``reader`` runs. Kernels overlap,
    so the granule must be free from the slot before the DMA's slot, through ``_IN_FLIGHT`` slots after ``reader``.
    """
    import numpy as np

    if reader == 0:
        return np.zeros(busy.shape[1], int)
    lead = min(reader, _MAX_LEAD)
    before = busy[reader - lead : reader][::-1]
    available = np.where(before.any(0), reader - 1 - before.argmax(0) + _IN_FLIGHT, reader - lead)
    available[busy[reader : reader + 1 + _IN_FLIGHT].any(0)] = reader
    return np.minimum(available, reader)


def _candidate_starts(available: np.ndarray, reader: int, count: int) -> list[int]:
    """First granules of free ranges of ``count`` granules; ranges that are free for the shortest time come first."""
    import numpy as np

    sums = np.concatenate(([0], np.cumsum(available)))
    used = np.concatenate(([0], np.cumsum(available >= reader)))
    bounds = np.flatnonzero(np.diff(np.concatenate(([reader], available, [reader]))))
    starts = np.unique(np.concatenate((bounds, bounds - count)))
    starts = starts[(starts >= 0) & (starts + count <= len(available))]
    starts = starts[used[starts + count] == used[starts]]
    found = starts[np.argsort(sums[starts] - sums[starts + count], kind="stable")].tolist()
    step = max(-(-len(found) // _MAX_ADDRESSES), 1)
    return [*found[::step], *found[-1:]]


def _list_runs(available: np.ndarray) -> Iterator[list[int]]:
    """Runs of equal values as [value, start, end]."""
    import numpy as np

    bounds = [0, *(1 + np.flatnonzero(np.diff(available))).tolist(), len(available)]
    for start, end in pairwise(bounds):
        yield [int(available[start]), start, end]
