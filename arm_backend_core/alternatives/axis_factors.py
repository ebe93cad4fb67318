"""Axis splitting: trace how RESHAPE and TRANSPOSE move factors of dimensions.

For example, a RESHAPE from [6, C] to [2, 3, C] splits the first dimension into factors of 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back

#: Data-movement operators that are traced.
MOVEMENT_KINDS = ("RESHAPE", "TRANSPOSE")


class AxisFactor(NamedTuple):
    """A factor of a dimension of the source tensor.

    Attributes:
        axis: the dimension.
        stride: distance of neighbouring elements of the factor along ``axis``.
        size: number of elements.
    """

    axis: int
    stride: int
    size: int


def collect_data_movement(op: Op, rewriter: Rewriter) -> list[Op]:
    """Collect the RESHAPEs and TRANSPOSEs directly before ``op``, followed by ``op`` itself.

    The first operator of the list comes first in the graph. An operator before ``op`` is collected only if its result
    has one use.
    """
    _, moves = trace_back(
        op.inputs[0], lambda before: before.kind in MOVEMENT_KINDS and rewriter.has_one_use(before.output)
    )
    return [*moves, op]


def trace_axis_factors(shape: Sequence[int], moves: Sequence[Op]) -> list[AxisFactor] | None:
    """Trace the dimensions of a tensor of shape ``shape`` through the TRANSPOSEs in ``moves``.

    Returns:
        The factors of the dimensions in their order after ``moves``. None if a dimension of a TRANSPOSE's
        operand is not a product of factors.
    """
    factors = [AxisFactor(axis, 1, size) for axis, size in enumerate(shape) if size != 1]
    for op in moves:
        if op.kind == "TRANSPOSE":
            parts = group_by_dimension(factors, op.inputs[0].shape)
            if parts is None:
                return None
            factors = [factor for axis in op.attrs["perms"] for factor in parts[axis]]
    return factors


def group_by_dimension(factors: Sequence[AxisFactor], shape: Sequence[int]) -> list[list[AxisFactor]] | None:
    """Distribute factors over the dimensions of ``shape``; split a factor if needed; None if this is impossible."""
    pending, groups = [*factors][::-1], list[list[AxisFactor]]()
    for size in shape:
        group, remaining = list[AxisFactor](), size
        while remaining > 1:
            factor = pending.pop()
            common_size = gcd(remaining, factor.size)
            inner = factor.size // common_size
            if common_size not in (remaining, factor.size):
                return None
            if inner > 1:
                pending.append(factor._replace(size=inner))
            group.append(factor._replace(stride=factor.stride * inner, size=common_size))
            remaining //= common_size
        groups.append(group)
    return groups


def sort_factors(factors: list[AxisFactor]) -> list[AxisFactor]:
    """Sort factors by their order in the source tensor."""
    return sorted(factors, key=lambda factor: (factor.axis, -factor.stride))
