"""Look-up of the ``cortex_m`` kernels, whose families it imports."""

from __future__ import annotations

from arm_backend_core.cortex_m.kernels import casting, convolution, elementwise, linear, movement, pooling, softmax
from arm_backend_core.cortex_m.kernels.registry import KERNELS, Kernel

__all__ = ["FAMILIES", "KERNELS", "find_kernel"]

#: Modules with kernel records.
FAMILIES = (casting, convolution, elementwise, linear, movement, pooling, softmax)


def find_kernel(name: str) -> Kernel:
    """Find a kernel's record by the operator's name without namespace and overload, for example ``quantized_add``.

    Raises:
        KeyError: there is no such kernel.
    """
    return KERNELS[name]
