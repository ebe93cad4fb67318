"""A TFLite network, as it is put together operator by operator."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np

from tests.runtime.tflite_models import TfliteOperator, TfliteTensor, table, tflite_model

Array = np.ndarray[Any, Any]
#: Index of an optional operand that is left out.
ABSENT = -1


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
        tensors = [_tensor(f"tensor_{index}", tensor) for index, tensor in enumerate(self.tensors)]
        return tflite_model(tensors, list(map(_operator, self.operators)), self.inputs, self.outputs)

    def _append(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def enumerator(kind: str, name: str) -> int:
    """A value of an enumeration of the schema."""
    value: int = getattr(getattr(_schema(kind), kind), name)
    return value


def _schema(name: str) -> Any:
    return importlib.import_module(f"ethosu.vela.tflite.{name}")


def _tensor(name: str, tensor: Tensor) -> TfliteTensor:
    quantization = tensor.quantization
    return TfliteTensor(
        name,
        tensor.dtype,
        tensor.shape,
        quantization.scale,
        quantization.zero_point,
        b"" if tensor.data is None else tensor.data.tobytes(),
        axis=quantization.axis,
        is_variable=tensor.is_variable,
    )


def _operator(operator: Operator) -> TfliteOperator:
    def write(builder: flatbuffers.Builder) -> int:
        return table(builder, _schema(operator.options), **operator.attributes)

    return TfliteOperator(
        enumerator("BuiltinOperator", operator.name),
        operator.inputs,
        operator.outputs,
        options=(enumerator("BuiltinOptions", operator.options), write) if operator.options else None,
        intermediates=operator.intermediates,
    )
