"""Data files (``.ptd``) of programs: named data outside the ``.pte``, in ExecuTorch's FlatTensor format.

A data file holds blocks of Ethos-U payloads: command streams and weights. The key of a block ends with the first
hexadecimal digits of the SHA-256 of the block's content (``payload_parts.content_key``). A data file of another program
therefore lacks the keys that this program needs, and the content of a changed block does not match the block's key.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu_blocks import external_keys
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError
from arm_recipes.runtime.payload_parts import matches_key
from arm_recipes.runtime.pte import ProgramError, PteProgram

#: Suffix of a data file: ``model.ptd`` belongs to ``model.pte``.
DATA_FILE_SUFFIX: Final = ".ptd"
_FILE_IDENTIFIER: Final = b"FT01"
#: Byte offset of the header, which follows the flatbuffer's root offset and file identifier. The fields of the header:
#: magic, length of the header, offset and size of the flatbuffer, offset and size of the segments.
_HEADER_OFFSET: Final = 8
_HEADER_STRUCT: Final = struct.Struct("<4sIQQQQ")
_HEADER_MAGIC: Final = b"FH01"


class _FlatTensor:
    segments = 1
    named_data = 2


class _DataSegment:
    offset = 0
    size = 1


class _NamedData:
    key = 0
    segment_index = 1


def data_file_path(path: str | Path) -> Path:
    """Path of the data file of a program: ``model.ptd`` beside ``model.pte``."""
    return Path(path).expanduser().with_suffix(DATA_FILE_SUFFIX)


def read_data_file(data: bytes | memoryview) -> dict[str, memoryview]:
    """Parse a data file, and return its named data as views of ``data``.

    Raises:
        ProgramError: the bytes are not a data file, or the file is truncated or damaged.
    """
    view = memoryview(data).toreadonly().cast("B")
    if len(view) < _HEADER_OFFSET + _HEADER_STRUCT.size or bytes(view[4:8]) != _FILE_IDENTIFIER:
        raise ProgramError(
            f"not a data file (.ptd) of a program (file identifier {bytes(view[4:8])!r}, expected {_FILE_IDENTIFIER!r})"
        )
    magic, _, _, _, base, _ = _HEADER_STRUCT.unpack_from(view, _HEADER_OFFSET)
    if magic != _HEADER_MAGIC:
        raise ProgramError(f"damaged: its header has the magic {magic!r}, expected {_HEADER_MAGIC!r}")
    try:
        return _read_named_data(view, base)
    except (FlatbufferError, IndexError) as error:
        raise ProgramError(f"truncated or damaged: {error}") from None


def _read_named_data(view: memoryview, base: int) -> dict[str, memoryview]:
    root = Flatbuffer(view).root
    spans = [
        (base + table.number(_DataSegment.offset, "Q"), table.number(_DataSegment.size, "Q"))
        for table in root.tables(_FlatTensor.segments)
    ]
    if spans and (end := max(start + size for start, size in spans)) > len(view):
        raise FlatbufferError(f"its data should end at byte {end:,}, the file has {len(view):,}")
    named_data = {}
    for table in root.tables(_FlatTensor.named_data):
        start, size = spans[table.number(_NamedData.segment_index, "I")]
        named_data[table.text(_NamedData.key)] = view[start : start + size]
    return named_data


def external_data_keys(program: PteProgram) -> list[str]:
    """Keys of the data that the Ethos-U delegates of a program need, but that the program itself does not contain."""
    delegates = (delegate for method in program.methods.values() for delegate in method.delegates)
    keys = (key for each in delegates if each.backend == "EthosUBackend" for key in external_keys(each.data))
    return [key for key in dict.fromkeys(keys) if key not in program.named_data]


def read_external_data(program: PteProgram, data_file: bytes | None) -> dict[str, memoryview]:
    """Read the data outside a program, and check that they are complete and unchanged.

    Args:
        program: the program.
        data_file: bytes of the program's data file; None if there is none. Ignored if the program needs no data file.

    Raises:
        ProgramError: the file is not a data file, or is damaged.
        RunError: the program needs a data file and there is none, or the file lacks data that the program needs, or the
            data have changed since the export.
    """
    keys = external_data_keys(program)
    if not keys:
        return {}
    if data_file is None:
        raise RunError(
            f"the program needs a data file (.ptd) with its command streams or weights ({len(keys)} blocks), and there "
            "is none: keep the .ptd that was saved with it beside the .pte, or pass it as ptd=..."
        )
    named_data = read_data_file(data_file)
    missing = [key for key in keys if key not in named_data]
    if missing:
        raise RunError(
            "the data file (.ptd) belongs to another program or another export: the checksums of its content differ "
            f"from those in the program ({len(missing)} of {len(keys)} blocks are missing, such as '{missing[0]}'). "
            "Use the .ptd that was saved with this .pte"
        )
    changed = [key for key in keys if not matches_key(key, named_data[key])]
    if changed:
        raise RunError(
            f"the data file (.ptd) is damaged: the SHA-256 of the block '{changed[0]}' differs from the one "
            "that was recorded at the export. Export or copy the file again"
        )
    return named_data
