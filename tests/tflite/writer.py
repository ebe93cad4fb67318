"""TFLite flatbuffers, written with the schema classes that come with Vela."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np

Array = np.ndarray[Any, Any]
#: Index of an optional operand that is absent.
ABSENT = -1
_SCHEMA_VERSION = 3
#: Bytes to which TFLite aligns the data of constants.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Quantization:
    """``real = scale * (integer - zero_point)``; several scales are those of the slices along ``axis``."""

    scale: float | tuple[float, ...]
    zero_point: int = 0
    axis: int = 0

    @property
    def scales(self) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a network. ``data`` is None unless it is constant."""

    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization
    data: Array | None = None
    is_variable: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator of a network; tensors by their index."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    intermediates: tuple[int, ...]
    options: str
    attributes: Mapping[str, Any]


@dataclass
class Network:
    """A network of one subgraph. Tensors are named by their index, as in the flatbuffer."""

    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    def tensor(self, shape: Sequence[int], dtype: str, quantization: Quantization, is_variable: bool = False) -> int:
        """A result of an operator, or a variable."""
        return self._append(Tensor(tuple(shape), dtype, quantization, is_variable=is_variable))

    def input(self, shape: Sequence[int], dtype: str, quantization: Quantization) -> int:
        """An input of the network."""
        self.inputs.append(self.tensor(shape, dtype, quantization))
        return self.inputs[-1]

    def constant(self, data: Array, quantization: Quantization) -> int:
        """A constant of the shape and type of ``data``."""
        return self._append(Tensor(data.shape, data.dtype.name, quantization, data))

    def operator(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        options: str = "",
        attributes: Mapping[str, Any] | None = None,
        intermediates: Sequence[int] = (),
    ) -> int:
        """Append an operator and return ``output``.

        Args:
            name: of ``BuiltinOperator``.
            options: the schema's table of its attributes, such as ``Conv2DOptions``; none if empty.
            attributes: fields of that table, in the schema's spelling with a capital: ``StrideW``.
        """
        self.operators.append(Operator(name, tuple(inputs), (output,), tuple(intermediates), options, attributes or {}))
        return output

    def serialize(self) -> bytes:
        """The flatbuffer, with ``outputs``."""
        builder = flatbuffers.Builder(1024)
        # Buffer 0 is empty by convention; each constant has the buffer that follows.
        constants = [tensor.data for tensor in self.tensors if tensor.data is not None]
        buffers = [_buffer(builder, data) for data in (None, *constants)]
        codes = list(dict.fromkeys(operator.name for operator in self.operators))
        subgraph = self._subgraph(builder, codes)
        model = _table(
            builder,
            "Model",
            Version=_SCHEMA_VERSION,
            OperatorCodes=_offsets(builder, [_operator_code(builder, name) for name in codes]),
            Subgraphs=_offsets(builder, [subgraph]),
            Buffers=_offsets(builder, buffers),
        )
        builder.Finish(model, b"TFL3")
        return bytes(builder.Output())

    def _append(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _subgraph(self, builder: flatbuffers.Builder, codes: list[str]) -> int:
        tensors, buffer = [], 0
        for index, tensor in enumerate(self.tensors):
            buffer += tensor.data is not None
            tensors.append(_tensor(builder, f"tensor_{index}", tensor, buffer if tensor.data is not None else 0))
        operators = [_operator(builder, operator, codes.index(operator.name)) for operator in self.operators]
        return _table(
            builder,
            "SubGraph",
            Tensors=_offsets(builder, tensors),
            Inputs=_numbers(builder, self.inputs, np.int32),
            Outputs=_numbers(builder, self.outputs, np.int32),
            Operators=_offsets(builder, operators),
            Name=builder.CreateString("main"),
        )


def enumerator(kind: str, name: str) -> int:
    """A value of an enumeration of the schema."""
    value: int = getattr(getattr(importlib.import_module(f"ethosu.vela.tflite.{kind}"), kind), name)
    return value


def _table(builder: flatbuffers.Builder, kind: str, /, **fields: Any) -> int:
    """A table of the schema; what fields refer to is written before."""
    module = importlib.import_module(f"ethosu.vela.tflite.{kind}")
    getattr(module, f"{kind}Start")(builder)
    for name, value in fields.items():
        getattr(module, f"{kind}Add{name}")(builder, value)
    end: int = getattr(module, f"{kind}End")(builder)
    return end


def _offsets(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    end: int = builder.EndVector()
    return end


def _numbers(builder: flatbuffers.Builder, values: Sequence[float], dtype: type[np.generic]) -> int:
    end: int = builder.CreateNumpyVector(np.asarray(values, dtype))
    return end


def _buffer(builder: flatbuffers.Builder, data: Array | None) -> int:
    if data is None:
        return _table(builder, "Buffer")
    stored = data.tobytes()
    builder.StartVector(1, len(stored), _ALIGNMENT)
    builder.head = builder.Head() - len(stored)
    builder.Bytes[builder.Head() : builder.Head() + len(stored)] = stored
    return _table(builder, "Buffer", Data=builder.EndVector())


def _operator_code(builder: flatbuffers.Builder, name: str) -> int:
    code = enumerator("BuiltinOperator", name)
    return _table(builder, "OperatorCode", DeprecatedBuiltinCode=min(code, 127), BuiltinCode=code, Version=1)


def _tensor(builder: flatbuffers.Builder, name: str, tensor: Tensor, buffer: int) -> int:
    quantization = tensor.quantization
    quantized = _table(
        builder,
        "QuantizationParameters",
        Scale=_numbers(builder, quantization.scales, np.float32),
        ZeroPoint=_numbers(builder, [quantization.zero_point] * len(quantization.scales), np.int64),
        QuantizedDimension=quantization.axis,
    )
    return _table(
        builder,
        "Tensor",
        Shape=_numbers(builder, tensor.shape, np.int32),
        Type=enumerator("TensorType", tensor.dtype.upper()),
        Buffer=buffer,
        Name=builder.CreateString(name),
        Quantization=quantized,
        IsVariable=tensor.is_variable,
    )


def _operator(builder: flatbuffers.Builder, operator: Operator, code: int) -> int:
    fields: dict[str, Any] = {
        "OpcodeIndex": code,
        "Inputs": _numbers(builder, operator.inputs, np.int32),
        "Outputs": _numbers(builder, operator.outputs, np.int32),
    }
    if operator.intermediates:
        fields["Intermediates"] = _numbers(builder, operator.intermediates, np.int32)
    if operator.options:
        fields["BuiltinOptionsType"] = enumerator("BuiltinOptions", operator.options)
        fields["BuiltinOptions"] = _table(builder, operator.options, **operator.attributes)
    return _table(builder, "Operator", **fields)
