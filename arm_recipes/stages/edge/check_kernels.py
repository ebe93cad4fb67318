"""Kernel check: whether ExecuTorch's library has a kernel for every operator that stays on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
from executorch.exir import EdgeProgramManager, memory
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.operator.convert import to_out_variant
from torch import fx

from arm_backend_core.cortex_m.catalog import KERNELS
from arm_backend_core.cortex_m.kernels.registry import LIBRARY_NAMESPACE
from arm_backend_core.nodes import is_empty, operator_name, overload_of, source_location
from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.errors import NotRunnableError
from arm_recipes._internal.messages import warn
from arm_recipes.stages.edge.cpu_operators import CpuOperator, group_operators
from arm_recipes.stages.edge.empty_tensors import MIXED_OPERAND_KERNELS

#: Element types that the kernels in ExecuTorch's library do not support.
_UNSUPPORTED_DTYPES = frozenset({torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2})
#: Floating-point types that the library's quantize and dequantize kernels support. For other types, the kernels abort
#: the process.
_QUANTIZABLE_FLOAT_DTYPES = (torch.float16, torch.float32, torch.float64)
#: Largest rank of the operand of ExecuTorch's convolution kernel: [N, C, H, W].
_MAX_CONVOLUTION_RANK = 4
#: Kernels of the firmware for Arm targets. ExecuTorch's pip package does not have them.
_FIRMWARE_KERNELS = frozenset(f"{LIBRARY_NAMESPACE}::{name}.out" for name in KERNELS)


class CheckRunnable:
    """Edge manager pass: detect CPU operators that would not load or run on the device.

    Args:
        required: True raises an error for such operators, "warn" warns, False ignores them. The report always lists
            these operators.
    """

    def __init__(self, required: bool | Literal["warn"]) -> None:
        self._required = required

    def __call__(self, manager: EdgeProgramManager) -> Sequence[Any]:
        """Check every method.

        Raises:
            NotRunnableError: ``required`` is True, and an operator has no kernel that supports its operands.
        """
        if self._required is False:
            return []
        for method in sorted(manager.methods):
            operators = find_not_runnable(manager.exported_program(method).graph)
            if not operators:
                continue
            lines = [f"  {o.operator} ({', '.join(o.sources)}): {o.reason}" for o in operators]
            text = f"'{method}' will not run: ExecuTorch's library cannot execute operators that stay on the CPU\n"
            if self._required is True:
                raise NotRunnableError(f"require_runnable: {text}" + "\n".join(lines))
            warn(text + "\n".join(lines) + "\nrequire_runnable=True makes this an error, False silences it")
        return []


def find_not_runnable(graph: fx.Graph) -> tuple[CpuOperator, ...]:
    """Find the operators outside the delegates that ExecuTorch's library cannot execute, with the reason."""
    operators = []
    for node in graph.nodes:
        if node.op == "call_function" and overload_of(node.target) is not None:
            reason = next(_kernel_problems(node), None)
            if reason is not None:
                operators.append((operator_name(node), reason, source_location(node)))
    return group_operators(operators)


def _kernel_problems(node: fx.Node) -> Iterator[str]:
    results = node.meta.get("val")
    tensors = [value for value in _to_list(results) if isinstance(value, torch.Tensor)]
    if not tensors:
        return  # shape arithmetic or a check, whose kernels are part of the runtime itself
    kernel = kernel_name(node)
    if kernel is None:
        yield "ExecuTorch has no out variant of it: use another operator"
        return
    if kernel not in _FIRMWARE_KERNELS and kernel not in _library_kernels():
        yield f"no kernel {kernel}: use another operator, or link a library that has it into the firmware"
    yield from _quantization_problems(node, tensors[0])
    operands = [source.meta.get("val") for source in node.all_input_nodes if source.target is not memory.alloc]
    if any(map(is_empty, operands)) and kernel not in MIXED_OPERAND_KERNELS:
        yield "its kernel may abort on a tensor without elements: remove it from the model"
    if kernel == "aten::convolution.out" and tensors[0].dim() > _MAX_CONVOLUTION_RANK:
        yield "its kernel supports 1D and 2D convolutions only: express the 3D convolution by 2D ones"
    for value in (*tensors, *(value for value in operands if isinstance(value, torch.Tensor))):
        if value.dtype in _UNSUPPORTED_DTYPES:
            yield f"its kernel does not support {dtype_name(value.dtype)}: convert to another type in the model"


def _quantization_problems(node: fx.Node, result: torch.Tensor) -> Iterator[str]:
    overload = overload_of(node.target)
    operator = overload.name().partition("::")[2].split(".")[0] if overload is not None else ""
    if not operator.startswith(("quantize_per_", "dequantize_per_")) or len(node.args) < 2:
        return
    quantizes = operator.startswith("quantize")
    source, scale = node.args[:2]
    float_tensor = source.meta["val"] if quantizes and isinstance(source, fx.Node) else result
    if float_tensor.dtype not in _QUANTIZABLE_FLOAT_DTYPES:
        yield f"its kernel does not support {dtype_name(float_tensor.dtype)}: convert to float32 in the model"
    if isinstance(scale, float) and not (0 < scale < math.inf and 1 / scale < math.inf):
        yield f"its scale is {scale}: calibrate with samples whose values are finite"
    if isinstance(scale, fx.Node) and quantizes and scale.meta["val"].dtype != torch.float64:
        yield f"its kernel needs float64 scales, these are {dtype_name(scale.meta['val'].dtype)}"


def kernel_name(node: fx.Node) -> str | None:
    """Return the name of the kernel that the runtime looks up; None if ExecuTorch cannot emit the operator."""
    target: Any = node.target
    try:
        out = target.to_out_variant() if isinstance(target, EdgeOpOverload) else to_out_variant(target)[0]
    except RuntimeError:
        return None
    overload = out._schema.overload_name
    return f"{out._schema.name}.{overload}" if overload else str(out._schema.name)


@cache
def _library_kernels() -> frozenset[str]:
    import executorch.kernels.quantized  # noqa: F401
    from executorch.extension.pybindings import portable_lib

    return frozenset(portable_lib._get_operator_names())


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
