"""Copies that Vela does not remove, and workarounds that insert them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.vela_workarounds.workaround import Workaround
from arm_backend_core.workers.vela import SUPPORTED_RELEASES, Release


def broadcast_constant(x: Value, number: int, dtype: DType, b: Builder) -> Value:
    """Create a constant of one element that broadcasts to ``x``."""
    return b.const(np.full((1,) * x.rank, number), dtype)


def emit_copy(x: Value, b: Builder, multiples: Sequence[int] = ()) -> Value:
    """Emit a copy of ``x`` that Vela does not remove: x * 1, or LOGICAL_OR(x, x) for booleans.

    Vela compiles the copy to an operation that can read a slice and write a part of a tensor. Vela would remove an
    IDENTITY. Vela estimates 1.1 to 1.5 cycles per element for a CLAMP, and 0.25 (U85) to 1 (U55) for this product.

    Args:
        x: the tensor.
        b: emits the operators.
        multiples: repeat counts of the dimensions, as in a TILE. Only dimensions of size 1 can be repeated, because the
            product broadcasts them. It is ignored for booleans. By default, no dimension is repeated.
    """
    if x.dtype is DType.BOOL:
        return b.binary("LOGICAL_OR", x, x)
    product = b.mul(x, b.const(np.ones(multiples or (1,) * x.rank), x.dtype))
    return product if x.dtype is DType.INT32 else b.rescale(product, x.dtype, 1.0)


def emit_scaled_by_almost_one(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit a RESCALE with scale 1 + 2**-30 instead of 1. Vela removes or merges a scale of 1, but not this scale.

    The result is the same if the result type has at most 29 bits: round(x * (1 + 2**-30)) = x for abs(x) < 2**29, and
    larger values are clipped. The operand must not be int48: its multiplier of 15 bits cannot hold this scale.
    """
    attrs = {**op.attrs, "multiplier": np.array([(1 << 30) + 1], np.int32), "shift": np.array([30], np.int8)}
    return rewriter.builder.emit("RESCALE", op.inputs, op.output.dtype, **attrs)


def copy_result(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the operator again and copy its result."""
    b = rewriter.builder
    return emit_copy(b.emit(op.kind, op.inputs, op.output.dtype, **op.attrs), b)


def copy_operands_where(
    name: str,
    kinds: tuple[str, ...],
    is_miscompiled: Callable[[Op, Value, Rewriter], bool],
    releases: tuple[Release, ...] = SUPPORTED_RELEASES,
) -> Workaround[list[int]]:
    """Create a workaround that copies each operand for which ``is_miscompiled`` is true.

    Args:
        is_miscompiled: returns whether Vela miscompiles the read of an operand. Its arguments are the operator, the
            operand and the rewriter.
    """
    return Workaround(name, kinds, partial(_find_operands, is_miscompiled), _copy_operands, releases=releases)


def _find_operands(is_miscompiled: Callable[[Op, Value, Rewriter], bool], op: Op, rewriter: Rewriter) -> list[int]:
    return [i for i, value in enumerate(op.inputs) if is_miscompiled(op, value, rewriter)]


def _copy_operands(op: Op, operands: Sequence[int], rewriter: Rewriter) -> Value:
    inputs = [emit_copy(value, rewriter.builder) if i in operands else value for i, value in enumerate(op.inputs)]
    return rewriter.builder.emit(op.kind, inputs, op.output.dtype, **op.attrs)
