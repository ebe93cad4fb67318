"""The operators of a delegate's TOSA graph, and what each of them gives."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from arm_recipes.report import TensorInfo
from arm_recipes.runtime.flatbuffer import Flatbuffer, Table
from arm_recipes.runtime.payloads import (
    _tosa_tensors,
    _TosaBasicBlock,
    _TosaGraph,
    _TosaOperator,
    _TosaRegion,
    _TosaTensor,
)

_OUTPUTS = 4  # of a TosaOperator
_WORD = struct.Struct("<I")


@dataclass(frozen=True)
class Operator:
    """An operator that is no constant.

    Attributes:
        place: its position among all operators, as Vela counts them.
        inputs: names of what it reads.
        result: its first result.
    """

    place: int
    inputs: tuple[str, ...]
    result: TensorInfo


def operators(flatbuffer: bytes) -> list[Operator]:
    """The operators of a flatbuffer that the compiler wrote; none where operators hold graphs."""
    block = _block(flatbuffer)
    if block is None:
        return []
    tensors = {tensor.text(_TosaTensor.name): tensor for tensor in block.tables(_TosaBasicBlock.tensors)}
    found = []
    for place, operator in enumerate(block.tables(_TosaBasicBlock.operators)):
        inputs = operator.texts(_TosaOperator.inputs)
        if inputs:
            (result, *_) = _tosa_tensors(operator.texts(_OUTPUTS), tensors)
            found.append(Operator(place, inputs, result))
    return found


def with_outputs(flatbuffer: bytes, names: Sequence[str]) -> bytes:
    """The same graph with other outputs.

    References of flatbuffers lead forwards: a new list behind the bytes that are there takes the place of the old one.
    """
    block = _block(flatbuffer)
    field = None if block is None else block.place(_TosaBasicBlock.outputs)
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


def _block(flatbuffer: bytes) -> Table | None:
    regions = Flatbuffer(memoryview(flatbuffer)).root.tables(_TosaGraph.regions)
    return regions[0].tables(_TosaRegion.blocks)[0] if len(regions) == 1 else None
