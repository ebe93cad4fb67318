"""Layer costs on the CPU: estimated cycles of the operators outside delegates, by PyTorch module and source line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arm_recipes.report.npu_layer_costs import LayerCost, LayerKind

if TYPE_CHECKING:
    import torch

    from arm_backend_core.targets.cortex_m import Processor

#: Names of operators in a lowered method that call no CPU kernel.
_NOT_ON_CPU = ("executorch_call_delegate", "alloc", "getitem")


@dataclass
class _Totals:
    """Running totals of a layer."""

    operators: dict[str, None] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    cycles: int = 0
    macs: int = 0
    read: int = 0
    written: int = 0


def estimate_cpu_layers(
    method: str, module: torch.fx.GraphModule, processor: Processor | None
) -> tuple[LayerCost, ...]:
    """Estimate the cost of each layer on the CPU, in program order.

    A source line of a module has up to three layers: its transposes, its quantize and dequantize operators, and its
    other operators. ``share`` is the fraction of the CPU's cycles. Operators with an estimate of 0 cycles are omitted.

    Args:
        method: name of the method.
        module: the lowered method.
        processor: the CPU; None: the result is empty.
    """
    return tuple(_estimate(method, module, processor)) if processor is not None else ()


def _estimate(method: str, module: torch.fx.GraphModule, processor: Processor) -> Iterator[LayerCost]:
    from arm_backend_core.cortex_m.cost.estimate import estimate_node
    from arm_backend_core.cortex_m.cost.processors import PEAK_MACS, code_variant_of
    from arm_backend_core.nodes import modules_of, operator_name, source_location

    layers: dict[tuple[str, str, LayerKind], _Totals] = {}
    for node in module.graph.nodes:
        name = operator_name(node).split(".")
        if node.op != "call_function" or name[-1] in _NOT_ON_CPU or _operator(name) in _NOT_ON_CPU:
            continue
        estimate = estimate_node(node, processor)
        if not estimate.cycles:
            continue
        *_, path = ("", *modules_of(node))
        totals = layers.setdefault((path, source_location(node), _kind(_operator(name))), _Totals())
        totals.operators.setdefault(".".join(name[:2]))
        totals.tensors.append(node.name)
        totals.cycles += estimate.cycles
        totals.macs += estimate.macs
        totals.read += estimate.bytes_read
        totals.written += estimate.bytes_written
    total = sum(layer.cycles for layer in layers.values())
    peak = PEAK_MACS.of(code_variant_of(processor))
    for (path, source, kind), layer in layers.items():
        yield LayerCost(
            method,
            "",
            path,
            source,
            kind,
            tuple(layer.operators),
            layer.cycles,
            layer.cycles / total,
            layer.macs,
            layer.macs / (layer.cycles * peak),
            layer.read,
            layer.written,
            "compute",
            _REASONS.get(kind, ""),
            tuple(layer.tensors),
        )


#: Reasons of the kinds of layers other than "layer".
_REASONS = {
    "transpose": "the model's own transpose, or the kernels use another dimension order",
    "boundary": "float inputs or outputs of kernels",
}


def _operator(name: list[str]) -> str:
    """Return the operator without namespace and overload: "transpose" for ["cortex_m", "transpose", "default"]."""
    return name[1] if len(name) > 1 else name[0]


def _kind(operator: str) -> LayerKind:
    from arm_backend_core.cortex_m.kernels.registry import QUANTIZE_OPERATORS

    if operator in QUANTIZE_OPERATORS:
        return "boundary"
    return "transpose" if operator in ("transpose", "permute_copy") else "layer"
