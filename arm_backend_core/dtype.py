"""TOSA element types."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


#: The uint8 integer x corresponds to the int8 integer x - 128. The zero points differ by 128, too, so both tensors
#: represent the same real numbers with the same scale.
UINT8_OFFSET = 128


class DType(Enum):
    """TOSA element types that this compiler produces (TOSA 1.0, section 1.9; the last four are in the draft of 1.1)."""

    BOOL = "bool"
    INT4 = "int4"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT48 = "int48"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP8E4M3 = "fp8e4m3"
    FP8E5M2 = "fp8e5m2"
    FP6E2M3 = "fp6e2m3"
    FP6E3M2 = "fp6e3m2"
    FP4E2M1 = "fp4e2m1"
    FP8UE8M0 = "fp8ue8m0"

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy element type of a constant: int8 for INT4, int64 for INT48, float32 for floats that NumPy lacks."""
        return _numpy_dtype(self)

    @property
    def bytes(self) -> int:
        """Bytes of an element in TOSA: 6 for INT48 (8 in NumPy), 1 for types of at most 8 bits."""
        return {DType.INT48: 6, DType.BF16: 2, **dict.fromkeys(_ONE_BYTE_FLOATS, 1)}.get(self, self.numpy.itemsize)

    @property
    def is_float(self) -> bool:
        """Whether values are floating point."""
        return self in _MAX_FINITE

    @property
    def is_fp8(self) -> bool:
        """Whether the type is FP8E4M3 or FP8E5M2. TOSA has no elementwise arithmetic with tensors of these types.

        TOSA has data movement, CAST, ARGMAX, convolutions, matrix products and pooling for them. False for FP8UE8M0,
        the type of block scales.
        """
        return self in (DType.FP8E4M3, DType.FP8E5M2)

    @property
    def max_finite(self) -> float:
        """Largest finite floating-point number. Raises KeyError for integers."""
        return _MAX_FINITE[self]

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest integer. Raises KeyError for floating point, BOOL and INT4."""
        bits = _INTEGER_BITS[self]
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


_MAX_FINITE = {DType.FP16: 65504.0, DType.BF16: (2 - 2**-7) * 2.0**127, DType.FP32: (2 - 2**-23) * 2.0**127}
_MAX_FINITE |= {DType.FP8E4M3: 448.0, DType.FP8E5M2: 57344.0, DType.FP6E2M3: 7.5, DType.FP6E3M2: 28.0}
_MAX_FINITE |= {DType.FP4E2M1: 6.0, DType.FP8UE8M0: 2.0**127}
#: Floating-point types of at most 8 bits. NumPy has none of them. An element takes one byte.
_ONE_BYTE_FLOATS = [DType(name) for name in ("fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2", "fp4e2m1", "fp8ue8m0")]
_NUMPY_NAMES = dict.fromkeys(_MAX_FINITE, "float32") | {DType.INT4: "int8", DType.INT48: "int64", DType.FP16: "float16"}
_INTEGER_BITS = {DType.INT8: 8, DType.INT16: 16, DType.INT32: 32, DType.INT48: 48}


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    import numpy as np  # late import: creating a compile spec must not import numpy

    return np.dtype(_NUMPY_NAMES.get(dtype, dtype.value))
