"""Look-up of the ``cortex_m`` kernels, whose families it imports."""

from __future__ import annotations

from arm_backend_core.cortex_m.kernels import convolution, elementwise, linear
from arm_backend_core.cortex_m.kernels.registry import KERNELS, Kernel

#: Modules with kernel records.
FAMILIES = (convolution, elementwise, linear)


def find_kernel(name: str) -> Kernel:
    """Find a kernel's record by the operator's name without namespace and overload, for example ``quantized_add``.

    Raises:
        KeyError: there is no such kernel.
    """
    return KERNELS[name]
