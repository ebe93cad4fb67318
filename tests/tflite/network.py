"""Builder of TFLite networks: tensors and operators are appended one by one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np

from tests.runtime.tflite_writer import TfliteOperator, TfliteTensor, table, tflite_model

Array = np.ndarray[Any, Any]
#: Index of an omitted optional operand.
ABSENT = -1


@dataclass(frozen=True)
class Quantization:
    """Quantization: ``real = scale * (integer - zero_point)``. A tuple has one scale per slice of ``axis``."""

    scale: float | tuple[float, ...]
    zero_point: int = 0
    axis: int = 0

    @property
    def scales(self) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a network. ``data`` has the values of a constant; None for other tensors."""

    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization
    data: Array | None = None
    is_variable: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator of a network; its tensors are given by their index."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    intermediates: tuple[int, ...]
    options: str
    attributes: Mapping[str, Any]


@dataclass
class Network:
    """A network with one subgraph. Tensors are identified by their index, as in the flatbuffer."""

    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    def tensor(self, shape: Sequence[int], dtype: str, quantization: Quantization, is_variable: bool = False) -> int:
        """Append a result of an operator, or a variable; return its index."""
        return self._append(Tensor(tuple(shape), dtype, quantization, is_variable=is_variable))

    def input(self, shape: Sequence[int], dtype: str, quantization: Quantization) -> int:
        """Append an input of the network; return its index."""
        self.inputs.append(self.tensor(shape, dtype, quantization))
        return self.inputs[-1]

    def constant(self, data: Array, quantization: Quantization) -> int:
        """Append a constant with the shape and type of ``data``; return its index."""
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
            name: name in the enumeration ``BuiltinOperator``.
            inputs: indices of the operands.
            output: index of the result.
            options: table of the attributes in the schema, such as ``Conv2DOptions``; empty for none.
            attributes: fields of this table, with a capital first letter: ``StrideW``.
            intermediates: indices of intermediate tensors.
        """
        self.operators.append(Operator(name, tuple(inputs), (output,), tuple(intermediates), options, attributes or {}))
        return output

    def serialize(self) -> bytes:
        """Serialize the network to a flatbuffer."""
        tensors = [_tensor(f"tensor_{index}", tensor) for index, tensor in enumerate(self.tensors)]
        return tflite_model(tensors, list(map(_operator, self.operators)), self.inputs, self.outputs)

    def _append(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def enumerator(kind: str, name: str) -> int:
    """Return the value of an enumerator of the schema."""
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
