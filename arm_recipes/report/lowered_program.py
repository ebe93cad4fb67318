"""Contents of a lowered program: its delegates, CPU operators and quantization, for the export record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.report.kernels import KernelCall, is_int8_data_movement, is_kernel_call, list_kernel_calls
from arm_recipes.report.record import CONVERSION_REMEDIES, Quantization
from arm_recipes.stages.edge.cpu_operators import CpuOperator, group_operators

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from arm_backend_core.compilation_log import DelegateRecord, RefusedOperator
    from arm_backend_core.targets.cortex_m import Processor

#: Names of calls that the report does not list as operators on the CPU, because they compute nothing. ``scan`` only
#: repeats its body, which calls delegates. ``alloc`` reserves the scratch memory of a kernel.
_NOT_OPERATORS = ("getitem", "executorch_call_delegate", "scan", "alloc")


@dataclass(frozen=True)
class LoweredParts:
    """Parts of a lowered method. The attributes are described in ``MethodReport``."""

    delegates: tuple[DelegateRecord, ...]
    other_delegates: dict[str, int]
    boundary: dict[str, int]
    cpu_operators: tuple[CpuOperator, ...]
    kernels: tuple[KernelCall, ...]
    data_movement: dict[str, int]


def collect_lowered_parts(
    graph_module: torch.fx.GraphModule, refused: Sequence[RefusedOperator], processor: Processor | None = None
) -> LoweredParts:
    """Collect the parts of a lowered method.

    If ``processor`` is given, the cycles of kernel calls on this CPU are estimated.
    """
    from arm_backend_core.compilation_log import delegate_record
    from arm_backend_core.nodes import operator_name
    from arm_backend_core.program import lowered_modules

    ours: list[DelegateRecord] = []
    others: Counter[str] = Counter()
    for module in lowered_modules(graph_module):
        delegate = delegate_record(module)
        if delegate is not None:
            ours.append(delegate)
        else:
            others[module.backend_id] += 1
    kernels, boundary, data_movement = list_kernel_calls(graph_module, processor), Counter[str](), Counter[str]()
    cpu: list[tuple[str, str, str]] = []
    for node in graph_module.graph.nodes:
        name = operator_name(node)
        if node.op != "call_function" or name.split(".")[-1] in _NOT_OPERATORS or is_kernel_call(node):
            continue
        if kernels and is_int8_data_movement(node):
            data_movement[name] += 1
        elif any(part in CONVERSION_REMEDIES for part in name.split(".")):
            boundary[name] += 1
        else:
            cpu.append((name, *_find_refusal_reason(node, name, refused)))
    return LoweredParts(tuple(ours), dict(others), dict(boundary), group_operators(cpu), kernels, dict(data_movement))


def _find_refusal_reason(node: torch.fx.Node, name: str, refused: Sequence[RefusedOperator]) -> tuple[str, str]:
    """Find the reason why a node is not delegated, and its source line.

    ExecuTorch decomposes and renames refused nodes. Most of the new nodes keep the metadata of the refused node, which
    contains the reason. For a node without this metadata, search ``refused`` for an entry with the same node name, else
    with the same source line, else with the same operator.
    """
    from arm_backend_core.nodes import REFUSAL_REASON, source_location

    source = source_location(node)
    reason_in_metadata = (node.meta.get("custom") or {}).get(REFUSAL_REASON)
    if reason_in_metadata:
        return reason_in_metadata, source
    operator = name.removeprefix("aten.").split(".")[0].removesuffix("_copy")
    matches = (
        [r for r in refused if r.node == node.name],
        [r for r in refused if source and r.source == source],
        [r for r in refused if r.operator.removeprefix("aten.").split(".")[0] == operator],
    )
    refusal = next((match[0] for match in matches if match), None)
    return ("", source) if refusal is None else (refusal.reason, source or refusal.source)


def count_quantized_tensors(
    program: ExportedProgram, samples: int | None, sqnr: dict[str, float]
) -> Quantization | None:
    """Count the quantized tensors of a program that is not lowered yet; None if no tensor is quantized.

    The result also holds ``samples`` and ``sqnr``, which ``Quantization`` describes.
    """
    activations: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    constants = {
        *program.graph_signature.inputs_to_parameters,
        *program.graph_signature.inputs_to_buffers,
        *program.graph_signature.inputs_to_lifted_tensor_constants,
    }
    seen = set()
    for node in program.graph.nodes:
        name = str(node.target)
        if node.op != "call_function" or not name.startswith("quantized_decomposed."):
            continue
        value = node.args[0]
        dtype = str(node.meta["val"].dtype if ".quantize" in name else value.meta["val"].dtype).split(".")[-1]
        if value.name in constants and ".dequantize" in name:
            if value.name not in seen:
                largest = node.args[-2]  # quant_max; int4 weights are int8 tensors with quant_max 7
                dtype = "int4" if dtype == "int8" and isinstance(largest, int) and largest < 8 else dtype
                weights[f"{dtype} per {'channel' if 'channel' in name else 'tensor'}"] += 1
                seen.add(value.name)
        elif ".quantize" in name:
            activations[dtype] += 1
    if not activations and not weights:
        return None
    return Quantization(dict(activations), dict(weights), samples, sqnr)
