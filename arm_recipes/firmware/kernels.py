"""CPU kernels that firmware must link, grouped by library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Kernels of the library ``arm_runtime_cortex_m_kernels``.
_CORTEX_M_KERNELS = ("cortex_m::quantize_per_tensor.out", "cortex_m::dequantize_per_tensor.out")
#: Namespaces of ExecuTorch's portable kernels, which its selective build includes.
_PORTABLE_NAMESPACES = ("aten", "dim_order_ops")


@dataclass(frozen=True)
class Kernels:
    """Names of kernels, grouped by library.

    Attributes:
        ours: kernels of this project's library ``arm_runtime_cortex_m_kernels``. ExecuTorch's library of Cortex-M
            kernels contains kernels of the same names.
        portable: ExecuTorch's portable kernels, which ``EXECUTORCH_SELECT_OPS_LIST`` selects.
        others: kernels of other libraries of ExecuTorch, or of the user's libraries.
    """

    ours: tuple[str, ...]
    portable: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def only_ours(self) -> bool:
        """Whether the program uses no other kernels than ``ours``, so that its results are bit-equal on all devices."""
        return not self.portable and not self.others


def classify_kernels(operators: Iterable[str]) -> Kernels:
    """Group the kernels of a program's operators by library, without duplicates, sorted by name."""
    names = sorted(set(operators))
    portable = tuple(name for name in names if name.partition("::")[0] in _PORTABLE_NAMESPACES)
    ours = tuple(name for name in names if name in _CORTEX_M_KERNELS)
    return Kernels(ours, portable, tuple(name for name in names if name not in {*portable, *ours}))
