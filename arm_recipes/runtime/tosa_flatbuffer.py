"""Parser of TOSA flatbuffers: inputs, outputs, operators, and positions of constants. A damaged file is an error.

The private classes hold flatbuffer field numbers, under the names of ``tosa.fbs`` (tosa-tools).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table
from arm_recipes.runtime.tensor_info import TensorInfo

_WORD = struct.Struct("<I")


class _TosaGraph:
    version = 0
    regions = 1


class _Version:
    _major = 0
    _minor = 1
    _patch = 2


class _TosaRegion:
    name = 0
    blocks = 1


class _TosaBasicBlock:
    operators = 1
    tensors = 2
    inputs = 3
    outputs = 4
    shapes = 5


class _TosaOperator:
    op = 0
    attribute = 2  # a union, whose type is field 1
    inputs = 3
    outputs = 4


class _TosaTensor:
    name = 0
    shape = 1
    type = 2
    data = 3
    variable = 4


class _TosaShape:
    name = 0
    rank = 1
    data = 2


#: {number in TOSA's enumeration ``DType``: dtype name}. The name is PyTorch's if PyTorch has the type.
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
#: {number in TOSA's enumeration ``DType``: bits of an element}. SHAPE is missing, because shape operands have no data.
#: MXINT8 is missing, because the compiler does not write it.
_TOSA_BITS: Final = {
    1: 8,
    2: 4,
    3: 8,
    4: 16,
    5: 32,
    6: 48,
    7: 32,
    8: 16,
    9: 16,
    11: 8,
    12: 8,
    13: 6,  # FP6E2M3
    14: 6,  # FP6E3M2
    15: 4,  # FP4E2M1
    16: 8,  # FP8UE8M0
    17: 64,
}
_TOSA_MAGIC: Final = b"TOSA"


@dataclass(frozen=True)
class TosaPayload:
    """Description of a TOSA flatbuffer.

    Attributes:
        version: version of TOSA.
        operators: number of operators in all blocks, including constants.
    """

    version: str
    operators: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def read_tosa_payload(data: memoryview) -> TosaPayload:
    """Parse and describe a TOSA flatbuffer, which may be untrusted.

    Raises:
        PayloadError: the bytes are not a TOSA flatbuffer, or are truncated or damaged.
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
            _describe_tensors(blocks[0].texts(_TosaBasicBlock.inputs), tensors),
            _describe_tensors(blocks[0].texts(_TosaBasicBlock.outputs), tensors),
        )
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


@dataclass(frozen=True)
class TosaOperator:
    """An operator of a TOSA flatbuffer that is not a constant.

    Attributes:
        index: Vela's index of the operator, which counts all operators, including constants.
        inputs, outputs: names of tensors.
        result: description of the first output.
    """

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    result: TensorInfo


@dataclass(frozen=True)
class TosaGraph:
    """The main block of a TOSA flatbuffer.

    Attributes:
        operators: operators except constants, in order. ``DelegateRecord.tosa_operators`` lists the same operators in
            the same order.
        inputs, outputs: names of the graph's inputs and outputs.
        tensor_bytes: size of each tensor, by name.
    """

    operators: tuple[TosaOperator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensor_bytes: Mapping[str, int]


def read_tosa_graph(data: memoryview) -> TosaGraph:
    """Parse the operators and tensors of a TOSA flatbuffer that this compiler wrote.

    The result has no operators if the graph contains nested graphs (COND_IF, WHILE_LOOP).
    """
    regions = Flatbuffer(data).root.tables(_TosaGraph.regions)
    block = regions[0].tables(_TosaRegion.blocks)[0]
    tensors = {tensor.text(_TosaTensor.name): tensor for tensor in block.tables(_TosaBasicBlock.tensors)}
    operators = []
    for index, operator in enumerate(block.tables(_TosaBasicBlock.operators) if len(regions) == 1 else ()):
        if inputs := operator.texts(_TosaOperator.inputs):
            outputs = operator.texts(_TosaOperator.outputs)
            operators.append(TosaOperator(index, inputs, outputs, _describe_tensors(outputs, tensors)[0]))
    inputs, outputs = (block.texts(field) for field in (_TosaBasicBlock.inputs, _TosaBasicBlock.outputs))
    return TosaGraph(
        tuple(operators), inputs, outputs, {name: _tensor_bytes(tensor) for name, tensor in tensors.items()}
    )


def _tensor_bytes(tensor: Table) -> int:
    """Size of a tensor. Elements of fewer than 8 bits are packed without padding."""
    bits = _TOSA_BITS.get(tensor.number(_TosaTensor.type, "I"), 0)
    return (prod(tensor.numbers(_TosaTensor.shape, "i")) * bits + 7) // 8


def find_constant_spans(data: memoryview, min_bytes: int) -> list[tuple[int, int]]:
    """Start and end byte of the data of each constant with at least ``min_bytes`` bytes, in file order."""
    regions = Flatbuffer(data).root.tables(_TosaGraph.regions)
    blocks = [block for region in regions for block in region.tables(_TosaRegion.blocks)]
    spans = [tensor.span(_TosaTensor.data) for block in blocks for tensor in block.tables(_TosaBasicBlock.tensors)]
    return sorted((start, start + count) for start, count in spans if count >= min_bytes)


def _describe_tensors(names: Iterable[str], tensors: dict[str, Table]) -> tuple[TensorInfo, ...]:
    infos = []
    for name in names:
        if name not in tensors:
            raise PayloadError(f"damaged: the TOSA flatbuffer has no tensor {name!r}")
        number = tensors[name].number(_TosaTensor.type, "I")
        dtype = _TOSA_DTYPES.get(number, f"TOSA type {number}")
        infos.append(TensorInfo(name, dtype, tensors[name].numbers(_TosaTensor.shape, "i")))
    return tuple(infos)


def replace_outputs(flatbuffer: bytes, names: Sequence[str]) -> bytes:
    """Replace the outputs of a graph by the tensors ``names``. The graph must not contain nested graphs.

    References in a flatbuffer point forward, so the new list of outputs is appended to the file.
    """
    (region,) = Flatbuffer(memoryview(flatbuffer)).root.tables(_TosaGraph.regions)
    field = region.tables(_TosaRegion.blocks)[0].field_position(_TosaBasicBlock.outputs)
    assert field is not None, "a graph without outputs"
    data = bytearray(flatbuffer)
    data += bytes(-len(data) % _WORD.size)
    _WORD.pack_into(data, field, len(data) - field)
    texts = [name.encode() for name in names]
    start = len(data) + _WORD.size
    data += _WORD.pack(len(texts)) + bytes(_WORD.size * len(texts))
    for index, text in enumerate(texts):
        at = start + _WORD.size * index
        _WORD.pack_into(data, at, len(data) - at)
        data += _WORD.pack(len(text)) + text + bytes(1)
        data += bytes(-len(data) % _WORD.size)
    return bytes(data)
