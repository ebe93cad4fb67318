"""Space-to-depth for Ethos-U: pixels become channels, so that strided convolutions of few channels use all multipliers.

The hardware multiplies 8 input channels at a time, for four window elements of int8 (two of int16) at once. An image of
3 channels uses three of the eight. A 7x7 window with stride 2 equals a 7x4 window with stride (2, 1) on 6 channels:
neighbouring pixels of a row, which are contiguous in NHWC, become channels of one pixel.

The rewrite is exact: each weight meets the same pixel, and the added weights are zero. Measured with Vela 5.1 on
U55-128 / U85-256: ResNet-18's first convolution 2,611,362 -> 1,411,332 / 1,306,061 -> 703,689 cycles; DS-CNN's
26,411 -> 11,334 / 6,978 -> 4,770; patches of 8x8 in a 64x64 image 1,638,818 -> 39,856 / 528,640 -> 19,692.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, rewrite_to_fixpoint

Array = np.ndarray[Any, Any]
#: Cost of a stride that Vela splits into one operation per window element: above any other candidate.
_SPLIT_STRIDE_COST = 1e12
#: Larger patches are cheaper to reorder by TRANSPOSE, or to convolve one row of patches at a time.
_MAX_GATHERED_PATCH = 256


def fold_strides(graph: Graph, target: Target) -> None:
    """Rewrite every CONV2D whose stride can become channels in fewer cycles."""
    if target.hardware.npu:
        rewrite_to_fixpoint(graph, target, {"CONV2D": [fold_stride]})


@dataclass(frozen=True)
class _Windows:
    """A convolution along height or width.

    Attributes:
        size: elements of the input.
        kernel: elements of the window.
        stride: distance of the windows.
        before: elements of padding before the input.
        out: number of windows.
    """

    size: int
    kernel: int
    stride: int
    before: int
    out: int

    @property
    def after(self) -> int:
        """Padding at the end; negative if no window reads the last elements."""
        return (self.out - 1) * self.stride + self.kernel - self.before - self.size

    def fold(self) -> tuple[_Windows, int] | None:
        """Fold the whole stride into channels by a RESHAPE.

        Returns:
            the folded windows, and the number of zeros that each window begins with; None if the size is no multiple of
            the stride.
        """
        s = self.stride
        if s == 1 or self.size % s:
            return None
        before = -(-self.before // s)
        zeros = before * s - self.before
        axis = _Windows(self.size // s, -(-(self.kernel + zeros) // s), 1, before, self.out)
        return (axis, zeros) if axis.after >= 0 else None

    @property
    def identity(self) -> _Windows:
        """Windows of one element that keep every element."""
        return _Windows(self.size, 1, 1, 0, self.size)

    def gather(self, largest_stride: int) -> Iterator[tuple[_Windows, _Windows]]:
        """Splits into (gathering, rest): an identity convolution gathers pixels as channels, and the rest reads them.

        It gathers one stride (or a small factor of it), or the whole window.
        """
        factor = self.stride
        if factor > largest_stride:
            factor = next((f for f in (2, 3) if factor % f == 0), 1)
        before, first = divmod(self.before, factor)
        size = -(-(self.size + first) // factor)
        rest = _Windows(size, -(-self.kernel // factor), self.stride // factor, before, self.out)
        if rest.after < 0:
            rest = replace(rest, size=size + rest.after)
        yield _Windows(self.size, factor, factor, first, rest.size), rest
        if 1 < self.kernel <= 8 and self.stride <= largest_stride:
            yield self, _Windows(self.out, 1, 1, 0, self.out)


@dataclass(frozen=True)
class _Estimate:
    """Cost model of convolutions on int8 or int16 for one target."""

    target: Target
    is_int16: bool

    def cycles(self, rows: _Windows, columns: _Windows, in_channels: int, out_channels: int) -> float:
        """Cycles: the larger of multiplying and writing results (one takes 1 cycle on U55-128 and 0.25 on U85-256)."""
        hardware, macs = self.target.hardware, self.target.macs
        assert macs is not None
        split_strides = sum(axis.stride for axis in (rows, columns) if axis.stride > hardware.max_stride)
        window, elements_at_once = rows.kernel * columns.kernel, 2 if self.is_int16 else 4
        by_window = -(-window // elements_at_once) * elements_at_once * -(-in_channels // 8)
        by_channel = window * 4 * -(-in_channels // 32)
        products = min(by_window, by_channel) * 8 * (2 if self.is_int16 else 1)
        multiplying = -(-out_channels // 8) * 8 * products / macs
        writing = out_channels * hardware.macs_per_result / macs
        return (
            split_strides * _SPLIT_STRIDE_COST
            + hardware.start_cycles
            + rows.out * columns.out * max(multiplying, writing)
        )


def fold_stride(op: Op, rewriter: Rewriter) -> Value | None:
    """The cheapest form of a CONV2D: as it is, width folded by a RESHAPE, or height and width gathered."""
    weight, build = op.inputs[1], rewriter.build
    if weight.data is None or max(op.attrs["dilation"]) > 1 or op.inputs[0].dtype not in (DType.INT8, DType.INT16):
        return None
    conv = _Convolution(op, _skip_unread_slice(op), build)
    if max(conv.rows.stride, conv.columns.stride) == 1 and conv.x.shape[3] >= 8:
        return None
    estimate = _Estimate(build.target, conv.x.dtype is DType.INT16)
    cheapest = min(conv.candidates(), key=lambda candidate: candidate.cycles(estimate), default=None)
    cycles = estimate.cycles(conv.rows, conv.columns, conv.x.shape[3], weight.shape[0])
    if cheapest is None or cheapest.cycles(estimate) >= cycles - build.target.hardware.start_cycles / 2:
        return None
    return cheapest.emit()


def _skip_unread_slice(op: Op) -> Value:
    """The input of a CONV2D, without a SLICE that removes only rows and columns that no window reaches.

    If windows extend past the SLICE, they read padding there, and the removed elements must not replace it.
    """
    x = op.inputs[0]
    slice_op = producer(x, "SLICE")
    if slice_op is None or any(slice_op.attrs["start"]):
        return x
    whole = slice_op.inputs[0]
    keeps_images = whole.shape[0] == x.shape[0] and whole.shape[3] == x.shape[3]
    padded = [axis.after > 0 and whole.shape[1 + i] > axis.size for i, axis in enumerate(_windows(op, x))]
    return whole if keeps_images and not any(padded) else x


def _windows(op: Op, x: Value) -> tuple[_Windows, _Windows]:
    """The windows of a CONV2D along height and width of ``x``, which may be larger than the operator's own input."""
    stride, pad = op.attrs["stride"], op.attrs["pad"]
    shapes = (x.shape[1:3], op.inputs[1].shape[1:3], op.output.shape[1:3])
    rows, columns = (
        _Windows(size, kernel, stride[i], pad[2 * i], out)
        for i, (size, kernel, out) in enumerate(zip(*shapes, strict=True))
    )
    return rows, columns


class _Rewrite(Protocol):
    """A bit-equal form of a convolution."""

    def cycles(self, estimate: _Estimate) -> float:
        """Estimated cycles."""

    def emit(self) -> Value:
        """Emit the form; returns the CONV2D's result."""


class _Convolution:
    """A CONV2D on ``x``, which may have more rows and columns than it reads."""

    def __init__(self, op: Op, x: Value, build: Builder) -> None:
        self.op = op
        self.x = x
        self.build = build
        self.rows, self.columns = _windows(op, x)

    def candidates(self) -> Iterator[_Rewrite]:
        """Every other form of the convolution."""
        rows, columns, limit = self.rows, self.columns, self.build.target.hardware.max_stride
        folded = columns.fold()
        if folded is not None:
            yield _FoldWidth(self, *folded)
            if columns.stride > limit:
                return  # the next application of the rule folds the height
        patches = rows.kernel == rows.stride > limit and rows.before == 0 and rows.after <= 0
        if patches and columns.stride == 1 and rows.stride * self.x.shape[3] > _MAX_GATHERED_PATCH:
            yield _ReshapePatches(self)
            return
        along_rows = [(rows.identity, rows), *rows.gather(limit)]
        along_columns = [(columns.identity, columns), *columns.gather(limit)]
        for (gather_rows, rest_rows), (gather_columns, rest_columns) in product(along_rows, along_columns):
            if gather_rows.kernel * gather_columns.kernel > 1:
                yield _GatherWindows(self, gather_rows, gather_columns, rest_rows, rest_columns)

    def convolve(self, x: Value, weight: Array, rows: _Windows, columns: _Windows) -> Value:
        """The convolution itself on other pixels; rows and columns at the end that are not read are sliced off."""
        n, h, w, c = x.shape
        x = self.build.slice(x, (0, 0, 0, 0), (n, h + min(rows.after, 0), w + min(columns.after, 0), c))
        attrs = {
            **self.op.attrs,
            "pad": [rows.before, max(rows.after, 0), columns.before, max(columns.after, 0)],
            "stride": [rows.stride, columns.stride],
        }
        shape = (n, rows.out, columns.out, weight.shape[0])
        inputs = (x, constant(weight, self.op.inputs[1].dtype), self.op.inputs[2])
        return self.build.emit("CONV2D", inputs, shape, self.op.output.dtype, **attrs)

    @property
    def weight(self) -> Array:
        """[OC, KH, KW, IC]."""
        data = self.op.inputs[1].data
        assert data is not None
        return data

    def pad_weight(self, more: tuple[tuple[int, int], tuple[int, int]]) -> Array:
        """The weight with zero rows and columns (the weight zero point) added before and after."""
        return np.pad(self.weight, ((0, 0), *more, (0, 0)), constant_values=self.op.attrs["weight_zp"])


@dataclass(frozen=True)
class _FoldWidth:
    """Fold the width into channels by a RESHAPE, which is free in NHWC."""

    conv: _Convolution
    columns: _Windows
    zeros: int

    def cycles(self, estimate: _Estimate) -> float:
        """Estimated cycles."""
        oc, *_, ic = self.conv.weight.shape
        return estimate.cycles(self.conv.rows, self.columns, ic * self.conv.columns.stride, oc)

    def emit(self) -> Value:
        """Emit the form; returns the CONV2D's result."""
        x, stride = self.conv.x, self.conv.columns.stride
        n, h, w, c = x.shape
        image = self.conv.build.reshape(x, (n, h, w // stride, stride * c))
        oc, kh, kw, _ = self.conv.weight.shape
        end = self.columns.kernel * stride - self.zeros - kw
        weight = self.conv.pad_weight(((0, 0), (self.zeros, end)))
        weight = weight.reshape(oc, kh, self.columns.kernel, stride * c)
        return self.conv.convolve(image, weight, self.conv.rows, self.columns)


@dataclass(frozen=True)
class _GatherWindows:
    """Gather pixels into channels by an identity convolution, whose cost is writing its result."""

    conv: _Convolution
    gather_rows: _Windows
    gather_columns: _Windows
    rows: _Windows
    columns: _Windows

    def cycles(self, estimate: _Estimate) -> float:
        """Estimated cycles of both convolutions."""
        oc, *_, ic = self.conv.weight.shape
        channels = ic * self.gather_rows.kernel * self.gather_columns.kernel
        gather = estimate.cycles(self.gather_rows, self.gather_columns, ic, channels)
        return gather + estimate.cycles(self.rows, self.columns, channels, oc)

    def emit(self) -> Value:
        """Emit the form; returns the CONV2D's result."""
        gh, gw = self.gather_rows.kernel, self.gather_columns.kernel
        oc, kh, kw, ic = self.conv.weight.shape
        zero_point = self.conv.op.attrs["input_zp"]
        image = gather(self.conv.build, self.conv.x, self.gather_rows, self.gather_columns, zero_point)
        sizes = (self.rows.kernel, gh, self.columns.kernel, gw)
        weight = self.conv.pad_weight(((0, sizes[0] * gh - kh), (0, sizes[2] * gw - kw))).reshape(oc, *sizes, ic)
        weight = weight.transpose(0, 1, 3, 2, 4, 5).reshape(oc, sizes[0], sizes[2], gh * gw * ic)
        return self.conv.convolve(image, weight, self.rows, self.columns)


def gather(build: Builder, x: Value, rows: _Windows, columns: _Windows, zero_point: int) -> Value:
    """Gather windows of ``x`` [N, H, W, C] as channels [N, H', W', KH * KW * C], padded with the zero point."""
    n, h, w, c = x.shape
    channels = rows.kernel * columns.kernel * c
    eye = np.eye(channels).reshape(channels, rows.kernel, columns.kernel, c)
    x = build.slice(x, (0, 0, 0, 0), (n, h + min(rows.after, 0), w + min(columns.after, 0), c))
    pad = (rows.before, max(rows.after, 0), columns.before, max(columns.after, 0))
    return identity_convolution(build, x, eye, pad, (rows.stride, columns.stride), zero_point)


def identity_convolution(
    build: Builder,
    x: Value,
    weight: Array,
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    stride: tuple[int, int] = (1, 1),
    zero_point: int = 0,
) -> Value:
    """CONV2D that moves elements: a single weight of 1 per result. Exact: x - zero_point is rescaled by 1."""
    accumulator = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
    zeros = build.const(np.zeros(weight.shape[0]), accumulator)
    kernel = build.const(weight, DType.INT8)
    moved = build.conv2d(x, kernel, zeros, pad=pad, stride=stride, zps=(zero_point, 0))
    return build.rescale(moved, x.dtype, 1.0, 0, zero_point)


@dataclass(frozen=True)
class _ReshapePatches:
    """Non-overlapping windows along the height with too many elements to gather.

    U55 and U65 reorder them by a TRANSPOSE. U85, where that is slow, computes each row of windows as an image of its
    own.
    """

    conv: _Convolution

    def cycles(self, estimate: _Estimate) -> float:
        """Zero: it is always cheaper than the convolution as it is, which Vela splits."""
        return 0.0

    def emit(self) -> Value:
        """Emit the form; returns the CONV2D's result."""
        build, x, rows = self.conv.build, self.conv.x, self.conv.rows
        n, _, w, c = x.shape
        oc, kh, kw, _ = self.conv.weight.shape
        x = build.slice(x, (0, 0, 0, 0), (n, rows.out * kh, w, c))
        columns = self.conv.columns
        if build.target.hardware.transposes_by_convolution:
            image = build.reshape(x, (n * rows.out, kh, w, c))
            result = self.conv.convolve(image, self.conv.weight, _Windows(kh, kh, 1, 0, 1), columns)
            return build.reshape(result, self.conv.op.output.shape)
        sorted_ = build.transpose(build.reshape(x, (n * rows.out, kh, w, c)), (0, 2, 1, 3))
        image = build.reshape(sorted_, (n, rows.out, w, kh * c))
        weight = self.conv.weight.transpose(0, 2, 1, 3).reshape(oc, 1, kw, kh * c)
        return self.conv.convolve(image, weight, _Windows(rows.out, 1, 1, 0, rows.out), columns)
