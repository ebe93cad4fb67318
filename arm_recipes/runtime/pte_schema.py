"""Schema of ExecuTorch programs: flatbuffer field numbers and enumerations, under the names of ``program.fbs``.

A test compares the numbers with the installed schema.
"""

from __future__ import annotations

from typing import Final


class Program:
    """The root table of a ``.pte``."""

    execution_plan = 1
    backend_delegate_data = 3
    segments = 4
    named_data = 7


class ExecutionPlan:
    """A method."""

    name = 0
    container_meta_type = 1
    values = 2
    inputs = 3
    outputs = 4
    chains = 5
    operators = 6
    delegates = 7
    non_const_buffer_sizes = 8


class ContainerMetadata:
    """Nested structures (treespecs) of a method's inputs and outputs."""

    encoded_out_str = 1


class Chain:
    """A sequence of instructions."""

    instructions = 2


class EValue:
    """A value of a method: a member of the union ``KernelTypes``."""

    val_type = 0
    val = 1


class Tensor:
    """Shape, dtype and memory of a tensor."""

    scalar_type = 0
    sizes = 2
    dim_order = 3
    shape_dynamism = 8


class Scalar:
    """A scalar value: ``Int``, ``Bool``, ``Double`` or ``String``, which are tables with one field."""

    value = 0


class Operator:
    """A CPU kernel."""

    name = 0
    overload = 1


class BackendDelegate:
    """A delegate with its compile specs."""

    id = 0
    processed = 1
    compile_specs = 2


class BackendDelegateDataReference:
    """Location of a delegate's payload."""

    location = 0
    index = 1


class BackendDelegateInlineData:
    """A payload inside the flatbuffer."""

    data = 0


class CompileSpec:
    """A compile spec of a delegate: key and value."""

    key = 0
    value = 1


class DataSegment:
    """A segment after the flatbuffer."""

    offset = 0
    size = 1


class NamedData:
    """An entry of named data: a key and the index of its segment."""

    key = 0
    segment_index = 1


#: Members of the union ``KernelTypes``, by number. Number 0 means that the union has no value.
VALUE_KINDS: Final = (
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
INLINE_LOCATION, SEGMENT_LOCATION = 0, 1
#: The enumeration ``ScalarType``: number -> PyTorch's dtype name.
DTYPE_NAMES: Final = {
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
    """Number of a dtype in ``executorch::aten::ScalarType``."""
    return next(number for number, known in DTYPE_NAMES.items() if known == name)
