"""Insert waits and table loads that Vela omits from command streams (``docs/contributors/vela.md``).

A kernel is an NPU operation other than a DMA.

Waits before a DMA (U55, U65): the last two kernels may still run when a DMA starts. Vela omits waits where it assumes
wrong addresses for parts of tensors. This module compares the addresses of feature maps, but not of weights.

Table loads (U55, U65): NPUs with fewer than 128 MACs lose their lookup tables in each kernel that uses no table. Vela
does not reload some of the lost tables.

Waits between kernels: a kernel may start before the previous kernel has written its last blocks. The register BLOCKDEP
limits this overlap; with the value 0, the kernel waits. It must wait in these cases:

- It reads the previous kernel's result with another layout, or not from the start of a row.
- It reads that result in windows with gaps between them: the stride exceeds the window size. Vela assumes no gaps.
- It reads that result, and its two inputs may be parts of one tensor. Vela considers only one of the inputs.
- It belongs to a chain (U85): kernels that pass feature maps to each other without writing them to memory.
- It is a RESIZE. Vela assumes that it reads as many rows and columns as it writes.
"""

from collections import defaultdict

from arm_backend_core.backends import ethosu_commands as npu
from arm_backend_core.backends.ethosu_accesses import (
    ELEMENTWISE_COMMAND,
    MemoryAccess,
    dma_accesses,
    kernel_accesses,
    list_feature_map_registers,
)
from arm_backend_core.backends.ethosu_commands import (
    DMA_REGISTERS,
    DMA_START,
    DMA_WAIT,
    FEATURE_MAP_REGISTERS,
    encode_command,
)

_RESIZE, _KERNEL_WAIT = 7, 18
_WINDOW_WIDTH, _WINDOW_HEIGHT, _STRIDES = 288, 289, 290
_ACTIVATION, _TABLE_0, _BLOCKDEP = 293, 16, 303
_DESTINATION_REGION, _DESTINATION_ADDRESS = DMA_REGISTERS[1], DMA_REGISTERS[3]


def insert_waits(stream: bytes) -> tuple[bytes, list[int]]:
    """Insert the missing commands into ``stream``.

    Returns:
        The new stream, and for each inserted word its byte offset in ``stream``, relative to the first command.
    """
    registers, kernels, words, offsets = (
        defaultdict[int, int](int),
        list[list[MemoryAccess]](),
        list[int](),
        list[int](),
    )
    # A slot, 0 to 7, holds a lookup table. {slot: words of the DMA that loads the table}, and slots of lost tables.
    table_dmas, lost_tables = dict[int, list[int]](), set[int]()
    ofm_layout, is_blockdep_overridden = tuple[int, ...](), False  # True while only the new stream has BLOCKDEP 0
    is_small_npu = stream[8] & 15 < 7  # lowest bits of the third word: log2 of the MACs
    for_u85 = npu.is_u85(stream)  # on U85, Vela is known to omit only waits between kernels

    def insert_words(*added: int) -> None:
        offsets.extend([4 * (len(words) - len(offsets))] * len(added))
        words.extend(added)

    for _, number, value in npu.decode_commands(stream):
        if number >= 256:
            registers[number] = value
            is_blockdep_overridden = is_blockdep_overridden and number != _BLOCKDEP
        elif number == _KERNEL_WAIT:
            del kernels[: -(value >> 32) or None]
        elif number in npu.KERNEL_COMMANDS:
            slot = (registers[_ACTIVATION] >> 32 & 31) - _TABLE_0
            if slot in lost_tables:
                insert_words(_KERNEL_WAIT, *table_dmas[slot], DMA_START, DMA_WAIT, *_dma_words(registers))
                lost_tables.remove(slot)
            elif is_small_npu and slot < 0 and not for_u85:
                lost_tables.update(table_dmas)
            maps = list_feature_map_registers(number)
            kernels = [*kernels[-1:], list(kernel_accesses(registers, maps))]
            is_chain = for_u85 and any(npu.is_chained(registers[precision]) for *_, precision, _ in maps)
            # Vela 5.1 makes every chain wait. Vela 5.2 lets some chains start before the previous kernel ends.
            must_wait = number == _RESIZE or is_chain
            if len(kernels) > 1 and not must_wait:
                has_gaps = number != ELEMENTWISE_COMMAND and _stride_exceeds_window(registers)
                must_wait = _needs_kernel_wait(registers, kernels, ofm_layout, has_gaps=has_gaps)
            if is_blockdep_overridden != (must_wait and registers[_BLOCKDEP] > 0):
                is_blockdep_overridden = not is_blockdep_overridden
                insert_words(*encode_command(_BLOCKDEP, 0 if is_blockdep_overridden else registers[_BLOCKDEP]))
            ofm_layout = _feature_map_layout(registers, FEATURE_MAP_REGISTERS[1])
        elif number == DMA_START and not for_u85:
            pairs = ((a, b) for a in dma_accesses(registers) for kernel in kernels for b in kernel)
            if any(_overlaps(a, b) and (a.is_write or b.is_write) for a, b in pairs):
                insert_words(_KERNEL_WAIT)
                kernels.clear()
            if registers[_DESTINATION_REGION] >> 40 & 1:
                slot = registers[_DESTINATION_ADDRESS] >> 8 & 7
                table_dmas[slot] = _dma_words(registers)
                lost_tables.discard(slot)
        words += encode_command(number, value)
    return npu.pack_command_stream(stream, words), offsets


def _feature_map_layout(registers: dict[int, int], map_registers: tuple[int, ...]) -> tuple[int, ...]:
    """Layout of a feature map: first byte, row stride, other strides, sizes, format, element size, transpose.

    If two layouts differ only in the first byte, rows of both feature maps have the same sizes, strides and format.
    """
    base, stride, tile, _, precision, depth = map_registers
    precision_bits = registers[precision]
    size, transpose = (
        (precision_bits >> 33 & 3, precision_bits >> 41 & 31)
        if base == FEATURE_MAP_REGISTERS[1][0]
        else (precision_bits >> 34 & 3, 0)
    )
    sizes = registers[tile] >> 32, registers[depth] >> 32, precision_bits >> 38 & 3, size, transpose
    return (*(registers[key] for key in (base, stride + 1, stride, stride + 2)), *sizes)


def _stride_exceeds_window(registers: dict[int, int]) -> bool:
    """Whether windows have gaps in columns or rows. Registers hold stride and window size, each minus one."""
    strides = registers[_STRIDES] >> 32
    stride_x, stride_y = ((strides >> low & 1) + 2 * (strides >> high & 1) for low, high in ((0, 6), (1, 9)))
    return stride_x > registers[_WINDOW_WIDTH] >> 32 or stride_y > registers[_WINDOW_HEIGHT] >> 32


def _needs_kernel_wait(
    registers: dict[int, int], kernels: list[list[MemoryAccess]], ofm_layout: tuple[int, ...], *, has_gaps: bool
) -> bool:
    """Whether a kernel reads the previous kernel's result in a case for which Vela's BLOCKDEP is too large.

    The module's docstring lists the cases. ``kernels`` has the accesses of the previous kernel and of this kernel.
    """
    (ofm_span,) = (span for span in kernels[0] if span.is_write)
    ifm_spans = [span for span in kernels[1] if not span.is_write]
    layouts = [_feature_map_layout(registers, map_registers) for map_registers in FEATURE_MAP_REGISTERS[::2]]
    must_wait = has_gaps or (len(ifm_spans) > 1 and _may_be_one_tensor(ifm_spans, layouts))
    return any(
        _overlaps(span, ofm_span) and (must_wait or not _have_same_rows(layout, ofm_layout))
        for span, layout in zip(ifm_spans, layouts, strict=False)
    )


def _may_be_one_tensor(spans: list[MemoryAccess], layouts: list[tuple[int, ...]]) -> bool:
    """Whether two feature maps may be parts of one tensor: rows of it, or adjacent or overlapping memory."""
    are_rows = spans[0].region == spans[1].region and _have_same_rows(*layouts)
    return are_rows or _overlaps(spans[0], spans[1], distance=1)


def _have_same_rows(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two layouts have equal rows, at addresses that differ by a multiple of the row stride."""
    return a[1:] == b[1:] and not (a[0] - b[0]) % (a[1] or 1)


def _overlaps(a: MemoryAccess, b: MemoryAccess, distance: int = 0) -> bool:
    return a.region == b.region and a.start < b.end + distance and b.start < a.end + distance


def _dma_words(registers: dict[int, int]) -> list[int]:
    """Commands that set the registers of a one-row DMA."""
    return [word for key in DMA_REGISTERS for word in encode_command(key, registers[key])]
