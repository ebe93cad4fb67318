"""Weight sharing: store weights that several methods use once, although Vela encodes them for each method.

The addresses of constants in the command streams are patched, so that all streams read one region: the constants of the
first method, followed by the additional ones of other methods. Nothing is copied at run time: the NPU reads constants
in place. Command and register numbers: ``runtime/emulator/command_stream.h``.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.ethosu_commands import DMA, decode_commands, encode_command, is_u85, pack_stream
from arm_recipes._internal.executorch_programs import delegates_of, set_payload, store_named_data
from arm_recipes._internal.messages import warn
from arm_recipes.runtime.ethosu_blocks import externalize_weights
from arm_recipes.runtime.ethosu_payload import read_parts
from arm_recipes.runtime.payload_parts import encode_parts, weights_key
from arm_recipes.runtime.tosa_graph import find_constant_spans

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule

_CONV, _DEPTHWISE, _KERNELS, _ELEMENTWISE, _DMA = 2, 3, (2, 3, 5, 6, 7), 6, 16
#: (region, base) registers of up to four weight streams and of the scales; the length register follows the base.
_STREAMS = ((296, 0x420), (296, 0x490), (296, 0x492), (296, 0x494), (297, 0x422))
#: (region, base, precision) registers of IFM and IFM2.
_MAPS = ((271, 0x400, 261), (399, 0x480, 389))
_SOURCE, _TARGET_REGION, _LENGTH = (DMA[0], DMA[2]), DMA[1], DMA[4]
_INDICES, _INDEX_MAX, _STRIDES, _COUNTS = (308, 0x437), 0x438, (0x433, 0x434), (306, 307)
_IN_MEMORY = 2  #: storage values from here on: a chained operand or a scalar
_CONSTANTS = 0  #: the region of weights and other constants
_ALIGNMENT = 64


_FEW = 1024  #: TOSA constants of fewer bytes are not shared


def share_weights(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: share the weights of Ethos-U and TOSA delegates among methods.

    A program with one method keeps weights in its payload, which all firmware versions read.
    """
    if len(manager.methods) > 1:
        modules = [module for method in sorted(manager.methods) for module in delegates_of(manager, method)]
        _share_ethosu(manager, [module for module in modules if module.backend_id == "EthosUBackend"])
        _share_tosa(manager, [module for module in modules if module.backend_id == "TOSABackend"])
    return []


def _share_ethosu(manager: EdgeProgramManager, modules: Sequence[LoweredBackendModule]) -> None:
    from arm_backend_core.backends.payload import WEIGHTS_CHECKSUM_KEY, checksum_spec

    if len(modules) < 2:
        return
    parts = [read_parts(module.processed_bytes) for module in modules]
    streams = []
    for part in parts:
        try:
            streams.append(Stream(bytes(part.commands)))
            _pieces(streams[-1], len(part.weights))
        except UnsupportedStream as reason:
            warn(f"methods do not share weights: {reason}; each method stores its own")
            return
    region, moved = merge_constants(streams, [part.weights for part in parts])
    if len(region) > 0.9 * sum(len(part.weights) for part in parts):
        return
    name = _store(manager, region)
    for module, stream, patched in zip(modules, streams, moved, strict=True):
        payload = externalize_weights(module.processed_bytes, patched, name)
        _replace(module, payload, [checksum_spec(region, WEIGHTS_CHECKSUM_KEY)], stream.inserted)


def _share_tosa(manager: EdgeProgramManager, modules: Sequence[LoweredBackendModule]) -> None:
    cuts = [_split_constants(module.processed_bytes) for module in modules]
    counts = Counter(content for parts in cuts for content in {data for data, constant in parts if constant})
    for module, parts in zip(modules, cuts, strict=True):
        named = [_store(manager, data) if constant and counts[data] > 1 else data for data, constant in parts]
        if any(isinstance(part, str) for part in named):
            _replace(module, encode_parts(named))


def _split_constants(flatbuffer: bytes) -> list[tuple[bytes, bool]]:
    """Split a TOSA flatbuffer into parts; the flag marks the data of a large constant."""
    borders = [0, *(border for span in find_constant_spans(memoryview(flatbuffer), _FEW) for border in span)]
    pairs = list(pairwise([*borders, len(flatbuffer)]))
    return [(flatbuffer[start:end], index % 2 == 1) for index, (start, end) in enumerate(pairs)]


def _store(manager: EdgeProgramManager, data: bytes) -> str:
    name = weights_key(data)
    store_named_data(manager, name, data, _ALIGNMENT)
    return name


def _replace(
    module: LoweredBackendModule, payload: bytes, told: Sequence[CompileSpec] = (), inserted: Sequence[int] = ()
) -> None:
    """Replace a delegate's payload, and update its record: checksum, size, and positions of the commands."""
    from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum_spec
    from arm_backend_core.events import delegate_record, set_delegate_record

    check = checksum_spec(payload)
    specs = [check if spec.key == CHECKSUM_KEY else spec for spec in module.compile_specs]
    set_payload(module, payload, [*specs, *told])
    record = delegate_record(module)
    assert record is not None
    vela = record.vela
    if inserted:
        assert vela is not None
        layers = [replace(layer, commands=_shift_commands(layer.commands, inserted)) for layer in vela.layers]
        vela = replace(vela, layers=tuple(layers))
    changed = replace(record, checksum=bytes(check.value), payload_bytes=len(payload), vela=vela)
    set_delegate_record(module, changed)


def _shift_commands(commands: Sequence[int], inserted: Sequence[int]) -> tuple[int, ...]:
    return tuple(at + 8 * bisect.bisect_right(inserted, at) for at in commands)


class UnsupportedStream(Exception):
    """A command stream reads constants in a way that cannot be patched."""


@dataclass(frozen=True)
class ConstantRead:
    """A read of constants by an operation.

    Attributes:
        word: index of the word of the command that set the address.
        address: address of the first byte.
        length: number of bytes; None if unknown.
    """

    word: int
    address: int
    length: int | None


class Stream:
    """A command stream as words, with its reads of constants.

    Attributes:
        uses: the reads, in program order.
        inserted: byte offsets, from the first command on, before which a command was inserted. It repeats an address
            that Vela sets once for a constant and a tensor of another region with the same offset.
    """

    def __init__(self, stream: bytes) -> None:
        self._stream, self._u85 = stream, is_u85(stream)
        self._words: list[int] = []
        self.inserted: list[int] = []
        self.uses = list(self._read())

    def with_addresses(self, places: dict[int, int]) -> bytes:
        """Patch the addresses of constants.

        Args:
            places: ``ConstantRead.word`` -> new address.
        """
        words = list(self._words)
        for place, address in places.items():
            words[place] = (words[place] & 0xFF00FFFF) | (address >> 32) << 16
            words[place + 1] = address & 0xFFFFFFFF
        return pack_stream(self._stream, words)

    def _read(self) -> Iterator[ConstantRead]:
        """Reads of constants, in program order. Registers keep their values between commands."""
        registers, places, words = defaultdict[int, int](int), dict[int, int](), self._words
        regions: dict[int, bool] = {}
        for _, number, value in decode_commands(self._stream):
            if number >= 256:
                registers[number], places[number] = value, len(words)
            else:
                for region, base, length in self._operands(number, registers):
                    if base not in places:
                        continue
                    constant = registers[region] >> 32 & 7 == _CONSTANTS
                    if regions.setdefault(places[base], constant) != constant:
                        self.inserted.append(4 * len(words) - 8 * len(self.inserted))
                        places[base], regions[len(words)] = len(words), constant
                        words += encode_command(base, registers[base])
                    if constant:
                        yield ConstantRead(places[base], registers[base] & 0xFFFFFFFFFF, length)
            words += encode_command(number, value)

    def _operands(self, code: int, registers: dict[int, int]) -> Iterator[tuple[int, int, int | None]]:
        """(region register, address register, number of bytes) of the operands of an operation."""
        if code in (_CONV, _DEPTHWISE):
            for region, base in _STREAMS:
                if registers[base + 1] & 0xFFFFFFFF:
                    yield region, base, registers[base + 1] & 0xFFFFFFFF
        if code in _KERNELS:
            for region, base, precision in _MAPS:
                if not (self._u85 and registers[precision] >> 46 & 3 >= _IN_MEMORY):
                    yield region, base, None
                    if registers[region] >> 32 & 7 == _CONSTANTS and any(registers[base + i] for i in (1, 2, 3)):
                        raise UnsupportedStream("a constant in several tiles")
        if code == _DMA and not registers[_SOURCE[0]] >> 40 & 1:
            yield *_SOURCE, self._copied(registers)
            if self._u85 and (registers[_SOURCE[0]] | registers[_TARGET_REGION]) >> 43 & 1:
                yield *_INDICES, None

    def _copied(self, registers: dict[int, int]) -> int:
        """Number of bytes from the first to the last byte that a DMA reads."""
        rank = registers[_SOURCE[0] if self._u85 else _TARGET_REGION] >> 41 & 3
        counts = [registers[count] >> 32 for count in _COUNTS]
        rows = counts[0] if rank >= 1 or self._u85 else 1
        images, length = counts[1] if rank >= 2 else 1, registers[_LENGTH] & 0xFFFFFFFFFF
        if not self._u85:
            return length * rows * images
        if registers[_SOURCE[0]] >> 43 & 1:  # gather: rows by indices
            rows = (registers[_INDEX_MAX] & 0xFFFFFFFF) + 1
        steps = [registers[stride] & 0xFFFFFFFFFF for stride in _STRIDES]
        return (rows - 1) * steps[0] + (images - 1) * steps[1] + length


def merge_constants(streams: Sequence[Stream], constants: Sequence[memoryview | bytes]) -> tuple[bytes, list[bytes]]:
    """Merge the constants of several command streams into one region.

    Returns:
        the region, and the patched streams.

    Raises:
        UnsupportedStream: a stream reads constants in a way that cannot be patched.
    """
    region, size = [constants[0]], len(constants[0])  # joined at the end, to avoid copies of the payloads
    known = {_digest(constants[0][start:end]): start for start, end in _pieces(streams[0], size)}
    moved = [streams[0].with_addresses({})]
    for stream, own in zip(streams[1:], constants[1:], strict=True):
        pieces = _pieces(stream, len(own))
        targets = []
        for start, end in pieces:
            content = own[start:end]
            key = _digest(content)
            if key not in known:
                region += [bytes(-size % _ALIGNMENT), content]
                known[key] = size + len(region[-2])
                size = known[key] + len(content)
            targets.append(known[key])
        places = {}
        for use in stream.uses:
            index = next(i for i, (start, end) in enumerate(pieces) if start <= use.address < end)
            places[use.word] = use.address - pieces[index][0] + targets[index]
        moved.append(stream.with_addresses(places))
    return b"".join([*region, bytes(-size % 16)]), moved


def _digest(content: memoryview | bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _pieces(stream: Stream, size: int) -> list[tuple[int, int]]:
    """Ranges of the constants that may be moved as a unit: reads with a known length, and the ranges in between.

    Raises:
        UnsupportedStream: an operation reads beyond the end of the constants.
    """
    ends: dict[int, int] = {}
    for use in stream.uses:
        ends[use.address] = max(ends.get(use.address, 0), use.address + (use.length or 0))
    if any(start >= size or end > size for start, end in ends.items()):
        raise UnsupportedStream("an address beyond the constants")
    exact: list[list[int]] = []
    for start, end in sorted((start, end) for start, end in ends.items() if end > start):
        if exact and start < exact[-1][1]:
            exact[-1][1] = max(exact[-1][1], end)
        else:
            exact.append([start, end])
    pieces = [(start, end) for start, end in exact]
    borders = [0, *(border for piece in exact for border in piece), size]
    for start, end in list(pairwise(borders))[::2]:
        first = min((address for address in ends if start <= address < end), default=None)
        if first is not None:
            pieces.append((first, end))
    return sorted(pieces)
