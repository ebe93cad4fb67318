"""Library kernels: replace ``arm_cortex_m`` operators by ExecuTorch's ``cortex_m`` operators with scratch buffers.

The buffers are ``memory.alloc`` nodes, for which ExecuTorch's memory planning reserves memory. This is the last step of
the lowering to Cortex-M kernels.
"""

from __future__ import annotations

import torch
from executorch.exir import memory
from torch.fx import GraphModule, Node

from arm_backend_core.cortex_m.catalog import find_called_kernel
from arm_backend_core.cortex_m.custom_ops import edge_operator
from arm_backend_core.cortex_m.kernels.registry import QUANTIZE_OPERATORS, Kernel
from arm_backend_core.targets.cortex_m import Isa


def lower_to_library_kernels(module: GraphModule, isa: Isa) -> None:
    """Replace the ``arm_cortex_m`` operators of an edge program, in place. ``isa``: instruction set of the kernels."""
    for node in list(module.graph.nodes):
        kernel = find_called_kernel(node)
        if kernel is None or kernel.name in QUANTIZE_OPERATORS:
            continue  # quantize and dequantize are ``cortex_m`` operators already
        sizes = _scratch_sizes(node, kernel, isa)
        node.target = edge_operator(kernel.name)
        node.args = (*node.args, *(_allocate(node, size) for size in sizes))
    module.recompile()


def _scratch_sizes(node: Node, kernel: Kernel, isa: Isa) -> tuple[int, ...]:
    shapes = torch.fx.map_arg(node.args, lambda x: tuple(x.meta["val"].shape))
    return kernel.scratch_bytes(isa, *shapes)


def _allocate(node: Node, size: int) -> Node:
    with node.graph.inserting_before(node):
        scratch = node.graph.call_function(memory.alloc, (((size,), torch.uint8),))
    scratch.meta["val"] = node.meta["val"].new_empty((size,), dtype=torch.uint8)
    return scratch
