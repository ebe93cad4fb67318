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
    flat = b.reshape(b.cast(indices.value, DType.INT32), (1, indices.value.size))
    return b.reshape(b.gather(b.reshape(table.value, (1, *table.shape)), flat), cx.shape)
