"""Payload parts: methods with equal weights share one copy of them, as named data of the program.

An Ethos-U payload refers to shared weights in ExecuTorch's format: its weight block holds the key instead of the data.
A TOSA flatbuffer, which only the host runs, is split into parts. Each part is data or the key of named data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_blocks import NAMED_DATA_KEY_SIZE, NamedDataLookup, inline_weights, look_up_weights

#: Prefix of the keys of shared weights. The data's SHA-256 follows; the key is cut to ``NAMED_DATA_KEY_SIZE``
#: characters.
WEIGHTS_PREFIX = "arm_weights_"
_MAGIC = b"ARMPARTS"
_PART_HEADER = struct.Struct("<BI")  # whether the part is a key, and its length in bytes


def weights_key(data: bytes) -> str:
    """Key of shared weights in the program's named data."""
    return (WEIGHTS_PREFIX + hashlib.sha256(data).hexdigest())[:NAMED_DATA_KEY_SIZE]


def encode_parts(parts: Sequence[bytes | str]) -> bytes:
    """Encode a payload that consists of parts: bytes are data, strings are keys of named data."""
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    pairs = zip(parts, encoded, strict=True)
    return _MAGIC + b"".join(_PART_HEADER.pack(isinstance(part, str), len(data)) + data for part, data in pairs)


def join_parts(payload: bytes | memoryview, find: NamedDataLookup) -> bytes | memoryview:
    """Join the parts of a payload, with named data inlined.

    Args:
        payload: result of ``encode_parts``, or an Ethos-U payload. Any other payload is returned unchanged.
        find: looks up named data of the program.

    Raises:
        PayloadError: a part is missing, or the payload is damaged.
    """
    if bytes(payload[: len(_MAGIC)]) != _MAGIC:
        return inline_weights(payload, find)
    return b"".join(_iter_parts(memoryview(payload), find))


def _iter_parts(payload: memoryview, find: NamedDataLookup) -> Iterator[bytes | memoryview]:
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
        yield look_up_weights(bytes(part).decode(errors="replace"), find) if is_key else part
