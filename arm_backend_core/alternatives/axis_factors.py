"""Axis splitting: trace how RESHAPE and TRANSPOSE move factors of dimensions.

For example, a RESHAPE from [6, C] to [2, 3, C] splits the first dimension into factors of 2 and 3 (MLIR's
``expand_shape``; the opposite is ``collapse_shape``).
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

    For example, a RESHAPE of dimension 0 from [6] to [2, 3] gives AxisFactor(0, 3, 2) and AxisFactor(0, 1, 3).

    Attributes:
        axis: the dimension of the source tensor.
        stride: distance along ``axis`` between neighbouring elements of the factor.
        size: number of elements of the factor.
    """

    axis: int
    stride: int
    size: int


def collect_data_movement(op: Op, rewriter: Rewriter) -> list[Op]:
    """Collect the RESHAPEs and TRANSPOSEs directly before ``op``, and ``op`` itself, in execution order.

    The search stops at a result with several uses.
    """
    _, moves = trace_back(
        op.inputs[0], lambda before: before.kind in MOVEMENT_KINDS and rewriter.has_one_use(before.output)
    )
    return [*moves, op]


def trace_axis_factors(shape: Sequence[int], moves: Sequence[Op]) -> list[AxisFactor] | None:
    """Trace the dimensions of a tensor of shape ``shape`` through the TRANSPOSEs in ``moves``.

    RESHAPEs only group factors differently, and keep their order.

    Returns:
        The factors of the dimensions in their order after ``moves``. None if ``group_by_dimension`` cannot distribute
        the factors over the dimensions of a TRANSPOSE's operand.
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
    """Distribute factors over the dimensions of ``shape``. A factor is split if a dimension ends within it.

    Returns:
        The factors of each dimension. None if a dimension and a factor in it have sizes of which neither divides the
        other. Example: factors of sizes 4 and 6 do not fit the shape [6, 4].
    """
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
