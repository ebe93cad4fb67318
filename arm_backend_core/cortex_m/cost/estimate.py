"""Estimate of the CPU cycles of a node of a lowered program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from arm_backend_core.cortex_m.catalog import find_called_kernel
from arm_backend_core.cortex_m.cost.kernels import kernel_work
from arm_backend_core.cortex_m.cost.portable_kernels import operator_work
from arm_backend_core.cortex_m.cost.processors import to_cycles
from arm_backend_core.cortex_m.kernels.registry import Shape
from arm_backend_core.nodes import operator_name
from arm_backend_core.targets.cortex_m import Processor


@dataclass(frozen=True)
class CpuEstimate:
    """Estimate for one call of an operator.

    Attributes:
        cycles: CPU cycles.
        macs: multiply-accumulates.
        bytes_read: bytes of the operands, constants included, each counted once.
        bytes_written: bytes of the results.
    """

    cycles: int
    macs: int
    bytes_read: int
    bytes_written: int


def estimate_node(node: Node, processor: Processor) -> CpuEstimate:
    """Estimate a call of an operator that the CPU runs, with a ``cortex_m`` kernel or a portable kernel."""
    kernel = find_called_kernel(node)
    if kernel is not None:
        arguments = torch.fx.map_arg(node.args, lambda operand: _shape(operand))
        work = kernel_work(kernel.name, processor, arguments)
    else:
        name = operator_name(node).removeprefix("aten.").split(".")[0]
        work = operator_work(name, processor, _shape(node), [_shape(operand) for operand in _operands(node)])
    read = sum(_bytes(operand) for operand in _operands(node))
    return CpuEstimate(to_cycles(processor, work.instructions), work.macs, read, _bytes(node))


def _operands(node: Node) -> list[Node]:
    """The tensors that a node reads, without its scratch memory."""
    from executorch.exir import memory

    return [source for source in node.all_input_nodes if source.target is not memory.alloc and _tensors(source)]


def _tensors(node: Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, torch.Tensor)]


def _shape(node: Node) -> Shape:
    tensors = _tensors(node)
    return _largest_shape(tensors[0]) if tensors else ()


def _largest_shape(tensor: torch.Tensor) -> Shape:
    """The shape of a tensor. The upper bound replaces a size that depends on data, as in ExecuTorch's memory plan."""
    from executorch.exir.sym_util import eval_upper_bound

    return tuple(map(eval_upper_bound, tensor.shape))


def _bytes(node: Node) -> int:
    return sum(math.prod(_largest_shape(tensor)) * tensor.element_size() for tensor in _tensors(node))
