"""Builder of TOSA graphs: one typed method per operator appends it to a graph and checks that the target supports it.

``legalize.LegalizingBuilder`` also emits an equivalent sequence of operators if the target lacks an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import COPY_OPERATOR, Graph, Op, Origin, Origins, Value, constant, merge_origins, prod
from arm_backend_core.tosa.legality import op_refusal_before_bool_lowering
from arm_backend_core.tosa.operators import OPERATORS

Array = np.ndarray[Any, Any]


class Builder:
    """Appends operators to ``graph``. ``emit`` and the typed methods return the result of the operator.

    The record of an operator (``operators.record``) computes the shape of its result. The typed methods of elementwise
    operators add leading dimensions of size 1 to operands of lower rank, as in PyTorch's broadcasting. An argument
    ``zps`` is a pair of zero points. For a convolution or MATMUL, they are the zero points of its two operands. For an
    average pooling, they are the zero points of the operand and of the result.

    Raises:
        Unsupported: from ``emit`` and the typed methods, if the target does not support the operator.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        #: Origins of emitted operators. If empty, an emitted operator inherits the origins of its operands' producers.
        #: Without producers, its origin is ``COPY_OPERATOR``.
        self.origins: Origins = {}

    # -- plumbing ------------------------------------------------------------------------------------------------

    def emit(self, kind: str, inputs: Sequence[Value], dtype: DType, /, **attrs: Any) -> Value:
        """Append an operator of any kind. Prefer the typed methods below."""
        op = self._create_op(kind, inputs, dtype, attrs)
        if reason := op_refusal_before_bool_lowering(self.target, op):
            raise Unsupported(reason)
        op.output.name = self.graph.new_name(kind)
        op.output.producer = op
        self.graph.ops.append(op)
        return op.output

    def refusal(self, kind: str, inputs: Sequence[Value], dtype: DType, /, **attrs: Any) -> str | None:
        """Why the target does not support this operator; None if ``emit`` can append it."""
        return op_refusal_before_bool_lowering(self.target, self._create_op(kind, inputs, dtype, attrs))

    def _create_op(self, kind: str, inputs: Sequence[Value], dtype: DType, attrs: dict[str, Any]) -> Op:
        origins = self.origins or merge_origins(value.producer for value in inputs if value.producer is not None)
        origins = origins or {Origin(inputs[0].name if inputs else "", COPY_OPERATOR): 1}
        if kind == "TRANSPOSE":
            origins = {replace(origin, is_transpose=True): work for origin, work in origins.items()}
        op = Op(kind, list(inputs), Value((), dtype, kind.lower()), attrs, origins)
        op.output.shape = tuple(int(size) for size in OPERATORS[kind].shape(op))
        return op

    def const(self, data: Any, dtype: DType) -> Value:
        """Create a constant tensor."""
        return constant(np.asarray(data), dtype)

    def _align_ranks(self, *values: Value) -> list[Value]:
        rank = max(value.rank for value in values)
        return [self.reshape(value, (1,) * (rank - value.rank) + value.shape) for value in values]

    def _binary(self, kind: str, a: Value, b: Value, dtype: DType | None = None, **attrs: Any) -> Value:
        return self.emit(kind, self._align_ranks(a, b), dtype or a.dtype, **attrs)

    def _unary(self, kind: str, x: Value, dtype: DType | None = None, **attrs: Any) -> Value:
        return self.emit(kind, (x,), dtype or x.dtype, **attrs)

    # -- tensor operators (TOSA 1.0, section 2.3) ----------------------------------------------------------------

    def argmax(self, x: Value, axis: int) -> Value:
        """Index of the largest element along ``axis``, as INT32. The result does not have this axis."""
        return self.emit("ARGMAX", (x,), DType.INT32, axis=axis, nan_mode="PROPAGATE")

    def avg_pool2d(
        self, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], zps: tuple[int, int] = (0, 0)
    ) -> Value:
        """Average pooling of x [N, H, W, C]; pad (top, bottom, left, right). The divisor does not count padding."""
        accumulator = OPERATORS["AVG_POOL2D"].accumulator_type(x.dtype)
        zero_points = {"input_zp": zps[0], "output_zp": zps[1]}
        return self._pool("AVG_POOL2D", x, kernel, stride, pad, acc_type=accumulator, **zero_points)

    def max_pool2d(self, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int]) -> Value:
        """Max pooling of x [N, H, W, C]; pad (top, bottom, left, right)."""
        return self._pool("MAX_POOL2D", x, kernel, stride, pad, nan_mode="PROPAGATE")

    def _pool(
        self, kind: str, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], **attrs: Any
    ) -> Value:
        attrs |= {"kernel": list(kernel), "stride": list(stride), "pad": list(pad)}
        return self.emit(kind, (x,), x.dtype, **attrs)

    def conv2d(
        self,
        x: Value,
        weight: Value,
        bias: Value,
        *,
        pad: Sequence[int],
        stride: Sequence[int] = (1, 1),
        dilation: Sequence[int] = (1, 1),
        zps: tuple[int, int] = (0, 0),
        depthwise: bool = False,
    ) -> Value:
        """Convolution of x [N, H, W, IC] with weight [OC, KH, KW, IC] and bias [OC]; pad (top, bottom, left, right).

        If ``depthwise`` is true, weight is [KH, KW, IC, M] and bias [IC * M], for M output channels per input channel.
        """
        kind = "DEPTHWISE_CONV2D" if depthwise else "CONV2D"
        attrs = {"pad": list(pad), "stride": list(stride), "dilation": list(dilation)}
        return self._emit_convolution(kind, (x, weight, bias), zps, **attrs)

    def depthwise_conv2d(self, x: Value, weight: Value, bias: Value, **options: Any) -> Value:
        """Depthwise convolution: ``conv2d(..., depthwise=True)``."""
        return self.conv2d(x, weight, bias, depthwise=True, **options)

    def mx_conv2d(
        self,
        x: Value,
        weight: Value,
        scales: Value,
        bias: Value,
        *,
        pad: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
    ) -> Value:
        """Block-scaled convolution of x [N, H, W, IC], weight [OC, KH, KW, IC], weight scales [OC, KH, KW, IC / 32].

        x is cast to blocks of the weight's element type.
        """
        attrs = {"pad": list(pad), "stride": list(stride), "dilation": list(dilation)}
        return self.emit("MX_CONV2D", (x, weight, scales, bias), DType.FP32, **attrs)

    def _emit_convolution(self, kind: str, inputs: tuple[Value, ...], zps: tuple[int, int], **attrs: Any) -> Value:
        record, types = OPERATORS[kind], (inputs[0].dtype, inputs[1].dtype)
        attrs |= {"local_bound": False, "acc_type": record.accumulator_type(*types)}
        attrs |= {"input_zp": zps[0], "weight_zp": zps[1]}
        return self.emit(kind, inputs, record.result_type(*types), **attrs)

    def transpose_conv2d(
        self,
        x: Value,
        weight: Value,
        bias: Value,
        *,
        out_pad: Sequence[int],
        stride: Sequence[int],
        zps: tuple[int, int] = (0, 0),
    ) -> Value:
        """Transposed convolution of x [N, H, W, IC] with weight [OC, KH, KW, IC].

        ``out_pad`` is (top, bottom, left, right). Negative amounts crop the result.
        """
        attrs = {"out_pad": list(out_pad), "stride": list(stride)}
        return self._emit_convolution("TRANSPOSE_CONV2D", (x, weight, bias), zps, **attrs)

    def matmul(self, a: Value, b: Value, zps: tuple[int, int] = (0, 0)) -> Value:
        """Matrix product of a [N, H, C] and b [N, C, W].

        The result is INT32 for int8, INT48 for int16, FP16 for FP8, and FP32 for other floating point.
        """
        dtype = OPERATORS["MATMUL"].result_type(a.dtype, b.dtype)
        return self.emit("MATMUL", (a, b), dtype, a_zp=zps[0], b_zp=zps[1])

    # -- elementwise operators (sections 2.4 to 2.8) -------------------------------------------------------------

    def clamp(self, x: Value, low: float, high: float) -> Value:
        """min(max(x, low), high)."""
        return self._unary("CLAMP", x, min_val=low, max_val=high, nan_mode="PROPAGATE")

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return self._binary("ADD", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """a - b."""
        return self._binary("SUB", a, b)

    def mul(self, a: Value, b: Value, shift: int = 0) -> Value:
        """a * b. The result of int8 and int16 is INT32. The result of INT32 is (a * b) >> shift, rounded."""
        return self._binary("MUL", a, b, OPERATORS["MUL"].result_type(a.dtype, b.dtype), shift=shift)

    def pow(self, a: Value, b: Value) -> Value:
        """a ** b."""
        return self._binary("POW", a, b)

    def maximum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Elementwise maximum. If one operand is NaN, the result is NaN, or the other operand if ``ignore_nan``."""
        return self._binary("MAXIMUM", a, b, nan_mode="IGNORE" if ignore_nan else "PROPAGATE")

    def minimum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Elementwise minimum. If one operand is NaN, the result is NaN, or the other operand if ``ignore_nan``."""
        return self._binary("MINIMUM", a, b, nan_mode="IGNORE" if ignore_nan else "PROPAGATE")

    def arithmetic_right_shift(self, a: Value, b: Value, *, round: bool = False) -> Value:
        """a >> b. If ``round`` is true, half of 2**b is added before the shift."""
        return self._binary("ARITHMETIC_RIGHT_SHIFT", a, b, round=round)

    def logical_left_shift(self, a: Value, b: Value) -> Value:
        """a << b."""
        return self._binary("LOGICAL_LEFT_SHIFT", a, b)

    def logical_right_shift(self, a: Value, b: Value) -> Value:
        """a >> b; zeros are shifted in."""
        return self._binary("LOGICAL_RIGHT_SHIFT", a, b)

    def binary(self, kind: str, a: Value, b: Value) -> Value:
        """BITWISE_AND, BITWISE_OR, BITWISE_XOR, INTDIV, LOGICAL_AND, LOGICAL_OR or LOGICAL_XOR."""
        return self._binary(kind, a, b)

    def compare(self, kind: str, a: Value, b: Value) -> Value:
        """EQUAL, GREATER or GREATER_EQUAL. The result is BOOL."""
        return self._binary(kind, a, b, DType.BOOL)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where ``condition`` is true, else b."""
        return self.emit("SELECT", self._align_ranks(condition, a, b), a.dtype)

    def unary(self, kind: str, x: Value) -> Value:
        """An operator with one operand and no attributes: ABS, CEIL, CLZ, COS, ERF, EXP, FLOOR, LOG, SIGMOID, ..."""
        return self._unary(kind, x)

    def negate(self, x: Value) -> Value:
        """-x."""
        return self._unary("NEGATE", x, input_zp=0, output_zp=0)

    def table(self, x: Value, table: Array) -> Value:
        """Table lookup.

        int8: 256 entries, the first for -128; the result is int8. int16: 513 entries, linearly interpolated; the result
        is INT32 and equal to the interpolated entry times 2**7.
        """
        entries = np.asarray(table, dtype=x.dtype.numpy)
        return self._unary("TABLE", x, OPERATORS["TABLE"].result_type(x.dtype), table=entries)

    # -- reductions (section 2.9): the axis stays with size 1 ----------------------------------------------------

    def reduce(self, kind: str, x: Value, axis: int) -> Value:
        """REDUCE_SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PRODUCT, REDUCE_ALL or REDUCE_ANY."""
        return self.emit(kind, (x,), x.dtype, **reduce_attributes(kind, axis))

    # -- data layout (section 2.10) ------------------------------------------------------------------------------

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along ``axis``. A single value is returned unchanged."""
        return values[0] if len(values) == 1 else self.emit("CONCAT", values, values[0].dtype, axis=axis)

    def pad(self, x: Value, padding: Sequence[tuple[int, int]], pad_const: float) -> Value:
        """Pad each dimension by (before, after) elements, which are not negative. A PAD by 0 is not emitted."""
        if not any(map(any, padding)):
            return x
        flat = [amount for pair in padding for amount in pair]
        return self.emit("PAD", (x,), x.dtype, padding=flat, pad_const=pad_const)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Change the shape. A RESHAPE to the same shape, or of a constant, is not emitted."""
        shape = tuple(int(size) for size in shape)
        if shape == x.shape:
            return x
        assert prod(shape) == x.size, f"reshape {x.shape} -> {shape}"
        if x.data is not None:
            return Value(shape, x.dtype, x.name, x.data.reshape(shape))
        return self.emit("RESHAPE", (x,), x.dtype, shape=list(shape))

    def reverse(self, x: Value, axis: int) -> Value:
        """Reverse the elements along ``axis``."""
        return self._unary("REVERSE", x, axis=axis)

    def slice(self, x: Value, start: Sequence[int], size: Sequence[int]) -> Value:
        """x[start : start + size] in every dimension. A SLICE of everything is not emitted."""
        if tuple(size) == x.shape:
            return x
        return self.emit("SLICE", (x,), x.dtype, start=list(start), size=list(size))

    def narrow(self, x: Value, axis: int, start: int, size: int) -> Value:
        """x[start : start + size] along ``axis``, which may be negative."""
        starts, sizes = [0] * x.rank, list(x.shape)
        starts[axis], sizes[axis] = start, size
        return self.slice(x, starts, sizes)

    def tile(self, x: Value, multiples: Sequence[int]) -> Value:
        """Repeat x ``multiples[i]`` times along dimension i. A TILE by 1 is not emitted."""
        if all(multiple == 1 for multiple in multiples):
            return x
        return self.emit("TILE", (x,), x.dtype, multiples=list(multiples))

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeat dimensions of size 1, so that ``x`` gets ``shape``. Missing leading dimensions count as size 1."""
        x = self.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
        return self.tile(x, [target // size for target, size in zip(shape, x.shape, strict=True)])

    def transpose(self, x: Value, perms: Sequence[int]) -> Value:
        """Permute dimensions: dimension i of the result is dimension perms[i] of x.

        A TRANSPOSE that permutes nothing, or of a constant, is not emitted.
        """
        if list(perms) == list(range(x.rank)):
            return x
        if x.data is not None:
            data = np.ascontiguousarray(x.data.transpose(perms))
            return Value(data.shape, x.dtype, x.name, data)
        return self.emit("TRANSPOSE", (x,), x.dtype, perms=list(perms))

    # -- gather, image, types (sections 2.11 to 2.13) ------------------------------------------------------------

    def gather(self, values: Value, indices: Value) -> Value:
        """Gather rows of values [N, K, C] by INT32 indices [N, W]. The result is [N, W, C]."""
        return self.emit("GATHER", (values, indices), values.dtype)

    def resize(self, x: Value, scale: Sequence[int], offset: Sequence[int], border: Sequence[int], mode: str) -> Value:
        """Resize x [N, H, W, C] by scale (yn, yd, xn, xd) in mode NEAREST or BILINEAR.

        ``ResizeAxis`` defines ``offset``, ``border`` and the size of the result.
        The BILINEAR result of int8 is INT32 and of int16 INT48, both scaled by yn * xn.
        """
        dtype = OPERATORS["RESIZE"].result_type(x.dtype) if mode == "BILINEAR" else x.dtype
        attrs = {"scale": list(scale), "offset": list(offset), "border": list(border), "mode": mode}
        return self.emit("RESIZE", (x,), dtype, **attrs)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Change the element type. A CAST to the same type is not emitted."""
        return x if x.dtype is dtype else self._unary("CAST", x, dtype)

    def rescale(
        self,
        x: Value,
        dtype: DType,
        scale: float | Array,
        input_zp: int = 0,
        output_zp: int = 0,
        *,
        round_double: bool = False,
        input_unsigned: bool = False,
    ) -> Value:
        """round((x - input_zp) * scale) + output_zp, saturated to ``dtype``.

        ``scale`` is one number, or one number per channel (the last dimension). It is quantized to a multiplier
        and a shift (``quantize_multipliers``). The multiplier has type INT16 if x is INT48, else INT32.
        ``input_unsigned`` reads the bits of an INT8 value as uint8; ``input_zp`` is then from 0 to 255.
        """
        multiplier, shift = quantize_multipliers(np.atleast_1d(scale), 16 if x.dtype is DType.INT48 else 32)
        return self._unary(
            "RESCALE",
            x,
            dtype,
            scale32=x.dtype is not DType.INT48,
            rounding_mode="DOUBLE_ROUND" if round_double else "SINGLE_ROUND",
            per_channel=multiplier.size > 1,
            input_unsigned=input_unsigned,
            output_unsigned=False,
            multiplier=multiplier,
            shift=shift,
            input_zp=input_zp,
            output_zp=output_zp,
        )


def reduce_attributes(kind: str, axis: int) -> dict[str, Any]:
    """The attributes of a reduction along ``axis``."""
    return {"axis": axis, **({"nan_mode": "PROPAGATE"} if kind in ("REDUCE_MAX", "REDUCE_MIN") else {})}


def quantize_multipliers(scales: Array, bits: int) -> tuple[Array, Array]:
    """Quantize scales: scale = multiplier * 2**-shift (TOSA 1.0, sections 1.12 and 2.13).

    The multiplier has ``bits`` - 1 bits (31 or 15). TOSA allows shifts from 2 to 62. A scale that would need a larger
    shift is rounded to a multiple of 2**-62, which may be 0.

    Raises:
        Unsupported: a scale is negative, not finite, or too large for a shift of at least 2.
    """
    scales = np.asarray(scales, dtype=np.float64)
    if not np.all(np.isfinite(scales)) or np.any(scales < 0):
        raise Unsupported(f"rescale factor {scales} is negative or not finite")
    mantissa, exponent = np.frexp(scales)
    multiplier = np.round(mantissa * (1 << (bits - 1))).astype(np.int64)
    overflow = multiplier == 1 << (bits - 1)
    multiplier = np.where(overflow, multiplier >> 1, multiplier)
    shift = (bits - 1) - (exponent + overflow)
    excess = np.maximum(shift - 62, 0)
    multiplier = np.where(excess > 0, np.round(multiplier * np.exp2(-excess.astype(np.float64))), multiplier)
    shift = np.where(scales == 0, 31, np.minimum(shift, 62))
    if np.any(shift < 2):
        raise Unsupported(f"rescale factor {scales.max():g} is too large for a TOSA shift")
    dtype = np.int32 if bits == 32 else np.int16
    return multiplier.astype(dtype), shift.astype(np.int8)
