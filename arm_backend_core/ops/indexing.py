"""Rows picked by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from arm_backend_core.dtype import DType
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten


@op(aten.embedding.default, kind=Kind.SHARED)
def embedding(cx: Context, table: Tensor, indices: Tensor, *_: Any, **__: Any) -> Value:
    """table [rows, width], indices of any shape -> [*indices, width] (TOSA 1.0, GATHER)."""
    b = cx.b
    if indices.is_constant and table.is_constant:
        assert table.value.data is not None
        assert indices.value.data is not None
        return b.const(table.value.data[indices.value.data], table.value.dtype)
    flat = reshape_indices(cx, b.cast(indices.value, DType.INT32), (1, indices.value.size))
    return b.reshape(b.gather(b.reshape(table.value, (1, *table.shape)), flat), cx.shape)


def reshape_indices(cx: Context, indices: Value, shape: Sequence[int]) -> Value:
    """The FP profile has INT32 indices but reshapes none, so they pass through FP32 there.

    That is exact below 2**24, more rows than any table on such a device has.
    """
    if cx.target.integer or indices.data is not None or indices.shape == tuple(shape):
        return cx.b.reshape(indices, shape)
    return cx.b.cast(cx.b.reshape(cx.b.cast(indices, DType.FP32), shape), DType.INT32)
