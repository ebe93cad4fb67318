"""Payloads of programs whose methods share weights: parts of them are named data of the program.

Ethos-U has ExecuTorch's own way to say so: the block with the weights holds the name in place of the data. A TOSA
flatbuffer, which runs on the host alone, is cut into parts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_payload import NAME_LENGTH, NamedDataLookup, inline_weights, look_up_weights

#: What the names of such data begin with; as much of the data's SHA-256 follows as ``NAME_LENGTH`` leaves.
WEIGHTS_PREFIX = "arm_weights_"
_MAGIC = b"ARMPARTS"
_PART = struct.Struct("<BI")  # whether it is a name, and its length


def weights_name(data: bytes) -> str:
    """The name of weights that methods share."""
    return (WEIGHTS_PREFIX + hashlib.sha256(data).hexdigest())[:NAME_LENGTH]


def split_payload(parts: Sequence[bytes | str]) -> bytes:
    """A payload of parts: data, or the name of data."""
    written = [part.encode() if isinstance(part, str) else part for part in parts]
    pairs = zip(parts, written, strict=True)
    return _MAGIC + b"".join(_PART.pack(isinstance(part, str), len(data)) + data for part, data in pairs)


def join_parts(payload: bytes | memoryview, find: NamedDataLookup) -> bytes | memoryview:
    """The payload with all of its parts.

    Raises:
        PayloadError: a part is missing, or it is damaged.
    """
    if bytes(payload[: len(_MAGIC)]) != _MAGIC:
        return inline_weights(payload, find)
    return b"".join(_parts(memoryview(payload), find))


def _parts(payload: memoryview, find: NamedDataLookup) -> Iterator[bytes | memoryview]:
    at = len(_MAGIC)
    while at < len(payload):
        if len(payload) - at < _PART.size:
            raise PayloadError("damaged: a payload ends inside the header of a part")
        is_name, length = _PART.unpack_from(payload, at)
        start = at + _PART.size
        at = start + length
        if at > len(payload):
            raise PayloadError(f"damaged: a part of a payload has {length} bytes, {len(payload) - start} are left")
        part = payload[start:at]
        yield look_up_weights(bytes(part).decode(errors="replace"), find) if is_name else part
