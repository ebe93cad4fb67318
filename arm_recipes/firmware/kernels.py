"""CPU kernels that firmware must link, grouped by library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arm_backend_core.cortex_m.catalog import KERNELS
from arm_backend_core.cortex_m.kernels.registry import LIBRARY_NAMESPACE
from arm_recipes.report.kernels import BIT_EXACT_OPERATORS

#: Operator namespaces of ExecuTorch's portable kernels. ExecuTorch's selective build links these kernels.
_PORTABLE_NAMESPACES = ("aten", "dim_order_ops")


@dataclass(frozen=True)
class Kernels:
    """Names of kernels, grouped by library.

    Attributes:
        cortex_m: kernels of this project's library ``arm_runtime_cortex_m_kernels``. ExecuTorch's library of Cortex-M
            kernels contains kernels of the same names.
        portable: ExecuTorch's portable kernels, which ``EXECUTORCH_SELECT_OPS_LIST`` selects.
        others: kernels of other libraries of ExecuTorch, or of the user's libraries.
    """

    cortex_m: tuple[str, ...]
    portable: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the kernels give the same bits on all devices.

        The kernels in ``cortex_m`` are bit-exact. Portable kernels are bit-exact if they only move or compare elements.
        Kernels in ``others`` are assumed not to be bit-exact.
        """
        return not self.others and all(name.partition(".")[0] in BIT_EXACT_OPERATORS for name in self.portable)

    def symbols(self) -> tuple[str, ...]:
        """Names of ``cortex_m`` without namespace and overload, as in ``runtime/kernels/kernel_list.h``."""
        return tuple(map(_symbol, self.cortex_m))


def classify_kernels(operators: Iterable[str]) -> Kernels:
    """Group the kernels of a program's operators by library, without duplicates, sorted by name."""
    names = sorted(set(operators))
    portable = tuple(name for name in names if name.partition("::")[0] in _PORTABLE_NAMESPACES)
    cortex_m = tuple(name for name in names if _is_in_library(name))
    return Kernels(cortex_m, portable, tuple(name for name in names if name not in {*portable, *cortex_m}))


def _is_in_library(name: str) -> bool:
    """Whether this project's library of Cortex-M kernels has a kernel."""
    namespace, _, rest = name.partition("::")
    return namespace == LIBRARY_NAMESPACE and rest.endswith(".out") and _symbol(name) in KERNELS


def _symbol(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]
