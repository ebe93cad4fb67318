"""Blocks of an Ethos-U payload, including external blocks, whose data is outside the payload.

Each block has a name, a length and data, and is aligned to 16 bytes. The data of commands and weights may be external:
named data of the program, which several delegates may share, or named data of a data file (``.ptd``) beside the
program. An external block holds the key of its data instead of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from arm_recipes.runtime.errors import PayloadError

#: Function that looks up named data of a program by its key; its result is None if there is no such data.
NamedDataLookup = Callable[[str], bytes | memoryview | None]
#: Size of a block's header in bytes, and byte offsets of its length field and of its external-data flag.
_HEADER_BYTES, _LENGTH_AT, _EXTERNAL_AT = 32, 16, 20
#: Alignment of blocks, and of the commands in a stream, in bytes.
ALIGNMENT: Final = 16
#: Length in bytes of the key of an external block. ExecuTorch's own EthosUBackend accepts no other length.
NAMED_DATA_KEY_SIZE: Final = 64


class BlockName(StrEnum):
    """Names of the blocks, in the order in which the compiler writes them."""

    HEADER = "vela_bin_stream"
    COMMANDS = "cmd_data"
    WEIGHTS = "weight_data"
    SCRATCH = "scratch_size"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    FOOTER = "vela_end_stream"


#: Blocks that may be external.
EXTERNAL_BLOCKS: Final = (BlockName.COMMANDS, BlockName.WEIGHTS)
_NAME_BY_BYTES: Final = {name.encode().ljust(16, b"\0"): name for name in BlockName}


@dataclass(frozen=True)
class Block:
    """A block of a payload.

    Attributes:
        name: name of the block.
        data: content of the block: its data, or the key of external data.
        offset: byte offset of ``data`` in the payload.
        external: whether the block's data is outside the payload: named data of the program or of its data file.
    """

    name: str
    data: memoryview
    offset: int
    external: bool = False

    @property
    def size(self) -> int:
        """Number of bytes of the data."""
        return len(self.data)

    @property
    def key(self) -> str:
        """Key of the named data of an external block."""
        return bytes(self.data).decode()

    def number(self, at: int, layout: str = "<I") -> int:
        """Read the number at byte ``at`` of the data; ``layout`` is a format of ``struct``."""
        value: int = struct.unpack_from(layout, self.data, at)[0]
        return value

    def error_at(self, at: int, reason: str) -> PayloadError:
        """Create the error for damage at byte ``at`` of the data."""
        return damage_error(self.name, self.offset + at, reason)

    def check_length(self, length: int) -> None:
        """Check the length of the data.

        Raises:
            PayloadError: the data has another length.
        """
        if self.size != length:
            length_at = _LENGTH_AT - _HEADER_BYTES  # negative: the header precedes the data
            raise self.error_at(length_at, f"its length is {self.size} bytes, not {length}")


def damage_error(block: str, offset: int, reason: str) -> PayloadError:
    """Create the error for a damaged block; ``offset`` is in bytes from the start of the payload."""
    return PayloadError(f"block '{block}' at byte {offset}: {reason}")


def read_blocks(data: memoryview) -> dict[str, Block]:
    """Split a payload into blocks, by name. Names, headers, lengths and keys are validated, but not the contents.

    Raises:
        PayloadError: a block is truncated, damaged, missing or repeated. The message says which one and where.
    """
    blocks: dict[str, Block] = {}
    at, previous = 0, str(BlockName.HEADER)
    while at < len(data):
        block, at = _read_block(data, at, previous, blocks)
        blocks[block.name] = block
        previous = block.name
        if previous == BlockName.FOOTER and at < len(data):
            raise damage_error(previous, at, f"{len(data) - at} bytes follow the last block")
    for name in BlockName:
        if name not in blocks:
            raise damage_error(name, len(data), "the payload ends without this block")
    return blocks


def _read_block(data: memoryview, start: int, previous: str, known: Mapping[str, Block]) -> tuple[Block, int]:
    """Read the block at byte ``start``, and return it with the offset of the next block.

    Args:
        data: the payload.
        start: byte offset of the block's header.
        previous: name of the preceding block, for error messages.
        known: the preceding blocks, by name.
    """
    remaining = len(data) - start
    if remaining < _HEADER_BYTES:
        tail = f"only {remaining} bytes follow this block" if start else f"the payload has {remaining} bytes"
        raise damage_error(previous, start, f"a block header has {_HEADER_BYTES} bytes, but {tail}")
    name = _NAME_BY_BYTES.get(bytes(data[start : start + 16]))
    if start == 0 and name != BlockName.HEADER:
        reason = "the bytes do not start with this block: not a program compiled for an Ethos-U"
        raise damage_error(BlockName.HEADER, 0, reason)
    if name is None:
        raise damage_error(previous, start, "the next block has an unknown name")
    if name in known:
        raise damage_error(name, start, "the block occurs twice")
    header = data[start : start + _HEADER_BYTES]
    external = header[_EXTERNAL_AT] == 1
    if external and name not in EXTERNAL_BLOCKS:
        reason = "its data is outside the payload, where only commands and weights may be: export this block inline"
        raise damage_error(name, start + _EXTERNAL_AT, reason)
    for at in range(_EXTERNAL_AT + external, _HEADER_BYTES):
        if header[at] != 0:
            raise damage_error(name, start + at, f"reserved byte is {header[at]}, not 0")
    length = int.from_bytes(header[_LENGTH_AT:_EXTERNAL_AT], "little")
    remaining -= _HEADER_BYTES
    if length > remaining:
        reason = f"its length is {length} bytes, {remaining} are left in the payload"
        raise damage_error(name, start + _LENGTH_AT, reason)
    data_start, padding = start + _HEADER_BYTES, -length % ALIGNMENT
    if padding > remaining - length:
        reason = f"it needs {padding} bytes of padding, {remaining - length} are left in the payload"
        raise damage_error(name, data_start + length, reason)
    content = data[data_start : data_start + length]
    if external and not (length == NAMED_DATA_KEY_SIZE and all(0x20 < byte < 0x7F for byte in content)):
        wrong = f"the key of its external data ({length} bytes) is not {NAMED_DATA_KEY_SIZE} printable characters"
        reason = f"{wrong}: export the program again"
        raise damage_error(name, start + _EXTERNAL_AT, reason)
    return Block(name, content, data_start, external), data_start + length + padding


def look_up_external_data(key: str, find_named_data: NamedDataLookup) -> bytes | memoryview:
    """Look up the data of an external block by its key, in the named data of the program and of its data file.

    Raises:
        PayloadError: there is no named data with this key.
    """
    data = find_named_data(key)
    if data is None:
        raise PayloadError(
            f"the data '{key}', which a payload refers to, are not among the program's named data: "
            "load the program with arm_recipes.load and the .ptd of the same export, or export it again"
        )
    return data


def inline_external_blocks(data: bytes | memoryview, find_named_data: NamedDataLookup) -> bytes | memoryview:
    """Copy the data of external blocks into a payload.

    A damaged payload, and a payload without external blocks, is returned unchanged.

    Raises:
        PayloadError: there is no named data with the key of an external block.
    """
    try:
        blocks = read_blocks(memoryview(data)) if len(data) else {}
    except PayloadError:
        return data  # the payload parser reports the damage
    if not any(block.external for block in blocks.values()):
        return data
    from arm_backend_core.backends.payload import pack_block_stream

    return pack_block_stream(
        [
            (name, bytes(look_up_external_data(block.key, find_named_data) if block.external else block.data))
            for name, block in blocks.items()
        ]
    )


def replace_blocks(data: bytes, contents: Mapping[BlockName, bytes], external: Collection[str]) -> bytes:
    """Replace the contents of blocks.

    Args:
        data: the payload.
        contents: {name of a block: its new content}. The content of an external block is its key.
        external: names of the blocks that become external. Blocks that were external before remain external.
    """
    from arm_backend_core.backends.payload import pack_block_stream

    blocks = read_blocks(memoryview(data))
    outside = [name for name, block in blocks.items() if block.external or name in external]
    new_blocks = [(name, contents.get(BlockName(name), bytes(block.data))) for name, block in blocks.items()]
    return pack_block_stream(new_blocks, external=outside)


def external_keys(data: bytes | memoryview) -> list[str]:
    """Keys of the external blocks of a payload; none for a damaged payload."""
    try:
        blocks = read_blocks(memoryview(data)) if len(data) else {}
    except PayloadError:
        return []
    return [block.key for block in blocks.values() if block.external]
