"""Element order: where data movement takes each element from, by moving the indices of the elements themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array, evaluate


def source_indices(x: Value, steps: Sequence[Op]) -> Array:
    """Compute for each element of the result of ``steps`` its flat index in ``x``."""
    indices: Array = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for step in steps:
        moved_on = evaluate(replace(step, output=replace(step.output, dtype=DType.INT32)), [indices])
        assert moved_on is not None, step.kind
        indices = moved_on
    return indices


def restores_order(x: Value, steps: Sequence[Op]) -> bool:
    """Whether the result of ``steps`` has all elements of ``x`` in the same order: its TRANSPOSEs cancel."""
    return np.array_equal(source_indices(x, steps).ravel(), np.arange(x.size))
