"""TOSA deserialization: flatbuffer -> ``Graph``, the inverse of ``arm_backend_core.tosa.serialize``.

The record of an operator (``arm_backend_core.tosa.operators``) lists its attribute fields in order, and its constant
operands. Content that the records do not describe is an error: an operator that the compiler never writes, a wrong
number of operands or results, or a shape or zero point that is not constant. A damaged file is an error, too.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import OPERATORS, Operator
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table
from arm_recipes.runtime.tosa_flatbuffer import (
    _TosaBasicBlock,
    _TosaGraph,
    _TosaOperator,
    _TosaRegion,
    _TosaShape,
    _TosaTensor,
)

Array = np.ndarray[Any, Any]
#: {attribute field: type}. A type is a TOSA enumeration, a letter of a ``struct`` format, or "bytes". A field that is
#: not listed is a vector of int32.
_FIELD_TYPES: Final = {
    "nan_mode": "NanPropagationMode",
    "rounding_mode": "RoundingMode",
    "mode": "ResizeMode",
    "acc_type": "DType",
    "axis": "i",
    "block_size": "I",
    **dict.fromkeys(("local_bound", "per_channel", "round", "scale32", "input_unsigned", "output_unsigned"), "?"),
    **dict.fromkeys(("min_val", "max_val"), "bytes"),
}
#: Constant operands that are vectors. The graph stores shapes as lists, and all other constant operands as numbers.
_VECTOR_OPERANDS: Final = {("RESCALE", "multiplier"), ("RESCALE", "shift"), ("TABLE", "table")}
#: {operator with nested graphs: names of its two graphs, in the order of its attribute fields}.
_NESTED_GRAPHS: Final = {"COND_IF": ("then_graph", "else_graph"), "WHILE_LOOP": ("cond_graph", "body_graph")}
#: Maximum rank of a tensor: the limit of NumPy 1. NumPy 2 allows 64, and TOSA's level 8K allows 6.
_MAX_DIMENSIONS: Final = 32
_CONSTANT_OPERATORS: Final = ("CONST", "CONST_SHAPE")
#: {floating-point format that NumPy lacks: name of the format in ml_dtypes}.
_ML_DTYPES_NAMES: Final = {
    DType.BF16: "bfloat16",
    DType.FP8E4M3: "float8_e4m3fn",
    DType.FP8E5M2: "float8_e5m2",
    DType.FP8UE8M0: "float8_e8m0fnu",
    DType.FP6E2M3: "float6_e2m3fn",
    DType.FP6E3M2: "float6_e3m2fn",
    DType.FP4E2M1: "float4_e2m1fn",
}
#: {format whose elements are packed without padding: bits of an element}.
_PACKED_BITS: Final = {DType.INT4: 4, DType.FP4E2M1: 4, DType.FP6E2M3: 6, DType.FP6E3M2: 6}


def deserialize(flatbuffer: bytes) -> Graph:
    """Read the graph of a TOSA flatbuffer (TOSA 1.0 or the draft of 1.1). The operators of the result have no origins.

    Raises:
        PayloadError: the flatbuffer is damaged, or contains something that the operator records do not describe.
            ``arm_backend_core.tosa.legality`` checks legality separately.
    """
    try:
        return _Reader(flatbuffer).graph("")
    except FlatbufferError as error:
        raise PayloadError(f"truncated or damaged: {error}") from None


class _Reader:
    def __init__(self, flatbuffer: bytes) -> None:
        import tosa_serializer

        self.ts = tosa_serializer
        regions = Flatbuffer(memoryview(flatbuffer)).root.tables(_TosaGraph.regions)
        self.regions: dict[str, Table] = {}
        for number, region in enumerate(regions):
            self.regions[region.text(_TosaRegion.name) if number else ""] = region
        self.unread_regions = set(self.regions)

    def graph(self, region: str) -> Graph:
        """Read a region. A second read of a region is an error, because cyclic regions would recurse forever."""
        if region not in self.unread_regions:
            raise PayloadError(f"the region '{region}' is missing, or two operators refer to it")
        self.unread_regions.remove(region)
        blocks = self.regions[region].tables(_TosaRegion.blocks)
        if len(blocks) != 1:
            raise PayloadError(f"the region '{region}' has {len(blocks)} blocks, not one")
        return _Block(self, region, blocks[0]).read()

    def enum_name(self, enumeration: str, number: int) -> str:
        """Name of a member of one of TOSA's enumerations."""
        try:
            return str(getattr(self.ts, enumeration)(number).name)
        except ValueError:
            raise PayloadError(f"unknown {enumeration} {number}") from None

    def dtype(self, number: int) -> DType:
        """Element type of a tensor. A type that the compiler does not support is an error."""
        name = self.enum_name("DType", number)
        if name not in DType.__members__:
            raise PayloadError(f"tensors of type {name} are not supported")
        return DType[name]


class _Block:
    """Reader of the only block of a region."""

    def __init__(self, reader: _Reader, region: str, block: Table) -> None:
        self.reader, self.region, self.block = reader, region, block
        self.tensors = {x.text(_TosaTensor.name): x for x in block.tables(_TosaBasicBlock.tensors)}
        self.shapes = {x.text(_TosaShape.name): x for x in block.tables(_TosaBasicBlock.shapes)}
        self.values: dict[str, Value] = {}
        self.constant_shapes: dict[str, list[int]] = {}

    def read(self) -> Graph:
        graph = Graph()
        for name in self.block.texts(_TosaBasicBlock.inputs):
            value = self._create_value(name, name.removeprefix(self.region))
            graph.inputs.append(value)
        for number, table in enumerate(self.block.tables(_TosaBasicBlock.operators)):
            try:
                graph.ops += self._read_operator(table)
            except PayloadError as error:
                kind = self.reader.enum_name("Op", table.number(_TosaOperator.op, "I"))
                raise PayloadError(f"operator {number}, {kind}: {error}") from None
        graph.outputs = [self._look_up(name) for name in self.block.texts(_TosaBasicBlock.outputs)]
        return graph

    def _read_operator(self, table: Table) -> list[Op]:
        """Read an operator; the result is empty for a constant, which becomes a value."""
        kind = self.reader.enum_name("Op", table.number(_TosaOperator.op, "I"))
        inputs, outputs = table.texts(_TosaOperator.inputs), table.texts(_TosaOperator.outputs)
        if kind in _CONSTANT_OPERATORS:
            self._read_constant(kind, inputs, outputs)
            return []
        fields = table.table(_TosaOperator.attribute)
        if fields is None:
            raise PayloadError("it has no attributes")
        if kind in _NESTED_GRAPHS:
            graphs = {name: self.reader.graph(fields.text(i)) for i, name in enumerate(_NESTED_GRAPHS[kind])}
            op = self._create_op(kind, [self._look_up(name) for name in inputs], outputs, graphs)
            _check_nested_graphs(op, **graphs)
            return [op]
        record = OPERATORS.get(kind)
        if record is None or record.is_placeholder:
            raise PayloadError("the compiler has no such operator")
        input_count = len(inputs) - len(record.constant_operands)
        expected_inputs = max(input_count, 1) if record.is_variadic else len(record.rows[0].inputs)
        expected_results = 2 if kind == "CAST_TO_BLOCK_SCALED" else 1
        if input_count != expected_inputs or len(outputs) != expected_results:
            expected = f"{expected_inputs + len(record.constant_operands)} operands and {expected_results} results"
            raise PayloadError(f"{len(inputs)} operands and {len(outputs)} results, not {expected}")
        operands = [self._look_up(name) for name in inputs[:input_count]]
        op = self._create_op(kind, operands, outputs, {})
        op.attrs = self._read_attributes(record, op, fields, inputs[input_count:])
        return [op]

    def _create_op(self, kind: str, operands: list[Value], outputs: tuple[str, ...], attrs: dict[str, Any]) -> Op:
        if not outputs:
            raise PayloadError("it has no result")
        first, *more = [self._create_value(name, name) for name in outputs]
        op = Op(kind, operands, first, attrs, extra_outputs=more)
        for value in op.results:
            value.producer = op
        return op

    def _create_value(self, name: str, graph_name: str) -> Value:
        """Create the value of the tensor ``name``, and name it ``graph_name``. A tensor must not get two values."""
        tensor = self.tensors.get(name)
        if tensor is None or name in self.values:
            raise PayloadError(f"the tensor '{name}' is {'missing' if tensor is None else 'defined twice'}")
        if tensor.number(_TosaTensor.variable, "B"):
            raise PayloadError(f"the tensor '{name}' is a variable")
        dtype = self.reader.dtype(tensor.number(_TosaTensor.type, "I"))
        shape = tensor.numbers(_TosaTensor.shape, "i")
        if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise PayloadError(
                f"the tensor '{name}' has more than {_MAX_DIMENSIONS} dimensions or a negative size: {list(shape)}"
            )
        self.values[name] = Value(shape, dtype, graph_name)
        return self.values[name]

    def _look_up(self, name: str) -> Value:
        if name not in self.values:
            raise PayloadError(f"the tensor '{name}' is read before it is defined")
        return self.values[name]

    def _read_constant(self, kind: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        if inputs or len(outputs) != 1:
            raise PayloadError(f"{len(inputs)} operands and {len(outputs)} results, not 0 and 1")
        if kind == "CONST":
            value = self._create_value(outputs[0], "")
            value.data = _read_array(self.tensors[outputs[0]].view(_TosaTensor.data), value)
        elif outputs[0] in self.shapes:
            shape = self.shapes[outputs[0]]
            rank, data = shape.number(_TosaShape.rank, "I"), shape.view(_TosaShape.data)
            if len(data) < 8 * rank:
                raise PayloadError(f"{len(data)} bytes for a shape of {rank} dimensions")
            self.constant_shapes[outputs[0]] = np.frombuffer(data[: 8 * rank], "<i8").tolist()
        else:
            raise PayloadError(f"the shape '{outputs[0]}' is missing")

    def _read_attributes(self, record: Operator, op: Op, fields: Table, constants: tuple[str, ...]) -> dict[str, Any]:
        attrs = {name: self._read_field(fields, i, name, op) for i, name in enumerate(record.fields)}
        for (name, operand_type), operand in zip(record.constant_operands, constants, strict=True):
            if operand_type == "shape":
                if operand not in self.constant_shapes:
                    raise PayloadError(f"its {name} is not a constant shape")
                attrs[name] = list(self.constant_shapes[operand])
                continue
            value = self._look_up(operand)
            if operand_type == "multiplier":
                dtype = DType.INT32 if attrs["scale32"] else DType.INT16
            elif operand_type in ("input0", "input1", "output"):
                dtype = (op.output if operand_type == "output" else op.inputs[int(operand_type[-1])]).dtype
            else:
                dtype = DType(operand_type)
            attrs[name] = _read_parameter(value, name, dtype, vector=(op.kind, name) in _VECTOR_OPERANDS)
        if attrs.get("input_unsigned"):  # the flatbuffer has the bits of the unsigned zero point as a signed integer
            attrs["input_zp"] %= 1 << 8 * op.inputs[0].dtype.bytes
        return attrs

    def _read_field(self, fields: Table, number: int, name: str, op: Op) -> Any:
        field_type = _FIELD_TYPES.get(name, "")
        if field_type == "DType":
            return self.reader.dtype(fields.number(number, "I"))
        if field_type == "bytes":
            data = fields.view(number)
            return _read_array(data, Value((), op.output.dtype)).item()
        if len(field_type) > 1:
            return self.reader.enum_name(field_type, fields.number(number, "I"))
        if field_type == "?":
            return bool(fields.number(number, field_type))
        return fields.number(number, field_type) if field_type else list(fields.numbers(number, "i"))


def _check_nested_graphs(op: Op, **graphs: Graph) -> None:
    """Check that the condition is one boolean, and that the inputs and outputs of nested graphs match the operator.

    Source: TOSA 1.0, COND_IF and WHILE_LOOP.
    """
    first_graph, second_graph = graphs.values()
    if op.kind == "COND_IF":
        conditions, operands, results = (
            op.inputs[:1],
            op.inputs[1:],
            [(graph, op.results) for graph in (first_graph, second_graph)],
        )
    else:
        conditions, operands, results = (
            first_graph.outputs,
            op.inputs,
            [(second_graph, op.inputs), (second_graph, op.results)],
        )
    if len(conditions) != 1 or conditions[0].dtype is not DType.BOOL or conditions[0].size != 1:
        raise PayloadError(f"its condition is {conditions}, not one boolean")
    pairs = [(graph.inputs, operands) for graph in (first_graph, second_graph)]
    for nested_values, operator_values in pairs + [(graph.outputs, values) for graph, values in results]:
        if [(x.shape, x.dtype) for x in nested_values] != [(x.shape, x.dtype) for x in operator_values]:
            raise PayloadError(f"its nested graph has {nested_values}, but the operator has {operator_values}")


def _read_parameter(value: Value, name: str, dtype: DType, *, vector: bool) -> Any:
    """Value of a constant operand: an array for a vector operand, otherwise a number."""
    if value.data is None:
        raise PayloadError(f"its {name} is not a constant")
    if value.dtype is not dtype or value.rank != 1 or (value.size != 1 and not vector):
        size = "a vector" if vector else "[1]"
        raise PayloadError(f"its {name} is {value!r}, not {dtype.value} of shape {size}")
    return value.data if vector else value.data.item()


def _read_array(data: memoryview, value: Value) -> Array:
    """Decode the elements of a constant, as the NumPy array that ``Value.data`` holds."""
    bits = _PACKED_BITS.get(value.dtype, 8 * value.dtype.bytes)
    count = prod(value.shape)
    length = (count * bits + 7) // 8
    if len(data) < length:
        raise PayloadError(f"{value!r} has {len(data)} bytes, not {length}")
    raw = np.frombuffer(data[:length], np.uint8)
    if value.dtype in _PACKED_BITS or value.dtype is DType.INT48:
        raw = _unpack_bits(raw, bits, count, signed=not value.dtype.is_float)
    if value.dtype in _ML_DTYPES_NAMES:
        import ml_dtypes

        stored = raw.astype(np.uint8) if value.dtype in _PACKED_BITS else raw
        elements = stored.view(getattr(ml_dtypes, _ML_DTYPES_NAMES[value.dtype])).astype(np.float32)
    elif value.dtype in _PACKED_BITS or value.dtype is DType.INT48:
        elements = raw.astype(value.dtype.numpy)
    else:
        elements = raw.view(value.dtype.numpy.newbyteorder("<")).astype(value.dtype.numpy)
    if np.issubdtype(elements.dtype, np.bool_):
        elements = raw != 0
    return np.array(elements.reshape(value.shape), order="C")


def _unpack_bits(raw: Array, bits: int, count: int, *, signed: bool) -> Array:
    """Unpack numbers of ``bits`` bits each. The first number is in the lowest bits of the first byte."""
    bit_rows = np.unpackbits(raw, bitorder="little")[: count * bits].reshape(count, bits).astype(np.int64)
    numbers = bit_rows @ (np.int64(1) << np.arange(bits, dtype=np.int64))
    return numbers - ((bit_rows[:, -1] << bits) if signed else 0)
