"""Parser of TFLite models that Vela compiled: custom operators ``ethos-u`` with a command stream for the NPU.

The inputs of such an operator are, in this order: the command stream, constants (region 0 of the NPU's addresses),
scratch (region 1), fast scratch (region 2), and the inputs of the network. Vela writes this order
(``npu_serialisation.rewrite_npu_call_ops``), and TFLite Micro reads it (``ethosu.cc``).

Scratch is TFLite Micro's arena. The metadata ``OfflineMemoryAllocation`` holds the offsets of the tensors in it,
including inputs and outputs of the model. In memory mode ``Dedicated_Sram``, fast scratch is a tensor of its own and
stands for a separate memory of the NPU. In other modes, scratch and fast scratch are the same tensor. Vela's legacy
core writes two tensors in these modes too, but its commands do not address the second one.

The private classes hold flatbuffer field numbers, under the names of TFLite's ``schema.fbs``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_command_header import read_header
from arm_recipes.runtime.ethosu_payload import SCRATCH, EthosUParts, EthosUPayload, EthosUTensor
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.tensor_info import TensorInfo


class _Model:
    operator_codes = 1
    subgraphs = 2
    description = 3
    buffers = 4
    metadata = 6


class _SubGraph:
    tensors = 0
    inputs = 1
    outputs = 2
    operators = 3


class _Tensor:
    shape = 0
    type = 1
    buffer = 2
    name = 3
    quantization = 4
    is_variable = 5


class _Quantization:
    scale = 2
    zero_point = 3


class _Operator:
    opcode_index = 0
    inputs = 1
    outputs = 2
    custom_options = 5


class _OperatorCode:
    deprecated_builtin_code = 0
    custom_code = 1
    builtin_code = 3


class _Buffer:
    data = 0


class _Metadata:
    name = 0
    buffer = 1


#: Position of the file identifier, after the offset of the root table.
IDENTIFIER: Final = slice(4, 8)
MAGIC: Final = b"TFL3"
_CUSTOM = 32
#: Custom code of the operators that Vela creates.
ETHOS_U: Final = "ethos-u"
_ALLOCATION = "OfflineMemoryAllocation"
#: Words before the offsets: version, subgraph and number of tensors.
_ALLOCATION_HEADER = 3
#: ``TensorType`` -> PyTorch's dtype name, bytes of an element.
_TYPES: Final = {
    0: ("float32", 4),
    1: ("float16", 2),
    2: ("int32", 4),
    3: ("uint8", 1),
    4: ("int64", 8),
    6: ("bool", 1),
    7: ("int16", 2),
    9: ("int8", 1),
    10: ("float64", 8),
    15: ("uint32", 4),
    16: ("uint16", 2),
}
#: Indices of the inputs of an ``ethos-u`` operator. The inputs of the network follow, from ``_FIRST_INPUT`` on.
_FIRST_INPUT, _COMMANDS_AT, _CONSTANTS_AT, _SCRATCH_AT, _FAST_SCRATCH_AT = 4, 0, 1, 2, 3
#: The operator's custom options are a flexbuffer of this integer, of any width.
_OPTIONS: Final = 1
_RANK, _MAX_BYTES = 6, 2**32


@dataclass(frozen=True)
class VelaOperator:
    """An ``ethos-u`` operator.

    Attributes:
        parts: command stream, constants and description. Its inputs and outputs are tensors in the arena (region 1).
        one_arena: whether scratch and fast scratch are the same tensor.
    """

    parts: EthosUParts
    one_arena: bool


@dataclass(frozen=True)
class VelaTflite:
    """A TFLite model that Vela compiled.

    Attributes:
        description: the file's description of the compiler, for example ``Vela 5.1.0 Optimised``.
        inputs, outputs: inputs and outputs of the model.
        input_locations, output_locations: the same tensors in the arena.
        npu: operators for the NPU, in order.
        operators: names of the other operators, in order.
        arena_bytes: size of the arena for intermediate tensors, including scratch.
        variables: tensors that keep their value between runs; with each, the initial value of its elements.
    """

    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    input_locations: tuple[EthosUTensor, ...]
    output_locations: tuple[EthosUTensor, ...]
    npu: tuple[VelaOperator, ...]
    operators: tuple[str, ...]
    arena_bytes: int
    variables: tuple[tuple[EthosUTensor, int], ...] = ()


def is_tflite(data: bytes | memoryview) -> bool:
    """Whether the bytes have the file identifier of a TFLite model."""
    return bytes(data[IDENTIFIER]) == MAGIC


def read_vela_tflite(data: bytes | memoryview) -> VelaTflite:
    """Parse a model. Command stream and constants are views of ``data``.

    Raises:
        ProgramError: the bytes are not a TFLite model, are truncated or damaged, or Vela has not compiled the model.
    """
    try:
        return _Reader(memoryview(data).toreadonly().cast("B")).model()
    except FlatbufferError as error:
        raise ProgramError(f"truncated or damaged: {error}") from None


class _Reader:
    """Parser of one model, whose first subgraph is the main graph."""

    def __init__(self, data: memoryview) -> None:
        if not is_tflite(data):
            magic = bytes(data[IDENTIFIER])
            raise ProgramError(f"not a TFLite model (magic {magic!r}, expected {MAGIC!r})")
        self._root = Flatbuffer(data).root
        self._buffers = self._root.tables(_Model.buffers)
        self._subgraphs = self._root.tables(_Model.subgraphs)
        self._graph = _element(self._subgraphs, 0, "subgraph")
        self._tensors = self._graph.tables(_SubGraph.tensors)
        self._codes = [_operator_name(table) for table in self._root.tables(_Model.operator_codes)]
        self._offsets: Sequence[int] = ()

    def model(self) -> VelaTflite:
        operators = [
            (_element(self._codes, table.number(_Operator.opcode_index, "I"), "operator code"), table)
            for table in self._graph.tables(_SubGraph.operators)
        ]
        if ETHOS_U not in (name for name, _ in operators):
            raise ProgramError(
                f"it has no operator '{ETHOS_U}': Vela has not compiled it, or left all of it to the CPU. "
                "Compile it with: vela model.tflite --accelerator-config ..."
            )
        for name, table in operators:
            if name == ETHOS_U:
                _check_options(table.read_bytes(_Operator.custom_options))
        self._offsets = self._read_allocation()
        index_lists = [self._graph.numbers(field, "i") for field in (_SubGraph.inputs, _SubGraph.outputs)]
        inputs, outputs = ([self._read_tensor(index) for index in indices] for indices in index_lists)
        npu = tuple(self._read_operator(table) for name, table in operators if name == ETHOS_U)
        locations = [location for _, location in (*inputs, *outputs)]
        return VelaTflite(
            self._root.text(_Model.description),
            tuple(info for info, _ in inputs),
            tuple(info for info, _ in outputs),
            tuple(location for _, location in inputs),
            tuple(location for _, location in outputs),
            npu,
            tuple(name for name, _ in operators if name != ETHOS_U),
            _arena_bytes([operator.parts.payload.scratch_bytes for operator in npu], locations),
            tuple(self._read_variables()),
        )

    def _read_variables(self) -> Iterator[tuple[EthosUTensor, int]]:
        """Yield variables with their initial values: the zero point for int8, else 0.

        TFLite Micro initializes them alike, in ``MicroInterpreterGraph::ResetTensorData``.
        """
        for index, tensor in enumerate(self._tensors):
            if tensor.number(_Tensor.is_variable, "B"):
                info, location = self._read_tensor(index)
                if location.offset >= 0:
                    yield location, (info.zero_point or 0) if info.dtype == "int8" else 0

    def _read_allocation(self) -> Sequence[int]:
        """Arena offsets of the first subgraph's tensors; -1 for a tensor outside of the arena."""
        tables = [table for table in self._root.tables(_Model.metadata) if table.text(_Metadata.name) == _ALLOCATION]
        if not tables:
            raise ProgramError(
                f"it has no metadata '{_ALLOCATION}' with the offsets of its tensors: compile it with Vela again"
            )
        data = self._buffer(tables[0].number(_Metadata.buffer, "I"))
        words = struct.unpack(f"<{len(data) // 4}i", data[: len(data) // 4 * 4])
        if len(words) < _ALLOCATION_HEADER or len(data) % 4 or words[0] != 0:
            raise ProgramError(f"damaged: its metadata '{_ALLOCATION}' has {len(data)} bytes in an unknown format")
        offsets = words[_ALLOCATION_HEADER:]
        if words[2] != len(offsets) or len(offsets) < len(self._tensors):
            raise ProgramError(
                f"damaged: its metadata '{_ALLOCATION}' announces {words[2]} tensors and has {len(offsets)}, "
                f"the model {len(self._tensors)}"
            )
        return offsets

    def _read_operator(self, table: Table) -> VelaOperator:
        inputs, outputs = table.numbers(_Operator.inputs, "i"), table.numbers(_Operator.outputs, "i")
        if len(inputs) < _FIRST_INPUT:
            raise ProgramError(f"damaged: an operator '{ETHOS_U}' has {len(inputs)} inputs, not {_FIRST_INPUT} or more")
        commands = self._constant(inputs[_COMMANDS_AT], "its command stream")
        try:
            header = read_header(commands)
        except PayloadError as error:
            raise ProgramError(f"damaged: {error}") from None
        constants = self._constant(inputs[_CONSTANTS_AT], "its constants", may_be_empty=True)
        scratch = self._memory_size(inputs[_SCRATCH_AT], "scratch")
        one_arena = inputs[_FAST_SCRATCH_AT] == inputs[_SCRATCH_AT]
        fast_scratch = scratch if one_arena else self._memory_size(inputs[_FAST_SCRATCH_AT], "fast scratch")
        locations = [
            tuple(self._read_tensor(index)[1] for index in indices if index >= 0)  # -1: an omitted optional input
            for indices in (inputs[_FIRST_INPUT:], outputs)
        ]
        payload = EthosUPayload(
            product=header.product,
            macs=header.macs,
            stream=header.kind,
            command_bytes=len(commands),
            weight_bytes=len(constants),
            scratch_bytes=_arena_bytes([scratch], [location for tensors in locations for location in tensors]),
            fast_scratch_bytes=fast_scratch,
            inputs=locations[0],
            outputs=locations[1],
        )
        return VelaOperator(
            EthosUParts(payload, commands, header.header_bytes, constants, has_external_weights=False), one_arena
        )

    def _constant(self, index: int, what: str, *, may_be_empty: bool = False) -> memoryview:
        tensor = _element(self._tensors, index, "tensor")
        data = self._buffer(tensor.number(_Tensor.buffer, "I"))
        if not len(data) and not may_be_empty:
            raise ProgramError(f"damaged: an operator '{ETHOS_U}' lacks {what}: tensor {index} is empty")
        return data

    def _memory_size(self, index: int, what: str) -> int:
        """Size in bytes of a tensor that represents scratch or fast scratch."""
        _, location = self._read_tensor(index)
        if location.offset != 0:
            raise ProgramError(
                f"damaged: {what} (tensor {index}) is at byte {location.offset:,} of the arena, not at byte 0"
            )
        return location.nbytes

    def _read_tensor(self, index: int) -> tuple[TensorInfo, EthosUTensor]:
        """A tensor and its location in the arena."""
        tensor = _element(self._tensors, index, "tensor")
        name, kind = tensor.text(_Tensor.name), tensor.number(_Tensor.type, "b")
        shape, offset = tensor.numbers(_Tensor.shape, "i"), self._offsets[index]
        if kind not in _TYPES:
            raise ProgramError(f"'{name}' (tensor {index}) has the TFLite type {kind}, which no NPU supports")
        dtype, size = _TYPES[kind]
        if min(shape, default=0) < 0 or max(offset, 0) + math.prod(shape) * size > _MAX_BYTES or offset < -1:
            raise ProgramError(f"damaged: '{name}' (tensor {index}) has the shape {list(shape)} at byte {offset}")
        info = TensorInfo(name, dtype, shape, *_read_quantization(tensor.table(_Tensor.quantization)))
        return info, EthosUTensor((1,) * (_RANK - len(shape)) + shape, size, offset, SCRATCH)

    def _buffer(self, index: int) -> memoryview:
        return _element(self._buffers, index, "buffer").view(_Buffer.data)


def _arena_bytes(scratch: Sequence[int], locations: Sequence[EthosUTensor]) -> int:
    return max(
        [*scratch, *(location.offset + location.nbytes for location in locations if location.offset >= 0)], default=0
    )


def _read_quantization(quantization: Table | None) -> tuple[float | None, int | None]:
    """Scale and zero point of per-tensor quantization; (None, None) otherwise."""
    if quantization is None:
        return None, None
    scales = quantization.numbers(_Quantization.scale, "f")
    zero_points = quantization.numbers(_Quantization.zero_point, "q")
    if len(scales) != 1 or len(zero_points) != 1:
        return None, None
    return float(scales[0]), int(zero_points[0])


def _operator_name(table: Table) -> str:
    """Name of an operator. Its code is the larger of two fields, because the deprecated one is limited to 127."""
    builtin = max(table.number(_OperatorCode.deprecated_builtin_code, "b"), table.number(_OperatorCode.builtin_code))
    return table.text(_OperatorCode.custom_code) or "CUSTOM" if builtin == _CUSTOM else _builtin_name(builtin)


def _builtin_name(code: int) -> str:
    """TFLite's name of an operator from Vela's list; its number if Vela is not installed or lacks the operator."""
    try:
        from ethosu.vela.tflite.BuiltinOperator import BuiltinOperator
    except ImportError:
        return f"builtin operator {code}"
    names = {number: name for name, number in vars(BuiltinOperator).items() if isinstance(number, int)}
    return names.get(code, f"builtin operator {code}")


def _check_options(options: bytes) -> None:
    """Raise ``ProgramError`` unless the options are the number 1; a flexbuffer ends with type and width of its root."""
    if len(options) >= 3:
        *_, kind, width = options
        # Types 1 and 2: integers with and without sign, stored in place.
        if kind >> 2 in (1, 2) and width == len(options) - 2 and int.from_bytes(options[:width], "little") == _OPTIONS:
            return
    raise ProgramError(
        f"its operator '{ETHOS_U}' has unknown custom options ({options[:16].hex(' ') or 'none'}), which TFLite Micro "
        "refuses too: compile it with another version of Vela"
    )


_Item = TypeVar("_Item")


def _element(items: Sequence[_Item], index: int, what: str) -> _Item:
    if not 0 <= index < len(items):
        raise ProgramError(f"damaged: it refers to {what} {index:,}, and there are {len(items):,}")
    return items[index]
