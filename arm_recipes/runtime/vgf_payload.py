"""Parser of VGF files: reads inputs, outputs and sizes. A damaged file is an error, never a crash.

Arm's own ``vgfpy`` does not check the offsets in a VGF file, so it is unsafe for damaged files. Each private
class stands for a table or struct of ``vgf.fbs`` (ML SDK VGF library): its attributes are the field numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table
from arm_recipes.runtime.tensor_info import TensorInfo


class _ModelSequenceTable:
    segments = 0
    inputs = 1
    outputs = 2
    input_names = 3
    output_names = 4


class _BindingSlot:
    binding = 0
    mrt_index = 1


class _ModelResourceTable:
    mrt_entry = 0


class _ModelResourceTableEntry:
    vk_format = 1
    description = 3


class _Description:
    shape = 0


_VGF_MAGIC: Final = b"VGF1"
#: Magic and versions, then offset and size of four sections: modules, model sequence, model resources, constants.
_VGF_HEADER_STRUCT: Final = struct.Struct("<4s12x8Q")
#: Dtypes by ``VkFormat`` number. The model converter writes tensors of these formats.
_VULKAN_DTYPES: Final = {
    13: "uint8",
    14: "int8",
    75: "int16",
    76: "float16",
    99: "int32",
    100: "float32",
    111: "int64",
    1000460000: "bool",
    1000460001: "bfloat16",
    1000460002: "float8_e4m3fn",
    1000460003: "float8_e5m2",
}


@dataclass(frozen=True)
class VgfPayload:
    """Description of a VGF file.

    Attributes:
        segments: number of segments. Each segment is a graph or a shader. Segments run in sequence.
        constant_bytes: size of the section with the constants.
        bindings: numbers of the descriptor bindings: first those of the inputs, then those of the outputs.
    """

    segments: int
    constant_bytes: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    bindings: tuple[int, ...]


def read_vgf(data: memoryview) -> VgfPayload:
    """Parse and describe a VGF file.

    Raises:
        PayloadError: the bytes are not a VGF file, or are truncated or damaged.
    """
    if len(data) < _VGF_HEADER_STRUCT.size or bytes(data[:4]) != _VGF_MAGIC:
        raise PayloadError(f"not a VGF file (magic {bytes(data[:4])!r}, expected {_VGF_MAGIC!r})")
    _, *offsets_and_sizes = _VGF_HEADER_STRUCT.unpack_from(data)
    sections = [
        _slice_section(data, offset, count)
        for offset, count in zip(offsets_and_sizes[::2], offsets_and_sizes[1::2], strict=True)
    ]
    _, sequence, resources, constants = sections
    try:
        sequence_table, resource_table = Flatbuffer(sequence).root, Flatbuffer(resources).root
        return VgfPayload(
            len(sequence_table.tables(_ModelSequenceTable.segments)),
            len(constants),
            _read_tensors(sequence_table, resource_table, _ModelSequenceTable.inputs, _ModelSequenceTable.input_names),
            _read_tensors(
                sequence_table, resource_table, _ModelSequenceTable.outputs, _ModelSequenceTable.output_names
            ),
            tuple(
                slot.number(_BindingSlot.binding, "I")
                for side in (_ModelSequenceTable.inputs, _ModelSequenceTable.outputs)
                for slot in sequence_table.tables(side)
            ),
        )
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


def _slice_section(data: memoryview, offset: int, count: int) -> memoryview:
    if offset + count > len(data):
        end = offset + count
        raise PayloadError(f"truncated: a section of the VGF file ends at byte {end:,}, the file has {len(data):,}")
    return data[offset : offset + count]


def _read_tensors(
    sequence_table: Table, resource_table: Table, slots_field: int, names_field: int
) -> tuple[TensorInfo, ...]:
    resources = resource_table.tables(_ModelResourceTable.mrt_entry)
    tensor_names = sequence_table.texts(names_field)
    tensors = []
    for position, slot in enumerate(sequence_table.tables(slots_field)):
        index = slot.number(_BindingSlot.mrt_index, "I")
        if index >= len(resources):
            raise PayloadError(f"damaged: the VGF file has no resource {index:,}")
        vk_format = resources[index].number(_ModelResourceTableEntry.vk_format, "I")
        description = resources[index].table(_ModelResourceTableEntry.description)
        shape = description.numbers(_Description.shape, "q") if description is not None else ()
        name = tensor_names[position] if position < len(tensor_names) else ""
        tensors.append(TensorInfo(name, _VULKAN_DTYPES.get(vk_format, f"VkFormat {vk_format}"), shape))
    return tuple(tensors)
