"""Parser of ExecuTorch programs (``.pte``). It reads untrusted files, and does not need ExecuTorch's runtime."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from arm_backend_core.errors import ArmRecipesError
from arm_recipes.runtime import pte_schema as schema
from arm_recipes.runtime.flatbuffer import Flatbuffer, FlatbufferError, Table

_MAGIC: Final = b"ET12"
_HEADER_MAGIC: Final = b"eh00"
#: Fields of the extended header: magic, length of the header, size of the flatbuffer, offset and size of the segments.
_HEADER_STRUCT: Final = struct.Struct("<4sIQQQ")
_HEADER_OFFSET: Final = 8
#: Length of the older header, which lacks the size of the segments.
_SHORT_HEADER_BYTES: Final = 24


class ProgramError(ArmRecipesError, ValueError):
    """A file (``.pte``, ``.ptd`` or ``.tflite``) is not a program, or is truncated, damaged or unsupported."""


@dataclass(frozen=True)
class PteTensor:
    """A tensor that a method takes or returns.

    Attributes:
        dtype: PyTorch's name of the dtype, for example ``int8``.
        shape: the shape; if ``dynamic``, the upper bound of each dimension.
        dynamic: whether the method also accepts or returns tensors that are smaller than ``shape``.
        dim_order: dimensions from the outermost to the innermost in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamic: bool = False

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether the method accepts a tensor of this shape."""
        if not self.dynamic:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(map(operator.le, shape, self.shape))


@dataclass(frozen=True)
class PteDelegate:
    """A delegate: the part of a method that a backend executes.

    Attributes:
        backend: backend id, for example ``EthosUBackend``.
        data: the payload, a view of the program.
        compile_specs: compile specs that the payload was compiled with.
    """

    backend: str
    data: memoryview
    compile_specs: dict[str, bytes]


@dataclass(frozen=True)
class PteMethod:
    """A method of the program.

    Attributes:
        inputs, outputs: a ``PteTensor`` for each tensor. For any other value, the name of its type, such as ``Int``.
        operators: CPU kernels that the method calls, for example ``cortex_m::quantize_per_tensor.out``.
        delegates: in program order.
        constants: results of a constant method (no inputs, no instructions): int, float, bool, str, or a ``PteTensor``
            that describes a tensor. None for any other method.
        planned_bytes: total size of the memory-planned buffers, which hold the intermediate tensors.
        planned_buffers: number of memory-planned buffers.
        output_structure: treespec of the model's outputs in ExecuTorch's JSON; empty if none is recorded.
    """

    name: str
    inputs: tuple[PteTensor | str, ...]
    outputs: tuple[PteTensor | str, ...]
    operators: tuple[str, ...]
    delegates: tuple[PteDelegate, ...]
    constants: tuple[object, ...] | None
    planned_bytes: int
    planned_buffers: int
    output_structure: str = ""


@dataclass(frozen=True)
class PteProgram:
    """A parsed program.

    Attributes:
        methods: methods by name, including constant methods.
        named_data: named data by key, as views of the program.
    """

    methods: dict[str, PteMethod]
    named_data: dict[str, memoryview]


def read_program(data: bytes | memoryview) -> PteProgram:
    """Parse a program. Payloads are views of ``data``, which must not change while they are in use.

    Raises:
        ProgramError: the bytes are not a program, or they are truncated or damaged. The message says where.
    """
    try:
        return _Reader(memoryview(data).toreadonly().cast("B")).program()
    except FlatbufferError as error:
        raise ProgramError(f"truncated or damaged: {error}") from None


class _Reader:
    """Parser of one program."""

    def __init__(self, data: memoryview) -> None:
        program, segments = _split_segments(data)
        self._root = Flatbuffer(program).root
        self._segments = [
            _slice_segment(
                index,
                segments,
                table.number(schema.DataSegment.offset, "Q"),
                table.number(schema.DataSegment.size, "Q"),
            )
            for index, table in enumerate(self._root.tables(schema.Program.segments))
        ]
        inline = self._root.tables(schema.Program.backend_delegate_data)
        self._inline = [table.view(schema.BackendDelegateInlineData.data) for table in inline]

    def program(self) -> PteProgram:
        methods = [self._read_method(plan) for plan in self._root.tables(schema.Program.execution_plan)]
        named_data = [
            (table.text(schema.NamedData.key), self._get_segment(table.number(schema.NamedData.segment_index, "I")))
            for table in self._root.tables(schema.Program.named_data)
        ]
        return PteProgram(
            _unique_by_name([(method.name, method) for method in methods], "methods"),
            _unique_by_name(named_data, "entries of named data"),
        )

    def _read_method(self, plan: Table) -> PteMethod:
        values = plan.tables(schema.ExecutionPlan.values)
        inputs = [_checked_element(values, index, "value") for index in plan.numbers(schema.ExecutionPlan.inputs, "i")]
        outputs = [
            _checked_element(values, index, "value") for index in plan.numbers(schema.ExecutionPlan.outputs, "i")
        ]
        has_no_instructions = not any(
            len(chain.tables(schema.Chain.instructions)) for chain in plan.tables(schema.ExecutionPlan.chains)
        )
        # The runtime numbers buffers from 1, so entry 0 is unused.
        sizes = plan.numbers(schema.ExecutionPlan.non_const_buffer_sizes, "q")[1:]
        if any(size < 0 for size in sizes):
            raise ProgramError(f"damaged: a planned buffer has {min(sizes)} bytes")
        containers = plan.table(schema.ExecutionPlan.container_meta_type)
        return PteMethod(
            name=plan.text(schema.ExecutionPlan.name),
            inputs=tuple(map(_describe_value, inputs)),
            outputs=tuple(map(_describe_value, outputs)),
            operators=tuple(map(_operator_name, plan.tables(schema.ExecutionPlan.operators))),
            delegates=tuple(map(self._read_delegate, plan.tables(schema.ExecutionPlan.delegates))),
            constants=tuple(map(_constant_value, outputs)) if has_no_instructions and not inputs else None,
            planned_bytes=sum(sizes),
            planned_buffers=len(sizes),
            output_structure="" if containers is None else containers.text(schema.ContainerMetadata.encoded_out_str),
        )

    def _read_delegate(self, delegate: Table) -> PteDelegate:
        backend = delegate.text(schema.BackendDelegate.id)
        reference = delegate.table(schema.BackendDelegate.processed)
        if reference is None:
            raise ProgramError(f"damaged: a delegate for {backend!r} has no payload")
        location = reference.number(schema.BackendDelegateDataReference.location, "b")
        index = reference.number(schema.BackendDelegateDataReference.index, "I")
        if location not in (schema.INLINE_LOCATION, schema.SEGMENT_LOCATION):
            raise ProgramError(
                f"damaged: the payload of a delegate for {backend!r} has the unknown location {location}"
            )
        data = (
            _checked_element(self._inline, index, "inline payload")
            if location == schema.INLINE_LOCATION
            else self._get_segment(index)
        )
        tables = delegate.tables(schema.BackendDelegate.compile_specs)
        specs = {spec.text(schema.CompileSpec.key): spec.read_bytes(schema.CompileSpec.value) for spec in tables}
        if "" in specs:  # the runtime would dereference a null pointer
            raise ProgramError(f"damaged: a compile spec of a delegate for {backend!r} has no key")
        return PteDelegate(backend, data, specs)

    def _get_segment(self, index: int) -> memoryview:
        return _checked_element(self._segments, index, "segment")


def _split_segments(data: memoryview) -> tuple[memoryview, memoryview]:
    """Split a file into the flatbuffer and the segments that follow it."""
    if len(data) < _HEADER_OFFSET:
        raise ProgramError(f"truncated: a file of {len(data)} bytes is too short for a program")
    magic = bytes(data[4:_HEADER_OFFSET])
    if magic != _MAGIC:
        raise ProgramError(f"not an ExecuTorch program (magic {magic!r}, expected {_MAGIC!r})")
    if bytes(data[_HEADER_OFFSET : _HEADER_OFFSET + len(_HEADER_MAGIC)]) != _HEADER_MAGIC:
        return data, data[:0]
    if len(data) < _HEADER_OFFSET + _HEADER_STRUCT.size:
        raise ProgramError(f"truncated: the file ends inside its header, after {len(data)} bytes")
    _, length, program_bytes, base, segment_bytes = _HEADER_STRUCT.unpack_from(data, _HEADER_OFFSET)
    if length < _HEADER_STRUCT.size:
        if length < _SHORT_HEADER_BYTES:
            raise ProgramError(f"damaged: the header has {length} bytes")
        segment_bytes = 0
    for what, end in (("program", program_bytes), ("segments", base + segment_bytes)):
        if end > len(data):
            raise ProgramError(f"truncated: the {what} should end at byte {end:,}, the file has {len(data):,}")
    return data[:program_bytes], data[base:]


def _slice_segment(index: int, segments: memoryview, offset: int, count: int) -> memoryview:
    if offset + count > len(segments):
        end = f"byte {offset + count:,} of the segments, the file has {len(segments):,}"
        raise ProgramError(f"truncated: segment {index} should end at {end}")
    return segments[offset : offset + count]


def _describe_value(value: Table) -> PteTensor | str:
    """Describe a value: a tensor's description, or the type of any other value."""
    kind = _checked_element(schema.VALUE_KINDS, value.number(schema.EValue.val_type, "B"), "kind of value")
    return _describe_tensor(_union_table(value)) if kind == "Tensor" else kind


def _constant_value(value: Table) -> object:
    """Read the value of a constant, or describe a tensor; None for types that are never constants in ExecuTorch."""
    description = _describe_value(value)
    if description == "Int":
        return _union_table(value).number(schema.Scalar.value, "q")
    if description == "Bool":
        return bool(_union_table(value).number(schema.Scalar.value, "B"))
    if description == "Double":
        return _union_table(value).double(schema.Scalar.value)
    if description == "String":
        return _union_table(value).text(schema.Scalar.value)
    return description if isinstance(description, PteTensor) else None


def _union_table(value: Table) -> Table:
    table = value.table(schema.EValue.val)
    if table is None:
        raise ProgramError("damaged: a value has no content")
    return table


def _describe_tensor(tensor: Table) -> PteTensor:
    dtype = tensor.number(schema.Tensor.scalar_type, "b")
    shape = tensor.numbers(schema.Tensor.sizes, "i")
    order = tensor.numbers(schema.Tensor.dim_order, "B")
    if dtype not in schema.DTYPE_NAMES:
        raise ProgramError(f"damaged: a tensor has the unknown scalar type {dtype}")
    if min(shape, default=0) < 0 or sorted(order) != list(range(len(shape))):
        raise ProgramError(f"damaged: a tensor has the shape {list(shape)} with the dimension order {list(order)}")
    return PteTensor(schema.DTYPE_NAMES[dtype], shape, order, tensor.number(schema.Tensor.shape_dynamism, "b") != 0)


def _operator_name(kernel: Table) -> str:
    name, overload = kernel.text(schema.Operator.name), kernel.text(schema.Operator.overload)
    return f"{name}.{overload}" if overload else name


_Item = TypeVar("_Item")


def _checked_element(items: Sequence[_Item], index: int, what: str) -> _Item:
    if not 0 <= index < len(items):
        raise ProgramError(f"damaged: it refers to {what} {index:,}, and there are {len(items):,}")
    return items[index]


def _unique_by_name(items: Sequence[tuple[str, _Item]], what: str) -> dict[str, _Item]:
    items_by_name = dict(items)
    if len(items_by_name) < len(items):
        raise ProgramError(f"damaged: two {what} have the same name")
    return items_by_name
