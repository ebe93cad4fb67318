"""The few largest or smallest elements along a dimension. TOSA sorts nothing: each is searched for in what is left."""

from __future__ import annotations

import math

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.reduction import vector
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
_MOST = 5  #: each costs eight operators on the whole tensor; more are left to the CPU, which looks at it once


@op(aten.topk.default, kind=Kind.SHARED)
def topk(cx: Context, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Tensor]:
    """Values and int32 indices in order, of equal elements the first; not a number counts as the largest."""
    b, shape, x = cx.b, cx.shape, vector(cx, x)
    axis, n = dim % x.rank, x.shape[dim]
    if k > _MOST:
        raise Unsupported(f"topk of {k} elements ({_MOST} at most); take fewer, or leave it to the CPU")
    number = DType.INT32 if cx.target.integer else DType.FP32  # the FP profile compares no integers
    places = b.const(np.arange(n).reshape([n if i == axis else 1 for i in range(x.rank)]), number)
    left = b.const(np.ones((1,) * x.rank, dtype=bool), DType.BOOL)
    elements = x.value if x.value.dtype.is_float else b.cast(x.value, DType.INT32)  # all that EQUAL takes
    values, indices = [], []
    for _ in range(k):
        value, hits = _extreme(b, elements, left, axis, largest=largest)
        index = b.reduce("REDUCE_MIN", b.select(hits, places, b.const(n, number)), axis)
        left = b.bitwise("LOGICAL_AND", left, b.unary("LOGICAL_NOT", b.compare("EQUAL", places, index)))
        values.append(value)
        indices.append(index)
    found, where = (b.reshape(b.concat(parts, axis), shape) for parts in (values, indices))
    return [Tensor(b.cast(found, x.value.dtype), x.q), Tensor(b.cast(where, DType.INT32))]


def _extreme(b: Builder, x: Value, left: Value, axis: int, *, largest: bool) -> tuple[Value, Value]:
    """The largest or smallest of the elements that are ``left``, and those that equal it."""
    if not x.dtype.is_float:
        low, high = x.dtype.range
        value = b.reduce(*_candidates(b, x, left, low if largest else high, largest), axis)
        return value, b.bitwise("LOGICAL_AND", left, b.compare("EQUAL", x, value))
    numbers = b.compare("EQUAL", x, x)
    if largest:  # REDUCE_MAX gives NaN where there is one
        value = b.reduce(*_candidates(b, x, left, -math.inf, largest), axis)
        alike = b.bitwise("LOGICAL_OR", b.compare("EQUAL", x, value), b.unary("LOGICAL_NOT", numbers))
        return value, b.bitwise("LOGICAL_AND", left, alike)
    counted = b.bitwise("LOGICAL_AND", left, numbers)
    some = b.reduce("REDUCE_ANY", counted, axis)
    value = b.reduce(*_candidates(b, x, counted, math.inf, largest), axis)
    alike = b.bitwise("LOGICAL_OR", b.compare("EQUAL", x, value), b.unary("LOGICAL_NOT", some))
    return b.select(some, value, b.const(math.nan, x.dtype)), b.bitwise("LOGICAL_AND", left, alike)


def _candidates(b: Builder, x: Value, among: Value, worst: float, largest: bool) -> tuple[str, Value]:
    return "REDUCE_MAX" if largest else "REDUCE_MIN", b.select(among, x, b.const(worst, x.dtype))
