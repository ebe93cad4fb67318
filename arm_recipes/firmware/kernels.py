"""The CPU kernels that a firmware must have, by the library that has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: In ``arm_runtime_cortex_m_kernels``.
_OURS = ("cortex_m::quantize_per_tensor.out", "cortex_m::dequantize_per_tensor.out")
#: Namespaces of ExecuTorch's portable kernels, which its selective build takes.
_PORTABLE = ("aten", "dim_order_ops")


@dataclass(frozen=True)
class Kernels:
    """Kernels by where they are.

    Attributes:
        ours: in ``arm_runtime_cortex_m_kernels``, and in ExecuTorch's own kernels for Cortex-M.
        portable: in ExecuTorch's portable kernels, chosen by ``EXECUTORCH_SELECT_OPS_LIST``.
        others: in other libraries of ExecuTorch, or in the user's.
    """

    ours: tuple[str, ...]
    portable: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def only_ours(self) -> bool:
        """Whether every number is the same on each device, bit for bit."""
        return not self.portable and not self.others


def classify_kernels(operators: Iterable[str]) -> Kernels:
    """The kernels of a program's operators, each once, by name."""
    names = sorted(set(operators))
    portable = tuple(name for name in names if name.partition("::")[0] in _PORTABLE)
    ours = tuple(name for name in names if name in _OURS)
    return Kernels(ours, portable, tuple(name for name in names if name not in {*portable, *ours}))
