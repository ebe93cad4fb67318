"""Parser of TFLite models that Vela compiled. Their custom operators ``ethos-u`` contain command streams for the NPU.

An ``ethos-u`` operator has these inputs, in this order: the command stream, constants (memory region 0 of the
NPU), scratch (region 1), fast scratch (region 2), and the inputs of the network. Vela writes this order
(``npu_serialisation.rewrite_npu_call_ops``), and TFLite Micro reads it (``ethosu.cc``).

Scratch is TFLite Micro's arena. The metadata ``OfflineMemoryAllocation`` holds the arena offset of each tensor,
including inputs and outputs of the model. In memory mode ``Dedicated_Sram``, fast scratch is a separate tensor,
which represents a separate memory of the NPU. In other modes, scratch and fast scratch are the same tensor. Vela's
legacy core writes two tensors in these modes, too, but its commands do not address the second one.

The private classes hold flatbuffer field numbers, under the names of TFLite's ``schema.fbs``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_command_header import read_stream_header
from arm_recipes.runtime.ethosu_payload import SCRATCH, EthosUPayload, EthosUPayloadContent, EthosUTensor
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


#: Position of the file identifier in a file. The offset of the root table comes before it.
FILE_IDENTIFIER_SLICE: Final = slice(4, 8)
FILE_IDENTIFIER: Final = b"TFL3"
_CUSTOM_OPERATOR_CODE = 32
#: Custom code of the operators that Vela creates.
ETHOS_U_CUSTOM_CODE: Final = "ethos-u"
_ALLOCATION_METADATA = "OfflineMemoryAllocation"
#: Number of 32-bit words before the offsets in this metadata: version, subgraph and number of tensors.
_ALLOCATION_HEADER_WORDS = 3
#: {number in TFLite's enumeration ``TensorType``: (PyTorch's dtype name, bytes of an element)}.
_TENSOR_TYPES: Final = {
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
#: Indices of the inputs of an ``ethos-u`` operator. The inputs of the network follow, from ``_FIRST_INPUT_INDEX`` on.
_FIRST_INPUT_INDEX, _COMMANDS_INDEX, _CONSTANTS_INDEX, _SCRATCH_INDEX, _FAST_SCRATCH_INDEX = 4, 0, 1, 2, 3
#: The operator's custom options are a flexbuffer that contains this integer, in any width.
_CUSTOM_OPTIONS_VALUE: Final = 1
_RANK, _MAX_BYTES = 6, 2**32


@dataclass(frozen=True)
class VelaOperator:
    """An ``ethos-u`` operator: an NPU program inside of a TFLite model.

    Attributes:
        content: command stream, constants and description. The inputs and outputs are tensors in the arena (region 1).
        one_arena: whether scratch and fast scratch are the same tensor.
    """

    content: EthosUPayloadContent
    one_arena: bool


@dataclass(frozen=True)
class VelaTflite:
    """A TFLite model that Vela compiled.

    Attributes:
        description: the file's description of the compiler, for example ``Vela 5.1.0 Optimised``.
        inputs, outputs: inputs and outputs of the model.
        input_locations, output_locations: arena locations of ``inputs`` and ``outputs``.
        npu_operators: operators for the NPU, in execution order.
        cpu_operators: names of the other operators, in execution order.
        arena_bytes: size of the arena, which contains scratch and the model's inputs and outputs.
        variables: tensors that keep their value between runs, each with the initial value of its elements.
    """

    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    input_locations: tuple[EthosUTensor, ...]
    output_locations: tuple[EthosUTensor, ...]
    npu_operators: tuple[VelaOperator, ...]
    cpu_operators: tuple[str, ...]
    arena_bytes: int
    variables: tuple[tuple[EthosUTensor, int], ...] = ()


def is_tflite(data: bytes | memoryview) -> bool:
    """Whether the bytes have the file identifier of a TFLite model."""
    return bytes(data[FILE_IDENTIFIER_SLICE]) == FILE_IDENTIFIER


def read_vela_tflite(data: bytes | memoryview) -> VelaTflite:
    """Parse a model. Command streams and constants are views of ``data``.

    Raises:
        ProgramError: the bytes are not a TFLite model, are truncated or damaged, or Vela has not compiled the
            model.
    """
    try:
        return _Reader(memoryview(data).toreadonly().cast("B")).read_model()
    except FlatbufferError as error:
        raise ProgramError(f"truncated or damaged: {error}") from None


class _Reader:
    """Parser of one model, whose first subgraph is the main graph."""

    def __init__(self, data: memoryview) -> None:
        if not is_tflite(data):
            magic = bytes(data[FILE_IDENTIFIER_SLICE])
            raise ProgramError(f"not a TFLite model (magic {magic!r}, expected {FILE_IDENTIFIER!r})")
        self._root = Flatbuffer(data).root
        self._buffers = self._root.tables(_Model.buffers)
        self._subgraphs = self._root.tables(_Model.subgraphs)
        self._graph = _checked_element(self._subgraphs, 0, "subgraph")
        self._tensors = self._graph.tables(_SubGraph.tensors)
        self._codes = [_operator_name(table) for table in self._root.tables(_Model.operator_codes)]
        self._offsets: Sequence[int] = ()

    def read_model(self) -> VelaTflite:
        operators = [
            (_checked_element(self._codes, table.number(_Operator.opcode_index, "I"), "operator code"), table)
            for table in self._graph.tables(_SubGraph.operators)
        ]
        if ETHOS_U_CUSTOM_CODE not in (name for name, _ in operators):
            raise ProgramError(
                f"it has no operator '{ETHOS_U_CUSTOM_CODE}': Vela has not compiled it, or left all of it to the CPU. "
                "Compile it with: vela model.tflite --accelerator-config ..."
            )
        for name, table in operators:
            if name == ETHOS_U_CUSTOM_CODE:
                _check_custom_options(table.read_bytes(_Operator.custom_options))
        self._offsets = self._read_allocation()
        index_lists = [self._graph.numbers(field, "i") for field in (_SubGraph.inputs, _SubGraph.outputs)]
        inputs, outputs = ([self._read_tensor(index) for index in indices] for indices in index_lists)
        npu_operators = tuple(self._read_operator(table) for name, table in operators if name == ETHOS_U_CUSTOM_CODE)
        locations = [location for _, location in (*inputs, *outputs)]
        return VelaTflite(
            self._root.text(_Model.description),
            tuple(info for info, _ in inputs),
            tuple(info for info, _ in outputs),
            tuple(location for _, location in inputs),
            tuple(location for _, location in outputs),
            npu_operators,
            tuple(name for name, _ in operators if name != ETHOS_U_CUSTOM_CODE),
            _required_arena_bytes([operator.content.payload.scratch_bytes for operator in npu_operators], locations),
            tuple(self._read_variables()),
        )

    def _read_variables(self) -> Iterator[tuple[EthosUTensor, int]]:
        """Yield variables with their initial values: the zero point for int8, otherwise 0.

        TFLite Micro uses the same values (``MicroInterpreterGraph::ResetTensorData``).
        """
        for index, tensor in enumerate(self._tensors):
            if tensor.number(_Tensor.is_variable, "B"):
                info, location = self._read_tensor(index)
                if location.offset >= 0:
                    yield location, (info.zero_point or 0) if info.dtype == "int8" else 0

    def _read_allocation(self) -> Sequence[int]:
        """Read the arena offset of each tensor of the first subgraph; -1 for a tensor outside of the arena."""
        allocation_tables = [
            table for table in self._root.tables(_Model.metadata) if table.text(_Metadata.name) == _ALLOCATION_METADATA
        ]
        if not allocation_tables:
            raise ProgramError(
                f"it has no metadata '{_ALLOCATION_METADATA}' with the offsets of its tensors: "
                "compile it with Vela again"
            )
        data = self._read_buffer(allocation_tables[0].number(_Metadata.buffer, "I"))
        words = struct.unpack(f"<{len(data) // 4}i", data[: len(data) // 4 * 4])
        if len(words) < _ALLOCATION_HEADER_WORDS or len(data) % 4 or words[0] != 0:
            raise ProgramError(
                f"damaged: its metadata '{_ALLOCATION_METADATA}' has {len(data)} bytes in an unknown format"
            )
        offsets = words[_ALLOCATION_HEADER_WORDS:]
        if words[2] != len(offsets) or len(offsets) < len(self._tensors):
            raise ProgramError(
                f"damaged: its metadata '{_ALLOCATION_METADATA}' announces {words[2]} tensors and has {len(offsets)} "
                f"offsets, and the model has {len(self._tensors)} tensors"
            )
        return offsets

    def _read_operator(self, table: Table) -> VelaOperator:
        inputs, outputs = table.numbers(_Operator.inputs, "i"), table.numbers(_Operator.outputs, "i")
        if len(inputs) < _FIRST_INPUT_INDEX:
            raise ProgramError(
                f"damaged: an operator '{ETHOS_U_CUSTOM_CODE}' has {len(inputs)} inputs, "
                f"not {_FIRST_INPUT_INDEX} or more"
            )
        commands = self._read_constant(inputs[_COMMANDS_INDEX], "its command stream")
        try:
            header = read_stream_header(commands)
        except PayloadError as error:
            raise ProgramError(f"damaged: {error}") from None
        constants = self._read_constant(inputs[_CONSTANTS_INDEX], "its constants", may_be_empty=True)
        scratch = self._read_memory_bytes(inputs[_SCRATCH_INDEX], "scratch")
        one_arena = inputs[_FAST_SCRATCH_INDEX] == inputs[_SCRATCH_INDEX]
        fast_scratch = scratch if one_arena else self._read_memory_bytes(inputs[_FAST_SCRATCH_INDEX], "fast scratch")
        locations = [
            tuple(self._read_tensor(index)[1] for index in indices if index >= 0)  # -1: an omitted optional input
            for indices in (inputs[_FIRST_INPUT_INDEX:], outputs)
        ]
        payload = EthosUPayload(
            product=header.product,
            macs=header.macs,
            stream=header.kind,
            command_bytes=len(commands),
            weight_bytes=len(constants),
            scratch_bytes=_required_arena_bytes([scratch], [location for tensors in locations for location in tensors]),
            fast_scratch_bytes=fast_scratch,
            inputs=locations[0],
            outputs=locations[1],
        )
        return VelaOperator(
            EthosUPayloadContent(payload, commands, header.header_bytes, constants, has_external_weights=False),
            one_arena,
        )

    def _read_constant(self, index: int, what: str, *, may_be_empty: bool = False) -> memoryview:
        tensor = _checked_element(self._tensors, index, "tensor")
        data = self._read_buffer(tensor.number(_Tensor.buffer, "I"))
        if not len(data) and not may_be_empty:
            raise ProgramError(f"damaged: an operator '{ETHOS_U_CUSTOM_CODE}' lacks {what}: tensor {index} is empty")
        return data

    def _read_memory_bytes(self, index: int, what: str) -> int:
        """Size in bytes of a tensor that represents scratch or fast scratch."""
        _, location = self._read_tensor(index)
        if location.offset != 0:
            raise ProgramError(
                f"damaged: {what} (tensor {index}) is at byte {location.offset:,} of the arena, not at byte 0"
            )
        return location.nbytes

    def _read_tensor(self, index: int) -> tuple[TensorInfo, EthosUTensor]:
        """Read the description of a tensor and its location in the arena."""
        tensor = _checked_element(self._tensors, index, "tensor")
        name, tensor_type = tensor.text(_Tensor.name), tensor.number(_Tensor.type, "b")
        shape, offset = tensor.numbers(_Tensor.shape, "i"), self._offsets[index]
        if tensor_type not in _TENSOR_TYPES:
            raise ProgramError(f"'{name}' (tensor {index}) has the TFLite type {tensor_type}, which no NPU supports")
        dtype, size = _TENSOR_TYPES[tensor_type]
        if min(shape, default=0) < 0 or max(offset, 0) + math.prod(shape) * size > _MAX_BYTES or offset < -1:
            raise ProgramError(f"damaged: '{name}' (tensor {index}) has the shape {list(shape)} at byte {offset}")
        info = TensorInfo(name, dtype, shape, *_read_quantization(tensor.table(_Tensor.quantization)))
        return info, EthosUTensor((1,) * (_RANK - len(shape)) + shape, size, offset, SCRATCH)

    def _read_buffer(self, index: int) -> memoryview:
        return _checked_element(self._buffers, index, "buffer").view(_Buffer.data)


def _required_arena_bytes(scratch_sizes: Sequence[int], locations: Sequence[EthosUTensor]) -> int:
    return max(
        [*scratch_sizes, *(location.offset + location.nbytes for location in locations if location.offset >= 0)],
        default=0,
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
    """Name of an operator.

    The operator code is the larger of two fields, because the deprecated field is limited to 127.
    """
    operator_code = max(
        table.number(_OperatorCode.deprecated_builtin_code, "b"), table.number(_OperatorCode.builtin_code)
    )
    return (
        table.text(_OperatorCode.custom_code) or "CUSTOM"
        if operator_code == _CUSTOM_OPERATOR_CODE
        else _builtin_name(operator_code)
    )


def _builtin_name(code: int) -> str:
    """TFLite's name of a builtin operator, from Vela's list.

    If Vela is not installed or its list lacks the operator, the name contains the operator code.
    """
    try:
        from ethosu.vela.tflite.BuiltinOperator import BuiltinOperator
    except ImportError:
        return f"builtin operator {code}"
    names = {number: name for name, number in vars(BuiltinOperator).items() if isinstance(number, int)}
    return names.get(code, f"builtin operator {code}")


def _check_custom_options(options: bytes) -> None:
    """Raise ``ProgramError`` unless the options are the number 1.

    The last two bytes of a flexbuffer are the type and the byte width of its root value.
    """
    if len(options) >= 3:
        *_, packed_type, width = options
        # Flexbuffer types 1 and 2: signed and unsigned integers, stored inline.
        if (
            packed_type >> 2 in (1, 2)
            and width == len(options) - 2
            and int.from_bytes(options[:width], "little") == _CUSTOM_OPTIONS_VALUE
        ):
            return
    raise ProgramError(
        f"its operator '{ETHOS_U_CUSTOM_CODE}' has unknown custom options ({options[:16].hex(' ') or 'none'}), "
        "which TFLite Micro refuses too: compile it with another version of Vela"
    )


_Item = TypeVar("_Item")


def _checked_element(items: Sequence[_Item], index: int, what: str) -> _Item:
    if not 0 <= index < len(items):
        raise ProgramError(f"damaged: it refers to {what} {index:,}, and there are {len(items):,}")
    return items[index]
