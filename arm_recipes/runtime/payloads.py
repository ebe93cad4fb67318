"""Reads TOSA and VGF payloads as far as it takes to describe them. A damaged one is an error, never a crash.

Arm's own ``vgfpy`` does not check the offsets in a VGF file, so damaged ones are not given to it. The classes
that begin with an underscore hold field numbers, under the names of ``tosa.fbs`` (tosa-tools) and ``vgf.fbs``
(ML SDK VGF library).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from arm_recipes.report import TensorInfo
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table


class _TosaGraph:
    version = 0
    regions = 1


class _Version:
    _major = 0
    _minor = 1
    _patch = 2


class _TosaRegion:
    blocks = 1


class _TosaBasicBlock:
    operators = 1
    tensors = 2
    inputs = 3
    outputs = 4


class _TosaOperator:
    inputs = 3
    outputs = 4


class _TosaTensor:
    name = 0
    shape = 1
    type = 2
    data = 3


#: The enumeration ``DType`` of TOSA, by PyTorch's names where it has the type.
_TOSA_DTYPES: Final = {
    1: "bool",
    2: "int4",
    3: "int8",
    4: "int16",
    5: "int32",
    6: "int48",
    7: "float32",
    8: "float16",
    9: "bfloat16",
    11: "float8_e4m3fn",
    12: "float8_e5m2",
    17: "int64",
}
#: Bits of an element, by the same enumeration; the compiler's shapes are no data.
_TOSA_BITS: Final = {1: 8, 2: 4, 3: 8, 4: 16, 5: 32, 6: 48, 7: 32, 8: 16, 9: 16, 11: 8, 12: 8, 17: 64}
_TOSA_MAGIC: Final = b"TOSA"


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
#: After magic and versions, offset and size of modules, model sequence, model resources and constants.
_VGF_HEADER: Final = struct.Struct("<4s12x8Q")
#: ``VkFormat`` of the tensors that the model converter makes.
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
class TosaPayload:
    """A TOSA flatbuffer.

    Attributes:
        version: of TOSA.
        operators: number of them in all blocks.
    """

    version: str
    operators: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class VgfPayload:
    """A VGF file.

    Attributes:
        segments: graphs and shaders that run in sequence.
        constant_bytes: size of the section with the constants.
        bindings: the descriptor binding of each input, then of each output.
    """

    segments: int
    constant_bytes: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    bindings: tuple[int, ...]


def read_tosa(data: memoryview) -> TosaPayload:
    """Describe a TOSA flatbuffer.

    Raises:
        PayloadError: it is none, or it is truncated or damaged.
    """
    if bytes(data[4:8]) != _TOSA_MAGIC:
        raise PayloadError(f"not a TOSA flatbuffer (magic {bytes(data[4:8])!r}, expected {_TOSA_MAGIC!r})")
    try:
        graph = Flatbuffer(data).root
        version = graph.table(_TosaGraph.version)
        blocks = [block for region in graph.tables(_TosaGraph.regions) for block in region.tables(_TosaRegion.blocks)]
        if version is None or not blocks:
            raise PayloadError("damaged: the TOSA flatbuffer has no version or no block")
        tensors = {tensor.text(_TosaTensor.name): tensor for tensor in blocks[0].tables(_TosaBasicBlock.tensors)}
        return TosaPayload(
            ".".join(str(version.number(field)) for field in (_Version._major, _Version._minor, _Version._patch)),
            sum(len(block.tables(_TosaBasicBlock.operators)) for block in blocks),
            _tosa_tensors(blocks[0].texts(_TosaBasicBlock.inputs), tensors),
            _tosa_tensors(blocks[0].texts(_TosaBasicBlock.outputs), tensors),
        )
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


@dataclass(frozen=True)
class TosaOperator:
    """An operator of a TOSA flatbuffer that is no constant.

    Attributes:
        place: its position among all operators.
        inputs, outputs: names of tensors.
    """

    place: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class TosaGraph:
    """The main block of a TOSA flatbuffer.

    Attributes:
        operators: in order; an export's record has as many.
        inputs, outputs: names of the graph's tensors.
        bytes: of every tensor.
    """

    operators: tuple[TosaOperator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: Mapping[str, int]


def read_graph(data: memoryview) -> TosaGraph:
    """Operators and tensors of a TOSA flatbuffer that the compiler wrote."""
    (region,) = Flatbuffer(data).root.tables(_TosaGraph.regions)
    (block,) = region.tables(_TosaRegion.blocks)
    operators = []
    for place, operator in enumerate(block.tables(_TosaBasicBlock.operators)):
        if inputs := operator.texts(_TosaOperator.inputs):
            operators.append(TosaOperator(place, inputs, operator.texts(_TosaOperator.outputs)))
    sizes = {}
    for tensor in block.tables(_TosaBasicBlock.tensors):
        bits = _TOSA_BITS.get(tensor.number(_TosaTensor.type, "I"), 0)
        sizes[tensor.text(_TosaTensor.name)] = prod(tensor.numbers(_TosaTensor.shape, "i")) * bits // 8
    inputs, outputs = (block.texts(field) for field in (_TosaBasicBlock.inputs, _TosaBasicBlock.outputs))
    return TosaGraph(tuple(operators), inputs, outputs, sizes)


def constant_spans(data: memoryview, least: int) -> list[tuple[int, int]]:
    """Where the bytes of constants of a TOSA flatbuffer begin and end, of those that have at least so many."""
    (region,) = Flatbuffer(data).root.tables(_TosaGraph.regions)
    (block,) = region.tables(_TosaRegion.blocks)
    spans = [tensor.span(_TosaTensor.data) for tensor in block.tables(_TosaBasicBlock.tensors)]
    return sorted((start, start + count) for start, count in spans if count >= least)


def _tosa_tensors(names: Iterable[str], tensors: dict[str, Table]) -> tuple[TensorInfo, ...]:
    found = []
    for name in names:
        if name not in tensors:
            raise PayloadError(f"damaged: the TOSA flatbuffer has no tensor {name!r}")
        number = tensors[name].number(_TosaTensor.type, "I")
        dtype = _TOSA_DTYPES.get(number, f"TOSA type {number}")
        found.append(TensorInfo(name, dtype, tensors[name].numbers(_TosaTensor.shape, "i")))
    return tuple(found)


def read_vgf(data: memoryview) -> VgfPayload:
    """Describe a VGF file.

    Raises:
        PayloadError: it is none, or it is truncated or damaged.
    """
    if len(data) < _VGF_HEADER.size or bytes(data[:4]) != _VGF_MAGIC:
        raise PayloadError(f"not a VGF file (magic {bytes(data[:4])!r}, expected {_VGF_MAGIC!r})")
    _, *places = _VGF_HEADER.unpack_from(data)
    sections = [_section(data, offset, count) for offset, count in zip(places[::2], places[1::2], strict=True)]
    _, sequence, resources, constants = sections
    try:
        order, table = Flatbuffer(sequence).root, Flatbuffer(resources).root
        return VgfPayload(
            len(order.tables(_ModelSequenceTable.segments)),
            len(constants),
            _vgf_tensors(order, table, _ModelSequenceTable.inputs, _ModelSequenceTable.input_names),
            _vgf_tensors(order, table, _ModelSequenceTable.outputs, _ModelSequenceTable.output_names),
            tuple(
                slot.number(_BindingSlot.binding, "I")
                for side in (_ModelSequenceTable.inputs, _ModelSequenceTable.outputs)
                for slot in order.tables(side)
            ),
        )
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


def _section(data: memoryview, offset: int, count: int) -> memoryview:
    if offset + count > len(data):
        end = offset + count
        raise PayloadError(f"truncated: a section of the VGF file ends at byte {end:,}, there are {len(data):,}")
    return data[offset : offset + count]


def _vgf_tensors(order: Table, table: Table, slots: int, names: int) -> tuple[TensorInfo, ...]:
    resources = table.tables(_ModelResourceTable.mrt_entry)
    known = order.texts(names)
    found = []
    for position, slot in enumerate(order.tables(slots)):
        index = slot.number(_BindingSlot.mrt_index, "I")
        if index >= len(resources):
            raise PayloadError(f"damaged: the VGF file has no resource {index:,}")
        number = resources[index].number(_ModelResourceTableEntry.vk_format, "I")
        description = resources[index].table(_ModelResourceTableEntry.description)
        shape = description.numbers(_Description.shape, "q") if description is not None else ()
        name = known[position] if position < len(known) else ""
        found.append(TensorInfo(name, _VULKAN_DTYPES.get(number, f"VkFormat {number}"), shape))
    return tuple(found)
