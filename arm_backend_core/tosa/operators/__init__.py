"""Records of all TOSA operators. Each module defines one family of operators."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import block_scaled, elementwise, movement, windows
from arm_backend_core.tosa.operators.record import LEVEL_8K, OPERATORS, Array, Operator

__all__ = ["ELEMENTWISE", "INJECTIVE_MOVEMENT", "LEVEL_8K", "OPERATORS", "UNARY", "Array", "Operator"]
__all__ += ["evaluate", "find_monotonic_range"]
_FAMILY_MODULES = (elementwise, movement, windows, block_scaled)

#: Operators whose result elements each depend on one element of each operand, and whose attributes name no dimension.
#: RESCALE is included, although the multipliers of a per-channel RESCALE belong to the last dimension.
ELEMENTWISE = frozenset(kind for kind, record in OPERATORS.items() if record.is_elementwise)
#: Elementwise operators with one operand.
UNARY = frozenset(kind for kind in ELEMENTWISE if len(OPERATORS[kind].rows[0].inputs) == 1)

#: Data movement of one operand that neither repeats elements nor adds new ones; it may drop elements (SLICE).
INJECTIVE_MOVEMENT = frozenset(kind for kind, record in OPERATORS.items() if record.is_injective)


def evaluate(op: Op, inputs: list[Array]) -> Array | None:
    """Evaluate ``op`` on these arrays, bit-exact for integers.

    The arrays for an elementwise operator may have other shapes than its operands. For example, ``compose_tables``
    passes an array of all 256 int8 values.

    Returns:
        The result. None if the record has no ``compute``, if the result is undefined or depends on the target, or if an
        operator other than data movement has a BF16 operand or result.
    """
    record = OPERATORS[op.kind]
    has_bf16 = DType.BF16 in (op.output.dtype, *(value.dtype for value in op.inputs))
    if record.compute is None or (has_bf16 and not record.is_data_movement):
        return None  # BF16 constants are stored as float32, so that numpy would not round results to BF16
    with np.errstate(all="ignore"):
        result = record.compute(op, *inputs)
    return None if result is None else np.asarray(result, dtype=op.output.dtype.numpy, order="C")


def find_monotonic_range(op: Op, low: int, high: int) -> tuple[int, int] | None:
    """Range of a monotonic function of one integer operand, from the function's values at ``low`` and ``high``.

    Returns:
        The smallest and the largest result. None for a RESCALE per channel or of unsigned integers, or if ``evaluate``
        returns None.
    """
    if op.attrs.get("per_channel") or op.attrs.get("input_unsigned"):
        return None
    ends = evaluate(op, [np.array((low, high), dtype=op.inputs[0].dtype.numpy)])
    return None if ends is None else (int(ends.min()), int(ends.max()))
