"""Builder of TOSA graphs: one typed method per operator infers the result's shape and checks the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import COPY, Graph, Op, Origin, Origins, Value, constant, merge_origins, prod
from arm_backend_core.tosa.legality import emission_refusal
from arm_backend_core.tosa.operators import LEVEL_8K, OPERATORS

Array = np.ndarray[Any, Any]


class Builder:
    """Appends operators to ``graph``. Every method returns the operator's result.

    Binary operators take operands of different rank and prepend dimensions of size 1, as PyTorch broadcasts.

    Args:
        splits_int32: emit data movement and comparisons of INT32, which the FP profile lacks, on two FP32 halves.

    Raises:
        Unsupported: from every method, if the target has no such operator on these types.
    """

    def __init__(self, graph: Graph, target: Target, *, splits_int32: bool = False) -> None:
        self.graph = graph
        self.target = target
        self.splits_int32 = splits_int32 and not target.integer
        #: Origins of emitted operators. If empty, an operator has the origins of its operands' producers.
        self.origins: Origins = {}

    # -- plumbing ------------------------------------------------------------------------------------------------

    def emit(self, kind: str, inputs: Sequence[Value], shape: Sequence[int], dtype: DType, /, **attrs: Any) -> Value:
        """Append any operator; prefer the typed methods below."""
        op = self._op(kind, inputs, shape, dtype, attrs)
        reason = emission_refusal(self.target, op)
        if reason and self.splits_int32 and dtype is DType.INT32 and OPERATORS[kind].is_data_movement:
            return self._move_halves(kind, inputs, shape, attrs)
        if reason:
            raise Unsupported(reason)
        op.output.name = self.graph.new_name(kind)
        op.output.producer = op
        self.graph.ops.append(op)
        return op.output

    def _move_halves(self, kind: str, inputs: Sequence[Value], shape: Sequence[int], attrs: dict[str, Any]) -> Value:
        """Emit data movement of INT32 on its two FP32 halves."""
        keep = [value.dtype is not DType.INT32 or (kind == "GATHER" and i == 1) for i, value in enumerate(inputs)]
        pairs = [(x, x) if is_kept else self.split_int32(x) for x, is_kept in zip(inputs, keep, strict=True)]
        pad_halves = self.split_int32(self.const(attrs["pad_const"], DType.INT32)) if kind == "PAD" else (None, None)
        results = []
        for half, fill in zip(zip(*pairs, strict=True), pad_halves, strict=True):
            pad_attrs = {} if fill is None or fill.data is None else {"pad_const": float(fill.data)}
            results.append(self.cast(self.emit(kind, half, shape, DType.FP32, **attrs | pad_attrs), DType.INT32))
        return self.add(*results)

    def split_int32(self, x: Value) -> tuple[Value, Value]:
        """Split INT32 into FP32 multiples of 2**16 and the rest, 0 to 65535; both are exact, their FP32 sum
        may not be.
        """
        if x.data is not None:
            high = x.data >> 16 << 16
            return self.const(high, DType.FP32), self.const(x.data - high, DType.FP32)
        half = self.const(np.full((1,) * x.rank, 16), DType.INT32)
        top = self.logical_left_shift(self.logical_right_shift(x, half), half)
        return self.cast(top, DType.FP32), self.cast(self.sub(x, top), DType.FP32)

    def _is_split(self, x: Value) -> bool:
        """Whether ``x`` is INT32 in an FP profile, which has only sums, products and shifts of it: use its halves."""
        return self.splits_int32 and x.dtype is DType.INT32

    def refusal(
        self, kind: str, inputs: Sequence[Value], shape: Sequence[int], dtype: DType, /, **attrs: Any
    ) -> str | None:
        """Why ``emit`` would refuse this operator, or None."""
        return emission_refusal(self.target, self._op(kind, inputs, shape, dtype, attrs))

    def _op(self, kind: str, inputs: Sequence[Value], shape: Sequence[int], dtype: DType, attrs: dict[str, Any]) -> Op:
        output = Value(tuple(int(size) for size in shape), dtype, kind.lower())
        origins = self.origins or merge_origins(value.producer for value in inputs if value.producer is not None)
        origins = origins or {Origin(inputs[0].name if inputs else "", COPY): 1}
        if kind == "TRANSPOSE":
            origins = {replace(origin, moves=True): work for origin, work in origins.items()}
        return Op(kind, list(inputs), output, attrs, origins)

    def const(self, data: Any, dtype: DType) -> Value:
        """A constant tensor."""
        return constant(np.asarray(data), dtype)

    def _broadcast(self, *values: Value) -> tuple[list[Value], tuple[int, ...]]:
        rank = max(value.rank for value in values)
        aligned = [self.reshape(value, (1,) * (rank - value.rank) + value.shape) for value in values]
        return aligned, np.broadcast_shapes(*(value.shape for value in aligned))

    def _binary(self, kind: str, a: Value, b: Value, dtype: DType | None = None, **attrs: Any) -> Value:
        (a, b), shape = self._broadcast(a, b)
        return self.emit(kind, (a, b), shape, dtype or a.dtype, **attrs)

    def _unary(self, kind: str, x: Value, dtype: DType | None = None, **attrs: Any) -> Value:
        return self.emit(kind, (x,), x.shape, dtype or x.dtype, **attrs)

    # -- tensor operators (TOSA 1.0, section 2.3) ----------------------------------------------------------------

    def argmax(self, x: Value, axis: int) -> Value:
        """Index of the largest element; the axis is removed. INT32.

        For integers that the target has no ARGMAX of: the smallest index whose element equals the maximum.
        """
        shape, attrs = x.shape[:axis] + x.shape[axis + 1 :], {"axis": axis, "nan_mode": "PROPAGATE"}
        if x.dtype.is_float or not self.refusal("ARGMAX", (x,), shape, DType.INT32, **attrs):
            return self.emit("ARGMAX", (x,), shape, DType.INT32, **attrs)
        count = x.shape[axis]
        maximum, element = (self.cast(value, DType.INT32) for value in (self.reduce("REDUCE_MAX", x, axis), x))
        is_less = self.cast(self.compare("GREATER", maximum, element), DType.INT32)
        indices = self.const(np.arange(count).reshape((-1,) + (1,) * (x.rank - axis - 1)), DType.INT32)
        candidates = self.add(self.mul(is_less, self.const(count, DType.INT32)), indices)
        return self.reshape(self.reduce("REDUCE_MIN", candidates, axis), shape)

    def avg_pool2d(
        self, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], zps: tuple[int, int] = (0, 0)
    ) -> Value:
        """x [N, H, W, C]; pad (top, bottom, left, right); padding does not count in the divisor."""
        accumulator = OPERATORS["AVG_POOL2D"].accumulator(x.dtype)
        zero_points = {"input_zp": zps[0], "output_zp": zps[1]}
        return self._pool("AVG_POOL2D", x, kernel, stride, pad, acc_type=accumulator, **zero_points)

    def max_pool2d(self, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int]) -> Value:
        """x [N, H, W, C]; pad (top, bottom, left, right)."""
        return self._pool("MAX_POOL2D", x, kernel, stride, pad, nan_mode="PROPAGATE")

    def _pool(
        self, kind: str, x: Value, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], **attrs: Any
    ) -> Value:
        n, h, w, c = x.shape
        out_h = (h + pad[0] + pad[1] - kernel[0]) // stride[0] + 1
        out_w = (w + pad[2] + pad[3] - kernel[1]) // stride[1] + 1
        attrs |= {"kernel": list(kernel), "stride": list(stride), "pad": list(pad)}
        return self.emit(kind, (x,), (n, out_h, out_w, c), x.dtype, **attrs)

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
        """x [N, H, W, IC], weight [OC, KH, KW, IC], bias [OC]; pad (top, bottom, left, right).

        With ``depthwise`` weight is [KH, KW, IC, M], bias [IC * M].
        """
        kind = "DEPTHWISE_CONV2D" if depthwise else "CONV2D"
        kernel = weight.shape[:2] if depthwise else weight.shape[1:3]
        channels = weight.shape[2] * weight.shape[3] if depthwise else weight.shape[0]
        x, shape, attrs = self._window_geometry(x, kernel, channels, pad, stride, dilation)
        try:
            return self._accumulate(kind, (x, weight, bias), shape, zps, **attrs)
        except Unsupported:
            if not any(pad):
                raise
        # Ethos-U55 and U65 do not pad windows with a stride above 3.
        pad = attrs["pad"]
        padded = self.pad(x, [(0, 0), (pad[0], pad[1]), (pad[2], pad[3]), (0, 0)], zps[0])
        options: dict[str, Any] = {"stride": stride, "dilation": dilation, "zps": zps, "depthwise": depthwise}
        return self.conv2d(padded, weight, bias, pad=(0, 0, 0, 0), **options)

    depthwise_conv2d = partialmethod(conv2d, depthwise=True)

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
        """x [N, H, W, IC] in blocks of the weight's type, weight [OC, KH, KW, IC], scales [OC, KH, KW, IC / 32]."""
        x, shape, attrs = self._window_geometry(x, weight.shape[1:3], weight.shape[0], pad, stride, dilation)
        return self.emit("MX_CONV2D", (x, weight, scales, bias), shape, DType.FP32, **attrs)

    def _window_geometry(
        self,
        x: Value,
        kernel: Sequence[int],
        channels: int,
        pad: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
    ) -> tuple[Value, tuple[int, ...], dict[str, list[int]]]:
        """The part of x that windows read, the result's shape, and the attributes.

        TOSA requires the last window to end exactly at the padded edge (ERROR_IF in CONV2D).
        """
        spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
        sizes = [x.shape[1 + i] + pad[2 * i] + pad[2 * i + 1] - spans[i] for i in (0, 1)]
        remainder = [size % step for size, step in zip(sizes, stride, strict=True)]
        if any(remainder):
            x, pad = self._fit_window(x, list(pad), remainder)
        positions = [size // step + 1 for size, step in zip(sizes, stride, strict=True)]
        attrs = {"pad": list(pad), "stride": list(stride), "dilation": list(dilation)}
        return x, (x.shape[0], *positions, channels), attrs

    def _accumulate(
        self, kind: str, inputs: tuple[Value, ...], shape: Sequence[int], zps: tuple[int, int], **attrs: Any
    ) -> Value:
        record, types = OPERATORS[kind], (inputs[0].dtype, inputs[1].dtype)
        attrs |= {"local_bound": False, "acc_type": record.accumulator(*types), "input_zp": zps[0], "weight_zp": zps[1]}
        return self.emit(kind, inputs, shape, record.result(*types), **attrs)

    def _fit_window(self, x: Value, pad: list[int], excess: Sequence[int]) -> tuple[Value, list[int]]:
        """Remove rows and columns that no window reads, first from the padding, then from the input by a SLICE."""
        cut = [0, 0]
        for i in (0, 1):
            from_pad = min(pad[2 * i + 1], excess[i])
            pad[2 * i + 1] -= from_pad
            cut[i] = excess[i] - from_pad
        if any(cut):
            n, h, w, c = x.shape
            x = self.slice(x, (0, 0, 0, 0), (n, h - cut[0], w - cut[1], c))
        return x, pad

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
        """x [N, H, W, IC], weight [OC, KH, KW, IC]; out_pad (top, bottom, left, right), negative to crop.

        The operator crops less than its kernel; a SLICE of the result crops the rest.
        """
        n, h, w, _ = x.shape
        oc, kh, kw, _ = weight.shape
        cropped = [max(amount, 1 - (kh, kw)[i // 2]) for i, amount in enumerate(out_pad)]
        if cropped != list(out_pad):
            whole = self.transpose_conv2d(x, weight, bias, out_pad=cropped, stride=stride, zps=zps)
            top, bottom, left, right = (kept - wanted for kept, wanted in zip(cropped, out_pad, strict=True))
            size = (n, whole.shape[1] - top - bottom, whole.shape[2] - left - right, oc)
            return self.slice(whole, (0, top, left, 0), size)
        out_h = (h - 1) * stride[0] + out_pad[0] + out_pad[1] + kh
        out_w = (w - 1) * stride[1] + out_pad[2] + out_pad[3] + kw
        attrs = {"out_pad": list(out_pad), "stride": list(stride)}
        return self._accumulate("TRANSPOSE_CONV2D", (x, weight, bias), (n, out_h, out_w, oc), zps, **attrs)

    def matmul(self, a: Value, b: Value, zps: tuple[int, int] = (0, 0)) -> Value:
        """a [N, H, C] times b [N, C, W]; int8 gives INT32, int16 INT48, FP16 and BF16 FP32."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        dtype = OPERATORS["MATMUL"].result(a.dtype, b.dtype)
        return self.emit("MATMUL", (a, b), shape, dtype, a_zp=zps[0], b_zp=zps[1])

    # -- elementwise operators (sections 2.4 to 2.8) -------------------------------------------------------------

    def clamp(self, x: Value, low: float, high: float) -> Value:
        """min(max(x, low), high)."""
        if self._is_split(x):
            return self.minimum(self.maximum(x, self.const(low, x.dtype)), self.const(high, x.dtype))
        return self._unary("CLAMP", x, min_val=low, max_val=high, nan_mode="PROPAGATE")

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return self._binary("ADD", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """a - b."""
        return self._binary("SUB", a, b)

    def mul(self, a: Value, b: Value, shift: int = 0) -> Value:
        """a * b; narrow integers give INT32; INT32 operands are rounded to (a * b) >> shift."""
        return self._binary("MUL", a, b, OPERATORS["MUL"].result(a.dtype, b.dtype), shift=shift)

    def pow(self, a: Value, b: Value) -> Value:
        """a ** b."""
        return self._binary("POW", a, b)

    def maximum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Elementwise maximum. If one operand is NaN: NaN, or with ``ignore_nan`` the other operand."""
        if self._is_split(a):
            return self.select(self.compare("GREATER", a, b), a, b)
        return self._binary("MAXIMUM", a, b, nan_mode="IGNORE" if ignore_nan else "PROPAGATE")

    def minimum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Elementwise minimum. If one operand is NaN: NaN, or with ``ignore_nan`` the other operand."""
        if self._is_split(a):
            return self.select(self.compare("GREATER", a, b), b, a)
        return self._binary("MINIMUM", a, b, nan_mode="IGNORE" if ignore_nan else "PROPAGATE")

    def arithmetic_right_shift(self, a: Value, b: Value, *, round: bool = False) -> Value:
        """a >> b; with ``round``, half is added before the shift.

        The FP profile has only logical shifts: the sign bit of INT32 is removed before the shift, and added in its new
        place. Ethos-U55 and U65 have only rounding shifts: half is subtracted before the shift, saturated at the
        minimum.
        """
        only_rounds = "ARITHMETIC_RIGHT_SHIFT" in self.target.hardware.limits
        if self.target.integer and only_rounds and not round and b.data is not None:
            half, least = (1 << b.data.astype(np.int64)) >> 1, a.dtype.range[0]
            a = self.sub(self.maximum(a, self.const(least + half, a.dtype)), self.const(half, a.dtype))
            return self._binary("ARITHMETIC_RIGHT_SHIFT", a, b, round=True)
        if self.target.integer:
            return self._binary("ARITHMETIC_RIGHT_SHIFT", a, b, round=round)
        (a, b), _ = self._broadcast(a, b)
        one, most = (self.const(np.full((1,) * a.rank, number), a.dtype) for number in (1, 31))
        magnitude = self.logical_right_shift(self.logical_left_shift(a, one), one)
        sign = self.sub(self.sub(one, one), self.logical_right_shift(a, most))
        return self.add(self.logical_right_shift(magnitude, b), self.logical_left_shift(sign, self.sub(most, b)))

    def logical_left_shift(self, a: Value, b: Value) -> Value:
        """a << b."""
        return self._binary("LOGICAL_LEFT_SHIFT", a, b)

    def logical_right_shift(self, a: Value, b: Value) -> Value:
        """a >> b; zeros are shifted in."""
        return self._binary("LOGICAL_RIGHT_SHIFT", a, b)

    def bitwise(self, kind: str, a: Value, b: Value) -> Value:
        """BITWISE_AND, BITWISE_OR, BITWISE_XOR, INTDIV, LOGICAL_AND, LOGICAL_OR or LOGICAL_XOR.

        Without BITWISE_AND on the target, a mask of the low bits is the remainder of a power of two.
        """
        is_lacking = kind == "BITWISE_AND" and (not self.target.integer or kind in self.target.hardware.unsupported)
        if is_lacking and b.data is not None:
            masks = b.data.astype(np.int64)
            if ((masks & masks + 1) == 0).all() and masks.max() < 1 << 30:  # 2**n - 1; all bits are -1
                shifts, powers = np.where(masks < 0, 0, np.log2(masks.clip(0) + 1)), np.where(masks < 0, 0, masks + 1)
                high_bits = self.arithmetic_right_shift(a, self.const(shifts, a.dtype))
                return self.sub(a, self.mul(high_bits, self.const(powers, a.dtype)))
        return self._binary(kind, a, b)

    def compare(self, kind: str, a: Value, b: Value) -> Value:
        """EQUAL, GREATER or GREATER_EQUAL; BOOL.

        For split INT32: differences of halves are exact. Their sum, rounded once, has the sign of the integers'
        difference.
        """
        if self._is_split(a):
            (high, low), (other_high, other_low) = (self.split_int32(x) for x in (a, b))
            a, b = self.add(self.sub(high, other_high), self.sub(low, other_low)), self.const(0, DType.FP32)
        return self._binary(kind, a, b, DType.BOOL)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition holds, else b. FP8 is selected as FP16, which represents all its values."""
        if a.dtype.is_fp8:
            return self.cast(self.select(condition, self.cast(a, DType.FP16), self.cast(b, DType.FP16)), a.dtype)
        (condition, a, b), shape = self._broadcast(condition, a, b)
        return self.emit("SELECT", (condition, a, b), shape, a.dtype)

    def unary(self, kind: str, x: Value) -> Value:
        """An operator with one operand and no attributes: ABS, CEIL, CLZ, COS, ERF, EXP, FLOOR, LOG, SIGMOID, ..."""
        if kind == "ABS" and self._is_split(x):
            return self.maximum(x, self.negate(x))
        return self._unary(kind, x)

    def negate(self, x: Value) -> Value:
        """-x."""
        if self._is_split(x):
            return self.sub(self.const(0, x.dtype), x)
        return self._unary("NEGATE", x, input_zp=0, output_zp=0)

    def table(self, x: Value, table: Array) -> Value:
        """int8: 256 entries from index -128, int8 result. int16: 513 entries, interpolated, INT32 result << 7."""
        return self._unary("TABLE", x, OPERATORS["TABLE"].result(x.dtype), table=np.asarray(table, dtype=x.dtype.numpy))

    # -- reductions (section 2.9): the axis stays with size 1 ----------------------------------------------------

    def reduce(self, kind: str, x: Value, axis: int) -> Value:
        """REDUCE_SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PRODUCT, REDUCE_ALL or REDUCE_ANY.

        Above rank 4, the dimensions before and after ``axis`` are merged: Vela 5.1 crashes on REDUCE_MIN of rank 5 for
        Ethos-U55 and U65. INT32 that the target does not reduce is combined half by half until one element is left.
        """
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        shape = (*before, 1, *after)
        combine = {"REDUCE_SUM": self.add, "REDUCE_MAX": self.maximum, "REDUCE_MIN": self.minimum}
        attrs: dict[str, Any] = {"axis": axis}
        if kind in ("REDUCE_MAX", "REDUCE_MIN"):
            attrs["nan_mode"] = "PROPAGATE"
        if x.dtype is DType.INT32 and kind in combine and self.refusal(kind, (x,), shape, x.dtype, **attrs):
            while (size := x.shape[axis]) > 1:
                half = size // 2
                combined = combine[kind](self.narrow(x, axis, 0, half), self.narrow(x, axis, half, half))
                x = self.concat([combined, self.narrow(x, axis, size - 1, 1)], axis) if size % 2 else combined
            return x
        if x.rank > 4:
            flat = self.reshape(x, (prod(before), x.shape[axis], prod(after)))
            return self.reshape(self.reduce(kind, flat, 1), shape)
        return self.emit(kind, (x,), shape, x.dtype, **attrs)

    # -- data layout (section 2.10) ------------------------------------------------------------------------------

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along ``axis``; more values than one operator takes (TOSA 1.0, section 1.6) in several
        operators.
        """
        if len(values) == 1:
            return values[0]
        most = LEVEL_8K.max_tensor_list_size
        if len(values) > most:
            return self.concat([self.concat(values[i : i + most], axis) for i in range(0, len(values), most)], axis)
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        return self.emit("CONCAT", values, shape, values[0].dtype, axis=axis)

    def pad(self, x: Value, padding: Sequence[tuple[int, int]], pad_const: float) -> Value:
        """padding: (before, after) for every dimension, not negative; a no-op is not emitted."""
        if not any(map(any, padding)):
            return x
        shape = [before + size + after for size, (before, after) in zip(x.shape, padding, strict=True)]
        flat = [amount for pair in padding for amount in pair]
        return self.emit("PAD", (x,), shape, x.dtype, padding=flat, pad_const=pad_const)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Same elements, other shape; a no-op is not emitted."""
        shape = tuple(int(size) for size in shape)
        if shape == x.shape:
            return x
        assert prod(shape) == x.size, f"reshape {x.shape} -> {shape}"
        if x.data is not None:
            return Value(shape, x.dtype, x.name, x.data.reshape(shape))
        return self.emit("RESHAPE", (x,), shape, x.dtype, shape=list(shape))

    def reverse(self, x: Value, axis: int) -> Value:
        """Reverse the elements along ``axis``; in rank 3 along axis 1 if the hardware supports only height and
        width.
        """
        if "REVERSE" not in self.target.hardware.limits or axis - x.rank in (-3, -2):
            return self._unary("REVERSE", x, axis=axis)
        lines = self.reshape(x, (prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])))
        return self.reshape(self._unary("REVERSE", lines, axis=1), x.shape)

    def slice(self, x: Value, start: Sequence[int], size: Sequence[int]) -> Value:
        """x[start : start + size] in every dimension; a no-op is not emitted."""
        if tuple(size) == x.shape:
            return x
        return self.emit("SLICE", (x,), size, x.dtype, start=list(start), size=list(size))

    def narrow(self, x: Value, axis: int, start: int, size: int) -> Value:
        """x[start : start + size] along ``axis``, which may be negative."""
        starts, sizes = [0] * x.rank, list(x.shape)
        starts[axis], sizes[axis] = start, size
        return self.slice(x, starts, sizes)

    def tile(self, x: Value, multiples: Sequence[int]) -> Value:
        """Repeat whole dimensions."""
        if all(multiple == 1 for multiple in multiples):
            return x
        shape = [size * multiple for size, multiple in zip(x.shape, multiples, strict=True)]
        return self.emit("TILE", (x,), shape, x.dtype, multiples=list(multiples))

    def transpose(self, x: Value, perms: Sequence[int]) -> Value:
        """Dimension i of the result is dimension perms[i] of x; a no-op is not emitted."""
        if list(perms) == list(range(x.rank)):
            return x
        shape = tuple(x.shape[i] for i in perms)
        if x.data is not None:
            return Value(shape, x.dtype, x.name, np.ascontiguousarray(x.data.transpose(perms)))
        return self.emit("TRANSPOSE", (x,), shape, x.dtype, perms=list(perms))

    # -- gather, image, types (sections 2.11 to 2.13) ------------------------------------------------------------

    def gather(self, values: Value, indices: Value) -> Value:
        """values [N, K, C], indices [N, W] INT32 -> [N, W, C]. TOSA 1.0 gathers no booleans: they are cast to
        numbers.
        """
        if values.dtype is DType.BOOL:
            kind = DType.INT32 if self.target.integer else DType.FP32
            return self.compare("GREATER", self.gather(self.cast(values, kind), indices), self.const(0, kind))
        return self.emit("GATHER", (values, indices), (*indices.shape, values.shape[2]), values.dtype)

    def resize(
        self,
        x: Value,
        size: Sequence[int],
        scale: Sequence[int],
        offset: Sequence[int],
        border: Sequence[int],
        mode: str,
    ) -> Value:
        """x [N, H, W, C] to [N, *size, C]; scale (yn, yd, xn, xd); mode NEAREST or BILINEAR.

        Bilinear int8 gives INT32 and int16 gives INT48, both scaled by yn * xn.
        """
        dtype = OPERATORS["RESIZE"].result(x.dtype) if mode == "BILINEAR" else x.dtype
        attrs = {"scale": list(scale), "offset": list(offset), "border": list(border), "mode": mode}
        return self.emit("RESIZE", (x,), (x.shape[0], *size, x.shape[3]), dtype, **attrs)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Change the element type; a no-op is not emitted.

        Booleans become 0 and 1 by a SELECT, since the FP profile does not cast them. The FP profile does not cast
        integers to other integers either: these are cast through FP32, INT32 after its high bits are dropped. Casts to
        and from FP8 also go through FP32.
        """
        types = {x.dtype, dtype}
        if len(types) == 2 and any(kind.is_fp8 for kind in types) and types.isdisjoint({DType.FP16, DType.FP32}):
            return self.cast(self.cast(x, DType.FP32), dtype)
        if x.dtype is DType.BOOL and dtype is not DType.BOOL:
            return self.select(x, self.const(1, dtype), self.const(0, dtype))
        kinds = (DType.INT8, DType.INT16, DType.INT32)
        if x.dtype is dtype or self.target.integer or x.dtype not in kinds or dtype not in kinds:
            return x if x.dtype is dtype else self._unary("CAST", x, dtype)
        if x.dtype is DType.INT32:
            dropped_bits = self.const(np.full((1,) * x.rank, 32 - 8 * dtype.bytes), DType.INT32)
            x = self.arithmetic_right_shift(self.logical_left_shift(x, dropped_bits), dropped_bits)
        return self.cast(self.cast(x, DType.FP32), dtype)

    def rescale(
        self,
        x: Value,
        dtype: DType,
        scale: float | Array,
        input_zp: int = 0,
        output_zp: int = 0,
        *,
        round_double: bool = False,
    ) -> Value:
        """round((x - input_zp) * scale) + output_zp, saturated to ``dtype``.

        ``scale`` is one number or one per channel (the last dimension). INT48 input has 16-bit multipliers.
        """
        multiplier, shift = quantized_multipliers(np.atleast_1d(scale), 16 if x.dtype is DType.INT48 else 32)
        return self._unary(
            "RESCALE",
            x,
            dtype,
            scale32=x.dtype is not DType.INT48,
            rounding_mode="DOUBLE_ROUND" if round_double else "SINGLE_ROUND",
            per_channel=multiplier.size > 1,
            input_unsigned=False,
            output_unsigned=False,
            multiplier=multiplier,
            shift=shift,
            input_zp=input_zp,
            output_zp=output_zp,
        )


def quantized_multipliers(scales: Array, bits: int) -> tuple[Array, Array]:
    """Multipliers and right shifts with scale = multiplier * 2**-shift (TOSA 1.0, section 1.10 and RESCALE).

    The multiplier takes ``bits`` - 1 bits (31 or 15); the shift stays within TOSA's 2 to 62. A scale below that range
    becomes 0, the nearest multiple of the smallest step.

    Raises:
        Unsupported: a scale is not finite, negative, or too large for a shift of at least 2.
    """
    scales = np.asarray(scales, dtype=np.float64)
    if not np.all(np.isfinite(scales)) or np.any(scales < 0):
        raise Unsupported(f"rescale factor {scales} is not a finite positive number")
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
