"""Reads ExecuTorch programs (``.pte``) without a runtime, and without trusting them.

The classes below that begin with an underscore hold the field numbers of the tables that are read, under the
names of ExecuTorch's ``program.fbs``; a test compares them with the one that is installed.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table

_MAGIC: Final = b"ET12"
_HEADER_MAGIC: Final = b"eh00"
#: Magic, length of the header, then sizes of the flatbuffer and of what is before the segments, and theirs.
_HEADER: Final = struct.Struct("<4sIQQQ")
_HEADER_AT: Final = 8
#: Programs from before segments were counted end their header before the last number.
_SHORT_HEADER: Final = 24


class _Program:
    execution_plan = 1
    backend_delegate_data = 3
    segments = 4
    named_data = 7


class _ExecutionPlan:
    name = 0
    values = 2
    inputs = 3
    outputs = 4
    chains = 5
    operators = 6
    delegates = 7
    non_const_buffer_sizes = 8


class _Chain:
    instructions = 2


class _EValue:
    val_type = 0
    val = 1


class _Tensor:
    scalar_type = 0
    sizes = 2
    dim_order = 3
    shape_dynamism = 8


class _Scalar:
    """``Int``, ``Bool``, ``Double`` and ``String``: tables with one field."""

    value = 0


class _Operator:
    name = 0
    overload = 1


class _BackendDelegate:
    id = 0
    processed = 1
    compile_specs = 2


class _BackendDelegateDataReference:
    location = 0
    index = 1


class _BackendDelegateInlineData:
    data = 0


class _CompileSpec:
    key = 0
    value = 1


class _DataSegment:
    offset = 0
    size = 1


class _NamedData:
    key = 0
    segment_index = 1


#: The union ``KernelTypes``; an unset one is 0.
_KINDS: Final = (
    "NONE",
    "Null",
    "Int",
    "Bool",
    "Double",
    "Tensor",
    "String",
    "IntList",
    "DoubleList",
    "BoolList",
    "TensorList",
    "OptionalTensorList",
)
#: The enumeration ``DataLocation``.
_INLINE, _SEGMENT = 0, 1
#: The enumeration ``ScalarType`` by the names that PyTorch has for its members.
_DTYPES: Final = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    12: "qint8",
    13: "quint8",
    14: "qint32",
    15: "bfloat16",
    16: "quint4x2",
    17: "quint2x4",
    22: "bits16",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
    27: "uint16",
    28: "uint32",
    29: "uint64",
}


def dtype_number(name: str) -> int:
    """How ``executorch::aten::ScalarType`` numbers a dtype."""
    return next(number for number, known in _DTYPES.items() if known == name)


class ProgramError(ValueError):
    """The bytes are no ExecuTorch program, only a part of one, or a damaged one."""


@dataclass(frozen=True)
class PteTensor:
    """A tensor that a method takes or returns.

    Attributes:
        dtype: as PyTorch names it, for example ``int8``.
        shape: of a dynamic shape, the upper bound.
        dynamic: whether the shape may be smaller.
        dim_order: the dimensions from the outermost in memory to the innermost.
    """

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamic: bool = False

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether the method can be given a tensor of this shape."""
        if not self.dynamic:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(map(operator.le, shape, self.shape))


@dataclass(frozen=True)
class PteDelegate:
    """What a backend executes.

    Attributes:
        backend: its id, for example ``EthosUBackend``.
        data: the payload, a view of the program.
        compile_specs: what the backend was given when it made the payload.
    """

    backend: str
    data: memoryview
    compile_specs: dict[str, bytes]


@dataclass(frozen=True)
class PteMethod:
    """A method of the program.

    Attributes:
        inputs, outputs: tensors; of another value its kind, for example ``Int``.
        operators: kernels that the firmware must contain, for example ``cortex_m::quantize_per_tensor.out``.
        delegates: in program order.
        constants: what a method without inputs and instructions returns: int, float, bool, str, or a
            ``PteTensor`` that describes a tensor. None for any other method.
        planned_bytes: of the buffers in which the tensors between operators lie.
        arenas: number of these buffers.
    """

    name: str
    inputs: tuple[PteTensor | str, ...]
    outputs: tuple[PteTensor | str, ...]
    operators: tuple[str, ...]
    delegates: tuple[PteDelegate, ...]
    constants: tuple[object, ...] | None
    planned_bytes: int
    arenas: int


@dataclass(frozen=True)
class PteProgram:
    """A program.

    Attributes:
        methods: by name, constant ones included.
        named_data: views of the program.
    """

    methods: dict[str, PteMethod]
    named_data: dict[str, memoryview]


def read_program(data: bytes | memoryview) -> PteProgram:
    """Read a program. Payloads are views of ``data``, which must not change while they are used.

    Raises:
        ProgramError: it is no program, or it is truncated or damaged; the message says where.
    """
    try:
        return _Reader(memoryview(data).toreadonly().cast("B")).program()
    except FlatbufferError as error:
        raise ProgramError(f"truncated or damaged: {error}") from None


class _Reader:
    """Reads one program."""

    def __init__(self, data: memoryview) -> None:
        program, segments = _split_segments(data)
        self._root = Flatbuffer(program).root
        self._segments = [
            _segment(index, segments, table.number(_DataSegment.offset, "Q"), table.number(_DataSegment.size, "Q"))
            for index, table in enumerate(self._root.tables(_Program.segments))
        ]
        inline = self._root.tables(_Program.backend_delegate_data)
        self._inline = [table.view(_BackendDelegateInlineData.data) for table in inline]

    def program(self) -> PteProgram:
        methods = [self._method(plan) for plan in self._root.tables(_Program.execution_plan)]
        named = [
            (table.text(_NamedData.key), self._segment(table.number(_NamedData.segment_index, "I")))
            for table in self._root.tables(_Program.named_data)
        ]
        return PteProgram(
            _unique_by_name([(method.name, method) for method in methods], "methods"),
            _unique_by_name(named, "pieces of named data"),
        )

    def _method(self, plan: Table) -> PteMethod:
        values = plan.tables(_ExecutionPlan.values)
        inputs = [_element(values, index, "value") for index in plan.numbers(_ExecutionPlan.inputs, "i")]
        outputs = [_element(values, index, "value") for index in plan.numbers(_ExecutionPlan.outputs, "i")]
        idle = not any(len(chain.tables(_Chain.instructions)) for chain in plan.tables(_ExecutionPlan.chains))
        # The runtime counts buffers from 1; what stands at 0 means nothing.
        sizes = plan.numbers(_ExecutionPlan.non_const_buffer_sizes, "q")[1:]
        if any(size < 0 for size in sizes):
            raise ProgramError(f"damaged: a buffer of {min(sizes)} bytes")
        return PteMethod(
            name=plan.text(_ExecutionPlan.name),
            inputs=tuple(map(_describe_value, inputs)),
            outputs=tuple(map(_describe_value, outputs)),
            operators=tuple(map(_operator_name, plan.tables(_ExecutionPlan.operators))),
            delegates=tuple(map(self._delegate, plan.tables(_ExecutionPlan.delegates))),
            constants=tuple(map(_constant_value, outputs)) if idle and not inputs else None,
            planned_bytes=sum(sizes),
            arenas=len(sizes),
        )

    def _delegate(self, delegate: Table) -> PteDelegate:
        backend = delegate.text(_BackendDelegate.id)
        reference = delegate.table(_BackendDelegate.processed)
        if reference is None:
            raise ProgramError(f"damaged: a delegate for {backend!r} has no payload")
        location = reference.number(_BackendDelegateDataReference.location, "b")
        index = reference.number(_BackendDelegateDataReference.index, "I")
        if location not in (_INLINE, _SEGMENT):
            raise ProgramError(f"damaged: the payload of a delegate for {backend!r} is at the unknown place {location}")
        data = _element(self._inline, index, "inline payload") if location == _INLINE else self._segment(index)
        tables = delegate.tables(_BackendDelegate.compile_specs)
        specs = {spec.text(_CompileSpec.key): spec.read_bytes(_CompileSpec.value) for spec in tables}
        if "" in specs:  # the runtime would read from the null pointer
            raise ProgramError(f"damaged: a compile spec of a delegate for {backend!r} has no key")
        return PteDelegate(backend, data, specs)

    def _segment(self, index: int) -> memoryview:
        return _element(self._segments, index, "segment")


def _split_segments(data: memoryview) -> tuple[memoryview, memoryview]:
    """The flatbuffer and the segments that follow it."""
    if len(data) < _HEADER_AT:
        raise ProgramError(f"truncated: {len(data)} bytes are too few for a program")
    magic = bytes(data[4:_HEADER_AT])
    if magic != _MAGIC:
        raise ProgramError(f"not an ExecuTorch program (magic {magic!r}, expected {_MAGIC!r})")
    if bytes(data[_HEADER_AT : _HEADER_AT + len(_HEADER_MAGIC)]) != _HEADER_MAGIC:
        return data, data[:0]
    if len(data) < _HEADER_AT + _HEADER.size:
        raise ProgramError(f"truncated: {len(data)} bytes end in the header")
    _, length, program_bytes, base, segment_bytes = _HEADER.unpack_from(data, _HEADER_AT)
    if length < _HEADER.size:
        if length < _SHORT_HEADER:
            raise ProgramError(f"damaged: a header of {length} bytes")
        segment_bytes = 0
    for what, end in (("program", program_bytes), ("segments", base + segment_bytes)):
        if end > len(data):
            raise ProgramError(f"truncated: the {what} should end at byte {end:,}, the file has {len(data):,}")
    return data[:program_bytes], data[base:]


def _segment(index: int, segments: memoryview, offset: int, count: int) -> memoryview:
    if offset + count > len(segments):
        end = f"byte {offset + count:,} of the segments, the file has {len(segments):,}"
        raise ProgramError(f"truncated: segment {index} should end at {end}")
    return segments[offset : offset + count]


def _describe_value(value: Table) -> PteTensor | str:
    """What kind of value it is."""
    kind = _element(_KINDS, value.number(_EValue.val_type, "B"), "kind of value")
    return _describe_tensor(_union_table(value)) if kind == "Tensor" else kind


def _constant_value(value: Table) -> object:
    """The value itself, of a tensor what it is like; None for a kind that ExecuTorch makes no constant of."""
    kind = _describe_value(value)
    if kind == "Int":
        return _union_table(value).number(_Scalar.value, "q")
    if kind == "Bool":
        return bool(_union_table(value).number(_Scalar.value, "B"))
    if kind == "Double":
        return _union_table(value).double(_Scalar.value)
    if kind == "String":
        return _union_table(value).text(_Scalar.value)
    return kind if isinstance(kind, PteTensor) else None


def _union_table(value: Table) -> Table:
    table = value.table(_EValue.val)
    if table is None:
        raise ProgramError("damaged: a value is empty")
    return table


def _describe_tensor(tensor: Table) -> PteTensor:
    dtype = tensor.number(_Tensor.scalar_type, "b")
    shape = tensor.numbers(_Tensor.sizes, "i")
    order = tensor.numbers(_Tensor.dim_order, "B")
    if dtype not in _DTYPES:
        raise ProgramError(f"damaged: a tensor has the unknown type {dtype}")
    if min(shape, default=0) < 0 or sorted(order) != list(range(len(shape))):
        raise ProgramError(f"damaged: a tensor has the shape {list(shape)} with the order {list(order)}")
    return PteTensor(_DTYPES[dtype], shape, order, tensor.number(_Tensor.shape_dynamism, "b") != 0)


def _operator_name(kernel: Table) -> str:
    name, overload = kernel.text(_Operator.name), kernel.text(_Operator.overload)
    return f"{name}.{overload}" if overload else name


_Item = TypeVar("_Item")


def _element(items: Sequence[_Item], index: int, what: str) -> _Item:
    if not 0 <= index < len(items):
        raise ProgramError(f"damaged: {what} {index:,} of {len(items):,} is used")
    return items[index]


def _unique_by_name(items: Sequence[tuple[str, _Item]], what: str) -> dict[str, _Item]:
    named = dict(items)
    if len(named) < len(items):
        raise ProgramError(f"damaged: two {what} have one name")
    return named
