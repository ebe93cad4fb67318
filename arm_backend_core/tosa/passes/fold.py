"""Operators whose operands are all constant become constants."""

from __future__ import annotations

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import OPERATORS, evaluate
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule

#: A constant may grow past its operands up to this many bytes: storage is flash on an Ethos-U.
GROWTH_LIMIT = 64 * 1024
#: Above this size, widening a constant where it is read is cheaper than to store it wide.
WIDENED_LIMIT = 1024


def fold(op: Op, rewriter: Rewriter) -> Value | None:
    """Evaluate ``op`` now; not when the result takes more storage than its operands and ``GROWTH_LIMIT``.

    For a RESCALE, which only widens what is stored, that is ``WIDENED_LIMIT``.
    """
    arrays = [value.data for value in op.inputs if value.data is not None]
    if len(arrays) != len(op.inputs) or not arrays:
        return None
    size = op.output.size * op.output.dtype.numpy.itemsize
    limit = WIDENED_LIMIT if op.kind == "RESCALE" else GROWTH_LIMIT
    if size > max(limit, sum(array.nbytes for array in arrays)):
        return None
    result = evaluate(op, arrays)
    return None if result is None else Value(op.output.shape, op.output.dtype, op.output.name, result)


RULES: dict[str, list[Rule]] = {kind: [fold] for kind in OPERATORS}
