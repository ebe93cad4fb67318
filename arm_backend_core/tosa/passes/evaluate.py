"""TOSA operators in numpy, exact to the bit on integers: folds constants and composes tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op

Array = np.ndarray[Any, Any]


def evaluate(op: Op, inputs: list[Array]) -> Array | None:
    """Result of ``op`` on these arrays, or None when this module does not compute such an operator.

    An elementwise operator takes arrays of other shapes than ``op`` has: a table is evaluated on its grid.
    """
    compute = _COMPUTE.get(op.kind)
    brain = DType.BF16 in (op.output.dtype, *(value.dtype for value in op.inputs))
    if compute is None or (brain and op.kind not in _MOVES):
        return None  # a BF16 constant is kept in float32: arithmetic here would not round it
    with np.errstate(all="ignore"):
        result = compute(op, *inputs)
    return None if result is None else np.asarray(result, dtype=op.output.dtype.numpy, order="C")


# -- integers ------------------------------------------------------------------------------------------------


def rescale(op: Op, x: Array) -> Array | None:
    """RESCALE (TOSA 1.0, sections 1.10 and 2.13): 32- or 16-bit multiplier, single or double rounding."""
    attrs = op.attrs
    if attrs["input_unsigned"] or attrs["output_unsigned"] or attrs["rounding_mode"] == "INEXACT_ROUND":
        return None
    multiplier, shift = (np.asarray(attrs[name], dtype=np.int64) for name in ("multiplier", "shift"))
    value = x.astype(np.int64) - int(attrs["input_zp"])
    rounding = np.int64(1) << (shift - 1)
    if attrs["rounding_mode"] == "DOUBLE_ROUND":
        half = np.where(value >= 0, np.int64(1 << 30), np.int64(-(1 << 30)))
        rounding = rounding + np.where(shift > 31, half, 0)
    scaled = (value * multiplier + rounding) >> shift
    return np.clip(scaled + int(attrs["output_zp"]), *op.output.dtype.range)


def _table(op: Op, x: Array) -> Array:
    table = np.asarray(op.attrs["table"]).astype(np.int32)
    if op.inputs[0].dtype is DType.INT8:
        return table[x.astype(np.int32) + 128]
    position = x.astype(np.int32) + 32768
    index, fraction = position >> 7, position & 127
    return table[index] * 128 + (table[index + 1] - table[index]) * fraction


def _mul(op: Op, a: Array, b: Array) -> Array:
    if op.output.dtype.is_float:
        return a * b
    product, shift = a.astype(np.int64) * b.astype(np.int64), int(op.attrs["shift"])
    return (product + (1 << (shift - 1))) >> shift if shift else product


def _clz(op: Op, x: Array) -> Array:
    _, bits = np.frexp(x.astype(np.uint32).astype(np.float64))
    return 32 - bits


def _intdiv(op: Op, a: Array, b: Array) -> Array | None:
    if np.any(b == 0):
        return None
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _arithmetic_shift(op: Op, a: Array, b: Array) -> Array:
    up = (a >> np.maximum(b - 1, 0)) & 1 if op.attrs["round"] else 0
    return (a >> b) + np.where(b > 0, up, 0)


def _logical_shift(op: Op, a: Array, b: Array) -> Array:
    unsigned = a.view(np.dtype(f"u{a.dtype.itemsize}"))
    return (unsigned >> b.astype(unsigned.dtype)).view(a.dtype)


def _negate(op: Op, x: Array) -> Array:
    if op.output.dtype.is_float:
        return -x
    negated = int(op.attrs["input_zp"]) - x.astype(np.int64) + int(op.attrs["output_zp"])
    return np.clip(negated, *op.output.dtype.range)


def _cast(op: Op, x: Array) -> Array:
    source, result = op.inputs[0].dtype, op.output.dtype
    if not source.is_float or result.is_float or result is DType.BOOL:
        return x.astype(result.numpy)
    low, high = result.range
    return np.clip(np.rint(np.nan_to_num(x.astype(np.float64))), low, high)


def _reduce_sum(op: Op, x: Array) -> Array | None:
    if op.output.dtype.is_float:  # the order of additions is the target's
        return None
    return x.sum(axis=op.attrs["axis"], keepdims=True, dtype=np.int32)


# -- data movement -------------------------------------------------------------------------------------------


def _pad(op: Op, x: Array) -> Array:
    padding = np.asarray(op.attrs["padding"], dtype=np.int64).reshape(-1, 2)
    return np.pad(x, padding, constant_values=op.attrs["pad_const"])


def _slice(op: Op, x: Array) -> Array:
    return x[tuple(slice(a, a + n) for a, n in zip(op.attrs["start"], op.attrs["size"], strict=True))]


def _gather(op: Op, values: Array, indices: Array) -> Array:
    return np.take_along_axis(values, indices[:, :, None], axis=1)


_MOVES: dict[str, Callable[..., Array | None]] = {
    "CONCAT": lambda op, *xs: np.concatenate(xs, axis=op.attrs["axis"]),
    "GATHER": _gather,
    "IDENTITY": lambda op, x: x,
    "PAD": _pad,
    "RESHAPE": lambda op, x: x.reshape(op.output.shape),
    "REVERSE": lambda op, x: np.flip(x, op.attrs["axis"]),
    "SELECT": lambda op, condition, a, b: np.where(condition, a, b),
    "SLICE": _slice,
    "TILE": lambda op, x: np.tile(x, op.attrs["multiples"]),
    "TRANSPOSE": lambda op, x: x.transpose(op.attrs["perms"]),
}
_COMPUTE: dict[str, Callable[..., Array | None]] = {
    **_MOVES,
    "ABS": lambda op, x: np.abs(x),
    "ADD": lambda op, a, b: a + b,
    "ARITHMETIC_RIGHT_SHIFT": _arithmetic_shift,
    "BITWISE_AND": lambda op, a, b: a & b,
    "BITWISE_NOT": lambda op, x: ~x,
    "BITWISE_OR": lambda op, a, b: a | b,
    "BITWISE_XOR": lambda op, a, b: a ^ b,
    "CAST": _cast,
    "CEIL": lambda op, x: np.ceil(x),
    "CLAMP": lambda op, x: np.minimum(np.maximum(x, op.attrs["min_val"]), op.attrs["max_val"]),
    "CLZ": _clz,
    "EQUAL": lambda op, a, b: a == b,
    "FLOOR": lambda op, x: np.floor(x),
    "GREATER": lambda op, a, b: a > b,
    "GREATER_EQUAL": lambda op, a, b: a >= b,
    "INTDIV": _intdiv,
    "LOGICAL_AND": lambda op, a, b: a & b,
    "LOGICAL_LEFT_SHIFT": lambda op, a, b: a << b,
    "LOGICAL_NOT": lambda op, x: ~x,
    "LOGICAL_OR": lambda op, a, b: a | b,
    "LOGICAL_RIGHT_SHIFT": _logical_shift,
    "LOGICAL_XOR": lambda op, a, b: a ^ b,
    "MAXIMUM": lambda op, a, b: np.maximum(a, b),
    "MINIMUM": lambda op, a, b: np.minimum(a, b),
    "MUL": _mul,
    "NEGATE": _negate,
    "RECIPROCAL": lambda op, x: 1 / x,
    "REDUCE_ALL": lambda op, x: x.all(axis=op.attrs["axis"], keepdims=True),
    "REDUCE_ANY": lambda op, x: x.any(axis=op.attrs["axis"], keepdims=True),
    "REDUCE_MAX": lambda op, x: x.max(axis=op.attrs["axis"], keepdims=True),
    "REDUCE_MIN": lambda op, x: x.min(axis=op.attrs["axis"], keepdims=True),
    "REDUCE_SUM": _reduce_sum,
    "RESCALE": rescale,
    "RSQRT": lambda op, x: 1 / np.sqrt(x),
    "SUB": lambda op, a, b: a - b,
    "TABLE": _table,
}
