"""Fusion rules: the conditions under which one integer operator computes several operators.

The rules apply to a float graph and to a graph with quantize and dequantize operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import Node

from arm_backend_core.nodes import is_quantize, overload_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Record
from arm_backend_core.qparams import QParams

aten = torch.ops.aten
Base = TypeVar("Base")


def find_fusible_consumer(node: Node) -> Node | None:
    """The only consumer of ``node``, if it is a clamp or a multiplication by a positive number; else None.

    This consumer can be fused into the RESCALE that requantizes the result of ``node``.
    """
    users = list(node.users)
    record = find_record(users[0]) if len(users) == 1 else None
    if record is None or not users[0].args or users[0].args[0] is not node:
        return None
    return users[0] if record.clamp_bounds is not None or get_scale_factor(users[0], record) is not None else None


def find_consumer_fused_into_accumulator(node: Node) -> Node | None:
    """The fusible consumer of ``node``, if the operator of ``node`` requantizes an accumulator; else None."""
    record = find_record(node)
    return find_fusible_consumer(node) if record is not None and record.absorbs_activation else None


def find_fused_consumers(node: Node) -> list[Node] | None:
    """The consumers that are fused into the requantization of ``node``, in execution order; usually none or one.

    Returns:
        The consumers. None if the last result of this sequence (the result of ``node``, if no consumer is fused) has no
        reader, or a reader that is not a quantize operator.
    """
    consumers: list[Node] = []
    while not node.users or not all(is_quantize(user) for user in node.users):
        consumer = find_fusible_consumer(node)
        if consumer is None:
            return None
        consumers.append(node := consumer)
    return consumers


def find_common_base(
    node: Node, record: Record, bases: Iterable[Base], shape: Callable[[Base], Iterable[Any]]
) -> Base | None:
    """The one tensor that ``node`` is an elementwise function of; None if there is no such tensor.

    Args:
        node: the operator.
        record: its record.
        bases: one entry for each operand that is not a scalar: the tensor that the operand is a function of, or the
            operand itself.
        shape: returns the shape of a base.
    """
    distinct = set(bases)
    if not record.is_univariate or len(distinct) != 1:
        return None
    (base,) = distinct
    return base if tuple(shape(base)) == tuple(node.meta["val"].shape) else None


def is_summed_product(node: Node) -> bool:
    """Whether ``node`` is a product with a single reader, which is an addition or subtraction.

    If its operands are int16 and the program does not quantize the product, the sum reads the exact INT32 product.
    ``FusionPlan`` omits the quantize operator of such products in recurrent layers only.
    """
    targets = [overload_of(x.target) for x in (node, *node.users)]
    return targets[0] is aten.mul.Tensor and len(targets) == 2 and targets[1] in (aten.add.Tensor, aten.sub.Tensor)


def infer_operand_qparams(consumer: Node, q: QParams) -> QParams:
    """Quantization parameters of a fusible consumer's operand, given the parameters ``q`` of its result."""
    record = find_record(consumer)
    factor = None if record is None or record.clamp_bounds is not None else get_scale_factor(consumer, record)
    return q if factor is None else replace(q, scale=float(q.scale) * (1 / factor))


def get_scale_factor(node: Node, record: Record) -> float | None:
    """The positive c if ``node`` computes c * (first operand); None if it computes anything else."""
    return record.scale_factor(*node.args, **node.kwargs) if record.scale_factor is not None else None
