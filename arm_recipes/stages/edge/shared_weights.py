"""Weight sharing: store a weight once if several methods use it, although Vela encodes it for each method.

For Ethos-U, this pass patches the addresses of constants in the command streams, so that all streams read one region.
The region holds the constants of the first method, then the additional constants of the other methods. Nothing is
copied at run time, because the NPU reads constants in place. Command and register numbers:
``runtime/emulator/command_stream.h``. Large constants that several TOSA flatbuffers contain become named data.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.ethosu_commands import (
    DMA_REGISTERS,
    FEATURE_MAP_REGISTERS,
    decode_commands,
    encode_command,
    is_u85,
    pack_command_stream,
)
from arm_recipes._internal.executorch_programs import arm_delegates_of, set_payload, store_named_data
from arm_recipes._internal.messages import warn
from arm_recipes.runtime.ethosu_blocks import BlockName, replace_blocks
from arm_recipes.runtime.ethosu_payload import read_payload_content
from arm_recipes.runtime.payload_parts import content_key, encode_parts
from arm_recipes.runtime.tosa_flatbuffer import find_constant_spans

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule

_CONV_OP, _DEPTHWISE_OP, _KERNEL_OPS, _DMA_OP = 2, 3, (2, 3, 5, 6, 7), 16
#: (region, base) registers of up to four weight streams and of the scales. The length register follows the base
#: register.
_WEIGHT_REGISTERS = ((296, 0x420), (296, 0x490), (296, 0x492), (296, 0x494), (297, 0x422))
#: (base, region, precision) registers of IFM and IFM2.
_INPUT_REGISTERS = tuple((FEATURE_MAP_REGISTERS[i][0], *FEATURE_MAP_REGISTERS[i][3:5]) for i in (0, 2))
_DMA_SOURCE, _DMA_TARGET_REGION, _DMA_LENGTH = (DMA_REGISTERS[0], DMA_REGISTERS[2]), DMA_REGISTERS[1], DMA_REGISTERS[4]
_GATHER_INDICES, _GATHER_INDEX_MAX, _DMA_STRIDES, _DMA_COUNTS = (308, 0x437), 0x438, (0x433, 0x434), (306, 307)
_MIN_CHAINED_STORAGE = 2  #: operands with the IFM storage modes 2 (chained) and 3 (scalar) are not in memory
_CONSTANT_REGION = 0  #: the region of weights and other constants
_ALIGNMENT_BYTES = 64
#: Ethos-U weights are shared only if the shared region has at most this fraction of the weight bytes of all methods.
_MAX_SHARED_FRACTION = 0.9
_MIN_SHARED_BYTES = 1024  #: TOSA constants of fewer bytes are not shared


def share_weights(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: share the weights of Ethos-U and TOSA delegates among methods.

    A program with one method is unchanged: it keeps weights in its payload, which all firmware versions read.
    """
    if len(manager.methods) > 1:
        modules = [module for method in sorted(manager.methods) for module in arm_delegates_of(manager, method)]
        _share_ethosu_weights(manager, [module for module in modules if module.backend_id == "EthosUBackend"])
        _share_tosa_constants(manager, [module for module in modules if module.backend_id == "TOSABackend"])
    return []


def _share_ethosu_weights(manager: EdgeProgramManager, modules: Sequence[LoweredBackendModule]) -> None:
    from arm_backend_core.backends.payload import WEIGHTS_CHECKSUM_KEY, checksum_spec

    if len(modules) < 2:
        return
    payload_contents = [read_payload_content(module.processed_bytes) for module in modules]
    streams = []
    for content in payload_contents:
        try:
            streams.append(CommandStream(bytes(content.commands)))
            _movable_ranges(streams[-1], len(content.weights))
        except UnsupportedStream as reason:
            warn(f"methods do not share weights: {reason}; each method stores its own")
            return
    region, patched_streams = merge_constants(streams, [content.weights for content in payload_contents])
    if len(region) > _MAX_SHARED_FRACTION * sum(len(content.weights) for content in payload_contents):
        return
    name = _store_shared(manager, region)
    for module, stream, patched in zip(modules, streams, patched_streams, strict=True):
        contents = {BlockName.COMMANDS: patched, BlockName.WEIGHTS: name.encode()}
        payload = replace_blocks(module.processed_bytes, contents, external=(BlockName.WEIGHTS,))
        replace_payload(module, payload, [checksum_spec(region, WEIGHTS_CHECKSUM_KEY)], stream.inserted_offsets)


def _share_tosa_constants(manager: EdgeProgramManager, modules: Sequence[LoweredBackendModule]) -> None:
    split_payloads = [_split_constants(module.processed_bytes) for module in modules]
    counts = Counter(content for parts in split_payloads for content in {data for data, constant in parts if constant})
    for module, parts in zip(modules, split_payloads, strict=True):
        data_or_names = [
            _store_shared(manager, data) if constant and counts[data] > 1 else data for data, constant in parts
        ]
        if any(isinstance(part, str) for part in data_or_names):
            replace_payload(module, encode_parts(data_or_names))


def _split_constants(flatbuffer: bytes) -> list[tuple[bytes, bool]]:
    """Split a TOSA flatbuffer into (part, whether the part is the data of a large constant) pairs."""
    bounds = [0, *(bound for span in find_constant_spans(memoryview(flatbuffer), _MIN_SHARED_BYTES) for bound in span)]
    pairs = list(pairwise([*bounds, len(flatbuffer)]))
    return [(flatbuffer[start:end], index % 2 == 1) for index, (start, end) in enumerate(pairs)]


def _store_shared(manager: EdgeProgramManager, data: bytes) -> str:
    name = content_key(data)
    store_named_data(manager, name, data, _ALIGNMENT_BYTES)
    return name


def replace_payload(
    module: LoweredBackendModule,
    payload: bytes,
    extra_specs: Sequence[CompileSpec] = (),
    inserted_offsets: Sequence[int] = (),
) -> None:
    """Replace a delegate's payload, and update checksum, size and command offsets in its compilation record.

    ``inserted_offsets``: see ``CommandStream``.
    """
    from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum_spec
    from arm_backend_core.compilation_log import delegate_record, set_delegate_record

    checksum = checksum_spec(payload)
    specs = [checksum if spec.key == CHECKSUM_KEY else spec for spec in module.compile_specs]
    set_payload(module, payload, [*specs, *extra_specs])
    record = delegate_record(module)
    assert record is not None
    vela = record.vela
    if inserted_offsets:
        assert vela is not None
        layers = [replace(layer, commands=_shift_commands(layer.commands, inserted_offsets)) for layer in vela.layers]
        vela = replace(vela, layers=tuple(layers))
    new_record = replace(record, checksum=bytes(checksum.value), payload_bytes=len(payload), vela=vela)
    set_delegate_record(module, new_record)


def _shift_commands(commands: Sequence[int], inserted_offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(offset + 8 * bisect.bisect_right(inserted_offsets, offset) for offset in commands)


class UnsupportedStream(Exception):
    """A command stream reads constants in a way that cannot be patched."""


@dataclass(frozen=True)
class ConstantRead:
    """A read of constants by an operation.

    Attributes:
        word: index of the first word of the command that set the address.
        address: address of the first byte, relative to the region of the constants.
        length: number of bytes; None if unknown.
    """

    word: int
    address: int
    length: int | None


class CommandStream:
    """A command stream of Vela, split into 32-bit words, and its reads of constants.

    Attributes:
        constant_reads: the reads, in program order.
        inserted_offsets: byte offsets in the original stream, relative to the first command, before which a command was
            inserted. If a constant and a tensor of another region have the same offset, Vela sets the address register
            once for both. The inserted command sets it again for the second operand, so that only the address of the
            constant is patched.
    """

    def __init__(self, stream: bytes) -> None:
        self._stream, self._u85 = stream, is_u85(stream)
        self._words: list[int] = []
        self.inserted_offsets: list[int] = []
        self.constant_reads = list(self._find_constant_reads())

    def patch_addresses(self, addresses: dict[int, int]) -> bytes:
        """Patch the addresses of constants.

        Args:
            addresses: new addresses, by ``ConstantRead.word`` of the reads.
        """
        words = list(self._words)
        for word, address in addresses.items():
            words[word] = (words[word] & 0xFF00FFFF) | (address >> 32) << 16
            words[word + 1] = address & 0xFFFFFFFF
        return pack_command_stream(self._stream, words)

    def _find_constant_reads(self) -> Iterator[ConstantRead]:
        """Yield the reads of constants, in program order. Registers keep their values between commands."""
        registers, words_of_registers, words = defaultdict[int, int](int), dict[int, int](), self._words
        is_constant_by_word: dict[int, bool] = {}
        for _, number, value in decode_commands(self._stream):
            if number >= 256:
                registers[number], words_of_registers[number] = value, len(words)
            else:
                for region, base, length in self._operands(number, registers):
                    if base not in words_of_registers:
                        continue
                    is_constant = registers[region] >> 32 & 7 == _CONSTANT_REGION
                    if is_constant_by_word.setdefault(words_of_registers[base], is_constant) != is_constant:
                        self.inserted_offsets.append(4 * len(words) - 8 * len(self.inserted_offsets))
                        words_of_registers[base], is_constant_by_word[len(words)] = len(words), is_constant
                        words += encode_command(base, registers[base])
                    if is_constant:
                        yield ConstantRead(words_of_registers[base], registers[base] & 0xFFFFFFFFFF, length)
            words += encode_command(number, value)

    def _operands(self, code: int, registers: dict[int, int]) -> Iterator[tuple[int, int, int | None]]:
        """Yield (region register, address register, number of bytes) of the operands of an operation."""
        if code in (_CONV_OP, _DEPTHWISE_OP):
            for region, base in _WEIGHT_REGISTERS:
                if registers[base + 1] & 0xFFFFFFFF:
                    yield region, base, registers[base + 1] & 0xFFFFFFFF
        if code in _KERNEL_OPS:
            for base, region, precision in _INPUT_REGISTERS:
                if not (self._u85 and registers[precision] >> 46 & 3 >= _MIN_CHAINED_STORAGE):
                    yield region, base, None
                    if registers[region] >> 32 & 7 == _CONSTANT_REGION and any(registers[base + i] for i in (1, 2, 3)):
                        raise UnsupportedStream("a command stream reads a constant in several tiles")
        if code == _DMA_OP and not registers[_DMA_SOURCE[0]] >> 40 & 1:
            yield *_DMA_SOURCE, self._dma_source_bytes(registers)
            if self._u85 and (registers[_DMA_SOURCE[0]] | registers[_DMA_TARGET_REGION]) >> 43 & 1:
                yield *_GATHER_INDICES, None

    def _dma_source_bytes(self, registers: dict[int, int]) -> int:
        """Number of bytes from the first to the last byte that a DMA reads."""
        rank = registers[_DMA_SOURCE[0] if self._u85 else _DMA_TARGET_REGION] >> 41 & 3
        counts = [registers[count] >> 32 for count in _DMA_COUNTS]
        rows = counts[0] if rank >= 1 or self._u85 else 1
        planes, length = counts[1] if rank >= 2 else 1, registers[_DMA_LENGTH] & 0xFFFFFFFFFF
        if not self._u85:
            return length * rows * planes
        if registers[_DMA_SOURCE[0]] >> 43 & 1:  # gather: rows by indices
            rows = (registers[_GATHER_INDEX_MAX] & 0xFFFFFFFF) + 1
        strides = [registers[stride] & 0xFFFFFFFFFF for stride in _DMA_STRIDES]
        return (rows - 1) * strides[0] + (planes - 1) * strides[1] + length


def merge_constants(
    streams: Sequence[CommandStream], constants: Sequence[memoryview | bytes]
) -> tuple[bytes, list[bytes]]:
    """Merge the constants of several command streams into one region.

    Returns:
        the region, and the patched streams.

    Raises:
        UnsupportedStream: a stream reads constants in a way that cannot be patched.
    """
    region, size = [constants[0]], len(constants[0])  # joined at the end, to avoid copies of the payloads
    positions = {_content_digest(constants[0][start:end]): start for start, end in _movable_ranges(streams[0], size)}
    patched_streams = [streams[0].patch_addresses({})]
    for stream, own_constants in zip(streams[1:], constants[1:], strict=True):
        ranges = _movable_ranges(stream, len(own_constants))
        new_positions = []
        for start, end in ranges:
            content = own_constants[start:end]
            key = _content_digest(content)
            if key not in positions:
                region += [bytes(-size % _ALIGNMENT_BYTES), content]
                positions[key] = size + len(region[-2])
                size = positions[key] + len(content)
            new_positions.append(positions[key])
        addresses = {}
        for read in stream.constant_reads:
            index = next(i for i, (start, end) in enumerate(ranges) if start <= read.address < end)
            addresses[read.word] = read.address - ranges[index][0] + new_positions[index]
        patched_streams.append(stream.patch_addresses(addresses))
    return b"".join([*region, bytes(-size % 16)]), patched_streams


def _content_digest(content: memoryview | bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _movable_ranges(stream: CommandStream, size: int) -> list[tuple[int, int]]:
    """Return the (start, end) ranges of the constants that ``merge_constants`` may move, each range as a unit.

    Overlapping reads of known length form one range. A read of unknown length (of a feature map or gather indices) may
    extend to the next range. Therefore, if such reads begin in a gap between ranges, the bytes from the first of them
    to the end of the gap form one range.

    Raises:
        UnsupportedStream: an operation reads beyond the end of the constants.
    """
    ends: dict[int, int] = {}
    for read in stream.constant_reads:
        ends[read.address] = max(ends.get(read.address, 0), read.address + (read.length or 0))
    if any(start >= size or end > size for start, end in ends.items()):
        raise UnsupportedStream("a command stream reads an address beyond the constants")
    known_ranges: list[list[int]] = []
    for start, end in sorted((start, end) for start, end in ends.items() if end > start):
        if known_ranges and start < known_ranges[-1][1]:
            known_ranges[-1][1] = max(known_ranges[-1][1], end)
        else:
            known_ranges.append([start, end])
    ranges = [(start, end) for start, end in known_ranges]
    bounds = [0, *(border for known_range in known_ranges for border in known_range), size]
    for start, end in list(pairwise(bounds))[::2]:
        first = min((address for address in ends if start <= address < end), default=None)
        if first is not None:
            ranges.append((first, end))
    return sorted(ranges)
