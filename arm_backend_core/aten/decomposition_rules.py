"""Decomposition rules: which operators are decomposed, and by which function.

The decomposition of a ``Composite`` record takes precedence over PyTorch's decomposition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.aten import complex_numbers
from arm_backend_core.nodes import KEEP_COMPOSITE, is_composite_implicit
from arm_backend_core.ops.catalog import find_composite, find_record
from arm_backend_core.ops.composites import computed_weights
from arm_backend_core.ops.composites.arithmetic import matmul_of_empty_inner_dimension

aten = torch.ops.aten


def needs_decomposition(node: Node, constants: Container[Node]) -> bool:
    """Whether ``node`` must be decomposed: it has no operator record that supports its operands."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or KEEP_COMPOSITE in node.meta:
        return False
    if node.target.namespace != "aten":
        return find_composite(node) is not None or is_composite_implicit(node.target)
    if _is_empty(node):  # targets have no empty tensors, and the CPU has no kernels for composites
        return find_record(node) is None
    if node.target is aten.view_as_complex.default:
        return False
    lacks_lowering = find_record(node) is None or complex_numbers.involves_complex(node)
    return lacks_lowering or _reduces_zero_elements(node) or _has_computed_weight(node, constants)


def find_decomposition(node: Node, constants: Container[Node], *, quantized: bool) -> Callable[..., Any] | None:
    """Find the function that decomposes ``node`` and takes the node's arguments; None if there is none.

    Args:
        node: a node that ``needs_decomposition``.
        constants: nodes that are constant.
        quantized: whether the program is going to be quantized.
    """
    overload = cast(OpOverload, node.target)
    if _is_empty(node):
        return lambda *_, **__: pytree.tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), node.meta["val"])
    if _reduces_zero_elements(node):
        return partial(matmul_of_empty_inner_dimension, node.meta["val"].shape)
    if _has_computed_weight(node, constants):
        return computed_weights.DYNAMIC_WEIGHT_DECOMPOSITIONS[overload][1]
    record = find_composite(node)
    if record is not None:
        return partial(record.decompose, quantized=quantized) if record.takes_quantized else record.decompose
    if overload in torch._decomp.decomposition_table:
        return torch._decomp.decomposition_table[overload]
    return overload.decompose if is_composite_implicit(overload) else None


def _is_empty(node: Node) -> bool:
    """Whether every result has zero elements."""
    shapes = [x.shape for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return bool(shapes) and all(all(isinstance(size, int) for size in shape) and 0 in shape for shape in shapes)


def _reduces_zero_elements(node: Node) -> bool:
    """Whether ``node`` is a matrix product with an inner dimension of size 0, whose result no kernel would write."""
    if node.target not in (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default):
        return False
    left = cast(Node, node.args[0]).meta["val"]
    return left.dim() > 0 and left.shape[-1] == 0 and node.meta["val"].numel() > 0


def _has_computed_weight(node: Node, constants: Container[Node]) -> bool:
    """Whether a weight that must be constant (for a norm, also the bias) is computed at run time.

    Also true for a linear layer whose weight is a vector, and for 3-D transposed convolutions.
    """
    if node.target not in computed_weights.DYNAMIC_WEIGHT_DECOMPOSITIONS:
        return False
    weight_arguments, _ = computed_weights.DYNAMIC_WEIGHT_DECOMPOSITIONS[node.target]
    if node.target is aten.convolution.default and node.args[6] and node.meta["val"].dim() > 4:
        return True  # 3-D transposed convolution, which the rule for images does not support
    weights = [weight for weight in node.args[weight_arguments] if isinstance(weight, Node)]
    is_vector = node.target is aten.linear.default and any(weight.meta["val"].dim() == 1 for weight in weights)
    return is_vector or any(weight not in constants for weight in weights)


def uses_pytorch_decomposition(node: Node) -> bool:
    """Whether the decomposition comes from PyTorch's table.

    The operators in this table have CPU kernels. Such an operator is decomposed only if all operators of its
    decomposition can be lowered. Otherwise, the decomposition would be slower on the CPU than the operator itself, and
    might contain operators without a CPU kernel.
    """
    return find_composite(node) is None and node.target in torch._decomp.decomposition_table


def is_lowerable(node: Node, constants: Container[Node]) -> bool:
    """Whether ``node`` has an operator record or needs none."""
    return (
        node.op != "call_function"
        or node in constants
        or node.target is operator.getitem
        or find_record(node) is not None
    )
