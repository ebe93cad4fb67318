"""Scalar kinds of tensor elements.

Each kind lists its dtypes. There is no default kind, so a dtype that is not listed raises an error.
"""

from __future__ import annotations

from enum import Enum

import torch

from arm_backend_core.errors import ModelError


class ScalarKind(Enum):
    """The kind of a tensor's elements."""

    FLOAT = "floating point"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    COMPLEX = "complex"


#: Integral kinds; booleans are the integers 0 and 1.
INTEGER_OR_BOOL = frozenset({ScalarKind.INTEGER, ScalarKind.BOOLEAN})

_DTYPE_NAMES: dict[ScalarKind, str] = {
    ScalarKind.FLOAT: (
        "float16 bfloat16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "float4_e2m1fn_x2"
    ),
    ScalarKind.INTEGER: (
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
    ),
    ScalarKind.BOOLEAN: "bool",
    ScalarKind.COMPLEX: "complex32 complex64 complex128",
}
#: {dtype: its kind}, without the dtypes that the installed PyTorch version lacks.
_KIND_OF: dict[torch.dtype, ScalarKind] = {
    getattr(torch, name): kind for kind, names in _DTYPE_NAMES.items() for name in names.split() if hasattr(torch, name)
}


def kind_of(dtype: torch.dtype) -> ScalarKind:
    """The kind of a PyTorch dtype.

    Raises:
        ModelError: the dtype belongs to none of the four kinds (``torch.qint8``, ``torch.bits8``).
    """
    if dtype not in _KIND_OF:
        raise ModelError(
            f"tensors of {dtype} hold no floating-point numbers, integers, booleans or complex numbers: convert them "
            "in the model, a quantized tensor with .dequantize()"
        )
    return _KIND_OF[dtype]


def is_float_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and kind_of(value.dtype) is ScalarKind.FLOAT
