"""Checks during lowering: shapes are static and not empty, and results match PyTorch's fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from arm_backend_core.errors import Unsupported, compiler_fault
from arm_backend_core.fusion.univariate import Univariate
from arm_backend_core.nodes import first_result, operator_name
from arm_backend_core.ops.operands import Operand, to_tosa_dtype
from arm_backend_core.scalar_kind import ScalarKind, kind_of

#: Result of lowering a node.
LoweringResult = Operand | Univariate | list[Any] | Unsupported


def check_result(node: Node, result: LoweringResult) -> LoweringResult:
    """Check number, shape and dtype of the results against the node's fake tensors; returns ``result``.

    Raises:
        Fault: they differ.
    """
    meta = node.meta.get("val")
    is_multiple = isinstance(meta, (list, tuple))
    results, expected = (x if isinstance(x, (list, tuple)) else [x] for x in (result, meta))
    if len(results) != len(expected) or isinstance(result, list) != is_multiple:
        raise compiler_fault(f"{operator_name(node)} was lowered to {len(results)} results in place of {len(expected)}")
    for item, fake in zip(results, expected, strict=True):
        if isinstance(fake, torch.Tensor) and not isinstance(item, Unsupported) and not _matches_meta(item, fake):
            actual = f"{item.base.value if isinstance(item, Univariate) else item.value}"
            raise compiler_fault(
                f"{operator_name(node)} was lowered to {actual} in place of {fake.dtype}{list(fake.shape)}"
            )
    return result


def _matches_meta(item: Operand | Univariate, meta: torch.Tensor) -> bool:
    """Whether a result has the shape and type of ``meta``. For a quantized result, ``meta`` is floating point."""
    tensor = item.base if isinstance(item, Univariate) else item
    if tensor.shape != tuple(meta.shape):
        return False
    if tensor.q is not None:
        return tensor.value.dtype is tensor.q.dtype and kind_of(meta.dtype) is ScalarKind.FLOAT
    return tensor.value.dtype is to_tosa_dtype(meta.dtype)


def require_static(node: Node) -> None:
    """Check that ``node``'s (first) result has a static, non-empty shape.

    Raises:
        Unsupported: a dimension is unknown at compile time, or 0.
    """
    first = first_result(node)
    shape = () if first is None else tuple(first.shape)
    if not all(isinstance(size, int) for size in shape):
        raise Unsupported(
            f"'{node.name}' has the shape {list(shape)}, which is not known before the program runs; the target is "
            "compiled for fixed shapes: export without dynamic_shapes, and select with torch.where instead of indexing"
        )
    if 0 in shape:
        raise Unsupported("TOSA has no tensors without elements")
