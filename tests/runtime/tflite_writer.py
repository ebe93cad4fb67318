"""TFLite models for tests, written with Vela's classes of the TFLite schema."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
from ethosu.vela.tflite import (
    Buffer,
    Conv2DOptions,
    DepthwiseConv2DOptions,
    Metadata,
    Model,
    Operator,
    OperatorCode,
    QuantizationParameters,
    SubGraph,
    Tensor,
)
from ethosu.vela.tflite.BuiltinOperator import BuiltinOperator
from ethosu.vela.tflite.BuiltinOptions import BuiltinOptions
from ethosu.vela.tflite.TensorType import TensorType

from tests.runtime.ethosu_emulator import Payload

#: Custom options of an ``ethos-u`` operator: the integer 1.
ETHOS_U_OPTIONS = b"\x01\x04\x01"
_TYPES = {
    "int8": TensorType.INT8,
    "int16": TensorType.INT16,
    "int32": TensorType.INT32,
    "int64": TensorType.INT64,
    "uint8": TensorType.UINT8,
}
#: Bytes to which TFLite aligns the data of constants.
_ALIGNMENT = 16


@dataclass(frozen=True)
class TfliteTensor:
    """A tensor.

    Attributes:
        scale: one scale, or one per slice along ``axis``; all slices have the same zero point.
        data: bytes of a constant.
        offset: offset in the arena; -1 if the runtime chooses it.
        is_variable: whether the tensor keeps its value from one run to the next.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | tuple[float, ...] | None = None
    zero_point: int = 0
    data: bytes = b""
    offset: int = -1
    axis: int = 0
    is_variable: bool = False


@dataclass(frozen=True)
class TfliteOperator:
    """An operator: a builtin one, or a custom one with a name. Tensors are identified by their index."""

    code: int | str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    custom_options: bytes = b""
    #: Type of the options of a builtin operator, and the function that writes them.
    options: tuple[int, Callable[[flatbuffers.Builder], int]] | None = None
    intermediates: tuple[int, ...] = ()


def tflite_model(
    tensors: Sequence[TfliteTensor],
    operators: Sequence[TfliteOperator],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    allocation: bytes | None = None,
) -> bytes:
    """Write a model with one subgraph; ``allocation`` is the metadata ``OfflineMemoryAllocation``."""
    b = flatbuffers.Builder(1024)
    buffers = [b"", *(tensor.data for tensor in tensors if tensor.data)]
    places, used = [], 0
    for tensor in tensors:
        used += bool(tensor.data)
        places.append(used if tensor.data else 0)
    written = [_tensor(b, tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    codes = list(dict.fromkeys(operator.code for operator in operators))
    graph = table(
        b,
        SubGraph,
        Tensors=_tables(b, written),
        Inputs=_ints(b, inputs),
        Outputs=_ints(b, outputs),
        Operators=_tables(b, [_operator(b, operator, codes.index(operator.code)) for operator in operators]),
        Name=b.CreateString("main"),
    )
    metadata = []
    if allocation is not None:
        buffers.append(allocation)
        name = b.CreateString("OfflineMemoryAllocation")
        metadata.append(table(b, Metadata, Name=name, Buffer=len(buffers) - 1))
    root = table(
        b,
        Model,
        Version=3,
        OperatorCodes=_tables(b, [_code(b, code) for code in codes]),
        Subgraphs=_tables(b, [graph]),
        Description=b.CreateString("made for a test"),
        Buffers=_tables(b, [table(b, Buffer, **({"Data": _bytes(b, data)} if data else {})) for data in buffers]),
        Metadata=_tables(b, metadata),
    )
    b.Finish(root, b"TFL3")
    return bytes(b.Output())


def wrap_command_stream(
    payload: Payload,
    inputs: Sequence[TfliteTensor],
    outputs: Sequence[TfliteTensor],
    *,
    options: bytes = ETHOS_U_OPTIONS,
    operators: Sequence[TfliteOperator] = (),
    allocation: bytes | None = None,
    fast_scratch: int | None = None,
) -> bytes:
    """Write a model around a command stream, as Vela does.

    Args:
        inputs, outputs: tensors, which get the offsets of the payload.
        operators: operators before that of the NPU.
        allocation: replaces the correct metadata.
        fast_scratch: bytes of a separate tensor for fast scratch; None if it is the scratch.
    """
    tensors = [
        TfliteTensor("ethos_u_command_stream", "uint8", (len(payload.commands),), data=payload.commands),
        TfliteTensor("read_only", "uint8", (len(payload.weights),), data=payload.weights),
        TfliteTensor("scratch", "uint8", (payload.scratch,), offset=0),
    ]
    if fast_scratch is not None:
        tensors.append(TfliteTensor("scratch_fast", "uint8", (fast_scratch,), offset=0))
    first, memories = len(tensors), (0, 1, 2, 2 if fast_scratch is None else 3)
    offsets = [tensor.offset for tensor in tensors] + [place.offset for place in (*payload.inputs, *payload.outputs)]
    tensors += [*inputs, *outputs]
    input_indices = tuple(range(first, first + len(inputs)))
    output_indices = tuple(range(first + len(inputs), len(tensors)))
    npu = TfliteOperator("ethos-u", (*memories, *input_indices), output_indices, options)
    if allocation is None:
        allocation = struct.pack(f"<{3 + len(offsets)}i", 0, 1, len(offsets), *offsets)
    return tflite_model(tensors, [*operators, npu], input_indices, output_indices, allocation=allocation)


def convolution_constants(layers: int, channels: int = 16) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return weights and biases of ``convolutions``."""
    generator = np.random.default_rng(0)
    return [
        (
            generator.integers(-127, 128, (channels, 3, 3, channels)).astype(np.int8),
            generator.integers(-100, 100, channels).astype(np.int32),
        )
        for _ in range(layers)
    ]


def convolutions(layers: int, size: int = 12, channels: int = 16) -> bytes:
    """Write an int8 network of padded 3x3 convolutions, as TFLite's converter does."""
    shape = (1, size, size, channels)
    tensors, operators = [TfliteTensor("x", "int8", shape, 0.05, 3)], []
    for layer, (weights, bias) in enumerate(convolution_constants(layers, channels)):
        scale = tensors[-1].scale
        assert isinstance(scale, float)
        tensors += [
            TfliteTensor(f"weights{layer}", "int8", weights.shape, 0.01, data=weights.tobytes()),
            TfliteTensor(f"bias{layer}", "int32", bias.shape, scale * 0.01, data=bias.tobytes()),
            TfliteTensor(f"y{layer}", "int8", shape, 0.2, -1),
        ]
        source = len(tensors) - 4
        options = BuiltinOptions.Conv2DOptions, _convolution_options
        inputs = (source, source + 1, source + 2)
        operators.append(TfliteOperator(BuiltinOperator.CONV_2D, inputs, (source + 3,), options=options))
    return tflite_model(tensors, operators, [0], [len(tensors) - 1])


def depthwise(kernels: Sequence[tuple[int, int]], size: tuple[int, int], channels: int = 16) -> bytes:
    """Write an int8 network of unpadded depthwise convolutions, one per kernel, for an image of ``size``."""
    generator, (rows, columns) = np.random.default_rng(0), size
    tensors, operators = [TfliteTensor("x", "int8", (1, rows, columns, channels), 0.5)], []
    for layer, (height, width) in enumerate(kernels):
        weights = generator.integers(-127, 128, (1, height, width, channels)).astype(np.int8)
        rows, columns = rows - height + 1, columns - width + 1
        tensors += [
            TfliteTensor(f"weights{layer}", "int8", weights.shape, 0.01, data=weights.tobytes()),
            TfliteTensor(f"bias{layer}", "int32", (channels,), 0.005, data=bytes(4 * channels)),
            TfliteTensor(f"y{layer}", "int8", (1, rows, columns, channels), 0.5),
        ]
        last = len(tensors) - 1
        options = BuiltinOptions.DepthwiseConv2DOptions, _depthwise_options
        inputs = (last - 3, last - 2, last - 1)
        operators.append(TfliteOperator(BuiltinOperator.DEPTHWISE_CONV_2D, inputs, (last,), options=options))
    return tflite_model(tensors, operators, [0], [len(tensors) - 1])


def _depthwise_options(b: flatbuffers.Builder) -> int:
    strides = {"StrideW": 1, "StrideH": 1, "DilationWFactor": 1, "DilationHFactor": 1}
    return table(b, DepthwiseConv2DOptions, Padding=1, DepthMultiplier=1, **strides)


def _convolution_options(b: flatbuffers.Builder) -> int:
    return table(b, Conv2DOptions, Padding=0, StrideW=1, StrideH=1, DilationWFactor=1, DilationHFactor=1)


def table(b: flatbuffers.Builder, schema: Any, **fields: int) -> int:
    """Write a flatbuffer table, whose referenced objects are already written."""
    schema.Start(b)
    for name, value in fields.items():
        getattr(schema, f"Add{name}")(b, value)
    end: int = schema.End(b)
    return end


def _tensor(b: flatbuffers.Builder, tensor: TfliteTensor, buffer: int) -> int:
    fields = {
        "Shape": _ints(b, tensor.shape),
        "Type": _TYPES[tensor.dtype],
        "Buffer": buffer,
        "Name": b.CreateString(tensor.name),
        "IsVariable": tensor.is_variable,
    }
    if tensor.scale is not None:
        scales = np.array(tensor.scale, np.float32).reshape(-1)
        fields["Quantization"] = table(
            b,
            QuantizationParameters,
            Scale=b.CreateNumpyVector(scales),
            ZeroPoint=b.CreateNumpyVector(np.full(len(scales), tensor.zero_point, np.int64)),
            QuantizedDimension=tensor.axis,
        )
    return table(b, Tensor, **fields)


def _operator(b: flatbuffers.Builder, operator: TfliteOperator, code: int) -> int:
    fields = {"OpcodeIndex": code, "Inputs": _ints(b, operator.inputs), "Outputs": _ints(b, operator.outputs)}
    if operator.custom_options:
        fields["CustomOptions"] = _bytes(b, operator.custom_options)
    if operator.options is not None:
        kind, write = operator.options
        fields |= {"BuiltinOptionsType": kind, "BuiltinOptions": write(b)}
    if operator.intermediates:
        fields["Intermediates"] = _ints(b, operator.intermediates)
    return table(b, Operator, **fields)


def _code(b: flatbuffers.Builder, code: int | str) -> int:
    """Write an operator code; codes above 127 have a separate field."""
    if isinstance(code, str):
        name = b.CreateString(code)
        builtin = BuiltinOperator.CUSTOM
        return table(b, OperatorCode, DeprecatedBuiltinCode=builtin, CustomCode=name, Version=1, BuiltinCode=builtin)
    return table(b, OperatorCode, DeprecatedBuiltinCode=min(code, 127), Version=1, BuiltinCode=code)


def _ints(b: flatbuffers.Builder, numbers: Sequence[int]) -> int:
    end: int = b.CreateNumpyVector(np.array(numbers, np.int32))
    return end


def _bytes(b: flatbuffers.Builder, data: bytes) -> int:
    b.StartVector(1, len(data), _ALIGNMENT)
    b.head = b.Head() - len(data)
    b.Bytes[b.Head() : b.Head() + len(data)] = data
    end: int = b.EndVector()
    return end


def _tables(b: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    end: int = b.EndVector()
    return end
