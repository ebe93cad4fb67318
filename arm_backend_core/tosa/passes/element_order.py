"""Element order: the source index of each element after data movement, computed by moving an array of indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array, evaluate


def source_indices(x: Value, steps: Sequence[Op]) -> Array:
    """Compute the flat index in ``x`` of each element of the result of ``steps``.

    Args:
        x: the operand of the first step.
        steps: data-movement operators in execution order.
    """
    indices: Array = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for step in steps:
        moved = evaluate(replace(step, output=replace(step.output, dtype=DType.INT32)), [indices])
        assert moved is not None, step.kind
        indices = moved
    return indices


def restores_order(x: Value, steps: Sequence[Op]) -> bool:
    """Whether ``steps`` keep all elements of ``x`` in their order, so that their TRANSPOSEs cancel."""
    return np.array_equal(source_indices(x, steps).ravel(), np.arange(x.size))
