"""Peephole rules that fuse PAD, CLAMP, RESCALE, and arithmetic after a convolution into a neighbouring operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from arm_backend_core.dtype import UINT8_OFFSET, DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, has_constant_weights, producer

Array = np.ndarray[Any, Any]
_CONVOLUTIONS = ("CONV2D", "DEPTHWISE_CONV2D", "TRANSPOSE_CONV2D")


# -- PAD into the operator that reads it ---------------------------------------------------------------------


def fold_pad(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold a PAD of height and width into the ``pad`` attribute of the operator, if both pad with the same value.

    CONV2D and DEPTHWISE_CONV2D pad with the input's zero point. MAX_POOL2D ignores its padding, which is the same as
    padding with the smallest value. AVG_POOL2D has no such rule: its divisor counts the elements that a PAD adds, but
    not the padding of the ``pad`` attribute.
    """
    pad = producer(op.inputs[0], "PAD")
    if pad is None or pad.attrs["pad_const"] != _padding_value(op):
        return None
    amounts = list(pad.attrs["padding"])
    if any(amounts[:2]) or any(amounts[6:]):
        return None
    padding = [a + b for a, b in zip(op.attrs["pad"], amounts[2:6], strict=True)]
    extent = _window_extent(op)
    # TOSA forbids pooling windows that read only padding, and no hardware supports padding as large as the window.
    if any(amount >= extent[side // 2] for side, amount in enumerate(padding)):
        return None
    attrs = {**op.attrs, "pad": padding}
    inputs = [pad.inputs[0], *op.inputs[1:]]
    return rewriter.builder.emit(op.kind, inputs, op.output.dtype, **attrs)


def _padding_value(op: Op) -> float:
    """The value with which a PAD has the same effect as the ``pad`` attribute of the operator."""
    if op.kind != "MAX_POOL2D":
        return float(op.attrs["input_zp"])
    dtype = op.output.dtype
    return -np.inf if dtype.is_float else dtype.range[0]


def _window_extent(op: Op) -> list[int]:
    """Height and width of the window in input elements, dilation included."""
    if op.kind == "MAX_POOL2D":
        return list(op.attrs["kernel"])
    kernel = op.inputs[1].shape[1:3] if op.kind == "CONV2D" else op.inputs[1].shape[:2]
    return [(size - 1) * step + 1 for size, step in zip(kernel, op.attrs["dilation"], strict=True)]


# -- CLAMP ---------------------------------------------------------------------------------------------------


def merge_clamp(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a CLAMP to the full range of its type; merge two successive CLAMPs."""
    low, high = op.attrs["min_val"], op.attrs["max_val"]
    floor, ceiling = (-np.inf, np.inf) if op.output.dtype.is_float else op.output.dtype.range
    if low <= floor and high >= ceiling:
        return op.inputs[0]
    inner = producer(op.inputs[0], "CLAMP")
    if inner is None or inner.attrs["nan_mode"] != op.attrs["nan_mode"]:
        return None
    low, high = (min(max(inner.attrs[name], low), high) for name in ("min_val", "max_val"))
    attrs = {**op.attrs, "min_val": low, "max_val": high}
    return rewriter.builder.emit("CLAMP", inner.inputs, op.output.dtype, **attrs)


# -- RESCALE -------------------------------------------------------------------------------------------------


def rescale_factors(op: Op) -> Array:
    """The real factors of a RESCALE, multiplier * 2**-shift: [1], or [channels] if per channel."""
    return np.asarray(op.attrs["multiplier"]) / 2.0 ** np.asarray(op.attrs["shift"])


def log2_scale(op: Op) -> int | None:
    """The exponent k >= 0 if the RESCALE computes (x - input_zp) * 2**k + output_zp, apart from saturation; else None.

    k = 0 means scale 1.
    """
    multiplier, shift = np.asarray(op.attrs["multiplier"]), np.asarray(op.attrs["shift"])
    if multiplier.size != 1 or op.attrs["input_unsigned"] or op.attrs["output_unsigned"]:
        return None
    factor, k = int(multiplier.flat[0]), int(shift.flat[0])
    exponent = factor.bit_length() - 1 - k
    return exponent if factor > 0 and factor & (factor - 1) == 0 and exponent >= 0 else None


def has_unit_scale(op: Op) -> bool:
    """Whether ``op`` is a RESCALE with scale 1. It may change the zero point, and it saturates to the output type."""
    return op.kind == "RESCALE" and log2_scale(op) == 0


def has_unit_scale_and_no_zero_points(op: Op) -> bool:
    """Whether ``op`` is a RESCALE with scale 1 and no zero points. It changes no value that fits the output type."""
    return has_unit_scale(op) and op.attrs["input_zp"] == op.attrs["output_zp"] == 0


def merge_rescale(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a RESCALE without effect; merge a RESCALE with a preceding RESCALE of scale 2**k that cannot saturate.

    A preceding RESCALE of uint8 is merged only if its scale is 1 (``_merge_unsigned_rescale``). For other types, the
    merged RESCALE has the multiplier m and the shift s - k, where m and s are those of the second RESCALE:
    ((x * 2**k) * m + 2**(s-1)) >> s equals (x * m + 2**(s-1-k)) >> (s-k). Double rounding adds a term for which this
    equation does not hold, so k must be 0 with double rounding.
    """
    source, attrs = op.inputs[0], op.attrs
    if source.dtype is op.output.dtype and attrs["input_zp"] == attrs["output_zp"] and log2_scale(op) == 0:
        return source
    inner = producer(source, "RESCALE")
    if inner is None or attrs["input_unsigned"] or attrs["output_unsigned"] or not attrs["scale32"]:
        return None
    if inner.attrs["input_unsigned"]:
        return _merge_unsigned_rescale(inner, op, rewriter)
    k = log2_scale(inner)
    if k is None or inner.attrs["output_zp"] != attrs["input_zp"] or not _cannot_saturate(inner, k):
        return None
    shift = np.asarray(attrs["shift"]) - k
    if np.any(shift < 2) or (k and attrs["rounding_mode"] != "SINGLE_ROUND"):
        return None
    attrs = {**attrs, "shift": shift.astype(np.int8), "input_zp": inner.attrs["input_zp"]}
    return rewriter.builder.emit("RESCALE", inner.inputs, op.output.dtype, **attrs)


def _merge_unsigned_rescale(inner: Op, op: Op, rewriter: Rewriter) -> Value | None:
    """Merge a RESCALE to int8 or int16 with a preceding RESCALE of uint8 that only changes the zero point.

    The first RESCALE subtracts its input zero point and adds its output zero point. The second one subtracts its input
    zero point. The merged RESCALE subtracts the net offset at once, so that it scales the same integers.
    """
    offset = inner.attrs["input_zp"] - inner.attrs["output_zp"]
    saturates = offset != UINT8_OFFSET or rescale_factors(inner).tolist() != [1.0]
    zero_point = offset + op.attrs["input_zp"]
    if saturates or op.output.dtype is DType.INT32 or not 0 <= zero_point <= 255:
        return None
    attrs = {**op.attrs, "input_unsigned": True, "input_zp": zero_point}
    return rewriter.builder.emit("RESCALE", inner.inputs, op.output.dtype, **attrs)


def _cannot_saturate(op: Op, k: int) -> bool:
    """Whether no input value saturates in a RESCALE with scale 2**k."""
    low, high = op.inputs[0].dtype.range
    output_min, output_max = op.output.dtype.range
    results = [((x - op.attrs["input_zp"]) << k) + op.attrs["output_zp"] for x in (low, high)]
    return bool(output_min <= results[0] and results[1] <= output_max)


# -- arithmetic with constants after a convolution -----------------------------------------------------------


def fold_scale_into_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold a MUL by one constant per channel into weight and bias of an FP32 convolution (batch normalization)."""
    match = _match_convolution_and_constant(op, rewriter, (DType.FP32,))
    if match is None:
        return None
    conv, factors = match
    weight, bias = conv.inputs[1].data, conv.inputs[2].data
    assert weight is not None
    assert bias is not None
    if conv.kind == "DEPTHWISE_CONV2D":
        weight = weight * factors.reshape(weight.shape[2:])
    else:
        weight = weight * factors.reshape(-1, 1, 1, 1)
    return _replace_constants(conv, weight, bias * factors, rewriter)


def fold_bias_into_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold an ADD or SUB of one constant per channel into the bias of a convolution.

    For INT32 the rule is exact: the addition to the bias and the ADD or SUB wrap around in the same way.
    """
    if op.kind == "SUB" and op.inputs[1].data is None:
        return None
    match = _match_convolution_and_constant(op, rewriter, (DType.FP32, DType.INT32))
    if match is None:
        return None
    conv, terms = match
    bias = conv.inputs[2].data
    assert bias is not None
    total = bias - terms if op.kind == "SUB" else bias + terms
    return _replace_constants(conv, conv.inputs[1].data, total, rewriter)


def _match_convolution_and_constant(op: Op, rewriter: Rewriter, dtypes: tuple[DType, ...]) -> tuple[Op, Array] | None:
    """The convolution whose only reader is ``op``, and the other operand of ``op``: one constant per channel."""
    for value, other in (op.inputs, op.inputs[::-1]):
        conv = value.producer
        if conv is None or conv.kind not in _CONVOLUTIONS or other.data is None or value.dtype not in dtypes:
            continue
        is_per_channel = other.size == other.shape[-1] and value.shape == op.output.shape
        if has_constant_weights(conv) and is_per_channel and rewriter.has_one_use(value):
            return conv, np.broadcast_to(other.data.reshape(-1), (value.shape[-1],))
    return None


def _replace_constants(conv: Op, weight: Array | None, bias: Array, rewriter: Rewriter) -> Value:
    """Emit the convolution with another weight and bias."""
    assert weight is not None
    operands = [constant(weight, conv.inputs[1].dtype), constant(bias, conv.inputs[2].dtype)]
    inputs = [conv.inputs[0], *operands]
    return rewriter.builder.emit(conv.kind, inputs, conv.output.dtype, **conv.attrs)


RULES: dict[str, list[RewriteRule]] = {
    "CONV2D": [fold_pad],
    "DEPTHWISE_CONV2D": [fold_pad],
    "MAX_POOL2D": [fold_pad],
    "CLAMP": [merge_clamp],
    "RESCALE": [merge_rescale],
    "MUL": [fold_scale_into_convolution],
    "ADD": [fold_bias_into_convolution],
    "SUB": [fold_bias_into_convolution],
}
