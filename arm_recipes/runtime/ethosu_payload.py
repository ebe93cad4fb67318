"""Parser of Ethos-U payloads.

It makes the same checks, with the same error messages, as the parser on the device
(``runtime/payload/ethosu_payload.cpp``). A test compares the two.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_blocks import (
    EXTERNAL_BLOCKS,
    Block,
    BlockName,
    NamedDataLookup,
    damage_error,
    look_up_external_data,
    read_blocks,
)
from arm_recipes.runtime.ethosu_command_header import StreamHeader, read_stream_header_in_block

#: Description of an input or output, as nine int32: shape (6 dimensions), element size, offset, region.
_TENSOR_STRUCT: Final = struct.Struct("<9i")
_RANK, _MAX_TENSORS, _MAX_BYTES = 6, 1024, 2**32 - 1
#: Memory regions of the NPU. The number of a region is the index of its base address. Only COP2 streams with separate
#: I/O have regions for inputs and outputs.
WEIGHTS, SCRATCH, FAST_SCRATCH, INPUT, OUTPUT = range(5)
#: Bytes of a cache line of Cortex-M processors. Memory that the NPU accesses occupies whole lines.
CACHE_LINE: Final = 32


@dataclass(frozen=True)
class EthosUTensor:
    """The location of an input or output tensor in the NPU's memory regions.

    Attributes:
        shape: six dimensions. Vela merges and splits dimensions, so only the number of elements matches the
            tensor in the program.
        element_size: bytes of an element.
        offset: bytes from the start of the region; -1 if the tensor is not in memory.
        region: index of the memory region.
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
    """Description of a compiled program for an Ethos-U; ``EthosUPayloadContent`` has its bytes.

    Attributes:
        product: 55, 65 or 85.
        macs: multiply-accumulates per cycle.
        stream: format of the command stream: ``COP1``, or ``COP2`` for Direct Drive.
        command_bytes, weight_bytes: sizes of the command stream and of the weights.
        scratch_bytes: size of the scratch memory that the backend must provide during a run.
        fast_scratch_bytes: size of the scratch in fast memory; None if neither the stream nor a compile spec states it.
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
class EthosUPayloadContent:
    """Command stream and weights of a payload. They are views of the payload, or of the data of external blocks.

    Attributes:
        payload: description of the payload.
        commands: the command stream.
        header_bytes: size of the stream's header, which comes before the first command.
        weights: the weights; empty if they are outside the payload and the caller passed no ``find_named_data``.
        has_external_weights: whether the weights are outside the payload. Several delegates may then share them.
    """

    payload: EthosUPayload
    commands: memoryview
    header_bytes: int
    weights: memoryview
    has_external_weights: bool


def round_to_cache_lines(count: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-count // CACHE_LINE) * CACHE_LINE


def read_payload(data: bytes | memoryview) -> EthosUPayload:
    """Parse and describe a payload whose command stream is not external.

    ``read_payload_content`` also reads payloads with an external command stream.

    Raises:
        PayloadError: the payload is truncated or damaged (the message says where), or its command stream is external.
    """
    return read_payload_content(data).payload


def read_payload_content(
    data: bytes | memoryview, find_named_data: NamedDataLookup | None = None
) -> EthosUPayloadContent:
    """Parse and validate a payload.

    Args:
        data: the payload.
        find_named_data: looks up named data of the program, for external blocks.

    Raises:
        PayloadError: the payload is truncated or damaged (the message says where), or an external block is missing.
    """
    if len(data) == 0:
        raise damage_error(BlockName.HEADER, 0, "the payload is empty")
    blocks = read_blocks(memoryview(data))
    for name, length in ((BlockName.HEADER, 0), (BlockName.FOOTER, 0), (BlockName.SCRATCH, 4)):
        blocks[name].check_length(length)
    scratch = blocks[BlockName.SCRATCH].number(0)
    commands, weights = (_resolve(blocks[name], find_named_data) for name in EXTERNAL_BLOCKS)
    if commands.external and not commands.size:
        reason = "the command stream is outside the payload and was not found: load the program with the .ptd of the "
        raise commands.error_at(0, f"{reason}same export")
    stream = read_stream_header_in_block(commands)
    inputs = _read_tensors(blocks[BlockName.INPUTS], INPUT, scratch, stream)
    outputs = _read_tensors(blocks[BlockName.OUTPUTS], OUTPUT, scratch, stream)
    described = EthosUPayload(
        product=stream.product,
        macs=stream.macs,
        stream=stream.kind,
        command_bytes=commands.size,
        weight_bytes=weights.size,
        scratch_bytes=scratch,
        fast_scratch_bytes=stream.fast_scratch,
        inputs=inputs,
        outputs=outputs,
    )
    return EthosUPayloadContent(described, commands.data, stream.header_bytes, weights.data, weights.external)


def _resolve(block: Block, find_named_data: NamedDataLookup | None) -> Block:
    """Replace the key in an external block by the data of this key, or by empty data if ``find_named_data`` is None."""
    if not block.external:
        return block
    data = b"" if find_named_data is None else look_up_external_data(block.key, find_named_data)
    return replace(block, data=memoryview(data), offset=0)


def read_scratch_size_and_io(data: bytes) -> tuple[int, tuple[EthosUTensor, ...], tuple[EthosUTensor, ...]]:
    """Read the size of scratch, the inputs and the outputs of a valid payload. Its commands may be external."""
    blocks = read_blocks(memoryview(data))
    inputs, outputs = (tuple(_parse_tensors(blocks[name])) for name in (BlockName.INPUTS, BlockName.OUTPUTS))
    return blocks[BlockName.SCRATCH].number(0), inputs, outputs


def with_fast_scratch(payload: EthosUPayload, compile_specs: Mapping[str, bytes]) -> EthosUPayload:
    """Return the payload with the fast scratch size of its compile specs, if they state a size.

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


def _read_tensors(block: Block, io_region: int, scratch: int, stream: StreamHeader) -> tuple[EthosUTensor, ...]:
    if block.size < 4:
        raise block.error_at(0, f"{block.size} bytes cannot hold a count")
    count = block.number(0)
    if count > _MAX_TENSORS or block.size != 4 + _TENSOR_STRUCT.size * count:
        required = f"must fill the {block.size} bytes of the block; at most {_MAX_TENSORS} tensors are allowed"
        raise block.error_at(0, f"{count} tensors of 36 bytes and their count {required}")
    tensors: list[EthosUTensor] = []
    for index, tensor in enumerate(_parse_tensors(block)):
        _check_tensor(block, index, tensor, io_region, scratch, stream)
        tensors.append(tensor)
    _check_overlaps(block, tensors, may_repeat=io_region == OUTPUT)
    return tuple(tensors)


def _parse_tensors(block: Block) -> Iterator[EthosUTensor]:
    for *shape, size, offset, region in _TENSOR_STRUCT.iter_unpack(block.data[4:]):
        yield EthosUTensor(tuple(shape), size, offset, region)


def _check_tensor(
    block: Block, index: int, tensor: EthosUTensor, io_region: int, scratch: int, stream: StreamHeader
) -> None:
    at = 4 + _TENSOR_STRUCT.size * index
    size_at, offset_at, region_at = (at + 4 * (_RANK + field) for field in range(3))
    if tensor.element_size not in (1, 2, 4, 8):
        raise block.error_at(size_at, f"tensor {index} has elements of {tensor.element_size} bytes")
    nbytes = tensor.element_size
    for dimension, extent in enumerate(tensor.shape):
        if extent <= 0:
            raise block.error_at(at + 4 * dimension, f"dimension {dimension} of tensor {index} is {extent}")
        nbytes *= extent
        if nbytes > _MAX_BYTES:
            raise block.error_at(at, f"tensor {index} is larger than 4 GiB")
    is_in_io_region = tensor.region == io_region
    if not is_in_io_region and tensor.region != SCRATCH:
        reason = f"tensor {index} is in region {tensor.region}, not in {SCRATCH} or {io_region}"
        raise block.error_at(region_at, reason)
    if is_in_io_region and not stream.separate_io:
        reason = f"tensor {index} is in region {tensor.region}, which its commands do not address"
        raise block.error_at(region_at, reason)
    if tensor.offset < -1:
        raise block.error_at(offset_at, f"tensor {index} is at offset {tensor.offset}")
    if tensor.offset >= 0 and not is_in_io_region and tensor.offset + nbytes > scratch:
        reason = f"tensor {index} ends at byte {tensor.offset + nbytes} of a scratch of {scratch} bytes"
        raise block.error_at(offset_at, reason)


def _check_overlaps(block: Block, tensors: list[EthosUTensor], *, may_repeat: bool) -> None:
    """Raise ``PayloadError`` if two tensors of a block overlap.

    Vela may reuse the memory of an input for an output, so inputs and outputs are not compared with each other.

    Args:
        block: the block of the inputs or of the outputs.
        tensors: tensors of the block.
        may_repeat: whether two tensors may have the same address and size. Two outputs have them if the model returns a
            tensor twice.
    """
    ends = [tensor.offset + tensor.nbytes for tensor in tensors]
    for i, tensor in enumerate(tensors):
        for j, other in enumerate(tensors[:i]):
            if tensor.region != other.region or tensor.offset < 0 or other.offset < 0:
                continue
            same = tensor.offset == other.offset and ends[i] == ends[j]
            if tensor.offset < ends[j] and other.offset < ends[i] and not (may_repeat and same):
                reason = f"tensors {j} and {i} overlap in region {tensor.region}"
                raise block.error_at(4 + _TENSOR_STRUCT.size * i, reason)
