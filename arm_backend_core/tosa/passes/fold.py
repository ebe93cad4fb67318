"""Operators whose operands are all constant become constants."""

from __future__ import annotations

from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import OPERATORS, evaluate
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule

#: A constant may grow past its operands up to this many bytes: storage is flash on an Ethos-U.
GROWTH_LIMIT = 64 * 1024


def fold(op: Op, rewriter: Rewriter) -> Value | None:
    """Evaluate ``op`` now; not when the result takes more storage than its operands and ``GROWTH_LIMIT``."""
    arrays = [value.data for value in op.inputs if value.data is not None]
    if len(arrays) != len(op.inputs) or not arrays:
        return None
    size = op.output.size * op.output.dtype.numpy.itemsize
    if size > max(GROWTH_LIMIT, sum(array.nbytes for array in arrays)):
        return None
    result = evaluate(op, arrays)
    return None if result is None else Value(op.output.shape, op.output.dtype, op.output.name, result)


RULES: dict[str, list[Rule]] = {kind: [fold] for kind in OPERATORS}
