"""Parser of Ethos-U payloads.

It validates as strictly as ``runtime/payload/ethosu_payload.cpp``, the parser on the device, and words its errors
alike. A test compares both.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from arm_recipes.runtime.errors import PayloadError

#: Looks up named data of a program by its key; returns None if there is none.
NamedDataLookup = Callable[[str], bytes | memoryview | None]
_HEADER, _COMMANDS, _WEIGHTS, _SCRATCH = "vela_bin_stream", "cmd_data", "weight_data", "scratch_size"
_INPUTS, _OUTPUTS, _FOOTER = "inputs", "outputs", "vela_end_stream"
_NAMES: Final = (_HEADER, _COMMANDS, _WEIGHTS, _SCRATCH, _INPUTS, _OUTPUTS, _FOOTER)
_NAME_BY_BYTES: Final = {name.encode().ljust(16, b"\0"): name for name in _NAMES}
#: Size of a block's header in bytes, and the offsets of its length field and of its external-data flag.
_BLOCK_HEADER_BYTES, _LENGTH_AT, _EXTERNAL_AT = 32, 16, 20
_ALIGNMENT = 16
#: An input or output: shape (6 dimensions), element size, offset, region; nine int32.
_TENSOR: Final = struct.Struct("<9i")
_RANK, _MAX_TENSORS, _MAX_BYTES = 6, 1024, 2**32 - 1
_PRODUCTS: Final = (55, 65, 85)
#: Length of the key of external data; ExecuTorch's own EthosUBackend accepts no other length.
NAME_LENGTH: Final = 64
#: Regions: numbers of base addresses. Only COP2 streams with separate I/O have regions for inputs and outputs.
WEIGHTS, SCRATCH, FAST_SCRATCH, INPUT, OUTPUT = range(5)


@dataclass(frozen=True)
class EthosUTensor:
    """Where the command stream reads or writes a tensor.

    Attributes:
        shape: six dimensions. Vela merges and splits dimensions, so only their product matches the program.
        element_size: bytes of an element.
        offset: bytes from the start of the region; -1 if the tensor is not placed.
        region: number of the base address.
    """

    shape: tuple[int, ...]
    element_size: int
    offset: int
    region: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.element_size

    def __str__(self) -> str:
        first = next((index for index, count in enumerate(self.shape) if count != 1), len(self.shape) - 1)
        where = f"byte {self.offset:,} of region {self.region}" if self.offset >= 0 else "not placed"
        return f"[{', '.join(map(str, self.shape[first:]))}] x {self.element_size} B, {where}"


@dataclass(frozen=True)
class EthosUPayload:
    """A compiled program for an Ethos-U.

    Attributes:
        product: 55, 65 or 85.
        macs: multiply-accumulates a cycle.
        stream: format of the command stream: ``COP1``, or ``COP2`` for Direct Drive.
        scratch_bytes: scratch memory that the backend must provide during a run.
        fast_scratch_bytes: the same in fast memory; None if neither the stream nor a compile spec states it.
    """

    product: int
    macs: int
    stream: str
    command_bytes: int
    weight_bytes: int
    scratch_bytes: int
    fast_scratch_bytes: int | None
    inputs: tuple[EthosUTensor, ...]
    outputs: tuple[EthosUTensor, ...]


@dataclass(frozen=True)
class EthosUParts:
    """A payload's command stream and weights, which the driver receives, as views of the payload.

    Attributes:
        payload: description of the payload.
        commands: the command stream.
        header_bytes: size of the stream's header, which comes before the first command.
        weights: empty if they are named data of the program that were not looked up.
        has_external_weights: whether the weights are named data, which other delegates may share.
    """

    payload: EthosUPayload
    commands: memoryview
    header_bytes: int
    weights: memoryview
    has_external_weights: bool


def read_payload(data: bytes | memoryview) -> EthosUPayload:
    """Parse and describe a payload.

    Raises:
        PayloadError: the payload is truncated or damaged; the message says where.
    """
    return read_parts(data).payload


def read_parts(data: bytes | memoryview, find: NamedDataLookup | None = None) -> EthosUParts:
    """Parse and validate a payload.

    Args:
        data: the payload.
        find: looks up named data of the program, for external weights.

    Raises:
        PayloadError: the payload is truncated or damaged (the message says where), or its weights are missing.
    """
    if len(data) == 0:
        raise _damage_error(_HEADER, 0, "the payload is empty")
    blocks = _read_blocks(memoryview(data))
    for name, length in ((_HEADER, 0), (_FOOTER, 0), (_SCRATCH, 4)):
        blocks[name].check_length(length)
    commands, scratch = blocks[_COMMANDS], blocks[_SCRATCH].number(0)
    weights = blocks[_WEIGHTS].data
    if blocks[_WEIGHTS].external:
        weights = memoryview(b"" if find is None else look_up_weights(bytes(weights).decode(), find))
    stream = _read_stream_header(commands)
    inputs = _read_tensors(blocks[_INPUTS], INPUT, scratch, stream)
    outputs = _read_tensors(blocks[_OUTPUTS], OUTPUT, scratch, stream)
    described = EthosUPayload(
        product=stream.product,
        macs=stream.macs,
        stream=stream.kind,
        command_bytes=commands.size,
        weight_bytes=len(weights),
        scratch_bytes=scratch,
        fast_scratch_bytes=stream.fast_scratch,
        inputs=inputs,
        outputs=outputs,
    )
    return EthosUParts(described, commands.data, stream.header_bytes, weights, blocks[_WEIGHTS].external)


def look_up_weights(name: str, find: NamedDataLookup) -> bytes | memoryview:
    """Look up external weights in the program's named data.

    Raises:
        PayloadError: there is no named data with this key.
    """
    data = find(name)
    if data is None:
        raise PayloadError(
            f"the weights '{name}', which methods share, are not among the program's named data: "
            "load the program with arm_recipes.load, or export it again"
        )
    return data


def inline_weights(data: bytes | memoryview, find: NamedDataLookup) -> bytes | memoryview:
    """Inline external weights into a payload; other payloads, damaged ones too, are returned unchanged."""
    try:
        blocks = _read_blocks(memoryview(data)) if len(data) else {}
    except PayloadError:
        return data  # the parser reports the damage
    weights = blocks.get(_WEIGHTS)
    if weights is None or not weights.external:
        return data
    from arm_backend_core.backends.payload import block_stream

    contents = {name: bytes(block.data) for name, block in blocks.items()}
    contents[_WEIGHTS] = bytes(look_up_weights(contents[_WEIGHTS].decode(), find))
    return block_stream(list(contents.items()))


def externalize_weights(data: bytes, commands: bytes, name: str) -> bytes:
    """Replace the commands of a payload, and its weights by the key ``name`` of external weights."""
    from arm_backend_core.backends.payload import block_stream

    blocks = {key: bytes(block.data) for key, block in _read_blocks(memoryview(data)).items()}
    return block_stream(list((blocks | {_COMMANDS: commands, _WEIGHTS: name.encode()}).items()), external=(_WEIGHTS,))


def with_fast_scratch(payload: EthosUPayload, compile_specs: Mapping[str, bytes]) -> EthosUPayload:
    """The payload with the fast scratch size of its compile specs, if they state one.

    Raises:
        PayloadError: the compile spec is malformed.
    """
    from arm_backend_core.backends.payload import FAST_SCRATCH_KEY

    value = compile_specs.get(FAST_SCRATCH_KEY)
    if value is None:
        return payload
    if len(value) != 4:
        raise PayloadError(f"damaged: the compile spec {FAST_SCRATCH_KEY} has {len(value)} bytes, not 4")
    return replace(payload, fast_scratch_bytes=int.from_bytes(value, "little"))


def _damage_error(block: str, offset: int, reason: str) -> PayloadError:
    return PayloadError(f"block '{block}' at byte {offset}: {reason}")


@dataclass(frozen=True)
class _Block:
    """A block: its data, or the key of external data, and the offset of its data in the payload."""

    name: str
    data: memoryview
    offset: int
    external: bool = False

    @property
    def size(self) -> int:
        return len(self.data)

    def number(self, at: int, layout: str = "<I") -> int:
        value: int = struct.unpack_from(layout, self.data, at)[0]
        return value

    def damaged(self, at: int, reason: str) -> PayloadError:
        return _damage_error(self.name, self.offset + at, reason)

    def check_length(self, length: int) -> None:
        if self.size != length:
            raise self.damaged(_LENGTH_AT - _BLOCK_HEADER_BYTES, f"its length is {self.size} bytes, not {length}")


def _read_blocks(data: memoryview) -> dict[str, _Block]:
    """Split a payload into blocks, by name. Validates names, headers and lengths, but not the content."""
    blocks: dict[str, _Block] = {}
    at, last = 0, _HEADER
    while at < len(data):
        block, at = _read_block(data, at, last, blocks)
        blocks[block.name] = block
        last = block.name
        if last == _FOOTER and at < len(data):
            raise _damage_error(last, at, f"{len(data) - at} bytes follow the last block")
    for name in _NAMES:
        if name not in blocks:
            raise _damage_error(name, len(data), "the payload ends without this block")
    return blocks


def _read_block(data: memoryview, start: int, last: str, known: Mapping[str, _Block]) -> tuple[_Block, int]:
    """Read the block at ``start``, which follows the block ``last``; also returns the offset of the next block."""
    remaining = len(data) - start
    if remaining < _BLOCK_HEADER_BYTES:
        tail = f"{remaining} follow this one" if start else f"the payload {remaining}"
        raise _damage_error(last, start, f"the header of a block has {_BLOCK_HEADER_BYTES} bytes, {tail}")
    name = _NAME_BY_BYTES.get(bytes(data[start : start + 16]))
    if start == 0 and name != _HEADER:
        reason = "the bytes do not start with this block: not a program compiled for an Ethos-U"
        raise _damage_error(_HEADER, 0, reason)
    if name is None:
        raise _damage_error(last, start, "a block follows this one that has no name of an Ethos-U payload's blocks")
    if name in known:
        raise _damage_error(name, start, "the block occurs twice")
    header = data[start : start + _BLOCK_HEADER_BYTES]
    external = header[_EXTERNAL_AT] == 1
    if external and name != _WEIGHTS:
        reason = "its data is kept outside the payload, which is not supported: export it inline"
        raise _damage_error(name, start + _EXTERNAL_AT, reason)
    for at in range(_EXTERNAL_AT + external, _BLOCK_HEADER_BYTES):
        if header[at] != 0:
            raise _damage_error(name, start + at, f"reserved byte is {header[at]}, not 0")
    length = int.from_bytes(header[_LENGTH_AT:_EXTERNAL_AT], "little")
    remaining -= _BLOCK_HEADER_BYTES
    if length > remaining:
        reason = f"its length is {length} bytes, {remaining} are left in the payload"
        raise _damage_error(name, start + _LENGTH_AT, reason)
    first, padding = start + _BLOCK_HEADER_BYTES, -length % _ALIGNMENT
    if padding > remaining - length:
        raise _damage_error(
            name, first + length, f"{padding} bytes of padding, {remaining - length} are left in the payload"
        )
    if external and not (length == NAME_LENGTH and all(0x20 < byte < 0x7F for byte in data[first : first + length])):
        wrong = f"the name of its data outside the payload is not {NAME_LENGTH} printable characters but {length} bytes"
        reason = f"{wrong}: export the program again"
        raise _damage_error(name, start + _EXTERNAL_AT, reason)
    return _Block(name, data[first : first + length], first, external), first + length + padding


@dataclass(frozen=True)
class StreamHeader:
    """The header of a command stream.

    Attributes:
        kind: ``COP1`` or ``COP2``.
        header_bytes: size of the header.
        product: 55, 65 or 85.
        macs: multiply-accumulates a cycle.
        fast_scratch: bytes of fast scratch that the stream uses; None if the header does not state it (COP1).
        separate_io: whether inputs and outputs have regions of their own.
    """

    kind: str
    header_bytes: int
    product: int
    macs: int
    fast_scratch: int | None = None
    separate_io: bool = False


def read_header(commands: memoryview) -> StreamHeader:
    """Read the header of a command stream.

    Raises:
        PayloadError: the header is truncated or damaged; the message says where.
    """
    return _read_stream_header(_Block("command stream", commands, 0))


def _read_stream_header(block: _Block) -> StreamHeader:
    if block.size == 0:
        raise block.damaged(0, "the command stream is empty")
    reader = {b"COP1": _read_cop1_header, b"COP2": _read_cop2_header}.get(bytes(block.data[:4]))
    if reader is None:
        raise block.damaged(0, "it starts neither with COP1 nor with COP2")
    return reader(block)


def _read_configuration(block: _Block, at: int) -> tuple[int, int]:
    """Product and MACs a cycle, from the word that the driver compares with the NPU's CONFIG register."""
    word = block.number(at)
    product, log2_macs = word >> 28, word & 0xF
    if product >= len(_PRODUCTS):
        raise block.damaged(at, f"unknown product {product} in its configuration")
    if not 5 <= log2_macs <= 11:
        reason = f"its configuration has 2**{log2_macs} multiply-accumulates; Ethos-U NPUs have 32 to 2048"
        raise block.damaged(at, reason)
    return _PRODUCTS[product], 1 << log2_macs


def _read_cop1_header(block: _Block) -> StreamHeader:
    """Read a COP1 header: the magic, then records that each begin with a tag word.

    Bits 0 to 7 of the tag are the kind of the record. For commands, the other bits are the length in words: its high
        part
    is in bits 8 to 15, its low part in bits 16 to 31.
    """
    at, configured = 4, None
    while block.size - at >= 4:
        tag, remaining = block.number(at), block.size - at
        kind = tag & 0xFF
        if kind == 5:
            at += 4
        elif kind == 1:
            if remaining < 12:
                raise block.damaged(at, "its configuration is cut off")
            configured = _read_configuration(block, at + 4)
            at += 12
        elif kind == 2:
            size = 4 * ((tag >> 8 & 0xFF) << 16 | tag >> 16)
            if configured is None:
                raise block.damaged(at, "commands without a configuration before them")
            if size == 0 or remaining - 4 != size:
                raise block.damaged(at, f"it announces {size} bytes of commands and has {remaining - 4}")
            if (at + 4) % _ALIGNMENT != 0:
                raise block.damaged(at, "the commands do not start at a multiple of 16 bytes")
            return StreamHeader("COP1", at + 4, *configured)
        else:
            raise block.damaged(at, f"unknown record {kind}")
    raise block.damaged(at, "it ends without commands")


def _read_cop2_header(block: _Block) -> StreamHeader:
    """Read a COP2 header: fields at fixed offsets, as in ``ethosu_payload.cpp``.

    Minor versions only append metadata.
    """
    fixed, metadata_at = 60, 28
    if block.size < fixed:
        raise block.damaged(0, f"the header of a COP2 stream has {fixed} bytes, it has {block.size}")
    if (version := block.number(4, "<H")) != 1:
        raise block.damaged(4, f"its major version is {version}, not 1")
    if (upper := block.number(12)) != 0 or block.number(8) != block.size - 16:
        raise block.damaged(8, f"it announces {block.number(8)} bytes (upper half {upper}) and has {block.size - 16}")
    kind, entry = block.number(16), block.number(20)
    if kind != 1 or entry != block.size - 24:
        reason = f"its entry is of kind {kind} with {entry} bytes; one entry of kind 1 fills the stream"
        raise block.damaged(16, reason)
    if bytes(block.data[metadata_at : metadata_at + 4]) != b"VEUM" or block.number(36) < fixed - 40:
        raise block.damaged(metadata_at, "its metadata is not of the known kind")
    if (version := block.number(32, "<H")) != 1:
        raise block.damaged(32, f"the major version of its metadata is {version}, not 1")
    metadata, remaining = block.number(24), block.size - metadata_at
    if metadata == remaining:
        raise block.damaged(block.size, "it ends without commands")
    ends = metadata_at + metadata
    if metadata < fixed - metadata_at or metadata > remaining or ends % _ALIGNMENT != 0 or (block.size - ends) % 4 != 0:
        reason = f"{metadata} bytes of metadata do not leave commands at a multiple of 16 in {block.size} bytes"
        raise block.damaged(24, reason)
    if (addressing := block.number(48)) not in (1, 2):
        raise block.damaged(48, f"unknown addressing {addressing}")
    return StreamHeader("COP2", ends, *_read_configuration(block, 40), block.number(52, "<Q"), addressing == 2)


def _read_tensors(block: _Block, io_region: int, scratch: int, stream: StreamHeader) -> tuple[EthosUTensor, ...]:
    if block.size < 4:
        raise block.damaged(0, f"{block.size} bytes cannot hold a count")
    count = block.number(0)
    if count > _MAX_TENSORS or block.size != 4 + _TENSOR.size * count:
        reason = f"{count} tensors of 36 bytes do not make {block.size} bytes (at most {_MAX_TENSORS})"
        raise block.damaged(0, reason)
    tensors: list[EthosUTensor] = []
    for index, (*shape, size, offset, region) in enumerate(_TENSOR.iter_unpack(block.data[4:])):
        tensor = EthosUTensor(tuple(shape), size, offset, region)
        _check_tensor(block, index, tensor, io_region, scratch, stream)
        tensors.append(tensor)
    _check_overlaps(block, tensors, may_repeat=io_region == OUTPUT)
    return tuple(tensors)


def _check_tensor(
    block: _Block, index: int, tensor: EthosUTensor, io_region: int, scratch: int, stream: StreamHeader
) -> None:
    at = 4 + _TENSOR.size * index
    size_at, offset_at, region_at = (at + 4 * (_RANK + field) for field in range(3))
    if tensor.element_size not in (1, 2, 4, 8):
        raise block.damaged(size_at, f"tensor {index} has elements of {tensor.element_size} bytes")
    nbytes = tensor.element_size
    for dimension, extent in enumerate(tensor.shape):
        if extent <= 0:
            raise block.damaged(at + 4 * dimension, f"dimension {dimension} of tensor {index} is {extent}")
        nbytes *= extent
        if nbytes > _MAX_BYTES:
            raise block.damaged(at, f"tensor {index} is larger than 4 GiB")
    own = tensor.region == io_region
    if not own and tensor.region != SCRATCH:
        reason = f"tensor {index} is in region {tensor.region}, not in {SCRATCH} or {io_region}"
        raise block.damaged(region_at, reason)
    if own and not stream.separate_io:
        reason = f"tensor {index} is in region {tensor.region}, which its commands do not address"
        raise block.damaged(region_at, reason)
    if tensor.offset < -1:
        raise block.damaged(offset_at, f"tensor {index} is at offset {tensor.offset}")
    if tensor.offset >= 0 and not own and tensor.offset + nbytes > scratch:
        reason = f"tensor {index} ends at byte {tensor.offset + nbytes} of a scratch of {scratch}"
        raise block.damaged(offset_at, reason)


def _check_overlaps(block: _Block, tensors: list[EthosUTensor], *, may_repeat: bool) -> None:
    """Raise if tensors of one side overlap.

    Vela may reuse the memory of an input for an output, so inputs and outputs are not compared with each other. A
    tensor that is returned twice appears as two outputs at the same address.
    """
    ends = [tensor.offset + tensor.nbytes for tensor in tensors]
    for i, tensor in enumerate(tensors):
        for j, other in enumerate(tensors[:i]):
            if tensor.region != other.region or tensor.offset < 0 or other.offset < 0:
                continue
            same = tensor.offset == other.offset and ends[i] == ends[j]
            if tensor.offset < ends[j] and other.offset < ends[i] and not (may_repeat and same):
                reason = f"tensors {j} and {i} overlap in region {tensor.region}"
                raise block.damaged(4 + _TENSOR.size * i, reason)
