"""Kernel records: schema, result shape, scratch memory and arithmetic of the ``cortex_m`` kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arm_backend_core.targets.cortex_m import Isa

#: Namespace of the kernels in ExecuTorch's library and in edge programs.
LIBRARY_NAMESPACE = "cortex_m"

#: Kernels that convert between float32 and integers. ATen programs contain PyTorch's operators instead.
QUANTIZE_OPERATORS = ("quantize_per_tensor", "dequantize_per_tensor")

#: Namespace of the kernels' operators in ATen programs, see ``arm_backend_core.cortex_m.custom_ops``.
NAMESPACE = "arm_cortex_m"

Array = NDArray[Any]
Shape = Sequence[int]


@dataclass(frozen=True)
class Kernel:
    """A kernel of ExecuTorch's ``cortex_m`` library.

    Attributes:
        name: name of the operator, without its namespace.
        arguments: arguments of the functional overload, in the syntax of ATen schemas. Firmware looks the kernel up by
            the ``out`` overload, which also has the keyword argument ``out``.
        compute: the kernel's arithmetic in NumPy, bit-equal to the kernel except where the function's docstring says
            otherwise. Tensor arguments are arrays (None if optional and absent). Scratch arguments have no effect.
        result_shape: the result's shape. Takes the arguments of ``compute``, with shapes instead of tensors.
        scratch_bytes: size of each scratch tensor, in the order of the scratch arguments. Takes the instruction set,
            then the arguments of ``result_shape``.
        find_limitation: why CMSIS-NN's kernel would fail, compute wrong results or write outside its result; None if it
            is correct. Takes the arguments of ``scratch_bytes``.
    """

    name: str
    arguments: str
    compute: Callable[..., Array]
    result_shape: Callable[..., Shape]
    scratch_bytes: Callable[..., tuple[int, ...]]
    find_limitation: Callable[..., str | None]


KERNELS: dict[str, Kernel] = {}
"""The records by name of the kernel. ``arm_backend_core.cortex_m.catalog`` imports all modules with records."""


def no_scratch(isa: Isa, *arguments: Any) -> tuple[int, ...]:
    """Scratch memory of kernels that need none."""
    return ()


def no_limitation(isa: Isa, *arguments: Any) -> None:
    """No limitation: CMSIS-NN's kernel is correct for all arguments of the right shapes and types."""
    return


def shape_of_first(first: Shape, *arguments: Any) -> Shape:
    """Shape of the result of kernels whose result has the shape of the first argument."""
    return first


def kernel(
    name: str,
    arguments: str,
    *,
    result_shape: Callable[..., Shape] = shape_of_first,
    scratch_bytes: Callable[..., tuple[int, ...]] = no_scratch,
    find_limitation: Callable[..., str | None] = no_limitation,
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register the decorated function as the arithmetic of a kernel.

    Args:
        name: name of the operator, without its namespace.
        arguments: see ``Kernel``.
        result_shape: see ``Kernel``.
        scratch_bytes: see ``Kernel``.
        find_limitation: see ``Kernel``.

    Raises:
        ValueError: the kernel is registered already.
    """

    def register(compute: Callable[..., Array]) -> Callable[..., Array]:
        if name in KERNELS:
            raise ValueError(f"the kernel {name!r} is registered already")
        KERNELS[name] = Kernel(name, arguments, compute, result_shape, scratch_bytes, find_limitation)
        return compute

    return register


def broadcast_shape(first: Shape, second: Shape) -> Shape:
    """Shape of the elementwise result of two operands that are broadcast."""
    return np.broadcast_shapes(tuple(first), tuple(second))
