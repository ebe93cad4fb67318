"""Header of an Ethos-U command stream, in the format COP1, or COP2 for Direct Drive."""

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
        macs: multiply-accumulates per cycle.
        fast_scratch: bytes of fast scratch that the stream uses; None if the header does not state it (COP1).
        separate_io: whether inputs and outputs have memory regions of their own, instead of places in the scratch.
    """

    kind: str
    header_bytes: int
    product: int
    macs: int
    fast_scratch: int | None = None
    separate_io: bool = False


def read_stream_header(commands: memoryview) -> StreamHeader:
    """Read the header of a command stream.

    Raises:
        PayloadError: the header is truncated or damaged. The message says where.
    """
    return read_stream_header_in_block(Block("command stream", commands, 0))


def read_stream_header_in_block(block: Block) -> StreamHeader:
    """Read the header of the command stream in a block of a payload.

    Raises:
        PayloadError: as for ``read_stream_header``.
    """
    if block.size == 0:
        raise block.error_at(0, "the command stream is empty")
    reader = {b"COP1": _read_cop1_header, b"COP2": _read_cop2_header}.get(bytes(block.data[:4]))
    if reader is None:
        raise block.error_at(0, "it starts neither with COP1 nor with COP2")
    return reader(block)


def _read_configuration(block: Block, at: int) -> tuple[int, int]:
    """Read product and MACs per cycle from the configuration word at byte ``at``.

    The driver compares this word with the NPU's CONFIG register.
    """
    word = block.number(at)
    product, log2_macs = word >> 28, word & 0xF
    if product >= len(_PRODUCTS):
        raise block.error_at(at, f"unknown product {product} in its configuration")
    if not 5 <= log2_macs <= 11:
        reason = f"its configuration has 2**{log2_macs} multiply-accumulates; Ethos-U NPUs have 32 to 2048"
        raise block.error_at(at, reason)
    return _PRODUCTS[product], 1 << log2_macs


def _read_cop1_header(block: Block) -> StreamHeader:
    """Read a COP1 header: the magic, then records. Each record begins with a tag word.

    Bits 0 to 7 of the tag are the type of the record: 1 for the configuration, 2 for the commands, 5 for padding, which
    is the tag word alone. In the tag of the commands, the other bits are the number of command words: bits 8 to 15 are
    the high part of this number, and bits 16 to 31 the low part.
    """
    at, configuration = 4, None
    while block.size - at >= 4:
        tag, remaining = block.number(at), block.size - at
        record_type = tag & 0xFF
        if record_type == 5:
            at += 4
        elif record_type == 1:
            if remaining < 12:
                raise block.error_at(at, "its configuration is cut off")
            configuration = _read_configuration(block, at + 4)
            at += 12
        elif record_type == 2:
            size = 4 * ((tag >> 8 & 0xFF) << 16 | tag >> 16)
            if configuration is None:
                raise block.error_at(at, "commands without a configuration before them")
            if size == 0 or remaining - 4 != size:
                raise block.error_at(at, f"its header gives {size} bytes of commands, but {remaining - 4} bytes follow")
            if (at + 4) % ALIGNMENT != 0:
                raise block.error_at(at, "the commands do not start at a multiple of 16 bytes")
            return StreamHeader("COP1", at + 4, *configuration)
        else:
            raise block.error_at(at, f"unknown record {record_type}")
    raise block.error_at(at, "it ends without commands")


def _read_cop2_header(block: Block) -> StreamHeader:
    """Read a COP2 header, whose fields have fixed offsets (as in ``ethosu_payload.cpp``).

    Newer minor versions may append metadata, which this parser skips.
    """
    fixed_bytes, metadata_at = 60, 28
    if block.size < fixed_bytes:
        reason = f"the header of a COP2 stream has {fixed_bytes} bytes, this stream has {block.size} bytes"
        raise block.error_at(0, reason)
    if (version := block.number(4, "<H")) != 1:
        raise block.error_at(4, f"its major version is {version}, not 1")
    if (upper := block.number(12)) != 0 or block.number(8) != block.size - 16:
        reason = f"its length field is {block.number(8)} (upper 32 bits: {upper}), but {block.size - 16} bytes follow"
        raise block.error_at(8, reason)
    entry_kind, entry_bytes = block.number(16), block.number(20)
    if entry_kind != 1 or entry_bytes != block.size - 24:
        reason = (
            f"its entry has kind {entry_kind} and {entry_bytes} bytes, instead of kind 1 and all bytes up to the end"
        )
        raise block.error_at(16, reason)
    if bytes(block.data[metadata_at : metadata_at + 4]) != b"VEUM" or block.number(36) < fixed_bytes - 40:
        raise block.error_at(metadata_at, "its metadata is not of the known kind")
    if (version := block.number(32, "<H")) != 1:
        raise block.error_at(32, f"the major version of its metadata is {version}, not 1")
    metadata_bytes, remaining = block.number(24), block.size - metadata_at
    if metadata_bytes == remaining:
        raise block.error_at(block.size, "it ends without commands")
    header_bytes = metadata_at + metadata_bytes
    if (
        metadata_bytes < fixed_bytes - metadata_at
        or metadata_bytes > remaining
        or header_bytes % ALIGNMENT != 0
        or (block.size - header_bytes) % 4 != 0
    ):
        required = f"start at a multiple of 16 bytes and fill the {block.size} bytes of the stream with whole words"
        raise block.error_at(24, f"after {metadata_bytes} bytes of metadata, the commands must {required}")
    if (addressing := block.number(48)) not in (1, 2):
        raise block.error_at(48, f"unknown addressing {addressing}")
    return StreamHeader("COP2", header_bytes, *_read_configuration(block, 40), block.number(52, "<Q"), addressing == 2)
