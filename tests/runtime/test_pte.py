"""The ``.pte`` reader: it agrees with ExecuTorch's, and refuses damaged programs with a reason and little work."""

from __future__ import annotations

import random
import re
import struct
import sys
import tracemalloc
from importlib.resources import files
from typing import Any

import flatbuffers
import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir._serialize.generated import executorch_flatbuffer as schema
from executorch.exir.schema import DataLocation, ScalarType
from executorch.exir.tensor import get_scalar_type, scalar_type_table

from arm_recipes.runtime import pte, pte_schema
from arm_recipes.runtime.pte import ProgramError, PteProgram, PteTensor, read_program
from tests.runtime.pte_programs import CONSTANTS, NAMES, program
from tests.runtime.schemas import assert_fields_match

pytestmark = pytest.mark.xdist_group("pte_programs")  # each process makes them anew
#: Limit of function calls while a small damaged program is read.
_MAX_CALLS = 100_000


@pytest.mark.parametrize("name", NAMES)
def test_read_program_agrees_with_executorch(name: str) -> None:
    data = program(name)
    own, theirs = read_program(data), deserialize_pte_binary(data)
    assert list(own.methods) == [plan.name for plan in theirs.program.execution_plan]
    for method, plan in zip(own.methods.values(), theirs.program.execution_plan, strict=True):
        for side in ("inputs", "outputs"):
            expected = [_describe(plan.values[index].val) for index in getattr(plan, side)]
            assert list(getattr(method, side)) == expected
        assert list(method.operators) == [".".join(filter(None, (o.name, o.overload))) for o in plan.operators]
        assert method.planned_bytes == sum(plan.non_const_buffer_sizes[1:])
        assert (method.constants is None) == any(chain.instructions for chain in plan.chains)
        for delegate, expected in zip(method.delegates, plan.delegates, strict=True):
            assert delegate.backend == expected.id
            assert expected.processed.location == DataLocation.INLINE  # ExecuTorch moves the segments back
            assert delegate.data == bytes(theirs.program.backend_delegate_data[expected.processed.index].data)
            assert delegate.compile_specs == {spec.key: bytes(spec.value) for spec in expected.compile_specs}
    stored = theirs.named_data
    expected_data = {} if stored is None else {k: stored.buffers[e.buffer_index] for k, e in stored.pte_data.items()}
    assert own.named_data == expected_data


def _describe(value: Any) -> PteTensor | str:
    if type(value).__name__ != "Tensor":
        return type(value).__name__
    dtype = str(get_scalar_type(value.scalar_type)).removeprefix("torch.")
    return PteTensor(dtype, tuple(value.sizes), tuple(value.dim_order))


def test_compared_programs_have_delegates_segments_and_named_data() -> None:
    """The comparison above would pass for programs without delegates, segments or named data as well."""
    backends = {
        name: {d.backend for m in read_program(program(name)).methods.values() for d in m.delegates} for name in NAMES
    }
    assert backends["ethosu"] == {"EthosUBackend"}
    assert backends["vgf"] == {"VgfBackend"}
    assert backends["xnnpack"] == {"XnnpackBackend"}
    assert backends["segments"] == backends["methods"] == {"TOSABackend"}
    assert "weights" in read_program(program("segments")).named_data
    assert read_program(program("xnnpack")).named_data
    assert len(program("segments")) - _flatbuffer_bytes(program("segments")) > 2000
    assert read_program(program("mutable_buffer")).methods["forward"].operators


def _flatbuffer_bytes(data: bytes) -> int:
    """Size of the flatbuffer in front of the segments."""
    return int.from_bytes(data[16:24], "little")


def test_constant_methods() -> None:
    methods = read_program(program("tosa")).methods
    constants = {name: method.constants for name, method in methods.items() if method.constants is not None}
    assert constants == {
        "version": (3,),
        "scale": (0.5,),
        "ready": (True,),
        "label": ("digits",),
        "shape": (1, 28),
        "table": (PteTensor("float32", (2, 3), (0, 1)),),
    }
    assert set(constants) == set(CONSTANTS)
    assert methods["forward"].operators == (
        "cortex_m::quantize_per_tensor.out",
        "cortex_m::dequantize_per_tensor.out",
    )


def test_payloads_are_views_of_the_program() -> None:
    data = program("segments")
    for method in read_program(data).methods.values():
        for delegate in method.delegates:
            assert delegate.data.obj is data
            assert delegate.data.readonly


def test_work_does_not_grow_with_the_payload() -> None:
    small, large = _inline_program(bytes(1 << 10)), _inline_program(bytes(14 << 20))
    assert len(read_program(memoryview(large)).methods["forward"].delegates[0].data) == 14 << 20
    assert _count_calls(memoryview(large)) == _count_calls(memoryview(small))
    tracemalloc.start()
    try:
        read_program(memoryview(large))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _count_calls(data: bytes | memoryview) -> int:
    """Number of function calls while a program is read or refused: a measure of work without a clock."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        read_program(data)
    except ProgramError:
        pass
    finally:
        sys.setprofile(before)
    return count


def test_field_numbers_are_those_of_the_schema() -> None:
    text = (files("executorch.exir._serialize") / "program.fbs").read_text()
    assert_fields_match(pte_schema, text, fields_of={"Scalar": ("Int", "Bool", "Double", "String")})
    assert f'file_identifier "{pte._MAGIC.decode()}"' in text
    union = re.search(r"union KernelTypes \{([^}]*)\}", text)
    assert union is not None
    assert ["NONE", *re.findall(r"\w+", union[1])] == list(pte_schema.VALUE_KINDS)
    assert (pte_schema.INLINE_LOCATION, pte_schema.SEGMENT_LOCATION) == (DataLocation.INLINE, DataLocation.SEGMENT)


def test_dtypes_are_those_of_executorch() -> None:
    assert set(pte_schema.DTYPE_NAMES) == {int(member) for member in ScalarType}
    for number, name in pte_schema.DTYPE_NAMES.items():
        dtype = getattr(torch, name)
        if ScalarType(number) in scalar_type_table.values():
            assert scalar_type_table[dtype] == number
        else:
            assert name.replace("_", "").replace("complex32", "complexhalf") == ScalarType(number).name.lower()


@pytest.mark.parametrize("name", NAMES)
def test_truncated_program_is_refused(name: str) -> None:
    data = program(name)
    step = max(1, len(data) // 1500)
    for length in [*range(0, len(data), step), *range(len(data) - 100, len(data))]:
        # A truncated program must not be read as if it were whole.
        with pytest.raises(ProgramError, match=r"^(truncated|damaged|not an ExecuTorch program)"):
            read_program(data[:length])


@pytest.mark.parametrize("name", NAMES)
def test_program_with_bit_flips_is_read_or_refused(name: str) -> None:
    data = program(name)
    flips = random.Random(name)
    refused, most = 0, 0
    for attempt in range(1500):
        damaged = bytearray(data)
        reach = len(data) if attempt % 3 else min(len(data), 1000)
        for _ in range(flips.choice((1, 1, 2, 8))):
            damaged[flips.randrange(reach)] ^= 1 << flips.randrange(8)
        try:
            assert isinstance(read_program(bytes(damaged)), PteProgram)
        except ProgramError:
            refused += 1
        if attempt % 10 == 0:
            most = max(most, _count_calls(bytes(damaged)))
    assert refused > 50
    assert most < _MAX_CALLS


def test_random_bytes_are_read_or_refused() -> None:
    numbers = random.Random(0)
    for attempt in range(3000):
        noise = bytearray(numbers.randbytes(numbers.randrange(400)))
        noise[4:8] = b"ET12"
        if attempt % 2:
            noise[:4] = numbers.randrange(60).to_bytes(4, "little")
        if attempt % 3 == 0:
            noise[8:12] = b"eh00"
        # An almost empty table is a valid program without methods.
        try:
            assert read_program(bytes(noise)).methods.keys() <= {""}
        except ProgramError:
            continue


@pytest.mark.parametrize("data", [b"", b"ET12", b"\0" * 7])
def test_too_few_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProgramError, match=r"truncated: a file of \d bytes is too short"):
        read_program(data)


def test_file_of_another_format_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"not an ExecuTorch program \(magic b'TOSA', expected b'ET12'\)"):
        read_program(b"\0\0\0\0TOSA" + bytes(100))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (12, 0, "the header has 0 bytes"),
        (16, 1 << 63, "the program should end at byte 9,223,372,036,854,775,808"),
        (24, (1 << 64) - 1, "the segments should end"),
        (32, (1 << 64) - 1, "the segments should end"),
        (16, 41, "truncated or damaged: bytes"),
    ],
)
def test_damaged_header_is_refused(at: int, value: int, message: str) -> None:
    damaged = bytearray(program("segments"))
    struct.pack_into("<I" if at == 12 else "<Q", damaged, at, value)
    with pytest.raises(ProgramError, match=re.escape(message)):
        read_program(bytes(damaged))


def test_many_references_to_one_table_are_refused() -> None:
    """3,000 references to one method, with 3,000 references to one operator: 24 KB that would take 9 million reads."""
    builder = flatbuffers.Builder()
    name = builder.CreateString("x")
    schema.Operator.OperatorStart(builder)
    schema.Operator.OperatorAddName(builder, name)
    operator = schema.Operator.OperatorEnd(builder)
    operators = _vector(builder, [operator] * 3000)
    schema.ExecutionPlan.ExecutionPlanStart(builder)
    schema.ExecutionPlan.ExecutionPlanAddOperators(builder, operators)
    plan = schema.ExecutionPlan.ExecutionPlanEnd(builder)
    data = _finish(builder, execution_plan=_vector(builder, [plan] * 3000))
    with pytest.raises(ProgramError, match="refer to more data than it has bytes"):
        read_program(data)
    assert _count_calls(data) < _MAX_CALLS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [-1]}, "a tensor has the shape [-1] with the dimension order [0]"),
        ({"order": [1]}, "a tensor has the shape [4] with the dimension order [1]"),
        ({"order": []}, "a tensor has the shape [4] with the dimension order []"),
        ({"dtype": 99}, "a tensor has the unknown scalar type 99"),
        ({"kind": 77}, "it refers to kind of value 77, and there are 12"),
        ({"inputs": [1]}, "it refers to value 1, and there are 1"),
        ({"inputs": [-1]}, "it refers to value -1, and there are 1"),
        ({"buffers": [0, -5]}, "a planned buffer has -5 bytes"),
        ({"location": 2}, "has the unknown location 2"),
        ({"index": 1}, "it refers to inline payload 1, and there are 1"),
        ({"location": 1}, "it refers to segment 0, and there are 0"),
        ({"name": b"\xff\xfe"}, "is not UTF-8"),
        ({"methods": 2}, "two methods have the same name"),
    ],
)
def test_damaged_field_is_named(change: dict[str, Any], message: str) -> None:
    assert read_program(_inline_program(b"payload")).methods["forward"].inputs == (PteTensor("int8", (4,), (0,)),)
    with pytest.raises(ProgramError, match=re.escape(message)):
        read_program(_inline_program(b"payload", **change))


def _inline_program(
    payload: bytes,
    *,
    name: bytes = b"forward",
    sizes: tuple[int, ...] | list[int] = (4,),
    order: tuple[int, ...] | list[int] = (0,),
    dtype: int = 1,
    kind: int = 5,
    inputs: tuple[int, ...] | list[int] = (0,),
    buffers: tuple[int, ...] | list[int] = (0, 16),
    location: int = 0,
    index: int = 0,
    methods: int = 1,
) -> bytes:
    """A program with one method and one delegate, written field by field."""
    builder = flatbuffers.Builder()
    data = builder.CreateByteVector(payload)
    schema.BackendDelegateInlineData.BackendDelegateInlineDataStart(builder)
    schema.BackendDelegateInlineData.BackendDelegateInlineDataAddData(builder, data)
    inline = _vector(builder, [schema.BackendDelegateInlineData.BackendDelegateInlineDataEnd(builder)])
    reference = schema.BackendDelegateDataReference.BackendDelegateDataReferenceT()
    reference.location, reference.index = location, index
    delegate = schema.BackendDelegate.BackendDelegateT()
    delegate.id, delegate.processed = "Backend", reference
    tensor = schema.Tensor.TensorT()
    tensor.scalarType, tensor.sizes, tensor.dimOrder = dtype, list(sizes), list(order)
    value = schema.EValue.EValueT()
    value.valType, value.val = kind, tensor
    plan = schema.ExecutionPlan.ExecutionPlanT()
    plan.name, plan.values, plan.delegates = name, [value], [delegate]
    plan.inputs, plan.nonConstBufferSizes = list(inputs), list(buffers)
    plans = _vector(builder, [plan.Pack(builder) for _ in range(methods)])
    return _finish(builder, execution_plan=plans, backend_delegate_data=inline)


def _vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    vector: int = builder.EndVector()
    return vector


def _finish(builder: flatbuffers.Builder, *, execution_plan: int, backend_delegate_data: int | None = None) -> bytes:
    schema.Program.ProgramStart(builder)
    schema.Program.ProgramAddExecutionPlan(builder, execution_plan)
    if backend_delegate_data is not None:
        schema.Program.ProgramAddBackendDelegateData(builder, backend_delegate_data)
    builder.Finish(schema.Program.ProgramEnd(builder), b"ET12")
    return bytes(builder.Output())
