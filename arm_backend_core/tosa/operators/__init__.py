"""Records of all TOSA operators. Each module defines one family of operators."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import block_scaled, elementwise, movement, windows
from arm_backend_core.tosa.operators.record import LEVEL_8K, OPERATORS, Array, Operator

__all__ = ["ELEMENTWISE", "INJECTIVE_MOVEMENT", "LEVEL_8K", "OPERATORS", "UNARY", "Array", "Operator", "evaluate"]
_FAMILY_MODULES = (elementwise, movement, windows, block_scaled)

#: Operators of which each result element depends on one element of each operand, and no attribute names a dimension.
#: A per-channel RESCALE is one of them, although its multipliers belong to the last dimension.
ELEMENTWISE = frozenset(kind for kind, record in OPERATORS.items() if record.is_elementwise)
#: Elementwise operators with one operand.
UNARY = frozenset(kind for kind in ELEMENTWISE if len(OPERATORS[kind].rows[0].inputs) == 1)

#: Data movement of one operand that repeats no element, and adds none.
INJECTIVE_MOVEMENT = frozenset(kind for kind, record in OPERATORS.items() if record.is_injective)


def evaluate(op: Op, inputs: list[Array]) -> Array | None:
    """Evaluate ``op`` on these arrays, bit-exact for integers.

    Returns:
        The result. None if the record has no evaluation, if the result is undefined or depends on the target, or if an
        operator other than data movement has a BF16 operand or result.

    For an elementwise operator, the arrays may have other shapes than its operands. ``compose_tables`` passes all 256
    int8 values.
    """
    record = OPERATORS[op.kind]
    has_bf16 = DType.BF16 in (op.output.dtype, *(value.dtype for value in op.inputs))
    if record.compute is None or (has_bf16 and not record.is_data_movement):
        return None  # BF16 constants are stored as float32, so that numpy would not round results to BF16
    with np.errstate(all="ignore"):
        result = record.compute(op, *inputs)
    return None if result is None else np.asarray(result, dtype=op.output.dtype.numpy, order="C")
