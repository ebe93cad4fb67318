"""Legalization: emit bit-exact replacements of operators that TOSA or the target lacks.

``LegalizingBuilder`` overrides typed methods of ``Builder`` for limits of TOSA 1.0, of its FP profile, and of Ethos-U.
It does not override ``emit``, so that a pass gets an error if it emits an operator that the target lacks.
``FloatProfileBuilder`` overrides ``emit`` too. It replaces INT32 operators that the FP profile lacks: data movement,
comparisons, CLAMP, MAXIMUM, MINIMUM, ABS and NEGATE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.tosa.builder import Builder, reduce_attributes
from arm_backend_core.tosa.graph import Value, prod
from arm_backend_core.tosa.operators import LEVEL_8K, OPERATORS
from arm_backend_core.tosa.operators.windows import WindowAxis


class LegalizingBuilder(Builder):
    """A builder whose methods emit an equivalent sequence of operators if the target lacks an operator."""

    # -- windows -------------------------------------------------------------------------------------------------

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
        """Emit a convolution. First, slice off the rows and columns of the input that no window reads.

        If the target refuses the padded convolution, emit a PAD before it. Example: Ethos-U55 and U65 refuse padding
        for a CONV2D with a kernel larger than 1x1 and a stride above 3.
        """
        x, pad = self._fit_windows(x, weight.shape[:2] if depthwise else weight.shape[1:3], pad, stride, dilation)
        options: dict[str, Any] = {"stride": stride, "dilation": dilation, "zps": zps, "depthwise": depthwise}
        try:
            return super().conv2d(x, weight, bias, pad=pad, **options)
        except Unsupported:
            if not any(pad):
                raise
        padded = self.pad(x, [(0, 0), (pad[0], pad[1]), (pad[2], pad[3]), (0, 0)], zps[0])
        return super().conv2d(padded, weight, bias, pad=(0, 0, 0, 0), **options)

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
        """Emit a block-scaled convolution. First, slice off the rows and columns of the input that no window reads."""
        x, pad = self._fit_windows(x, weight.shape[1:3], pad, stride, dilation)
        return super().mx_conv2d(x, weight, scales, bias, pad=pad, stride=stride, dilation=dilation)

    def _fit_windows(
        self, x: Value, kernel: Sequence[int], pad: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> tuple[Value, list[int]]:
        """Remove rows and columns that no window reads: first from the padding, then from the input by a SLICE.

        TOSA requires that the last window ends exactly at the padded edge (ERROR_IF in CONV2D).

        Returns:
            The sliced input and the reduced padding.
        """
        pad, removed = list(pad), [0, 0]
        for i, name in enumerate(("height", "width")):
            axis = WindowAxis(name, x.shape[1 + i], kernel[i], stride[i], dilation[i], pad[2 * i], pad[2 * i + 1])
            unread = axis.slack % axis.stride
            from_pad = min(axis.pad_after, unread)
            pad[2 * i + 1] -= from_pad
            removed[i] = unread - from_pad
        n, h, w, c = x.shape
        return self.slice(x, (0, 0, 0, 0), (n, h - removed[0], w - removed[1], c)), pad

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
        """Emit a transposed convolution, with a SLICE if ``out_pad`` crops by the kernel size or more.

        TRANSPOSE_CONV2D itself can crop only by less than the kernel size.
        """
        legal_out_pad = [max(amount, 1 - weight.shape[1 + i // 2]) for i, amount in enumerate(out_pad)]
        uncropped = super().transpose_conv2d(x, weight, bias, out_pad=legal_out_pad, stride=stride, zps=zps)
        top, bottom, left, right = (legal - amount for legal, amount in zip(legal_out_pad, out_pad, strict=True))
        n, h, w, c = uncropped.shape
        return self.slice(uncropped, (0, top, left, 0), (n, h - top - bottom, w - left - right, c))

    # -- elementwise operators -----------------------------------------------------------------------------------

    def arithmetic_right_shift(self, a: Value, b: Value, *, round: bool = False) -> Value:
        """Emit an arithmetic shift. The FP profile has only logical shifts, Ethos-U55 and U65 only rounding shifts.

        FP profile: a logical shift moves the lower 31 bits of an INT32 value a. If a is negative, -2**(31 - b) is then
        added, that is, the shifted sign bit and its copies to the left of it.
        Ethos-U55 and U65, if b is constant: half of 2**b is subtracted from a before a rounding shift. The subtraction
        saturates at the minimum of the type.
        """
        only_rounds = "ARITHMETIC_RIGHT_SHIFT" in self.target.hardware.limits
        if self.target.has_int_profile and only_rounds and not round and b.data is not None:
            half, minimum = (1 << b.data.astype(np.int64)) >> 1, a.dtype.range[0]
            a = self.sub(self.maximum(a, self.const(minimum + half, a.dtype)), self.const(half, a.dtype))
            return super().arithmetic_right_shift(a, b, round=True)
        if self.target.has_int_profile:
            return super().arithmetic_right_shift(a, b, round=round)
        a, b = self._align_ranks(a, b)
        one, sign_shift = (self.const(np.full((1,) * a.rank, number), a.dtype) for number in (1, 31))
        magnitude = self.logical_right_shift(self.logical_left_shift(a, one), one)
        sign = self.sub(self.sub(one, one), self.logical_right_shift(a, sign_shift))
        return self.add(self.logical_right_shift(magnitude, b), self.logical_left_shift(sign, self.sub(sign_shift, b)))

    def binary(self, kind: str, a: Value, b: Value) -> Value:
        """Emit ``kind``. If the target lacks BITWISE_AND, a & (2**n - 1) becomes a - (a >> n) * 2**n for constant n."""
        is_lacking = kind == "BITWISE_AND" and (
            not self.target.has_int_profile or kind in self.target.hardware.unsupported
        )
        if is_lacking and b.data is not None:
            masks = b.data.astype(np.int64)
            if ((masks & masks + 1) == 0).all() and masks.max() < 1 << 30:  # masks 2**n - 1, and -1 for all bits
                shifts, powers = np.where(masks < 0, 0, np.log2(masks.clip(0) + 1)), np.where(masks < 0, 0, masks + 1)
                high_bits = self.arithmetic_right_shift(a, self.const(shifts, a.dtype))
                return self.sub(a, self.mul(high_bits, self.const(powers, a.dtype)))
        return super().binary(kind, a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Emit a SELECT. FP8 operands are cast to FP16, which represents all FP8 values."""
        if a.dtype.is_fp8:
            return self.cast(self.select(condition, self.cast(a, DType.FP16), self.cast(b, DType.FP16)), a.dtype)
        return super().select(condition, a, b)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Emit a cast, in several steps if the target lacks it.

        Booleans: a SELECT converts them to 0 and 1, because the FP profile cannot cast them.

        Integer to integer: the FP profile has no such cast, so the value is cast to FP32 and from FP32 to the result's
        type. A cast to a narrower integer must drop the high bits, but the cast from FP32 saturates. Two INT32
        shifts, to the left and back to the right, therefore drop these bits first.

        FP8: a cast between FP8 and a type other than FP16 and FP32 also goes through FP32.
        """
        types = {x.dtype, dtype}
        if len(types) == 2 and any(kind.is_fp8 for kind in types) and types.isdisjoint({DType.FP16, DType.FP32}):
            return self.cast(self.cast(x, DType.FP32), dtype)
        if x.dtype is DType.BOOL and dtype is not DType.BOOL:
            return self.select(x, self.const(1, dtype), self.const(0, dtype))
        if x.dtype is dtype or self.target.has_int_profile or not types <= {DType.INT8, DType.INT16, DType.INT32}:
            return super().cast(x, dtype)
        if x.dtype.bytes > dtype.bytes:
            x = self.cast(x, DType.INT32)
            dropped_bits = self.const(np.full((1,) * x.rank, 32 - 8 * dtype.bytes), DType.INT32)
            x = self.arithmetic_right_shift(self.logical_left_shift(x, dropped_bits), dropped_bits)
        return self.cast(self.cast(x, DType.FP32), dtype)

    # -- reductions and data movement ----------------------------------------------------------------------------

    def argmax(self, x: Value, axis: int) -> Value:
        """Emit an ARGMAX. If the target lacks it for integers, compare all elements with the maximum instead.

        The result is then the smallest index of an element that is equal to the maximum.
        """
        try:
            return super().argmax(x, axis)
        except Unsupported:
            if x.dtype.is_float:
                raise
        count = x.shape[axis]
        maximum, element = (self.cast(value, DType.INT32) for value in (self.reduce("REDUCE_MAX", x, axis), x))
        is_less = self.cast(self.compare("GREATER", maximum, element), DType.INT32)
        indices = self.const(np.arange(count).reshape((-1,) + (1,) * (x.rank - axis - 1)), DType.INT32)
        candidates = self.add(self.mul(is_less, self.const(count, DType.INT32)), indices)
        return self.reshape(self.reduce("REDUCE_MIN", candidates, axis), x.shape[:axis] + x.shape[axis + 1 :])

    def reduce(self, kind: str, x: Value, axis: int) -> Value:
        """Emit a reduction. If the target lacks it for INT32, halve the axis repeatedly, by combining its two halves.

        Above rank 4, a RESHAPE merges all dimensions before ``axis`` into one, and all dimensions after it into one,
        because Vela 5.1 crashes on REDUCE_MIN of rank 5 for Ethos-U55 and U65.
        """
        combine = {"REDUCE_SUM": self.add, "REDUCE_MAX": self.maximum, "REDUCE_MIN": self.minimum}
        is_int32 = x.dtype is DType.INT32 and kind in combine
        if is_int32 and self.refusal(kind, (x,), x.dtype, **reduce_attributes(kind, axis)):
            while (size := x.shape[axis]) > 1:
                half = size // 2
                combined = combine[kind](self.narrow(x, axis, 0, half), self.narrow(x, axis, half, half))
                x = self.concat([combined, self.narrow(x, axis, size - 1, 1)], axis) if size % 2 else combined
            return x
        if x.rank > 4:
            before, after = x.shape[:axis], x.shape[axis + 1 :]
            flat = self.reshape(x, (prod(before), x.shape[axis], prod(after)))
            return self.reshape(self.reduce(kind, flat, 1), (*before, 1, *after))
        return super().reduce(kind, x, axis)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Emit a CONCAT, or several if there are more values than one CONCAT accepts (TOSA 1.0, section 1.7)."""
        limit = LEVEL_8K.max_tensor_list_size
        if len(values) > limit:
            return self.concat([self.concat(values[i : i + limit], axis) for i in range(0, len(values), limit)], axis)
        return super().concat(values, axis)

    def reverse(self, x: Value, axis: int) -> Value:
        """Emit a REVERSE. If the hardware reverses only height and width, reshape to rank 3 and reverse axis 1."""
        if "REVERSE" not in self.target.hardware.limits or axis - x.rank in (-3, -2):
            return super().reverse(x, axis)
        rank_3 = self.reshape(x, (prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])))
        return self.reshape(super().reverse(rank_3, 1), x.shape)

    def gather(self, values: Value, indices: Value) -> Value:
        """Emit a GATHER. Booleans are cast to numbers, because TOSA 1.0 cannot gather booleans."""
        if values.dtype is DType.BOOL:
            kind = DType.INT32 if self.target.has_int_profile else DType.FP32
            return self.compare("GREATER", self.gather(self.cast(values, kind), indices), self.const(0, kind))
        return super().gather(values, indices)


class FloatProfileBuilder(LegalizingBuilder):
    """A builder for the FP profile, which has few INT32 operators.

    For INT32, this profile of TOSA 1.0 has ADD, SUB, MUL, INTDIV, logical shifts, IDENTITY and CAST, but no arithmetic
    shift. The profile lacks other data movement and comparisons of INT32. For these, the builder splits each INT32
    operand into two FP32 values: the high and the low 16 bits (``split_int32``).
    """

    def emit(self, kind: str, inputs: Sequence[Value], dtype: DType, /, **attrs: Any) -> Value:
        """Append an operator. INT32 data movement that the target lacks is emitted for each half of ``split_int32``."""
        try:
            return super().emit(kind, inputs, dtype, **attrs)
        except Unsupported:
            if dtype is not DType.INT32 or not OPERATORS[kind].is_data_movement:
                raise
        is_unsplit = [value.dtype is not DType.INT32 or (kind == "GATHER" and i == 1) for i, value in enumerate(inputs)]
        pairs = [(x, x) if unsplit else self.split_int32(x) for x, unsplit in zip(inputs, is_unsplit, strict=True)]
        pad_halves = self.split_int32(self.const(attrs["pad_const"], DType.INT32)) if kind == "PAD" else (None, None)
        results = []
        for half, fill in zip(zip(*pairs, strict=True), pad_halves, strict=True):
            pad_attrs = {} if fill is None or fill.data is None else {"pad_const": float(fill.data)}
            results.append(self.cast(self.emit(kind, half, DType.FP32, **attrs | pad_attrs), DType.INT32))
        return self.add(*results)

    def split_int32(self, x: Value) -> tuple[Value, Value]:
        """Split INT32 into two FP32 values: a multiple of 2**16, and the remainder from 0 to 65535.

        Both are exact. Their FP32 sum may not be exact.
        """
        if x.data is not None:
            high = x.data >> 16 << 16
            return self.const(high, DType.FP32), self.const(x.data - high, DType.FP32)
        sixteen = self.const(np.full((1,) * x.rank, 16), DType.INT32)
        high_bits = self.logical_left_shift(self.logical_right_shift(x, sixteen), sixteen)
        return self.cast(high_bits, DType.FP32), self.cast(self.sub(x, high_bits), DType.FP32)

    def compare(self, kind: str, a: Value, b: Value) -> Value:
        """Emit a comparison. For INT32, it compares a - b with 0 in FP32.

        a - b is the sum of the differences of the halves. The differences are exact. The sum is rounded once, so that
        its sign is correct.
        """
        if a.dtype is DType.INT32:
            (high, low), (other_high, other_low) = (self.split_int32(x) for x in (a, b))
            a, b = self.add(self.sub(high, other_high), self.sub(low, other_low)), self.const(0, DType.FP32)
        return super().compare(kind, a, b)

    def clamp(self, x: Value, low: float, high: float) -> Value:
        """Emit a CLAMP. INT32 is clamped by a maximum and a minimum."""
        if x.dtype is not DType.INT32:
            return super().clamp(x, low, high)
        return self.minimum(self.maximum(x, self.const(low, x.dtype)), self.const(high, x.dtype))

    def maximum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Emit a MAXIMUM. INT32 is compared and selected."""
        if a.dtype is not DType.INT32:
            return super().maximum(a, b, ignore_nan=ignore_nan)
        return self.select(self.compare("GREATER", a, b), a, b)

    def minimum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Emit a MINIMUM. INT32 is compared and selected."""
        if a.dtype is not DType.INT32:
            return super().minimum(a, b, ignore_nan=ignore_nan)
        return self.select(self.compare("GREATER", a, b), b, a)

    def unary(self, kind: str, x: Value) -> Value:
        """Emit a unary operator. ABS of INT32 becomes the maximum of x and -x."""
        is_int32_abs = kind == "ABS" and x.dtype is DType.INT32
        return self.maximum(x, self.negate(x)) if is_int32_abs else super().unary(kind, x)

    def negate(self, x: Value) -> Value:
        """Emit -x. INT32 is subtracted from 0."""
        return self.sub(self.const(0, x.dtype), x) if x.dtype is DType.INT32 else super().negate(x)
