"""Reductions over dimensions: sum, mean, variance, standard deviation, max, min, any, all, product, argmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.format_count import format_count
from arm_backend_core.nodes import is_only_user_of_operand
from arm_backend_core.ops import fixed_point, intervals
from arm_backend_core.ops.casting import to_bool
from arm_backend_core.ops.float_expression import FloatExpr
from arm_backend_core.ops.indexing import reshape_indices
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.ops.spatial_mean import spatial_mean
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.graph import Value, prod

aten = torch.ops.aten


def _normalize_axes(x: Operand, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Convert ``dims`` to sorted non-negative axes; None or an empty list means all axes."""
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted(dim % x.rank for dim in dims)) if dims else tuple(range(x.rank))


def _reduce(cx: Context, kind: str, x: Value, axes: Sequence[int]) -> Value:
    for axis in axes:
        x = cx.b.reduce(kind, x, axis)
    return x


def atleast_1d(cx: Context, x: Operand) -> Operand:
    """Reshape a rank-0 tensor to [1], because PyTorch accepts ``dim=0`` for it. Other tensors stay unchanged."""
    return x if x.rank else Operand(cx.b.reshape(x.value, (1,)), x.q)


def reduce_mean(cx: Context, x: Operand, axes: Sequence[int]) -> Value:
    """Mean of plain or quantized x over ``axes``, as with ``keepdim=True``."""
    if x.q is not None:
        spatial = spatial_mean(cx.b, x.value, x.q, axes, cx.q, is_only_user=is_only_user_of_operand(cx.node))
        return fixed_point.mean(cx.b, x.value, x.q, tuple(axes), cx.q) if spatial is None else spatial
    count = prod(x.shape[axis] for axis in axes)
    total = _reduce(cx, "REDUCE_SUM", cx.b.cast(x.value, cx.dtype), axes)
    return cx.b.mul(total, cx.to_value(1.0 / count))


@op(aten.mean.dim, aten.mean.default, absorbs_activation=True, error_bound=2.0**-14, compute_fp32=True)
def mean(
    cx: Context, x: Operand, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Mean over ``dim``, all dimensions if None."""
    x = atleast_1d(cx, x)
    return cx.b.reshape(reduce_mean(cx, x, _normalize_axes(x, dim)), cx.shape)


mean.integer_rule(mean.lower)


@op(aten.sum.dim_IntList, aten.sum.default, absorbs_activation=True, interval=intervals.reduced_sum, compute_fp32=True)
def sum_(
    cx: Context, x: Operand, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Sum over ``dim``, all dimensions if None."""
    x = atleast_1d(cx, x)
    # In the FP profile, REDUCE_SUM takes no integers. There, booleans are summed in FP32, which is exact up to 2**24.
    sums_booleans_in_fp32 = x.value.dtype is DType.BOOL and not cx.target.has_int_profile
    numbers = cx.b.cast(x.value, DType.FP32 if sums_booleans_in_fp32 else cx.dtype)
    return cx.b.cast(cx.b.reshape(_reduce(cx, "REDUCE_SUM", numbers, _normalize_axes(x, dim)), cx.shape), cx.dtype)


@sum_.integer_rule
def _(
    cx: Context, x: Operand, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Sum of quantized numbers, or of booleans with a quantized result."""
    x = atleast_1d(cx, x)
    if x.q is None:  # unquantized operand, quantized result
        if x.value.dtype is not DType.BOOL:
            raise Unsupported(
                f"a quantized sum of unquantized {x.value.dtype.name.lower()}; convert them with .to(torch.float32)"
            )
        x = Operand(cx.b.cast(x.value, DType.INT8), QParams(1.0, 0, DType.INT8, *DType.INT8.range))
    assert x.q is not None
    return cx.b.reshape(fixed_point.sum_(cx.b, x.value, x.q, _normalize_axes(x, dim), cx.q), cx.shape)


def _parse_variance_arguments(
    x: Operand,
    dim: Sequence[int] | int | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[tuple[int, ...], float]:
    """Parse the arguments of any overload of var and std into (axes, correction). The divisor is count - correction.

    Raises:
        Unsupported: the divisor is not positive.
    """
    if isinstance(dim, bool):  # var(x, unbiased)
        return _parse_variance_arguments(x, None, dim)
    axes = _normalize_axes(x, dim)
    correction = float(unbiased) if correction is None else correction
    count = prod(x.shape[axis] for axis in axes)
    if count <= correction:
        elements = format_count(count, "element")
        raise Unsupported(f"the variance of {elements} with a correction of {correction:g} divides by zero or less")
    return axes, correction


def _corrected_mean_square(cx: Context, x: Value, axes: Sequence[int], correction: float) -> Value:
    """Sum of x * x over ``axes`` divided by (count - correction), as with ``keepdim=True``."""
    count = prod(x.shape[axis] for axis in axes)
    return reduce_mean(cx, Operand(cx.b.mul(x, cx.b.mul(x, cx.to_value(count / (count - correction))))), axes)


@op(
    aten.var.correction,
    aten.var.dim,
    aten.var.default,
    prefers_int16_input=True,
    error_bound=2.0**-13,
    compute_fp32=True,
)
def var(cx: Context, x: Operand, *args: Any, **kwargs: Any) -> Value:
    """Variance over ``dim``."""
    x = atleast_1d(cx, x)
    axes, correction = _parse_variance_arguments(x, *args, **kwargs)
    if x.q is not None:
        return cx.b.reshape(fixed_point.var(cx.b, x.value, x.q, axes, correction, cx.q), cx.shape)
    centred = cx.b.sub(x.value, reduce_mean(cx, x, axes))
    return cx.b.reshape(_corrected_mean_square(cx, centred, axes, correction), cx.shape)


@op(
    aten.std.correction,
    aten.std.dim,
    aten.std.default,
    prefers_int16_input=True,
    error_bound=2.0**-13,
    compute_fp32=True,
)
def std(cx: Context, x: Operand, *args: Any, **kwargs: Any) -> Value:
    """Standard deviation over ``dim``.

    In floating point, deviations are divided by the largest deviation before they are squared, to avoid overflow.
    """
    x = atleast_1d(cx, x)
    axes, correction = _parse_variance_arguments(x, *args, **kwargs)
    if x.q is not None:
        return cx.b.reshape(fixed_point.std(cx.b, x.value, x.q, axes, correction, cx.q), cx.shape)
    centred = FloatExpr(cx.b, cx.b.sub(x.value, reduce_mean(cx, x, axes)))
    largest = FloatExpr(cx.b, _reduce(cx, "REDUCE_MAX", abs(centred).value, axes)).clamp(2.0**-120, 2.0**126)
    variance = _corrected_mean_square(cx, (centred / largest).value, axes, correction)
    return cx.b.reshape((FloatExpr(cx.b, variance).sqrt() * largest).value, cx.shape)


for _record in (var, std):
    _record.integer_rule(_record.lower)


@op(aten.amax.default, kind=AnnotationKind.SHARED)
def amax(cx: Context, x: Operand, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Maximum over ``dim``. Quantized values are compared as integers, because quantization is monotonic."""
    x = atleast_1d(cx, x)
    axes = _normalize_axes(x, dim)
    if x.q is not None and axes == (x.rank - 1,):
        return cx.b.reshape(fixed_point.reduce_max(cx.b, x.value, x.q, axes[0]), cx.shape)
    return cx.b.reshape(_reduce(cx, "REDUCE_MAX", x.value, axes), cx.shape)


@op(aten.amin.default, kind=AnnotationKind.SHARED)
def amin(cx: Context, x: Operand, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Minimum over ``dim``."""
    x = atleast_1d(cx, x)
    return cx.b.reshape(_reduce(cx, "REDUCE_MIN", x.value, _normalize_axes(x, dim)), cx.shape)


def _register_any_or_all(kind: str, *overloads: OpOverload) -> None:
    """Register ``overloads`` as reductions of booleans by the TOSA operator ``kind``."""

    @op(*overloads)
    def rule(cx: Context, x: Operand, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Value:
        x = atleast_1d(cx, Operand(to_bool(cx, x)))
        return cx.b.reshape(_reduce(cx, kind, x.value, _normalize_axes(x, dim)), cx.shape)

    rule.integer_rule(rule.lower)


_register_any_or_all("REDUCE_ANY", aten.any.default, aten.any.dim, aten.any.dims)
_register_any_or_all("REDUCE_ALL", aten.all.default, aten.all.dim, aten.all.dims)


@op(aten.prod.default, aten.prod.dim_int, compute_fp32=True, error_bound=2.0**-10)
def product(cx: Context, x: Operand, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Product over ``dim``, all dimensions if None."""
    x = atleast_1d(cx, Operand(cx.b.cast(x.value, cx.dtype)))
    axes = _normalize_axes(x, None if dim is None else [dim])
    return cx.b.reshape(_reduce(cx, "REDUCE_PRODUCT", x.value, axes), cx.shape)


@product.integer_rule
def _(cx: Context, x: Operand, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Product of the signs, times exp(sum(ln(abs(x)))). Direct products of x could exceed 32 bits."""
    x = atleast_1d(cx, x)
    axis, count = (x.rank - 1, x.value.size) if dim is None else (dim % x.rank, x.shape[dim])
    if count == 1:
        return cx.b.reshape(cx.requantize(x, cx.q), cx.shape)
    order = [*(i for i in range(x.rank) if i != axis), axis]
    element = cx.to_fixed_point(x).to_int32()
    element = replace(element, value=cx.b.transpose(element.value, order)).reshape((x.value.size // count, count))
    log = fixed_point.logarithm(abs(element).with_scale(1.0).maximum(1))
    log = log + round(math.log(element.scale) / log.scale)
    log_sum = log.mul(1, max((log.peak * count).bit_length() - 29, 0)).sum(1)
    signs = element.sign().with_scale(1.0)
    while count > 1:
        half = count // 2
        left, right = (cx.b.narrow(signs.value, 1, start, half) for start in (0, half))
        last_odd = [cx.b.narrow(signs.value, 1, count - 1, 1)] if count % 2 else []
        signs, count = replace(signs, value=cx.b.concat([cx.b.mul(left, right), *last_odd], 1)), half + len(last_odd)
    magnitude = fixed_point.exponential(log_sum, cx.q).rescale(DType.INT32, 1.0)
    return cx.b.reshape((magnitude * signs).requantize(cx.q), cx.shape)


@op(aten.argmax.default, interval=intervals.element_index)
def argmax(cx: Context, x: Operand, dim: int | None = None, keepdim: bool = False) -> Value:
    """Index of the largest element as int32. ``dim`` is moved to the end: U55 has ARGMAX only along the last axis."""
    x = atleast_1d(cx, x)
    value = cx.b.reshape(x.value, (x.value.size,)) if dim is None else x.value
    axis = 0 if dim is None else dim % x.rank
    order = [*(i for i in range(value.rank) if i != axis), axis]
    value = cx.b.transpose(value, order)
    return reshape_indices(cx, cx.b.argmax(value, value.rank - 1), cx.shape)


argmax.integer_rule(argmax.lower)
