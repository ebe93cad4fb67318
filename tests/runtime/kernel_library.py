"""The ``cortex_m`` kernels in C++, called from Python on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_recipes.runtime.build import combine_kernels, list_kernel_sources
from tests.runtime.cpp_build import RUNTIME, compile_cpp, executorch_include_flags, executorch_link_flags

#: ExecuTorch's ScalarType of each NumPy type.
SCALAR_TYPES = {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float32": 6}
#: UBSan ends the process.
_FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-fsanitize=undefined", "-fno-sanitize=vptr"]
_FLAGS += ["-fno-sanitize-recover=all"]
_GUARD, _GUARD_BYTES = 0x5A, 64
_LOG_BYTES = 1024


class _Argument(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("list", ctypes.POINTER(ctypes.c_int64)),
        ("length", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("dim_order", ctypes.POINTER(ctypes.c_uint8)),
    ]


_NONE, _INT, _DOUBLE, _BOOL, _INT_LIST, _TENSOR = range(6)


class KernelError(Exception):
    """A kernel refused its arguments. The message has the lines that it logged."""


class KernelLibrary:
    """All kernels, compiled with UndefinedBehaviorSanitizer (UBSan)."""

    def __init__(self, folder: Path) -> None:
        """Compile the kernels into ``folder``."""
        sources = combine_kernels([*list_kernel_sources(), RUNTIME / "tests/kernels/kernel_abi.cpp"], folder)
        flags = [*_FLAGS, *executorch_include_flags()]
        path = compile_cpp(
            folder / "kernels.so", sources, flags, link=["-shared", *executorch_link_flags()], compiler="g++"
        )
        self._library = ctypes.CDLL(str(path))
        self._library.arm_test_list_kernels.restype = ctypes.c_char_p
        self._library.arm_test_call_kernel.argtypes = [
            *(ctypes.c_char_p, ctypes.POINTER(_Argument), ctypes.c_uint64),
            *(ctypes.c_char_p, ctypes.c_uint64),
        ]

    def list_names(self) -> list[str]:
        """Names of the kernels, without namespace and overload."""
        names: bytes = self._library.arm_test_list_kernels()
        return names.decode().split()

    def call(self, name: str, *arguments: Any) -> None:
        """Call the kernel ``cortex_m::<name>.out``.

        Args:
            name: operator.
            arguments: None, bool, int, float, a sequence of int, or a NumPy array, whose strides define the order of
                the axes in memory. The last one is the result.

        Raises:
            KernelError: the kernel refused the arguments.
        """
        keep: list[Any] = []
        values = (_Argument * len(arguments))(*(_box(argument, keep) for argument in arguments))
        log = ctypes.create_string_buffer(_LOG_BYTES)
        code = self._library.arm_test_call_kernel(
            f"cortex_m::{name}.out".encode(), values, len(arguments), log, _LOG_BYTES - 1
        )
        if code:
            raise KernelError(f"error {code}: {log.value.decode()}")

    def run(self, name: str, *arguments: Any, channels_last: bool = False) -> Array:
        """Call a kernel and return its result, an int8 array of the shape that the kernel's record computes.

        Raises:
            KernelError: the kernel refused the arguments.
            AssertionError: the kernel wrote outside its result.
        """
        shapes = [argument.shape if isinstance(argument, np.ndarray) else argument for argument in arguments]
        shape = tuple(find_kernel(name).result_shape(*shapes))
        count = int(np.prod(shape))
        memory = np.full(count + 2 * _GUARD_BYTES, _GUARD, np.int8)
        inside = memory[_GUARD_BYTES : _GUARD_BYTES + count]
        if channels_last:
            batch, channels, height, width = shape
            out = inside.reshape(batch, height, width, channels).transpose(0, 3, 1, 2)
        else:
            out = inside.reshape(shape)
        self.call(name, *arguments, out)
        assert (memory[:_GUARD_BYTES] == _GUARD).all(), f"{name} wrote before its result"
        assert (memory[_GUARD_BYTES + count :] == _GUARD).all(), f"{name} wrote after its result"
        return out


def to_channels_last(x: Array) -> Array:
    """The array of shape [N, C, H, W] with its elements in the order N, H, W, C."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def _box(value: Any, keep: list[Any]) -> _Argument:
    """Convert an argument to its C struct. Objects that the struct points to are appended to ``keep``."""
    if value is None:
        return _Argument(kind=_NONE)
    if isinstance(value, bool):
        return _Argument(kind=_BOOL, integer=int(value))
    if isinstance(value, (int, np.integer)):
        return _Argument(kind=_INT, integer=int(value))
    if isinstance(value, float):
        return _Argument(kind=_DOUBLE, real=value)
    if isinstance(value, np.ndarray):
        return _box_array(value, keep)
    assert isinstance(value, Sequence)
    numbers = (ctypes.c_int64 * len(value))(*value)
    keep.append(numbers)
    return _Argument(kind=_INT_LIST, list=numbers, length=len(value))


def _box_array(array: Array, keep: list[Any]) -> _Argument:
    rank = array.ndim
    order = sorted(range(rank), key=lambda axis: -array.strides[axis])
    assert array.transpose(order).flags.c_contiguous, "the array has gaps"
    sizes, axes = (ctypes.c_int32 * rank)(*array.shape), (ctypes.c_uint8 * rank)(*order)
    keep += [array, sizes, axes]
    return _Argument(
        kind=_TENSOR,
        dtype=SCALAR_TYPES[array.dtype.name],
        data=array.ctypes.data,
        length=rank,
        sizes=sizes,
        dim_order=axes,
    )
