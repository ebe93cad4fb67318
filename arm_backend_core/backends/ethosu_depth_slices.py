"""Split convolutions by output channels in a command stream (U55, U65), so that their weights can be prefetched.

The NPU computes the channels of an OFM in blocks, and weights are encoded block by block. A slice is a range of output
channels that consists of whole blocks. The kernel of a slice writes only these channels of the OFM. The scales and the
order of the weights do not change. Vela's encoder encodes the weights of each slice again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from arm_backend_core.backends.ethosu_accesses import WEIGHT_REGION_REGISTERS
from arm_backend_core.backends.ethosu_commands import (
    DMA_REGISTERS,
    DMA_START,
    FEATURE_MAP_REGISTERS,
    KERNEL_COMMANDS,
    RegisterWriter,
    decode_commands,
    encode_command,
    pack_command_stream,
)
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError

_CONVOLUTION = 2  # NPU_OP_CONV
#: Numbers of the registers that hold the OFM's width, height, depth and block depth, each minus one.
_WIDTH, _HEIGHT, _DEPTH, _BLOCK_DEPTH = 273, 274, 275, 279
_OFM_BASE, _OFM_STRIDE, _OFM_TILE, _, _OFM_PRECISION, _ = FEATURE_MAP_REGISTERS[1]
#: Numbers of the registers with address and length of the weights and of the scales of core 0, and with the length of
#: the weights of core 1.
_WEIGHTS, _WEIGHT_BYTES, _SCALES, _SCALE_BYTES, _SECOND_WEIGHT_BYTES = 0x420, 0x421, 0x422, 0x423, 0x491
_SCALE_RECORD_BYTES = 10
_ALIGNMENT = 16
#: Depth of an OFM microblock. If the OFM's depth is a multiple of it, the encoded weights have no padding.
_MICROBLOCK_DEPTH = 8
#: Maximum number of slices of a convolution. Many short kernels take more cycles than one long kernel.
_MAX_SLICES = 12
#: {address register: region register} of the IFM, the IFM2 and the source of a DMA, which may be constants.
_CONSTANT_BASES = {0x400: 271, 0x480: 399, DMA_REGISTERS[2]: DMA_REGISTERS[0]}
#: {address register: region register} of the weights and scales of both cores.
_WEIGHT_BASES = {0x420: 296, 0x490: 296, 0x422: 297, 0x492: 297}


class _Slice(NamedTuple):
    """A range of output channels of a convolution: first channel, number of channels, encoded scales and weights."""

    channel: int
    depth: int
    scales: bytes
    weights: bytes


class _Convolution(NamedTuple):
    """A convolution that can be split.

    Its scales and weights are the bytes ``start`` to ``end`` of the constants; ``scales_address`` and
    ``weights_address`` are their addresses. ``depth`` and ``block_depth`` are numbers of channels of the OFM and of an
    OFM block.
    """

    start: int
    end: int
    scales_address: int
    weights_address: int
    depth: int
    block_depth: int


def find_slices(vela_result: dict[str, Any], word_indices: Set[int], max_bytes: int) -> dict[int, list[int]]:
    """Find the convolutions that can be split.

    Args:
        vela_result: Vela's result.
        word_indices: word indices of the commands of the convolutions to consider.
        max_bytes: the scales and weights of each slice must take fewer bytes than this. Other convolutions are not
            split.

    Returns:
        ``{5: [32, 32, 16]}``: the convolution at word index 5 has three slices, of 32, 32 and 16 output channels.
    """
    found = {}
    for key, conv in _find_convolutions(vela_result, word_indices).items():
        blocks, bytes_per_channel = -(-conv.depth // conv.block_depth), (conv.end - conv.start) / conv.depth
        depth = max(-(-blocks // _MAX_SLICES), 1) * conv.block_depth
        if depth < conv.depth and depth * bytes_per_channel < max_bytes:
            found[key] = [min(depth, conv.depth - channel) for channel in range(0, conv.depth, depth)]
    return found


def slice_convolutions(
    vela_result: dict[str, Any], depths: Mapping[int, list[int]], const_memory: str
) -> dict[str, Any] | None:
    """Split convolutions into slices.

    Args:
        vela_result: Vela's result; it is not changed.
        depths: numbers of output channels of the slices, from ``find_slices``.
        const_memory: name of the memory of the constants.

    Returns:
        The changed entries of the result; None if the weights cannot be encoded again.
    """
    convolutions = _find_convolutions(vela_result, depths.keys())
    constants = bytes(vela_result["weights"])
    requests = [(constants[conv.weights_address : conv.end], depths[key]) for key, conv in convolutions.items()]
    try:
        encoded = vela.split_weights(requests)
    except (WorkerError, WorkerDied):
        return None
    slices = {
        key: list(_make_slices(constants, conv, depths[key], parts))
        for (key, conv), parts in zip(convolutions.items(), encoded, strict=True)
        if parts
    }
    return _rewrite(vela_result, const_memory, convolutions, slices) if slices else None


def _find_convolutions(vela_result: dict[str, Any], word_indices: Set[int]) -> dict[int, _Convolution]:
    """Find the convolutions that can be split, by word index.

    They run on one core and write one tile. Their weights directly follow their scales, one scale for each channel, and
    no other kernel reads these scales. Their depth is a multiple of ``_MICROBLOCK_DEPTH``, their block depth of
    ``_ALIGNMENT``.
    """
    registers, found, readers = defaultdict[int, int](int), dict[int, _Convolution](), defaultdict[int, int](int)
    weight_region = vela_result["weight_region"] << 32  # value of the region register
    for word_index, number, value in decode_commands(vela_result["command_stream"]):
        registers[number] = value
        if number in KERNEL_COMMANDS and registers[WEIGHT_REGION_REGISTERS[0]] == weight_region:
            readers[registers[_SCALES]] += 1
        if word_index not in word_indices or number != _CONVOLUTION or registers[_SECOND_WEIGHT_BYTES]:
            continue
        depth, block_depth = ((registers[key] >> 32) + 1 for key in (_DEPTH, _BLOCK_DEPTH))
        scales, weights = registers[_SCALES], registers[_WEIGHTS]
        end = weights + registers[_WEIGHT_BYTES]
        is_adjacent = scales + registers[_SCALE_BYTES] == weights
        has_scales = registers[_SCALE_BYTES] >= _SCALE_RECORD_BYTES * depth
        is_one_tile = registers[_WIDTH] <= registers[_OFM_TILE] and registers[_HEIGHT] <= registers[_OFM_TILE + 1]
        is_aligned = depth % _MICROBLOCK_DEPTH == 0 and block_depth % _ALIGNMENT == 0
        if is_adjacent and has_scales and is_one_tile and is_aligned:
            found[word_index] = _Convolution(scales, end, scales, weights, depth, block_depth)
    return {key: conv for key, conv in found.items() if readers[conv.scales_address] == 1}


def _make_slices(constants: bytes, conv: _Convolution, depths: list[int], parts: list[bytes]) -> Iterator[_Slice]:
    channel = 0
    for depth, weights in zip(depths, parts, strict=True):
        first, last = (conv.scales_address + _SCALE_RECORD_BYTES * at for at in (channel, channel + depth))
        yield _Slice(channel, depth, _pad(constants[first:last]), _pad(weights))
        channel += depth


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _rewrite(
    vela_result: dict[str, Any],
    const_memory: str,
    convolutions: Mapping[int, _Convolution],
    slices: Mapping[int, list[_Slice]],
) -> dict[str, Any]:
    """The changed entries of Vela's result, with the slices in place of the convolutions."""
    constants, new_constants, moves, starts = bytes(vela_result["weights"]), bytearray(), list[tuple[int, int]](), {}
    position = 0
    for key, conv in sorted(convolutions.items(), key=lambda item: item[1].start):
        if key in slices:
            moves.append((position, len(new_constants) - position))
            new_constants += constants[position : conv.start]
            starts[key] = len(new_constants)
            new_constants += b"".join(part.scales + part.weights for part in slices[key])
            position = conv.end
    moves.append((position, len(new_constants) - position))
    new_constants += constants[position:]
    stream, positions = _rewrite_stream(vela_result, slices, starts, moves)
    growth = len(new_constants) - len(constants)
    header, rows = vela_result["tables"]["queue"]
    queue = [[str(4 * new), *row[1:]] for row in rows for new in positions[int(row[0]) // 4]]
    use, report = vela_result["memories"][const_memory], vela_result["report"]
    return {
        "command_stream": stream,
        "weights": bytes(new_constants),
        "tables": {**vela_result["tables"], "queue": (header, queue)},
        "report": {**report, "readOnlyPeakUsage": report["readOnlyPeakUsage"] + growth},
        "memories": {**vela_result["memories"], const_memory: {**use, "peak": use["peak"] + growth}},
    }


def _rewrite_stream(
    vela_result: dict[str, Any],
    slices: Mapping[int, list[_Slice]],
    starts: Mapping[int, int],
    moves: list[tuple[int, int]],
) -> tuple[bytes, dict[int, list[int]]]:
    """Write the stream with the slices.

    Args:
        vela_result: Vela's result.
        slices: {word index of a convolution: its slices}.
        starts: {word index of a convolution: address of its first slice}.
        moves: (address, offset), ascending. Constants from ``address`` up to the next address move by ``offset`` bytes.

    Returns:
        The new stream, and {word index in Vela's stream: word indices in the new stream}. A convolution that is split
        has several indices in the new stream.
    """
    stream, weight_region = vela_result["command_stream"], vela_result["weight_region"]
    own = {_DEPTH, _OFM_BASE, _WEIGHTS, _WEIGHT_BYTES, _SCALES, _SCALE_BYTES}
    writer, regions = RegisterWriter({*own, *_CONSTANT_BASES, *_WEIGHT_BASES}), defaultdict[int, int](int)
    positions = dict[int, list[int]]()

    def relocate(register: int, value: int) -> int:
        region_register = {**_CONSTANT_BASES, **_WEIGHT_BASES}.get(register)
        if region_register is None or regions[region_register] != weight_region << 32:
            return value
        return value + next(offset for address, offset in reversed(moves) if address <= value)

    for word_index, number, value in decode_commands(stream):
        if writer.defer(number, value):
            continue
        regions[number] = value
        values = dict[int, int]()
        if number in KERNEL_COMMANDS or number == DMA_START:
            values = {register: relocate(register, pending) for register, pending in writer.pending.items()}
        parts = list(_slice_registers(values, regions, slices.get(word_index, []), starts.get(word_index, 0)))
        for registers in parts or [{}]:
            writer.set_registers(values | registers)
            positions.setdefault(word_index, []).append(len(writer.words))
            writer.words += encode_command(number, value)
    return pack_command_stream(stream, writer.words), positions


def _slice_registers(
    values: Mapping[int, int], others: Mapping[int, int], slices: list[_Slice], start: int
) -> Iterator[dict[int, int]]:
    """Yield {register: value} for each slice: the registers in which its kernel differs from Vela's kernel.

    Args:
        values: {register: value} of Vela's kernel, for the deferred registers.
        others: {register: value} of Vela's kernel, for all other registers.
        slices: the slices.
        start: address of the first slice's scales.
    """
    is_bricks, bytes_log2 = others[_OFM_PRECISION] >> 38 & 3 == 1, others[_OFM_PRECISION] >> 33 & 3
    for part in slices:
        offset = part.channel // 16 * others[_OFM_STRIDE + 2] if is_bricks else part.channel << bytes_log2
        yield {
            _DEPTH: (part.depth - 1) << 32,
            _OFM_BASE: values[_OFM_BASE] + offset,
            _SCALES: start,
            _SCALE_BYTES: len(part.scales),
            _WEIGHTS: start + len(part.scales),
            _WEIGHT_BYTES: len(part.weights),
        }
        start += len(part.scales) + len(part.weights)
