"""Payload parts: methods with equal weights share one copy of them, as named data of the program.

An Ethos-U payload refers to shared weights in ExecuTorch's format: its weight block holds the key instead of the data.
A TOSA flatbuffer, which only the host runs, is split into parts. Each part is data or the key of named data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_blocks import (
    NAMED_DATA_KEY_SIZE,
    NamedDataLookup,
    inline_external_blocks,
    look_up_external_data,
)

#: Prefixes of the keys of weights and of command streams. The data's SHA-256 follows; the key is cut to
#: ``NAMED_DATA_KEY_SIZE`` characters.
WEIGHTS_PREFIX, COMMANDS_PREFIX = "arm_weights_", "arm_commands_"
_MAGIC = b"ARMPARTS"
_PART_HEADER = struct.Struct("<BI")  # whether the part is a key, and its length in bytes


def content_key(data: bytes | memoryview, prefix: str = WEIGHTS_PREFIX) -> str:
    """Compute the key of weights or of a command stream in the named data of a program or data file."""
    return (prefix + hashlib.sha256(data).hexdigest())[:NAMED_DATA_KEY_SIZE]


def matches_key(key: str, data: bytes | memoryview) -> bool:
    """Whether the digest in a key matches ``data``.

    A key that does not begin with a prefix of this package comes from another exporter, and contains no digest. The
    result is then True.
    """
    prefix = next((prefix for prefix in (WEIGHTS_PREFIX, COMMANDS_PREFIX) if key.startswith(prefix)), None)
    return prefix is None or content_key(data, prefix) == key


def encode_parts(parts: Sequence[bytes | str]) -> bytes:
    """Encode a payload that consists of parts: bytes are data, strings are keys of named data."""
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    pairs = zip(parts, encoded, strict=True)
    return _MAGIC + b"".join(_PART_HEADER.pack(isinstance(part, str), len(data)) + data for part, data in pairs)


def join_parts(payload: bytes | memoryview, find_named_data: NamedDataLookup) -> bytes | memoryview:
    """Join the parts of a payload, with named data inlined.

    Args:
        payload: result of ``encode_parts``, or an Ethos-U payload. Any other payload is returned unchanged.
        find_named_data: looks up named data of the program.

    Raises:
        PayloadError: there is no named data for one of the keys, or the result of ``encode_parts`` is damaged. A
            damaged Ethos-U payload is returned unchanged.
    """
    if bytes(payload[: len(_MAGIC)]) != _MAGIC:
        return inline_external_blocks(payload, find_named_data)
    return b"".join(_iter_parts(memoryview(payload), find_named_data))


def _iter_parts(payload: memoryview, find_named_data: NamedDataLookup) -> Iterator[bytes | memoryview]:
    at = len(_MAGIC)
    while at < len(payload):
        if len(payload) - at < _PART_HEADER.size:
            raise PayloadError("damaged: a payload ends inside the header of a part")
        is_key, length = _PART_HEADER.unpack_from(payload, at)
        start = at + _PART_HEADER.size
        at = start + length
        if at > len(payload):
            raise PayloadError(f"damaged: a part of a payload has {length} bytes, {len(payload) - start} are left")
        part = payload[start:at]
        yield look_up_external_data(bytes(part).decode(errors="replace"), find_named_data) if is_key else part
