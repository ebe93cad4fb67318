"""Constant folding: evaluate operators whose operands are all constant."""

from __future__ import annotations

import numpy as np

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import OPERATORS, evaluate
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule

#: Maximum size, in bytes, of a folded constant that is larger than its operands. It is limited because constants are
#: stored in flash on most systems with an Ethos-U.
MAX_GROWN_BYTES = 64 * 1024


def fold_constants(op: Op, rewriter: Rewriter) -> Value | None:
    """Evaluate ``op`` at compile time, unless the result is larger than its operands and than ``MAX_GROWN_BYTES``.

    A RESCALE that widens a constant is kept if each reader has an operand that is not constant. An NPU fuses the
    RESCALE into the reader. With the folded INT32 constant, the reader takes two NPU passes. Example: int8
    [1, 512, 128] times a constant [128]. Vela 5.1 estimates 344,064 cycles with the INT32 constant and 65,536 with the
    RESCALE on U55-128; on U85-256, 204,498 and 19,016.
    """
    arrays = [value.data for value in op.inputs if value.data is not None]
    if len(arrays) != len(op.inputs) or not arrays:
        return None
    result_bytes = op.output.size * op.output.dtype.numpy.itemsize
    operand_bytes = sum(array.nbytes for array in arrays)
    if result_bytes > max(MAX_GROWN_BYTES, operand_bytes) or (
        op.kind == "RESCALE" and result_bytes > operand_bytes and _is_fused_by_readers(op, rewriter)
    ):
        return None
    result = evaluate(op, arrays)
    return None if result is None else Value(op.output.shape, op.output.dtype, op.output.name, result)


def _is_fused_by_readers(op: Op, rewriter: Rewriter) -> bool:
    """Whether every reader of ``op`` has another operand that is not constant."""
    readers = rewriter.users(op.output) or []
    others = [[v for v in reader.inputs if v is not op.output and v.data is None] for reader in readers]
    return bool(others) and all(others)


def fold_convolution_of_padding(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a convolution by its bias if all its windows read only padding.

    Vela would drop the input of a program with such a convolution.
    """
    weight, bias = op.inputs[1], op.inputs[2]
    if bias.data is None or (op.output.dtype.is_float and (weight.data is None or not np.isfinite(weight.data).all())):
        return None
    if all(any(map(axis.overlaps_input, range(axis.output_size))) for axis in window_axes(op)):
        return None
    return rewriter.builder.const(np.broadcast_to(bias.data, op.output.shape), op.output.dtype)


RULES: dict[str, list[RewriteRule]] = {kind: [fold_constants] for kind in OPERATORS}
for _kind in ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D"):
    RULES[_kind].append(fold_convolution_of_padding)
