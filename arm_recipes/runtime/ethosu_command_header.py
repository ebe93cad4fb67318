"""Header of an Ethos-U command stream: COP1, or COP2 for Direct Drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from arm_recipes.runtime.ethosu_blocks import ALIGNMENT, Block

_PRODUCTS: Final = (55, 65, 85)


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
    return read_stream_header(Block("command stream", commands, 0))


def read_stream_header(block: Block) -> StreamHeader:
    """Read the header of the command stream in a block; raises as ``read_header``."""
    if block.size == 0:
        raise block.error_at(0, "the command stream is empty")
    reader = {b"COP1": _read_cop1_header, b"COP2": _read_cop2_header}.get(bytes(block.data[:4]))
    if reader is None:
        raise block.error_at(0, "it starts neither with COP1 nor with COP2")
    return reader(block)


def _read_configuration(block: Block, at: int) -> tuple[int, int]:
    """Product and MACs a cycle, from the word that the driver compares with the NPU's CONFIG register."""
    word = block.number(at)
    product, log2_macs = word >> 28, word & 0xF
    if product >= len(_PRODUCTS):
        raise block.error_at(at, f"unknown product {product} in its configuration")
    if not 5 <= log2_macs <= 11:
        reason = f"its configuration has 2**{log2_macs} multiply-accumulates; Ethos-U NPUs have 32 to 2048"
        raise block.error_at(at, reason)
    return _PRODUCTS[product], 1 << log2_macs


def _read_cop1_header(block: Block) -> StreamHeader:
    """Read a COP1 header: the magic, then records that each begin with a tag word.

    Bits 0 to 7 of the tag are the kind of the record. For commands, the other bits are the length in words: its high
    part is in bits 8 to 15, its low part in bits 16 to 31.
    """
    at, configured = 4, None
    while block.size - at >= 4:
        tag, remaining = block.number(at), block.size - at
        kind = tag & 0xFF
        if kind == 5:
            at += 4
        elif kind == 1:
            if remaining < 12:
                raise block.error_at(at, "its configuration is cut off")
            configured = _read_configuration(block, at + 4)
            at += 12
        elif kind == 2:
            size = 4 * ((tag >> 8 & 0xFF) << 16 | tag >> 16)
            if configured is None:
                raise block.error_at(at, "commands without a configuration before them")
            if size == 0 or remaining - 4 != size:
                raise block.error_at(at, f"it announces {size} bytes of commands and has {remaining - 4}")
            if (at + 4) % ALIGNMENT != 0:
                raise block.error_at(at, "the commands do not start at a multiple of 16 bytes")
            return StreamHeader("COP1", at + 4, *configured)
        else:
            raise block.error_at(at, f"unknown record {kind}")
    raise block.error_at(at, "it ends without commands")


def _read_cop2_header(block: Block) -> StreamHeader:
    """Read a COP2 header: fields at fixed offsets, as in ``ethosu_payload.cpp``.

    Minor versions only append metadata.
    """
    fixed, metadata_at = 60, 28
    if block.size < fixed:
        raise block.error_at(0, f"the header of a COP2 stream has {fixed} bytes, it has {block.size}")
    if (version := block.number(4, "<H")) != 1:
        raise block.error_at(4, f"its major version is {version}, not 1")
    if (upper := block.number(12)) != 0 or block.number(8) != block.size - 16:
        raise block.error_at(8, f"it announces {block.number(8)} bytes (upper half {upper}) and has {block.size - 16}")
    kind, entry = block.number(16), block.number(20)
    if kind != 1 or entry != block.size - 24:
        reason = f"its entry is of kind {kind} with {entry} bytes; one entry of kind 1 fills the stream"
        raise block.error_at(16, reason)
    if bytes(block.data[metadata_at : metadata_at + 4]) != b"VEUM" or block.number(36) < fixed - 40:
        raise block.error_at(metadata_at, "its metadata is not of the known kind")
    if (version := block.number(32, "<H")) != 1:
        raise block.error_at(32, f"the major version of its metadata is {version}, not 1")
    metadata, remaining = block.number(24), block.size - metadata_at
    if metadata == remaining:
        raise block.error_at(block.size, "it ends without commands")
    ends = metadata_at + metadata
    if metadata < fixed - metadata_at or metadata > remaining or ends % ALIGNMENT != 0 or (block.size - ends) % 4 != 0:
        reason = f"{metadata} bytes of metadata do not leave commands at a multiple of 16 in {block.size} bytes"
        raise block.error_at(24, reason)
    if (addressing := block.number(48)) not in (1, 2):
        raise block.error_at(48, f"unknown addressing {addressing}")
    return StreamHeader("COP2", ends, *_read_configuration(block, 40), block.number(52, "<Q"), addressing == 2)
