"""TOSA serializer: writes a graph as a flatbuffer of version 1.0.0, or of the 1.1 draft if an operator needs it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.operators import OPERATORS


def serialize(graph: Graph, *, locations: bool = False, target: Target | None = None) -> bytes:
    """Serialize ``graph``. Inputs and outputs keep their order.

    Equal constants of a graph or region are stored once. Exception: a data operand and an equal parameter, such as a
    shift or zero point, are stored separately, because Vela aborts otherwise.

    Args:
        locations: also write the fx node, ATen operator and source line of each operator.
        target: the target that accepts ``graph``. The written TOSA version is the oldest one that has all operators of
            ``graph`` in the profiles and extensions of ``target``; without a target, in any profile or extension.
    """
    return _Writer(graph, locations, target).write()


_ENUM_TYPES = {"nan_mode": "NanPropagationMode", "rounding_mode": "RoundingMode", "mode": "ResizeMode"}


class _Writer:
    """Writes one graph and its regions with Arm's ``tosa_serializer``."""

    def __init__(self, graph: Graph, locations: bool, target: Target | None) -> None:
        import tosa_serializer

        self.ts = tosa_serializer
        self.locations = locations
        #: (region name, graph) to write. The main graph has the name "".
        self.pending_regions: list[tuple[str, Graph]] = [("", graph)]
        # By default, TosaSerializer writes the 1.1 draft, which neither Vela nor the model converter accepts.
        major, minor = _required_version(graph, target)
        self.out = tosa_serializer.TosaSerializer(
            "", targetMajor=major, targetMinor=minor, targetPatch=0, targetDraft=minor > 0
        )

    def write(self) -> bytes:
        for region, graph in self.pending_regions:  # writing a graph appends its regions
            if region:
                self.out.startRegion(region)
                self.out.addBasicBlock(region)
            self._write_graph(region, graph)
        return bytes(self.out.serialize())

    def _write_graph(self, region: str, graph: Graph) -> None:
        self.tensors: dict[Value, Any] = {}
        self.constants: dict[tuple[Any, ...], str] = {}
        self.shapes: dict[tuple[int, ...], str] = {}
        for value in graph.inputs:
            tensor = self.ts.TosaSerializerTensor(region + value.name, list(value.shape), self._dtype(value.dtype))
            self.out.addInputTensor(tensor)
            self.tensors[value] = tensor
        for op in graph.ops:
            self._write_operator(op)
        for value in graph.outputs:
            self.out.addOutputTensor(self.tensors[value])

    def _dtype(self, dtype: DType) -> Any:
        return getattr(self.ts.DType, dtype.name)

    def _write_operator(self, op: Op) -> None:
        operands = [self._operand_name(value) for value in op.inputs]
        attribute = self.ts.TosaSerializerAttribute()
        if op.regions:
            regions = [f"{op.kind.lower()}_{len(self.pending_regions) + i}_" for i in range(len(op.regions))]
            self.pending_regions += zip(regions, op.regions, strict=True)
            getattr(attribute, op.kind.title().replace("_", "") + "Attribute")(*regions)
        else:
            record = OPERATORS[op.kind]
            operands += [self._write_constant_operand(op, name, source) for name, source in record.constant_operands]
            fields = [self._attribute_field(op, name) for name in record.fields]
            getattr(attribute, record.attribute_table + "Attribute")(*fields)
        for value in op.results:
            self.tensors[value] = self.out.addIntermediate(list(value.shape), self._dtype(value.dtype))
        names = [self.tensors[value].name for value in op.results]
        location = None
        if self.locations and op.origin is not None:
            location = self.ts.TosaOpLocation(f"{op.origin.node} {op.origin.operator} {op.origin.source}")
        self.out.addOperator(getattr(self.ts.Op, op.kind), operands, names, attribute, location)

    def _operand_name(self, value: Value) -> str:
        if value.data is None:
            return str(self.tensors[value].name)
        return self._write_constant(value)

    def _write_constant_operand(self, op: Op, name: str, type_source: str) -> str:
        attr = op.attrs[name]
        if type_source == "shape":
            return self._write_shape(tuple(int(v) for v in attr))
        data = np.atleast_1d(np.asarray(attr))
        if type_source == "multiplier":
            dtype = DType.INT32 if op.attrs["scale32"] else DType.INT16
        elif type_source in ("input0", "input1", "output"):
            dtype = (op.output if type_source == "output" else op.inputs[int(type_source[-1])]).dtype
        else:
            dtype = DType(type_source)
        if name == "input_zp" and op.attrs.get("input_unsigned"):
            data = data.astype(np.uint8).view(np.int8)  # TOSA has no unsigned types: INT8 holds the uint8 bits
        return self._write_constant(constant(data, dtype), "parameter")

    def _write_constant(self, value: Value, use: str = "data") -> str:
        key = use, value.content_key  # Vela aborts if a constant is the shift of a MUL and the data of another operator
        if key not in self.constants:
            data = np.asarray(value.data, dtype=value.dtype.numpy, order="C")
            self.constants[key] = self.out.addConst(list(value.shape), self._dtype(value.dtype), data).name
        return self.constants[key]

    def _write_shape(self, values: tuple[int, ...]) -> str:
        if values not in self.shapes:
            self.shapes[values] = self.out.addConst([len(values)], self.ts.DType.SHAPE, list(values)).name
        return self.shapes[values]

    def _attribute_field(self, op: Op, name: str) -> Any:
        value = op.attrs[name]
        if isinstance(value, DType):
            return self._dtype(value)
        if name in _ENUM_TYPES:
            return getattr(getattr(self.ts, _ENUM_TYPES[name]), value)
        if name in ("min_val", "max_val"):
            return list(_scalar_bytes(value, op.output.dtype))
        return value


def _required_version(graph: Graph, target: Target | None) -> tuple[int, int]:
    """The oldest TOSA version, (major, minor), that has all operators of ``graph`` (``Operator.min_version``)."""
    ops = [op for op in graph.walk() if not op.regions]
    typed_records = ((OPERATORS[op.kind], [x.dtype for x in op.inputs], op.output) for op in ops)
    return max(
        (record.min_version(types, result.dtype, target) for record, types, result in typed_records), default=(1, 0)
    )


def _scalar_bytes(value: float, dtype: DType) -> bytes:
    """A bound of a CLAMP as little-endian bytes of the element type."""
    if dtype is DType.BF16:
        return struct.pack("<f", value)[2:]
    return np.asarray(value, dtype=dtype.numpy).tobytes()
