"""Look-up of ``cortex_m`` kernels by name. Importing this module imports all modules that register kernels."""

from __future__ import annotations

from torch.fx import Node

from arm_backend_core.cortex_m.kernels import (
    convolution,
    elementwise,
    linear,
    movement,
    pooling,
    quantize_dequantize,
    softmax,
)
from arm_backend_core.cortex_m.kernels.registry import KERNELS, LIBRARY_NAMESPACE, NAMESPACE, Kernel
from arm_backend_core.nodes import overload_of

__all__ = ["KERNELS", "KERNEL_MODULES", "find_called_kernel", "find_kernel"]

#: Modules that define the kernel records.
KERNEL_MODULES = (quantize_dequantize, convolution, elementwise, linear, movement, pooling, softmax)


def find_kernel(name: str) -> Kernel:
    """Find a kernel's record by the operator's name without namespace and overload, for example ``quantized_add``.

    Raises:
        KeyError: there is no such kernel.
    """
    return KERNELS[name]


def find_called_kernel(node: Node) -> Kernel | None:
    """Find the kernel that a node of an ATen or edge program calls; None if it calls another operator."""
    overload = overload_of(node.target)
    if overload is None or overload.namespace not in (NAMESPACE, LIBRARY_NAMESPACE):
        return None
    return KERNELS.get(overload._schema.name.partition("::")[2])
