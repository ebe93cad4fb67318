"""One record for each TOSA operator, by family."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import block_scaled, elementwise, movement, windows
from arm_backend_core.tosa.operators.record import LEVEL_8K, OPERATORS, Array, Operator

__all__ = ["ELEMENTWISE", "LEVEL_8K", "OPERATORS", "UNARY", "Array", "Operator", "evaluate"]
_FAMILIES = (elementwise, movement, windows, block_scaled)

#: Every element of the result depends on one element of each operand; attributes do not name dimensions.
ELEMENTWISE = frozenset(kind for kind, record in OPERATORS.items() if record.elementwise)
#: Those of one operand.
UNARY = frozenset(kind for kind in ELEMENTWISE if len(OPERATORS[kind].rows[0].inputs) == 1)


def evaluate(op: Op, inputs: list[Array]) -> Array | None:
    """Result of ``op`` on these arrays, exact to the bit on integers; None when its record does not compute it.

    An elementwise operator takes arrays of other shapes than ``op`` has: a table is evaluated on its grid.
    """
    record = OPERATORS[op.kind]
    brain = DType.BF16 in (op.output.dtype, *(value.dtype for value in op.inputs))
    if record.compute is None or (brain and not record.moves and op.kind != "IDENTITY"):
        return None  # a BF16 constant is kept in float32: arithmetic here would not round it
    with np.errstate(all="ignore"):
        result = record.compute(op, *inputs)
    return None if result is None else np.asarray(result, dtype=op.output.dtype.numpy, order="C")
