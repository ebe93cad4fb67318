"""TOSA serializer: graph to flatbuffer, version 1.0.0 unless an operator needs the 1.1 draft."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.operators import OPERATORS


def serialize(graph: Graph, *, locations: bool = False) -> bytes:
    """Serialize ``graph``; inputs and outputs keep their order, equal constants are stored once.

    Args:
        locations: also write each operator's fx node, ATen operator and source line.
    """
    return _Writer(graph, locations).write()


_ENUMS = {"nan_mode": "NanPropagationMode", "rounding_mode": "RoundingMode", "mode": "ResizeMode"}


class _Writer:
    def __init__(self, graph: Graph, locations: bool) -> None:
        import tosa_serializer

        self.ts = tosa_serializer
        self.locations = locations
        self.waiting: list[tuple[str, Graph]] = [
            ("", graph)
        ]  # each graph that an operator holds gets a region of its own
        # The default is the 1.1 draft, which neither Vela nor the model converter accepts.
        major, minor = _version(graph)
        self.out = tosa_serializer.TosaSerializer(
            "", targetMajor=major, targetMinor=minor, targetPatch=0, targetDraft=minor > 0
        )

    def write(self) -> bytes:
        for region, graph in self.waiting:  # the loop appends to it
            if region:
                self.out.startRegion(region)
                self.out.addBasicBlock(region)
            self._graph(region, graph)
        return bytes(self.out.serialize())

    def _graph(self, region: str, graph: Graph) -> None:
        self.tensors: dict[Value, Any] = {}
        self.constants: dict[tuple[Any, ...], str] = {}
        self.shapes: dict[tuple[int, ...], str] = {}
        for value in graph.inputs:
            tensor = self.ts.TosaSerializerTensor(region + value.name, list(value.shape), self._dtype(value.dtype))
            self.out.addInputTensor(tensor)
            self.tensors[value] = tensor
        for op in graph.ops:
            self._operator(op)
        for value in graph.outputs:
            self.out.addOutputTensor(self.tensors[value])

    def _dtype(self, dtype: DType) -> Any:
        return getattr(self.ts.DType, dtype.name)

    def _operator(self, op: Op) -> None:
        operands = [self._data(value) for value in op.inputs]
        attribute = self.ts.TosaSerializerAttribute()
        if op.graphs:
            regions = [f"{op.kind.lower()}_{len(self.waiting) + i}_" for i in range(len(op.graphs))]
            self.waiting += zip(regions, op.graphs, strict=True)
            getattr(attribute, op.kind.title().replace("_", "") + "Attribute")(*regions)
        else:
            record = OPERATORS[op.kind]
            operands += [self._constant_operand(op, name, how) for name, how in record.operands]
            getattr(attribute, record.attribute + "Attribute")(*(self._field(op, name) for name in record.fields))
        for value in op.results:
            self.tensors[value] = self.out.addIntermediate(list(value.shape), self._dtype(value.dtype))
        names = [self.tensors[value].name for value in op.results]
        location = None
        if self.locations and op.origin is not None:
            location = self.ts.TosaOpLocation(f"{op.origin.node} {op.origin.operator} {op.origin.source}")
        self.out.addOperator(getattr(self.ts.Op, op.kind), operands, names, attribute, location)

    def _data(self, value: Value) -> str:
        if value.data is None:
            return str(self.tensors[value].name)
        return self._const(value)

    def _constant_operand(self, op: Op, name: str, how: str) -> str:
        attr = op.attrs[name]
        if how == "shape":
            return self._shape(tuple(int(v) for v in attr))
        data = np.atleast_1d(np.asarray(attr))
        if how == "multiplier":
            dtype = DType.INT32 if op.attrs["scale32"] else DType.INT16
        elif how in ("input0", "input1", "output"):
            dtype = (op.output if how == "output" else op.inputs[int(how[-1])]).dtype
        else:
            dtype = DType(how)
        return self._const(constant(data, dtype), "parameter")

    def _const(self, value: Value, use: str = "data") -> str:
        key = use, value.content  # Vela aborts if the shift of a MUL is also data of another operator
        if key not in self.constants:
            data = np.asarray(value.data, dtype=value.dtype.numpy, order="C")
            self.constants[key] = self.out.addConst(list(value.shape), self._dtype(value.dtype), data).name
        return self.constants[key]

    def _shape(self, values: tuple[int, ...]) -> str:
        if values not in self.shapes:
            self.shapes[values] = self.out.addConst([len(values)], self.ts.DType.SHAPE, list(values)).name
        return self.shapes[values]

    def _field(self, op: Op, name: str) -> Any:
        value = op.attrs[name]
        if isinstance(value, DType):
            return self._dtype(value)
        if name in _ENUMS:
            return getattr(getattr(self.ts, _ENUMS[name]), value)
        if name in ("min_val", "max_val"):
            return list(_scalar_bytes(value, op.output.dtype))
        return value


def _version(graph: Graph) -> tuple[int, int]:
    """The first version that has all operators."""
    plain = ((OPERATORS[op.kind], [x.dtype for x in op.inputs], op.output) for op in graph.walk() if not op.graphs)
    return max((record.min_version(types, result.dtype) for record, types, result in plain), default=(1, 0))


def _scalar_bytes(value: float, dtype: DType) -> bytes:
    """CLAMP's bounds as little-endian bytes of the element type."""
    if dtype is DType.BF16:
        return struct.pack("<f", value)[2:]
    return np.asarray(value, dtype=dtype.numpy).tobytes()
