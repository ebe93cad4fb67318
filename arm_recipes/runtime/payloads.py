"""Parser of VGF files: reads their description. A damaged file is an error, never a crash.

Arm's own ``vgfpy`` does not check the offsets in a VGF file, so it must not read damaged files. The private classes
hold flatbuffer field numbers, under the names of ``vgf.fbs`` (ML SDK VGF library).
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
#: ``VkFormat`` of the tensors that the model converter writes -> dtype.
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
    """A VGF file.

    Attributes:
        segments: graphs and shaders that run in sequence.
        constant_bytes: size of the section with the constants.
        bindings: descriptor binding of each input, then of each output.
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
    _, *places = _VGF_HEADER_STRUCT.unpack_from(data)
    sections = [_slice_section(data, offset, count) for offset, count in zip(places[::2], places[1::2], strict=True)]
    _, sequence, resources, constants = sections
    try:
        order, table = Flatbuffer(sequence).root, Flatbuffer(resources).root
        return VgfPayload(
            len(order.tables(_ModelSequenceTable.segments)),
            len(constants),
            _read_tensors(order, table, _ModelSequenceTable.inputs, _ModelSequenceTable.input_names),
            _read_tensors(order, table, _ModelSequenceTable.outputs, _ModelSequenceTable.output_names),
            tuple(
                slot.number(_BindingSlot.binding, "I")
                for side in (_ModelSequenceTable.inputs, _ModelSequenceTable.outputs)
                for slot in order.tables(side)
            ),
        )
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


def _slice_section(data: memoryview, offset: int, count: int) -> memoryview:
    if offset + count > len(data):
        end = offset + count
        raise PayloadError(f"truncated: a section of the VGF file ends at byte {end:,}, there are {len(data):,}")
    return data[offset : offset + count]


def _read_tensors(order: Table, table: Table, slots: int, names: int) -> tuple[TensorInfo, ...]:
    resources = table.tables(_ModelResourceTable.mrt_entry)
    known = order.texts(names)
    tensors = []
    for position, slot in enumerate(order.tables(slots)):
        index = slot.number(_BindingSlot.mrt_index, "I")
        if index >= len(resources):
            raise PayloadError(f"damaged: the VGF file has no resource {index:,}")
        number = resources[index].number(_ModelResourceTableEntry.vk_format, "I")
        description = resources[index].table(_ModelResourceTableEntry.description)
        shape = description.numbers(_Description.shape, "q") if description is not None else ()
        name = known[position] if position < len(known) else ""
        tensors.append(TensorInfo(name, _VULKAN_DTYPES.get(number, f"VkFormat {number}"), shape))
    return tuple(tensors)
