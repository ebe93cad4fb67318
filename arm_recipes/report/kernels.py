"""Kernel calls of a lowered method: int8 kernels of a Cortex-M, and operators that move int8 values between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes._internal.rendering import Section, format_bytes

if TYPE_CHECKING:
    import torch

    from arm_backend_core.targets.cortex_m import Processor

#: Operators of ExecuTorch's portable kernels that only move or compare elements, so that all implementations are
#: bit-equal.
BIT_EXACT_OPERATORS = frozenset(
    {
        *("aten::cat", "aten::copy_", "aten::expand_copy", "aten::permute_copy", "aten::select_copy"),
        *("aten::slice_copy", "aten::split_copy", "aten::split_with_sizes_copy", "aten::squeeze_copy"),
        *("aten::unsqueeze_copy", "aten::view_copy", "aten::where", "dim_order_ops::_clone_dim_order"),
        *("aten::eq", "aten::ge", "aten::gt", "aten::le", "aten::lt", "aten::ne"),
    }
)


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel.

    Attributes:
        kernel: name of the kernel, without its namespace.
        module: path of the module whose operator the kernel computes; empty if unknown.
        source: line of the user's model; empty if unknown.
        shape: shape of the result.
        scratch_bytes: size of the scratch memory that the call needs.
        macs: multiply-accumulates; 0 if the CPU is not known.
        cycles: estimated cycles; None if the CPU is not known.
    """

    kernel: str
    module: str
    source: str
    shape: tuple[int, ...]
    scratch_bytes: int
    macs: int = 0
    cycles: int | None = None


def is_kernel_call(node: torch.fx.Node) -> bool:
    """Whether a node calls an int8 kernel other than quantize and dequantize."""
    from arm_backend_core.cortex_m.catalog import find_called_kernel
    from arm_backend_core.cortex_m.kernels.registry import QUANTIZE_OPERATORS

    kernel = find_called_kernel(node)
    return kernel is not None and kernel.name not in QUANTIZE_OPERATORS


def is_int8_data_movement(node: torch.fx.Node) -> bool:
    """Whether an operator that is no int8 kernel moves int8 values: true if its result and first operand are int8."""
    import torch

    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes[:1])]
    return all(isinstance(value, torch.Tensor) and value.dtype is torch.int8 for value in values)


def list_kernel_calls(module: torch.fx.GraphModule, processor: Processor | None = None) -> tuple[KernelCall, ...]:
    """List the kernel calls of a lowered method in program order, without quantize and dequantize.

    Args:
        module: the lowered method.
        processor: the CPU, for the estimates; None: no estimates.
    """
    from arm_backend_core.cortex_m.catalog import find_called_kernel
    from arm_backend_core.cortex_m.cost.estimate import estimate_node
    from arm_backend_core.cortex_m.kernels.registry import QUANTIZE_OPERATORS
    from arm_backend_core.nodes import modules_of, source_location

    calls = []
    for node in module.graph.nodes:
        kernel = find_called_kernel(node)
        if kernel is not None and kernel.name not in QUANTIZE_OPERATORS:
            scratch = sum(_bytes(x) for x in node.all_input_nodes if _is_scratch(x))
            *_, path = ("", *modules_of(node))
            shape = tuple(node.meta["val"].shape)
            estimate = None if processor is None else estimate_node(node, processor)
            figures = (0, None) if estimate is None else (estimate.macs, estimate.cycles)
            calls.append(KernelCall(kernel.name, path, source_location(node), shape, scratch, *figures))
    return tuple(calls)


def _is_scratch(node: torch.fx.Node) -> bool:
    from executorch.exir import memory

    return node.target is memory.alloc


def _bytes(node: torch.fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def kernel_sections(calls: Sequence[KernelCall], data_movement: dict[str, int], suffix: str) -> Iterator[Section]:
    """Sections of the report: calls, cycles and scratch of each kernel, and operators that move int8 values."""
    if not calls:
        return
    counts = Counter(call.kernel for call in calls)
    scratch = {name: max(call.scratch_bytes for call in calls if call.kernel == name) for name in counts}
    rows: list[tuple[str, ...]] = [
        (
            f"{count} x {name}",
            _format_cycles([call for call in calls if call.kernel == name]),
            f"scratch up to {format_bytes(scratch[name])}" if scratch[name] else "",
        )
        for name, count in counts.most_common()
    ]
    rows += [(f"{count} x {name}", "", "moves int8 values") for name, count in data_movement.items()]
    yield f"int8 kernels on the Cortex-M{suffix}: {len(calls)} calls", rows


def _format_cycles(calls: Sequence[KernelCall]) -> str:
    """Text with the sum of the cycle estimates; empty if no call has an estimate."""
    cycles = [call.cycles for call in calls if call.cycles is not None]
    return f"{sum(cycles):,} cycles (estimate)" if cycles else ""
