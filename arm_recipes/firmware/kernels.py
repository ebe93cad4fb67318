"""CPU kernels that firmware must link, grouped by library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Kernels of the library ``arm_runtime_cortex_m_kernels``.
_OURS = ("cortex_m::quantize_per_tensor.out", "cortex_m::dequantize_per_tensor.out")
#: Namespaces of ExecuTorch's portable kernels, which its selective build includes.
_PORTABLE = ("aten", "dim_order_ops")


@dataclass(frozen=True)
class Kernels:
    """Kernels by library.

    Attributes:
        ours: kernels of ``arm_runtime_cortex_m_kernels``; ExecuTorch's own kernels for Cortex-M contain them, too.
        portable: ExecuTorch's portable kernels, selected by ``EXECUTORCH_SELECT_OPS_LIST``.
        others: kernels of other libraries of ExecuTorch, or of the user.
    """

    ours: tuple[str, ...]
    portable: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def only_ours(self) -> bool:
        """Whether results are bit-equal on all devices."""
        return not self.portable and not self.others


def classify_kernels(operators: Iterable[str]) -> Kernels:
    """Group the kernels of a program's operators by library, without duplicates, sorted by name."""
    names = sorted(set(operators))
    portable = tuple(name for name in names if name.partition("::")[0] in _PORTABLE)
    ours = tuple(name for name in names if name in _OURS)
    return Kernels(ours, portable, tuple(name for name in names if name not in {*portable, *ours}))
