"""Fusion rules: the conditions under which operators are computed as one.

They hold for a float graph and for a graph with quantize and dequantize operators alike.
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


def fusible_consumer(node: Node) -> Node | None:
    """The only consumer of ``node``, if it is a clamp or a product with a positive number; else None.

    Such a consumer merges into the RESCALE that requantizes the producer's accumulator.
    """
    users = list(node.users)
    record = find_record(users[0]) if len(users) == 1 else None
    if record is None or not users[0].args or users[0].args[0] is not node:
        return None
    return users[0] if record.clamp_bounds is not None or factor_of(users[0], record) is not None else None


def absorbed_consumer(node: Node) -> Node | None:
    """The fusible consumer of ``node``, if the operator of ``node`` requantizes an accumulator; else None."""
    record = find_record(node)
    return fusible_consumer(node) if record is not None and record.absorbs_activation else None


def find_merged_consumers(node: Node) -> list[Node] | None:
    """The consumers that merge into the requantization of ``node``, in order; usually none or one.

    Returns:
        None unless all readers of the last one, or of ``node`` if there is none, are quantize operators.
    """
    consumers: list[Node] = []
    while not node.users or not all(is_quantize(user) for user in node.users):
        consumer = fusible_consumer(node)
        if consumer is None:
            return None
        consumers.append(node := consumer)
    return consumers


def common_base(
    node: Node, record: Record, bases: Iterable[Base], shape: Callable[[Base], Iterable[Any]]
) -> Base | None:
    """The one tensor that ``node`` is an elementwise function of; None if there is no such tensor.

    Args:
        node: the operator.
        record: its record.
        bases: for each operand that is not a number, the tensor that it is, or is a function of.
        shape: returns the shape of a base.
    """
    distinct = set(bases)
    if not record.univariate or len(distinct) != 1:
        return None
    (base,) = distinct
    return base if tuple(shape(base)) == tuple(node.meta["val"].shape) else None


def is_summed_product(node: Node) -> bool:
    """Whether ``node`` is a product that only a sum reads; of int16 operands, the sum adds it unrounded in INT32."""
    targets = [overload_of(x.target) for x in (node, *node.users)]
    return targets[0] is aten.mul.Tensor and len(targets) == 2 and targets[1] in (aten.add.Tensor, aten.sub.Tensor)


def qparams_before_consumer(reader: Node, q: QParams) -> QParams:
    """Quantization parameters of a fusible consumer's operand, given those of its result, ``q``."""
    record = find_record(reader)
    factor = None if record is None or record.clamp_bounds is not None else factor_of(reader, record)
    return q if factor is None else replace(q, scale=float(q.scale) * (1 / factor))


def factor_of(node: Node, record: Record) -> float | None:
    """The positive number that ``node`` multiplies its first operand by; None if it does anything else."""
    return record.scale_factor(*node.args, **node.kwargs) if record.scale_factor is not None else None
