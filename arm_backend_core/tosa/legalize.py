"""Legalization: emit other operators, equal to the bit, in place of one that the target or TOSA does not have.

``LegalizingBuilder`` replaces methods of ``Builder`` for limits of TOSA 1.0 and of Ethos-U. ``Int32HalvesBuilder`` also
replaces data movement and comparisons of INT32, which the FP profile lacks. ``emit`` itself is never legalized there,
so that a pass that emits a rewritten operator learns that the target refuses it.
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
from arm_backend_core.tosa.operators.windows import Axis


class LegalizingBuilder(Builder):
    """A builder whose methods emit several operators where the target lacks the one that they are named after."""

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
        """Fit the windows to the input; emit a PAD if the target's convolution does not pad.

        Ethos-U55 and U65 do not pad windows with a stride above 3.
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
        """Fit the windows to the input."""
        x, pad = self._fit_windows(x, weight.shape[1:3], pad, stride, dilation)
        return super().mx_conv2d(x, weight, scales, bias, pad=pad, stride=stride, dilation=dilation)

    def _fit_windows(
        self, x: Value, kernel: Sequence[int], pad: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> tuple[Value, list[int]]:
        """Remove rows and columns that no window reads, first from the padding, then from the input by a SLICE.

        TOSA requires the last window to end exactly at the padded edge (ERROR_IF in CONV2D).

        Returns:
            the input and its padding.
        """
        pad, cut = list(pad), [0, 0]
        for i, name in enumerate(("height", "width")):
            axis = Axis(name, x.shape[1 + i], kernel[i], stride[i], dilation[i], pad[2 * i], pad[2 * i + 1])
            unread = axis.slack % axis.stride
            from_pad = min(axis.after, unread)
            pad[2 * i + 1] -= from_pad
            cut[i] = unread - from_pad
        n, h, w, c = x.shape
        return self.slice(x, (0, 0, 0, 0), (n, h - cut[0], w - cut[1], c)), pad

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
        """Crop by as much as the operator allows, less than its kernel, and the rest by a SLICE of the result."""
        cropped = [max(amount, 1 - weight.shape[1 + i // 2]) for i, amount in enumerate(out_pad)]
        whole = super().transpose_conv2d(x, weight, bias, out_pad=cropped, stride=stride, zps=zps)
        top, bottom, left, right = (kept - wanted for kept, wanted in zip(cropped, out_pad, strict=True))
        n, h, w, c = whole.shape
        return self.slice(whole, (0, top, left, 0), (n, h - top - bottom, w - left - right, c))

    # -- elementwise operators -----------------------------------------------------------------------------------

    def arithmetic_right_shift(self, a: Value, b: Value, *, round: bool = False) -> Value:
        """The FP profile has only logical shifts, and Ethos-U55 and U65 have only rounding ones.

        FP: the sign bit of INT32 is removed before the shift, and added in its new place. Ethos-U: half is subtracted
        before the shift, saturated at the minimum.
        """
        only_rounds = "ARITHMETIC_RIGHT_SHIFT" in self.target.hardware.limits
        if self.target.integer and only_rounds and not round and b.data is not None:
            half, least = (1 << b.data.astype(np.int64)) >> 1, a.dtype.range[0]
            a = self.sub(self.maximum(a, self.const(least + half, a.dtype)), self.const(half, a.dtype))
            return super().arithmetic_right_shift(a, b, round=True)
        if self.target.integer:
            return super().arithmetic_right_shift(a, b, round=round)
        a, b = self._align_ranks(a, b)
        one, most = (self.const(np.full((1,) * a.rank, number), a.dtype) for number in (1, 31))
        magnitude = self.logical_right_shift(self.logical_left_shift(a, one), one)
        sign = self.sub(self.sub(one, one), self.logical_right_shift(a, most))
        return self.add(self.logical_right_shift(magnitude, b), self.logical_left_shift(sign, self.sub(most, b)))

    def bitwise(self, kind: str, a: Value, b: Value) -> Value:
        """Without BITWISE_AND on the target, a mask of the low bits is the remainder of a power of two."""
        is_lacking = kind == "BITWISE_AND" and (not self.target.integer or kind in self.target.hardware.unsupported)
        if is_lacking and b.data is not None:
            masks = b.data.astype(np.int64)
            if ((masks & masks + 1) == 0).all() and masks.max() < 1 << 30:  # 2**n - 1; all bits are -1
                shifts, powers = np.where(masks < 0, 0, np.log2(masks.clip(0) + 1)), np.where(masks < 0, 0, masks + 1)
                high_bits = self.arithmetic_right_shift(a, self.const(shifts, a.dtype))
                return self.sub(a, self.mul(high_bits, self.const(powers, a.dtype)))
        return super().bitwise(kind, a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """FP8 is selected as FP16, which represents all its values."""
        if a.dtype.is_fp8:
            return self.cast(self.select(condition, self.cast(a, DType.FP16), self.cast(b, DType.FP16)), a.dtype)
        return super().select(condition, a, b)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Cast in several steps.

        Booleans become 0 and 1 by a SELECT, since the FP profile does not cast them. The FP profile does not cast
        integers to other integers either: these are cast through FP32, which saturates. Before a cast to a narrower
        type, INT32 shifts drop the high bits. Casts to and from FP8 also go through FP32.
        """
        types = {x.dtype, dtype}
        if len(types) == 2 and any(kind.is_fp8 for kind in types) and types.isdisjoint({DType.FP16, DType.FP32}):
            return self.cast(self.cast(x, DType.FP32), dtype)
        if x.dtype is DType.BOOL and dtype is not DType.BOOL:
            return self.select(x, self.const(1, dtype), self.const(0, dtype))
        if x.dtype is dtype or self.target.integer or not types <= {DType.INT8, DType.INT16, DType.INT32}:
            return super().cast(x, dtype)
        if x.dtype.bytes > dtype.bytes:
            x = self.cast(x, DType.INT32)
            dropped_bits = self.const(np.full((1,) * x.rank, 32 - 8 * dtype.bytes), DType.INT32)
            x = self.arithmetic_right_shift(self.logical_left_shift(x, dropped_bits), dropped_bits)
        return self.cast(self.cast(x, DType.FP32), dtype)

    # -- reductions and data movement ----------------------------------------------------------------------------

    def argmax(self, x: Value, axis: int) -> Value:
        """For integers that the target has no ARGMAX of: the smallest index whose element equals the maximum."""
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
        """Without an INT32 reduction on the target, combine the two halves of the axis until its size is 1.

        Above rank 4, the dimensions before and after ``axis`` are merged: Vela 5.1 crashes on REDUCE_MIN of rank 5 for
        Ethos-U55 and U65.
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
        """Concatenate more values than one operator takes (TOSA 1.0, section 1.6) in several operators."""
        most = LEVEL_8K.max_tensor_list_size
        if len(values) > most:
            return self.concat([self.concat(values[i : i + most], axis) for i in range(0, len(values), most)], axis)
        return super().concat(values, axis)

    def reverse(self, x: Value, axis: int) -> Value:
        """Reverse in rank 3 along axis 1 if the hardware supports only height and width."""
        if "REVERSE" not in self.target.hardware.limits or axis - x.rank in (-3, -2):
            return super().reverse(x, axis)
        lines = self.reshape(x, (prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])))
        return self.reshape(super().reverse(lines, 1), x.shape)

    def gather(self, values: Value, indices: Value) -> Value:
        """TOSA 1.0 gathers no booleans: they are cast to numbers."""
        if values.dtype is DType.BOOL:
            kind = DType.INT32 if self.target.integer else DType.FP32
            return self.compare("GREATER", self.gather(self.cast(values, kind), indices), self.const(0, kind))
        return super().gather(values, indices)


class Int32HalvesBuilder(LegalizingBuilder):
    """A builder for the FP profile, which has only sums, products and shifts of INT32.

    It emits data movement and comparisons of INT32 on two FP32 halves.
    """

    def emit(self, kind: str, inputs: Sequence[Value], dtype: DType, /, **attrs: Any) -> Value:
        """Append any operator; data movement of INT32 that the target lacks, on halves."""
        try:
            return super().emit(kind, inputs, dtype, **attrs)
        except Unsupported:
            if dtype is not DType.INT32 or not OPERATORS[kind].is_data_movement:
                raise
        keep = [value.dtype is not DType.INT32 or (kind == "GATHER" and i == 1) for i, value in enumerate(inputs)]
        pairs = [(x, x) if is_kept else self.split_int32(x) for x, is_kept in zip(inputs, keep, strict=True)]
        pad_halves = self.split_int32(self.const(attrs["pad_const"], DType.INT32)) if kind == "PAD" else (None, None)
        results = []
        for half, fill in zip(zip(*pairs, strict=True), pad_halves, strict=True):
            pad_attrs = {} if fill is None or fill.data is None else {"pad_const": float(fill.data)}
            results.append(self.cast(self.emit(kind, half, DType.FP32, **attrs | pad_attrs), DType.INT32))
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

    def compare(self, kind: str, a: Value, b: Value) -> Value:
        """Differences of halves are exact; their sum, rounded once, has the sign of the integers' difference."""
        if a.dtype is DType.INT32:
            (high, low), (other_high, other_low) = (self.split_int32(x) for x in (a, b))
            a, b = self.add(self.sub(high, other_high), self.sub(low, other_low)), self.const(0, DType.FP32)
        return super().compare(kind, a, b)

    def clamp(self, x: Value, low: float, high: float) -> Value:
        """Clamp INT32 by a maximum and a minimum."""
        if x.dtype is not DType.INT32:
            return super().clamp(x, low, high)
        return self.minimum(self.maximum(x, self.const(low, x.dtype)), self.const(high, x.dtype))

    def maximum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Select INT32 by a comparison."""
        if a.dtype is not DType.INT32:
            return super().maximum(a, b, ignore_nan=ignore_nan)
        return self.select(self.compare("GREATER", a, b), a, b)

    def minimum(self, a: Value, b: Value, *, ignore_nan: bool = False) -> Value:
        """Select INT32 by a comparison."""
        if a.dtype is not DType.INT32:
            return super().minimum(a, b, ignore_nan=ignore_nan)
        return self.select(self.compare("GREATER", a, b), b, a)

    def unary(self, kind: str, x: Value) -> Value:
        """ABS of INT32 is the maximum of x and -x."""
        is_int32_abs = kind == "ABS" and x.dtype is DType.INT32
        return self.maximum(x, self.negate(x)) if is_int32_abs else super().unary(kind, x)

    def negate(self, x: Value) -> Value:
        """INT32 is subtracted from 0."""
        return self.sub(self.const(0, x.dtype), x) if x.dtype is DType.INT32 else super().negate(x)
