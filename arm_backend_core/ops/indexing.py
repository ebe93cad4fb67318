"""Rows picked by index."""

from __future__ import annotations

from typing import Any

import torch

from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import DType, Value

aten = torch.ops.aten


@op(aten.embedding.default, kind=Kind.SHARED)
def embedding(cx: Context, table: Tensor, indices: Tensor, *_: Any, **__: Any) -> Value:
    """table [rows, width], indices of any shape -> [*indices, width] (TOSA 1.0, GATHER)."""
    b = cx.b
    if indices.is_constant and table.is_constant:
        assert table.value.data is not None and indices.value.data is not None
        return b.const(table.value.data[indices.value.data], table.value.dtype)
    flat = _row(cx, b.cast(indices.value, DType.INT32))
    return b.reshape(b.gather(b.reshape(table.value, (1, *table.shape)), flat), cx.shape)


def _row(cx: Context, indices: Value) -> Value:
    """Indices as [1, count]. The FP profile gathers by INT32 but reshapes none, so they pass through FP32 there.

    That is exact below 2**24, more rows than any table on such a device has.
    """
    if cx.target.integer or indices.data is not None or indices.shape == (1, indices.size):
        return cx.b.reshape(indices, (1, indices.size))
    return cx.b.cast(cx.b.reshape(cx.b.cast(indices, DType.FP32), (1, indices.size)), DType.INT32)
