"""Constant folding: evaluate operators whose operands are all constant."""

from __future__ import annotations

import numpy as np

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import OPERATORS, evaluate
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule

#: Limit in bytes for a folded constant that is larger than its operands: on an Ethos-U, it is stored in flash.
GROWTH_LIMIT = 64 * 1024


def fold(op: Op, rewriter: Rewriter) -> Value | None:
    """Evaluate ``op`` at compile time, unless its result is larger than its operands and than ``GROWTH_LIMIT``.

    A RESCALE that widens a constant for an operator on another tensor is kept: an NPU fuses it into that operator. An
    INT32 operand would take two passes (Vela 5.1, int8 [1, 512, 128] times a constant [128]: 344,064 cycles against
    65,536 on U55-128, 204,498 against 19,016 on U85-256).
    """
    arrays = [value.data for value in op.inputs if value.data is not None]
    if len(arrays) != len(op.inputs) or not arrays:
        return None
    size = op.output.size * op.output.dtype.numpy.itemsize
    stored = sum(array.nbytes for array in arrays)
    if size > max(GROWTH_LIMIT, stored) or (
        op.kind == "RESCALE" and size > stored and _is_fused_by_readers(op, rewriter)
    ):
        return None
    result = evaluate(op, arrays)
    return None if result is None else Value(op.output.shape, op.output.dtype, op.output.name, result)


def _is_fused_by_readers(op: Op, rewriter: Rewriter) -> bool:
    """Whether every reader of a constant has another operand that is not constant."""
    readers = rewriter.users(op.output) or []
    others = [[v for v in reader.inputs if v is not op.output and v.data is None] for reader in readers]
    return bool(others) and all(others)


def fold_padding_only(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a convolution whose windows read only padding by its bias. Vela drops the input of such a program."""
    weight, bias = op.inputs[1], op.inputs[2]
    if bias.data is None or (op.output.dtype.is_float and (weight.data is None or not np.isfinite(weight.data).all())):
        return None
    if all(any(map(axis.overlaps_input, range(axis.out))) for axis in window_axes(op)):
        return None
    return rewriter.build.const(np.broadcast_to(bias.data, op.output.shape), op.output.dtype)


RULES: dict[str, list[Rule]] = {kind: [fold] for kind in OPERATORS}
for _kind in ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D"):
    RULES[_kind].append(fold_padding_only)
