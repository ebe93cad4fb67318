"""Liveness analysis of the scratch: which bytes hold live data while each kernel of a command stream runs.

Data are live from a write to the last read before the next write. The analysis is conservative. Its unit is a granule,
a block of bytes of the scratch. It treats a write with gaps between the written bytes as a read, too. It assumes that a
DMA runs during the kernel before it and the kernel after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from arm_backend_core.backends.ethosu_accesses import (
    CONVOLUTION_COMMANDS,
    UNKNOWN_LENGTH,
    MemoryAccess,
    dma_accesses,
    kernel_accesses,
    list_feature_map_registers,
    weight_accesses,
    writes_without_gaps,
)
from arm_backend_core.backends.ethosu_commands import DMA_START, KERNEL_COMMANDS, decode_commands

if TYPE_CHECKING:
    import numpy as np

_MIN_GRANULE, _MAX_GRANULES = 16, 2048  #: minimum bytes of a granule; maximum number of granules in the scratch
_MAX_CELLS = 1 << 23  #: maximum product of the number of kernels and the number of granules


#: Ranges of bytes [start, end).
Ranges = tuple[tuple[int, int], ...]


class NpuKernel(NamedTuple):
    """A kernel of a command stream.

    Attributes:
        word_index: position of its command.
        weights: ranges [start, end) of the constants that it reads as weights and scales; adjacent ranges are merged.
            Empty if it reads none, or if some of them are not in the region of the constants.
        dma_bytes: bytes of constants that DMAs copy between the previous kernel and this kernel. DMAs of lookup tables
            are not counted, because tables are small.
    """

    word_index: int
    weights: Ranges
    dma_bytes: int


class Liveness(NamedTuple):
    """The granules of the scratch that hold live data, by kernel.

    Attributes:
        kernels: all kernels, in order.
        granule: bytes of a granule.
        busy: bool array [kernels, granules]; True if a granule holds live data or is accessed while a kernel runs.
    """

    kernels: list[NpuKernel]
    granule: int
    busy: np.ndarray


class _CommandAccesses(NamedTuple):
    """Accesses of one command to the scratch, while the kernels ``first`` to ``last`` run."""

    first: int
    last: int
    #: (access, overwrites): ``overwrites`` is True if the command writes all bytes of the access and reads none.
    spans: list[tuple[MemoryAccess, bool]]


def analyze_liveness(
    stream: bytes, weight_region: int, scratch: tuple[int, int], outputs: Iterable[tuple[int, int]]
) -> Liveness:
    """Find the granules of the scratch that hold live data or are accessed while each kernel runs.

    Args:
        stream: the command stream, for U55 or U65.
        weight_region: region of the constants.
        scratch: (bytes, region).
        outputs: (address, bytes) of each result of the program.
    """
    import numpy as np

    size, scratch_region = scratch
    kernels, accesses = _list_accesses(stream, weight_region, scratch_region)
    count = max(min(_MAX_GRANULES, _MAX_CELLS // max(len(kernels), 1)), 1)
    granule = max(-(-size // count // _MIN_GRANULE), 1) * _MIN_GRANULE
    busy = np.zeros((len(kernels), size // granule), bool)
    accessed = np.zeros(busy.shape[1], int)  # index of the last kernel that accesses each granule, at first 0
    final_reads = [
        (MemoryAccess(scratch_region, address, address + length, False), False) for address, length in outputs
    ]
    for first, last, spans in [*accesses, _CommandAccesses(len(kernels) - 1, len(kernels) - 1, final_reads)]:
        for span, is_overwritten in spans:
            outer = slice(span.start // granule, -(-span.end // granule))
            inner = slice(-(-span.start // granule), span.end // granule) if is_overwritten else slice(0, 0)
            is_live = np.ones(busy.shape[1], bool)
            is_live[inner] = False
            for since in np.unique(accessed[outer][is_live[outer]]):
                busy[since : last + 1, outer] |= (accessed[outer] == since) & is_live[outer]
        for span, _ in spans:
            outer = slice(span.start // granule, -(-span.end // granule))
            busy[first : last + 1, outer] = True
            accessed[outer] = last
    return Liveness(kernels, granule, busy)


def _list_accesses(
    stream: bytes, weight_region: int, scratch_region: int
) -> tuple[list[NpuKernel], list[_CommandAccesses]]:
    """All kernels, and for each kernel and DMA its accesses to the scratch."""
    registers, kernels, accesses = defaultdict[int, int](int), list[NpuKernel](), list[_CommandAccesses]()
    dma_bytes = 0
    for word_index, number, value in decode_commands(stream):
        if number >= 256:
            registers[number] = value
        elif number == DMA_START:
            spans = list(dma_accesses(registers))
            if len(spans) == 2:  # source and target; a DMA to the table memory has the source only
                dma_bytes += sum(s.end - s.start for s in spans if s.region == weight_region and not s.is_write)
            overwrites_all = all(span.end - span.start < UNKNOWN_LENGTH for span in spans)
            first = max(len(kernels) - 1, 0)
            accesses.append(_select_accesses(first, len(kernels), spans, scratch_region, overwrites_all=overwrites_all))
        elif number in KERNEL_COMMANDS:
            weights = list(weight_accesses(registers)) if number in CONVOLUTION_COMMANDS else []
            spans = [*kernel_accesses(registers, list_feature_map_registers(number)), *weights]
            count = len(kernels)
            accesses.append(
                _select_accesses(count, count, spans, scratch_region, overwrites_all=writes_without_gaps(registers))
            )
            is_constant = all(span.region == weight_region for span in weights)
            kernels.append(NpuKernel(word_index, _merge_ranges(weights) if is_constant else (), dma_bytes))
            dma_bytes = 0
    return kernels, accesses


def _merge_ranges(spans: Iterable[MemoryAccess]) -> Ranges:
    """Merge adjacent and overlapping accesses to ranges, in ascending order."""
    ranges = list[tuple[int, int]]()
    for start, end in sorted((span.start, span.end) for span in spans):
        if ranges and start <= ranges[-1][1]:
            start, last_end = ranges.pop()
            end = max(end, last_end)
        ranges.append((start, end))
    return tuple(ranges)


def _select_accesses(
    first: int, last: int, spans: Sequence[MemoryAccess], scratch_region: int, *, overwrites_all: bool
) -> _CommandAccesses:
    return _CommandAccesses(
        first, last, [(span, span.is_write and overwrites_all) for span in spans if span.region == scratch_region]
    )
