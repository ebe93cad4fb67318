"""Matrix products. TOSA 1.0, CONV2D (constant weight) and MATMUL."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import DType, Value, prod

aten = torch.ops.aten


@op(aten.linear.default, kind=Kind.CONV, activations=(0,), fuses=True)
def linear(cx: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Value:
    """x [..., IC], weight [OC, IC]: a 1x1 convolution whose pixels are the rows of x."""
    if weight.value.data is None:
        raise Unsupported("its weight is computed while the program runs; use torch.matmul")
    if x.q is not None and weight.q is None:
        raise Unsupported("its input is quantized but its weight is not")
    out_channels, in_channels = weight.shape
    rows = prod(x.shape[:-1])
    image = cx.b.reshape(x.value, (1, 1, rows, in_channels))
    kernel = cx.b.const(weight.value.data.reshape(out_channels, 1, 1, in_channels), weight.value.dtype)
    real = np.zeros(out_channels) if bias is None else bias.real
    if x.q is None or weight.q is None:
        result = cx.b.conv2d(image, kernel, cx.b.const(real, x.value.dtype), pad=(0, 0, 0, 0))
        return cx.b.reshape(result, cx.shape)
    scale = float(x.q.scale) * np.atleast_1d(weight.q.scale)
    dtype = DType.INT48 if x.value.dtype is DType.INT16 else DType.INT32
    offsets = cx.b.const(np.clip(np.rint(real / scale), *dtype.range), dtype)
    zps = (x.q.zero_point, weight.q.zero_point)
    result = cx.result(cx.b.conv2d(image, kernel, offsets, pad=(0, 0, 0, 0), zps=zps), scale)
    return cx.b.reshape(result, cx.shape)


linear.integer(linear.lower)


def _product(cx: Context, a: Tensor, b: Tensor) -> Value:
    """a [N, H, C] x b [N, C, W]."""
    if a.q is None or b.q is None:
        if a.q is not b.q:
            raise Unsupported("one of its operands is quantized and the other is not")
        return cx.b.matmul(a.value, b.value)
    left, right = _same_width(cx, a, b)
    zps = (a.q.zero_point, b.q.zero_point)
    accumulator = cx.b.matmul(left, right, zps)
    return cx.result(accumulator, float(a.q.scale) * float(b.q.scale))


def _same_width(cx: Context, a: Tensor, b: Tensor) -> tuple[Value, Value]:
    """MATMUL wants operands of one type: widen an int8 operand beside an int16 one (zero point removed)."""
    if a.value.dtype is b.value.dtype:
        return a.value, b.value
    raise Unsupported("matrix product of an int8 and an int16 operand")


@op(aten.bmm.default, aten.mm.default, aten.matmul.default, fuses=True)
def matmul(cx: Context, a: Tensor, b: Tensor) -> Value:
    """torch.matmul: leading dimensions broadcast; a vector operand is a matrix with a dimension of size 1."""
    left = a.shape if a.rank > 1 else (1, *a.shape)
    right = b.shape if b.rank > 1 else (*b.shape, 1)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    result = _product(cx, _batched(cx, a, left, batch), _batched(cx, b, right, batch))
    return cx.b.reshape(result, cx.shape)


matmul.integer(matmul.lower)


def _batched(cx: Context, x: Tensor, shape: tuple[int, ...], batch: tuple[Any, ...]) -> Tensor:
    """x as [N, rows, columns], N the product of the broadcast batch dimensions."""
    lead = (1,) * (len(batch) - len(shape[:-2])) + shape[:-2]
    value = cx.b.reshape(x.value, (*lead, *shape[-2:]))
    repeats = [wanted // size for wanted, size in zip(batch, lead, strict=True)]
    if value.data is not None and prod(repeats) > 1:
        value = cx.b.const(np.tile(value.data, (*repeats, 1, 1)), value.dtype)
    value = cx.b.tile(value, (*repeats, 1, 1))
    return Tensor(cx.b.reshape(value, (prod(batch), *shape[-2:])), x.q)
