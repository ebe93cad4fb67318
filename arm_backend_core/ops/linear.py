"""Matrix products. TOSA 1.0, CONV2D (constant weight) and MATMUL."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import Value, prod
from arm_backend_core.tosa.legality import refusal

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
    if a.value.dtype is not b.value.dtype:
        raise Unsupported("matrix product of an int8 and an int16 operand")
    scale = float(a.q.scale) * float(b.q.scale)
    if a.value.dtype is DType.INT16 and refusal(cx.target, "MATMUL", (DType.INT16, DType.INT16), DType.INT48):
        return _split_product(cx, a.value, b.value, scale)
    return cx.result(cx.b.matmul(a.value, b.value, (a.q.zero_point, b.q.zero_point)), scale)


def _split_product(cx: Context, a: Value, b: Value, scale: float) -> Value:
    """An int16 product by four int8 ones, for hardware without the former (Ethos-U55 and U65).

    x = r * high + low, r = 258, high = round(x / r), |low| <= 129. So a @ b = r**2 (ah @ bh) + r (ah @ bl + al @ bh) +
    al @ bl. Low parts of 128 and 129 saturate to 127, an error of 2 in 2**16 for one value in a hundred.
    The partial sums are brought to one scale before they are added: 2**-14 of the result's step, or as much coarser as
    keeps the largest possible sum of K products below 2**29.
    """
    radix = 258
    pairs = []
    for x in (a, b):
        high = cx.b.rescale(x, DType.INT8, 1 / radix)
        rest = cx.b.sub(cx.b.rescale(x, DType.INT32, 1.0), cx.b.rescale(high, DType.INT32, float(radix)))
        pairs.append((high, cx.b.rescale(rest, DType.INT8, 1.0)))
    (a_high, a_low), (b_high, b_low) = pairs
    step = max(float(cx.q.scale) * 2.0**-14, scale * a.shape[-1] * 2.0 ** (30 - 29))
    total = cx.b.rescale(cx.b.matmul(a_high, b_high), DType.INT32, scale * radix**2 / step)
    for left, right, weight in ((a_high, b_low, radix), (a_low, b_high, radix), (a_low, b_low, 1)):
        total = cx.b.add(total, cx.b.rescale(cx.b.matmul(left, right), DType.INT32, scale * weight / step))
    return cx.result(total, step)


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
    if value.data is not None:
        value = cx.b.const(np.tile(value.data, (*repeats, 1, 1)), value.dtype)
    else:
        value = cx.b.tile(value, (*repeats, 1, 1))
    return Tensor(cx.b.reshape(value, (prod(batch), *shape[-2:])), x.q)
