"""Scratch memory of kernels: the last stage replaces ``arm_cortex_m`` by ``cortex_m`` operators, which take it."""

from __future__ import annotations

import torch
from executorch.exir import memory
from torch.fx import GraphModule, Node

from arm_backend_core.cortex_m.catalog import find_called_kernel
from arm_backend_core.cortex_m.kernels.registry import CASTS, Kernel
from arm_backend_core.cortex_m.operators import edge_operator
from arm_backend_core.targets.cortex_m import Isa


def insert_scratch(module: GraphModule, isa: Isa) -> None:
    """Replace the kernel operators of an edge program, in place. ``isa`` is the instruction set of the kernels."""
    for node in list(module.graph.nodes):
        kernel = find_called_kernel(node)
        if kernel is None or kernel.name in CASTS:
            continue  # edge programs have the casts as ``cortex_m`` operators already
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
