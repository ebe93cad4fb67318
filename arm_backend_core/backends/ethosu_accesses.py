"""Memory accesses of Ethos-U commands: byte ranges that kernels and DMAs read and write.

A kernel is an NPU operation other than a DMA. The argument ``registers`` maps register numbers to their values at the
start of the command.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from arm_backend_core.backends.ethosu_commands import DMA_REGISTERS, FEATURE_MAP_REGISTERS, pixel_extent

#: NPU_OP_CONV and NPU_OP_DEPTHWISE.
CONVOLUTION_COMMANDS = (2, 3)
ELEMENTWISE_COMMAND = 6
#: Numbers of the registers that hold the region of the weights and the region of the scales.
WEIGHT_REGION_REGISTERS = (296, 297)
#: Numbers of the address registers: weights of core 0 and of core 1, scales of core 0 and of core 1. The register with
#: the next number holds the length.
WEIGHT_BASE_REGISTERS = (0x420, 0x490, 0x422, 0x492)
#: Length that is assumed for a DMA of several rows: the DMA may access all memory after its first byte.
UNKNOWN_LENGTH = 1 << 40
_SOURCE_REGION, _DESTINATION_REGION, _SOURCE_ADDRESS, _DESTINATION_ADDRESS, _LENGTH = DMA_REGISTERS


class MemoryAccess(NamedTuple):
    """A read or a write of the bytes [start, end) of a region."""

    region: int
    start: int
    end: int
    is_write: bool


def list_feature_map_registers(number: int) -> Sequence[tuple[int, ...]]:
    """Rows of ``FEATURE_MAP_REGISTERS`` for a kernel with command ``number``: IFM, OFM and, if elementwise, IFM2."""
    return FEATURE_MAP_REGISTERS[: 3 if number == ELEMENTWISE_COMMAND else 2]


def kernel_accesses(registers: Mapping[int, int], maps: Sequence[tuple[int, ...]]) -> Iterator[MemoryAccess]:
    """Memory that a kernel reads and writes as feature maps.

    An access begins at the first byte of the feature map, or of the rolling buffer that contains the feature map. If a
    stride is negative, the access begins at byte 0 of the region. Every access ends at the end of tile 0.

    Args:
        registers: values of the registers.
        maps: rows of ``FEATURE_MAP_REGISTERS``.
    """
    for base, stride, tile, region, precision, depth in maps:
        start, x, y, brick, precision_bits = (
            registers[key] for key in (base, stride, stride + 1, stride + 2, precision)
        )
        columns, rows, channels = (registers[key] >> 32 for key in (tile, tile + 1, depth))  # each minus one
        is_ofm = base == FEATURE_MAP_REGISTERS[1][0]
        pixel_end = pixel_extent(channels + 1, brick, precision_bits, precision_bits >> (33 if is_ofm else 34) & 3)
        first = 0 if max(x, y) >> 39 else registers[base + 2] or start  # negative stride: from byte 0 on
        yield MemoryAccess(registers[region] >> 32 & 7, first, start + rows * y + columns * x + pixel_end, is_ofm)


def writes_without_gaps(registers: Mapping[int, int]) -> bool:
    """Whether a kernel writes all bytes of its OFM: no gaps between pixels or rows, and no rolling buffer."""
    base, stride, tile, _, precision, depth = FEATURE_MAP_REGISTERS[1]
    x, y, brick, bits = (registers[key] for key in (stride, stride + 1, stride + 2, precision))
    columns, channels = ((registers[key] >> 32) + 1 for key in (tile, depth))
    if registers[base + 2]:
        return False
    if bits >> 38 & 3 == 1:
        return x == 16 << (bits >> 33 & 3) and brick == columns * x and y == -(-channels // 16) * brick
    return x == channels << (bits >> 33 & 3) and y == columns * x


def dma_accesses(registers: Mapping[int, int]) -> Iterator[MemoryAccess]:
    """Memory that a DMA reads and writes."""
    length = UNKNOWN_LENGTH if registers[_DESTINATION_REGION] >> 41 & 3 else registers[_LENGTH]
    for region, address in ((_SOURCE_REGION, _SOURCE_ADDRESS), (_DESTINATION_REGION, _DESTINATION_ADDRESS)):
        if not registers[region] >> 40 & 1:  # not the NPU's internal memory of lookup tables
            start = registers[address]
            yield MemoryAccess(registers[region] >> 32 & 7, start, start + length, region == _DESTINATION_REGION)


def weight_accesses(registers: Mapping[int, int]) -> Iterator[MemoryAccess]:
    """Memory that a convolution reads as weights and scales."""
    weights, scales = WEIGHT_REGION_REGISTERS
    for base, region in zip(WEIGHT_BASE_REGISTERS, (weights, weights, scales, scales), strict=True):
        if registers[base + 1]:
            start = registers[base]
            yield MemoryAccess(registers[region] >> 32 & 7, start, start + registers[base + 1], False)
