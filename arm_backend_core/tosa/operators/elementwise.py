"""Records of elementwise operators: activations, arithmetic, comparisons, conversions.

Source: TOSA 1.0, sections 2.4 to 2.8 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators.record import ANY_RANK, Array, broadcast_shape, define_operator, min_max_ufunc

#: Supported element types, in the syntax of ``TypeRow.parse``. _FLOATS, _INTEGERS and _LOGIC are for operators with one
#: operand. The other constants up to _MINMAX are for operators with two operands.
_FLOATS = "f16>f16:FP bf16>bf16:bf16 f32>f32:FP "
_FLOATS2 = "f16,f16>f16:FP bf16,bf16>bf16:bf16 f32,f32>f32:FP "
_INTEGERS = "i8>i8:INT i16>i16:INT i32>i32:INT "
_INTEGERS2 = "i8,i8>i8:INT i16,i16>i16:INT i32,i32>i32:INT "
_SHIFT = _INTEGERS2.replace("INT", "INT|FP")
_LOGIC, _LOGIC2 = "b>b:INT|FP", "b,b>b:INT|FP"
_COMPARE = "i32,i32>b:INT f16,f16>b:FP bf16,bf16>b:bf16 f32,f32>b:FP"
_ARITHMETIC = "i32,i32>i32:INT|FP " + _FLOATS2
_MINMAX = "i32,i32>i32:INT " + _FLOATS2
_NAN_FIELDS = ("nan_mode",)


def _broadcast_violations(op: Op) -> Iterator[str]:
    first, *others = (value.shape for value in op.inputs)
    if all(shape == first for shape in others):
        return
    if any(len(shape) != len(first) for shape in others):
        yield f"operands of different rank: {op.inputs!r}; reshape one"
    elif any(len({*sizes} - {1}) > 1 for sizes in zip(first, *others, strict=True)):
        yield f"shapes that do not broadcast: {op.inputs!r}"


def _define_elementwise(
    kind: str,
    rows: str,
    compute: Callable[..., Array | None] | None = None,
    find_violations: Callable[[Op], Iterator[str]] | None = None,
    **facts: Any,
) -> None:
    def violations(op: Op) -> Iterator[str]:
        yield from _broadcast_violations(op)
        yield from find_violations(op) if find_violations is not None else ()

    facts |= {"find_violations": violations, "compute": compute, "is_elementwise": True}
    define_operator(kind, rows, [ANY_RANK], broadcast_shape, **facts)


# -- activations ---------------------------------------------------------------------------------------------


def _clamp_violations(op: Op) -> Iterator[str]:
    low, high = op.attrs["min_val"], op.attrs["max_val"]
    if not low <= high:  # NaN included
        yield f"bounds {low} to {high}"
    if not op.output.dtype.is_float:
        type_min, type_max = op.output.dtype.range
        if low < type_min or high > type_max:
            yield f"bounds {low} to {high} beyond {op.output.dtype.value}"


def _clamp(op: Op, x: Array) -> Array:
    return np.asarray(min_max_ufunc(op, "min")(min_max_ufunc(op, "max")(x, op.attrs["min_val"]), op.attrs["max_val"]))


def _table_violations(op: Op) -> Iterator[str]:
    table = np.asarray(op.attrs["table"])
    is_int16 = op.inputs[0].dtype is DType.INT16
    entries = 513 if is_int16 else 256
    if table.shape != (entries,):
        yield f"a table of shape {table.shape} in place of ({entries},)"
    elif is_int16 and np.any(np.abs(np.diff(table.astype(np.int32)) + 0.5) > 32768):
        yield "neighbouring entries more than 32767 apart; halve the table's range"


def _table(op: Op, x: Array) -> Array:
    table = np.asarray(op.attrs["table"]).astype(np.int32)
    if op.inputs[0].dtype is DType.INT8:
        return table[x.astype(np.int32) + 128]
    position = x.astype(np.int32) + 32768
    index, fraction = position >> 7, position & 127
    return table[index] * 128 + (table[index + 1] - table[index]) * fraction


_CLAMP = "i8>i8:INT i16>i16:int16 " + _FLOATS
_define_elementwise("CLAMP", _CLAMP, _clamp, _clamp_violations, fields=("min_val", "max_val", "nan_mode"))
for _kind in ("ERF", "SIGMOID", "TANH", "COS", "SIN", "EXP", "LOG"):
    _define_elementwise(_kind, _FLOATS)
_define_elementwise(
    "TABLE", "i8>i8:INT i16>i32:int16", _table, _table_violations, constant_operands=(("table", "input0"),)
)


# -- one operand ---------------------------------------------------------------------------------------------


def _clz(op: Op, x: Array) -> Array:
    _, bits = np.frexp(x.astype(np.uint32).astype(np.float64))
    return 32 - bits


def _negate(op: Op, x: Array) -> Array:
    if op.output.dtype.is_float:
        return -x
    negated = int(op.attrs["input_zp"]) - x.astype(np.int64) + int(op.attrs["output_zp"])
    return np.clip(negated, *op.output.dtype.range)


_ZERO_POINTS = (("input_zp", "input0"), ("output_zp", "output"))
_define_elementwise("ABS", "i32>i32:INT " + _FLOATS, lambda op, x: np.abs(x))
_define_elementwise("BITWISE_NOT", _INTEGERS, lambda op, x: ~x)
_define_elementwise("CEIL", _FLOATS, lambda op, x: np.ceil(x))
_define_elementwise("CLZ", "i32>i32:INT", _clz)
_define_elementwise("FLOOR", _FLOATS, lambda op, x: np.floor(x))
_define_elementwise("LOGICAL_NOT", _LOGIC, lambda op, x: ~x)
_define_elementwise("NEGATE", _INTEGERS + _FLOATS, _negate, constant_operands=_ZERO_POINTS)
_define_elementwise("RECIPROCAL", _FLOATS, lambda op, x: 1 / x)
_define_elementwise("RSQRT", _FLOATS, lambda op, x: 1 / np.sqrt(x, dtype=np.float32))
_define_elementwise(
    "IDENTITY",
    "b>b:INT|FP i4>i4:int4 i48>i48:int16 e4m3>e4m3:fp8e4m3 e5m2>e5m2:fp8e5m2 "
    + _INTEGERS.replace("T", "T|FP")
    + _FLOATS,
    lambda op, x: x,
    is_data_movement=True,
    is_injective=True,
)


# -- two operands --------------------------------------------------------------------------------------------


def _shift_violations(op: Op) -> Iterator[str]:
    amounts, bits = op.inputs[1].data, 8 * op.output.dtype.bytes
    if amounts is not None and (amounts.min() < 0 or amounts.max() >= bits):
        yield f"a shift by {amounts.min()} to {amounts.max()} (0 to {bits - 1})"


def _divisor_violations(op: Op) -> Iterator[str]:
    if op.inputs[1].data is not None and not op.inputs[1].data.all():
        yield "a divisor of 0"


def _power_violations(op: Op) -> Iterator[str]:
    base, exponent = (value.data for value in op.inputs)
    if base is not None and (not np.isfinite(base).all() or base.min() < 0):
        yield "a base that is negative or not finite: the result is not defined"
    if exponent is not None and not np.isfinite(exponent).all():
        yield "an exponent that is not finite: the result is not defined"


def _mul_violations(op: Op) -> Iterator[str]:
    shift = op.attrs["shift"]
    if not 0 <= shift <= 63 or (shift and op.inputs[0].dtype is not DType.INT32):
        yield f"shift {shift} for {op.inputs[0].dtype.value} (0 to 63 for int32, else 0)"


def _mul(op: Op, a: Array, b: Array) -> Array | None:
    if op.output.dtype.is_float:
        return a * b
    product, shift = a.astype(np.int64) * b.astype(np.int64), int(op.attrs["shift"])
    if not shift:
        return product.astype(np.int32)
    return _none_if_overflow((product + (np.int64(1) << np.int64(shift - 1))) >> np.int64(shift), DType.INT32)


def _none_if_overflow(result: Array, dtype: DType) -> Array | None:
    """``result``, or None if it overflows ``dtype``: the specification does not define the result on overflow."""
    low, high = dtype.range
    return result if result.size == 0 or (result.min() >= low and result.max() <= high) else None


def _intdiv(op: Op, a: Array, b: Array) -> Array | None:
    if np.any(b == 0):
        return None
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return _none_if_overflow(np.where((a < 0) != (b < 0), -quotient, quotient), DType.INT32)


def _arithmetic_shift(op: Op, a: Array, b: Array) -> Array:
    last_dropped_bit = (a >> np.maximum(b - 1, 0)) & 1 if op.attrs["round"] else 0
    return (a >> b) + np.where(b > 0, last_dropped_bit, 0)


def _logical_shift(op: Op, a: Array, b: Array) -> Array:
    unsigned = a.view(np.dtype(f"u{a.dtype.itemsize}"))
    return (unsigned >> b.astype(unsigned.dtype)).view(a.dtype)


_MUL = "i8,i8>i32:INT i16,i16>i32:INT i32,i32>i32:INT|FP " + _FLOATS2
_SELECT = """b,b,b>b:INT|FP b,i8,i8>i8:INT b,i16,i16>i16:INT b,i32,i32>i32:INT
    b,f16,f16>f16:FP b,bf16,bf16>bf16:bf16 b,f32,f32>f32:FP"""
_define_elementwise("ADD", _ARITHMETIC, lambda op, a, b: a + b)
_define_elementwise("SUB", _ARITHMETIC, lambda op, a, b: a - b)
_define_elementwise("MUL", _MUL, _mul, _mul_violations, constant_operands=(("shift", "int8"),))
_define_elementwise("POW", _FLOATS2, find_violations=_power_violations)
_define_elementwise("INTDIV", "i32,i32>i32:INT|FP", _intdiv, _divisor_violations, attribute_table="IntDiv")
_define_elementwise("MAXIMUM", _MINMAX, lambda op, a, b: min_max_ufunc(op, "max")(a, b), fields=_NAN_FIELDS)
_define_elementwise("MINIMUM", _MINMAX, lambda op, a, b: min_max_ufunc(op, "min")(a, b), fields=_NAN_FIELDS)
_define_elementwise("ARITHMETIC_RIGHT_SHIFT", _INTEGERS2, _arithmetic_shift, _shift_violations, fields=("round",))
_define_elementwise("LOGICAL_LEFT_SHIFT", _SHIFT, lambda op, a, b: a << b, _shift_violations)
_define_elementwise("LOGICAL_RIGHT_SHIFT", _SHIFT, _logical_shift, _shift_violations)
for _kind, _rows in (("BITWISE", _INTEGERS2), ("LOGICAL", _LOGIC2)):
    _define_elementwise(f"{_kind}_AND", _rows, lambda op, a, b: a & b)
    _define_elementwise(f"{_kind}_OR", _rows, lambda op, a, b: a | b)
    _define_elementwise(f"{_kind}_XOR", _rows, lambda op, a, b: a ^ b)
_define_elementwise("EQUAL", _COMPARE, lambda op, a, b: a == b)
_define_elementwise("GREATER", _COMPARE, lambda op, a, b: a > b)
_define_elementwise("GREATER_EQUAL", _COMPARE, lambda op, a, b: a >= b)
_define_elementwise("SELECT", _SELECT, lambda op, condition, a, b: np.where(condition, a, b), is_data_movement=True)


# -- conversions ---------------------------------------------------------------------------------------------


def _cast(op: Op, x: Array) -> Array | None:
    source, result = op.inputs[0].dtype, op.output.dtype
    if result.is_fp8:
        return None  # numpy has no FP8 type
    if not source.is_float or result.is_float or result is DType.BOOL:
        return x.astype(result.numpy)
    low, high = result.range
    return np.clip(np.rint(np.nan_to_num(x.astype(np.float64))), low, high)


def _rescale_violations(op: Op) -> Iterator[str]:
    attrs, source = op.attrs, op.inputs[0]
    multiplier, shift = (np.asarray(attrs[name], dtype=np.int64) for name in ("multiplier", "shift"))
    channels = source.shape[-1:] if attrs["per_channel"] else (1,)
    if attrs["output_unsigned"] or (attrs["input_unsigned"] and source.dtype is not DType.INT8):
        yield "an unsigned output, or an unsigned input that is not INT8; this compiler emits neither"
    if attrs["input_unsigned"] and op.output.dtype is DType.INT32:
        yield "an unsigned input and a result of int32"
    if multiplier.shape != channels or shift.shape != channels:
        yield f"{multiplier.size} multipliers and {shift.size} shifts for {source!r}"
    if attrs["scale32"] == (source.dtype is DType.INT48) and attrs["scale32"]:
        yield "a 32-bit multiplier for int48, which requires a 16-bit multiplier"
    if not attrs["scale32"] and attrs["rounding_mode"] == "DOUBLE_ROUND":
        yield "DOUBLE_ROUND and a 16-bit multiplier"
    if multiplier.min() < 0 or multiplier.max() > (1 << (31 if attrs["scale32"] else 15)) - 1:
        yield f"multipliers from {multiplier.min()} to {multiplier.max()}"
    if shift.min() < 2 or shift.max() > 62:
        yield f"shifts from {shift.min()} to {shift.max()} (2 to 62)"
    elif source.dtype in (DType.INT8, DType.INT16) and attrs["scale32"]:
        low, high = rescale_input_range(op)
        max_magnitude = max(int(attrs["input_zp"]) - low - 1, high - int(attrs["input_zp"]))
        if max_magnitude >= 1 << (int(shift.min()) - 1):
            factor = float(multiplier[shift.argmin()]) / float(1 << int(shift.min()))
            reason = "too large: a value minus input_zp exceeds 2**(shift - 1)"
            yield f"a factor of {factor:g} for {source.dtype.value} ({reason})"


def rescale_input_range(op: Op) -> tuple[int, int]:
    """Minimum and maximum element that a RESCALE may read.

    If the operand is constant, these are the bounds of its data, otherwise the bounds of its type.
    """
    source = op.inputs[0]
    if source.data is not None:
        elements = _rescale_elements(op, source.data)
        return int(elements.min()), int(elements.max())
    return (0, 255) if op.attrs["input_unsigned"] else source.dtype.range


def _rescale_elements(op: Op, x: Array) -> Array:
    """The elements that a RESCALE reads, as int64. If ``input_unsigned``, the bits of an INT8 element are a uint8."""
    elements = x.astype(np.int64)
    return elements & 0xFF if op.attrs["input_unsigned"] else elements


def _rescale(op: Op, x: Array) -> Array | None:
    """Evaluate a RESCALE with single or double rounding (TOSA 1.0, sections 1.12 and 2.13)."""
    attrs = op.attrs
    if attrs["output_unsigned"] or attrs["rounding_mode"] == "INEXACT_ROUND":
        return None
    multiplier, shift = (np.asarray(attrs[name], dtype=np.int64) for name in ("multiplier", "shift"))
    if not attrs["per_channel"]:
        multiplier, shift = multiplier[0], shift[0]
    value = _rescale_elements(op, x) - int(attrs["input_zp"])
    limit = np.int64(1) << (shift - 1)
    if attrs["scale32"] and np.any((value < -limit) | (value >= limit)):
        return None
    rounding = limit
    if attrs["rounding_mode"] == "DOUBLE_ROUND":
        half = np.where(value >= 0, np.int64(1 << 30), np.int64(-(1 << 30)))
        rounding = rounding + np.where(shift > 31, half, 0)
    scaled = _none_if_overflow((value * multiplier + rounding) >> shift, DType.INT32)
    return None if scaled is None else np.clip(scaled + int(attrs["output_zp"]), *op.output.dtype.range)


_CAST = """b>i8:INT b>i16:INT b>i32:INT i8>b:INT i8>i16:INT i8>i32:INT i16>b:INT i16>i8:INT i16>i32:INT
    i32>b:INT i32>i8:INT i32>i16:INT i8>f16:FP i8>f32:FP i16>f16:FP i16>f32:FP i32>f16:FP i32>f32:FP
    f16>i8:FP f16>i16:FP f16>i32:FP f16>f32:FP f32>i8:FP f32>i16:FP f32>i32:FP f32>f16:FP
    i8>bf16:bf16 i16>bf16:bf16 i32>bf16:bf16 bf16>i8:bf16 bf16>i16:bf16 bf16>i32:bf16 bf16>f32:bf16 f32>bf16:bf16
    f16>e4m3:fp8e4m3 f32>e4m3:fp8e4m3 e4m3>f16:fp8e4m3 e4m3>f32:fp8e4m3
    f16>e5m2:fp8e5m2 f32>e5m2:fp8e5m2 e5m2>f16:fp8e5m2 e5m2>f32:fp8e5m2 bf16>e4m3:bf16&fp8e4m3
    e4m3>bf16:bf16&fp8e4m3 bf16>e5m2:bf16&fp8e5m2 e5m2>bf16:bf16&fp8e5m2 b>f32:FP@1.1 f32>b:FP@1.1"""
_RESCALE = """i8>i8:INT i8>i16:INT i8>i32:INT i16>i8:INT i16>i16:INT i16>i32:INT i32>i8:INT i32>i16:INT i32>i32:INT
    i48>i8:int16 i48>i16:int16 i48>i32:int16"""
_define_elementwise("CAST", _CAST, _cast)
_define_elementwise(
    "RESCALE",
    _RESCALE,
    _rescale,
    _rescale_violations,
    fields=("scale32", "rounding_mode", "per_channel", "input_unsigned", "output_unsigned"),
    constant_operands=(("multiplier", "multiplier"), ("shift", "int8"), *_ZERO_POINTS),
)
