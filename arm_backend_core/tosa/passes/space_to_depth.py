"""Space-to-depth and im2col for Ethos-U: pixels become channels, so that strided CONV2Ds of few channels use all MACs.

In one step, the hardware multiplies 8 input channels at four positions of the kernel (int8), or at two (int16). An
image of 3 channels uses three of the eight. Space-to-depth merges neighbouring pixels of a row, which are contiguous in
NHWC, into the channels of one pixel. For example, a 7x7 kernel with stride 2 on 3 channels equals a 7x4 kernel with
stride (2, 1) on 6 channels.

The rewrite is exact: each pixel is multiplied by the same weight as before, and the added weights are zero. Estimates
of Vela 5.1 in cycles, without -> with the rewrite:

* first convolution of ResNet-18: U55-128 2,611,362 -> 1,411,332; U85-256 1,306,061 -> 703,689;
* first convolution of DS-CNN: U55-128 26,411 -> 11,334; U85-256 6,978 -> 4,770;
* patches of 8x8 in a 64x64 image: U55-128 1,638,818 -> 39,856; U85-256 528,640 -> 19,692.
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
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, rewrite_to_fixpoint

Array = np.ndarray[Any, Any]
#: Penalty in cycles for each operation into which Vela splits a convolution with a large stride. The penalty exceeds
#: the cycles of all candidates without such a stride.
_SPLIT_STRIDE_COST = 1e12
#: Maximum number of elements of an im2col patch. ``_NonOverlappingWindowConv`` is cheaper for larger patches.
_MAX_IM2COL_PATCH = 256


def apply_space_to_depth(graph: Graph, target: Target) -> None:
    """Apply space-to-depth or im2col to every CONV2D whose estimated cycles it reduces."""
    if target.hardware.is_ethos_u:
        rewrite_to_fixpoint(graph, target, {"CONV2D": [rewrite_by_space_to_depth_or_im2col]})


@dataclass(frozen=True)
class _ConvAxis:
    """Parameters of a convolution along one axis, height or width.

    Attributes:
        input_size: number of input elements.
        kernel: number of kernel elements.
        stride: number of input elements between the starts of neighbouring windows.
        pad_before: number of padding elements before the input.
        output_size: number of output elements, one per window.
    """

    input_size: int
    kernel: int
    stride: int
    pad_before: int
    output_size: int

    @property
    def pad_after(self) -> int:
        """Number of padding elements after the input; negative if no window reads the last input elements."""
        return (self.output_size - 1) * self.stride + self.kernel - self.pad_before - self.input_size

    def space_to_depth(self) -> tuple[_ConvAxis, int] | None:
        """Merge ``stride`` neighbouring input elements into channels by a RESHAPE.

        Returns:
            The axis after the RESHAPE, with stride 1, and the number of zeros to add in front of the kernel. None if
            the stride is 1, if it does not divide the input size, or if no window would read the last elements.
        """
        s = self.stride
        if s == 1 or self.input_size % s:
            return None
        pad_before = -(-self.pad_before // s)
        leading_zeros = pad_before * s - self.pad_before
        kernel = -(-(self.kernel + leading_zeros) // s)
        axis = _ConvAxis(self.input_size // s, kernel, 1, pad_before, self.output_size)
        return (axis, leading_zeros) if axis.pad_after >= 0 else None

    @property
    def identity(self) -> _ConvAxis:
        """The axis of a convolution with kernel 1 and stride 1."""
        return _ConvAxis(self.input_size, 1, 1, 0, self.input_size)

    def im2col_splits(self, max_stride: int) -> Iterator[tuple[_ConvAxis, _ConvAxis]]:
        """Yield splits into two convolutions: (im2col, convolution of the im2col result).

        The im2col of the first split merges ``stride`` neighbouring elements into channels, so that the convolution
        after it has stride 1. If the stride exceeds ``max_stride``, the im2col merges 2 elements if 2 divides the
        stride, else 3 if 3 divides the stride, else 1. The second split, for kernels from 2 to 8 and strides up to
        ``max_stride``, merges a whole window.
        """
        factor = self.stride
        if factor > max_stride:
            factor = next((f for f in (2, 3) if factor % f == 0), 1)
        pad_before, im2col_pad_before = divmod(self.pad_before, factor)
        input_size = -(-(self.input_size + im2col_pad_before) // factor)
        rest = _ConvAxis(input_size, -(-self.kernel // factor), self.stride // factor, pad_before, self.output_size)
        if rest.pad_after < 0:
            rest = replace(rest, input_size=input_size + rest.pad_after)
        yield _ConvAxis(self.input_size, factor, factor, im2col_pad_before, rest.input_size), rest
        if 1 < self.kernel <= 8 and self.stride <= max_stride:
            yield self, _ConvAxis(self.output_size, 1, 1, 0, self.output_size)


@dataclass(frozen=True)
class _ConvCostModel:
    """Analytical cost model of int8 or int16 convolutions on one target."""

    target: Target
    is_int16: bool

    def cycles(self, rows: _ConvAxis, columns: _ConvAxis, in_channels: int, out_channels: int) -> float:
        """Estimate the cycles of a convolution: start cycles, and per output pixel the maximum of MAC and write cycles.

        Writing one output element takes 1 cycle on U55-128 and 0.25 cycles on U85-256. The MAC cycles are the minimum
        over the two block traversals: part-kernel-first reads 8 channels a step, depth-first 32.
        """
        hardware, macs = self.target.hardware, self.target.macs
        assert macs is not None
        split_operations = sum(axis.stride for axis in (rows, columns) if axis.stride > hardware.max_stride)
        window, elements_per_step = rows.kernel * columns.kernel, 2 if self.is_int16 else 4
        part_kernel_first = -(-window // elements_per_step) * elements_per_step * -(-in_channels // 8)
        depth_first = window * 4 * -(-in_channels // 32)
        macs_per_channel = min(part_kernel_first, depth_first) * 8 * (2 if self.is_int16 else 1)
        mac_cycles = -(-out_channels // 8) * 8 * macs_per_channel / macs
        write_cycles = out_channels * hardware.macs_per_write / macs
        return (
            split_operations * _SPLIT_STRIDE_COST
            + hardware.start_cycles
            + rows.output_size * columns.output_size * max(mac_cycles, write_cycles)
        )


def rewrite_by_space_to_depth_or_im2col(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a CONV2D by its cheapest space-to-depth or im2col candidate.

    None if no candidate saves more than half the start cycles of an operation, or if the convolution is not eligible:
    computed weights, a dilation, elements other than int8 and int16, or stride 1 with at least 8 channels.
    """
    weight, build = op.inputs[1], rewriter.builder
    if weight.data is None or max(op.attrs["dilation"]) > 1 or op.inputs[0].dtype not in (DType.INT8, DType.INT16):
        return None
    conv = _Convolution(op, _skip_slice_of_unread_elements(op), build)
    if max(conv.rows.stride, conv.columns.stride) == 1 and conv.x.shape[3] >= 8:
        return None
    cost_model = _ConvCostModel(build.target, conv.x.dtype is DType.INT16)
    cheapest = min(conv.candidates(), key=lambda candidate: candidate.cycles(cost_model), default=None)
    cycles = cost_model.cycles(conv.rows, conv.columns, conv.x.shape[3], weight.shape[0])
    if cheapest is None or cheapest.cycles(cost_model) >= cycles - build.target.hardware.start_cycles / 2:
        return None
    return cheapest.emit()


def _skip_slice_of_unread_elements(op: Op) -> Value:
    """The input of a CONV2D, or the input of the SLICE before it if that SLICE removes only elements that are not read.

    The SLICE stays if windows extend beyond the sliced size: without the SLICE, they would read the removed elements
    instead of padding.
    """
    x = op.inputs[0]
    slice_op = producer(x, "SLICE")
    if slice_op is None or any(slice_op.attrs["start"]):
        return x
    unsliced = slice_op.inputs[0]
    keeps_images = unsliced.shape[0] == x.shape[0] and unsliced.shape[3] == x.shape[3]
    padded = [
        axis.pad_after > 0 and unsliced.shape[1 + i] > axis.input_size for i, axis in enumerate(_conv_axes(op, x))
    ]
    return unsliced if keeps_images and not any(padded) else x


def _conv_axes(op: Op, x: Value) -> tuple[_ConvAxis, _ConvAxis]:
    """The axes (height, width) of a CONV2D on ``x``, which may be larger than the input of the operator."""
    rows, columns = (
        _ConvAxis(size, axis.kernel, axis.stride, axis.pad_before, axis.output_size)
        for size, axis in zip(x.shape[1:3], window_axes(op), strict=True)
    )
    return rows, columns


class _Candidate(Protocol):
    """A bit-exact replacement of a convolution."""

    def cycles(self, cost_model: _ConvCostModel) -> float:
        """Estimated cycles."""

    def emit(self) -> Value:
        """Emit the operators; returns the value that replaces the CONV2D's result."""


class _Convolution:
    """A CONV2D ``op`` whose input is replaced by ``x``. Windows need not reach the last rows and columns of ``x``."""

    def __init__(self, op: Op, x: Value, build: Builder) -> None:
        self.op = op
        self.x = x
        self.build = build
        self.rows, self.columns = _conv_axes(op, x)

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the replacements to compare."""
        rows, columns, limit = self.rows, self.columns, self.build.target.hardware.max_stride
        folded = columns.space_to_depth()
        if folded is not None:
            yield _SpaceToDepthWidth(self, *folded)
            if columns.stride > limit:
                return  # the next application of the rule handles the height
        patches = rows.kernel == rows.stride > limit and rows.pad_before == 0 and rows.pad_after <= 0
        if patches and columns.stride == 1 and rows.stride * self.x.shape[3] > _MAX_IM2COL_PATCH:
            yield _NonOverlappingWindowConv(self)
            return
        along_rows = [(rows.identity, rows), *rows.im2col_splits(limit)]
        along_columns = [(columns.identity, columns), *columns.im2col_splits(limit)]
        for (im2col_rows, rest_rows), (im2col_columns, rest_columns) in product(along_rows, along_columns):
            if im2col_rows.kernel * im2col_columns.kernel > 1:
                yield _Im2colConv(self, im2col_rows, im2col_columns, rest_rows, rest_columns)

    def convolve(self, x: Value, weight: Array, rows: _ConvAxis, columns: _ConvAxis) -> Value:
        """Emit the CONV2D with another input, weight and axes. A SLICE removes unread rows and columns."""
        n, h, w, c = x.shape
        x = self.build.slice(x, (0, 0, 0, 0), (n, h + min(rows.pad_after, 0), w + min(columns.pad_after, 0), c))
        attrs = {
            **self.op.attrs,
            "pad": [rows.pad_before, max(rows.pad_after, 0), columns.pad_before, max(columns.pad_after, 0)],
            "stride": [rows.stride, columns.stride],
        }
        inputs = (x, constant(weight, self.op.inputs[1].dtype), self.op.inputs[2])
        return self.build.emit("CONV2D", inputs, self.op.output.dtype, **attrs)

    @property
    def weight(self) -> Array:
        """The constant weight [OC, KH, KW, IC]."""
        data = self.op.inputs[1].data
        assert data is not None
        return data

    def pad_weight(self, padding: tuple[tuple[int, int], tuple[int, int]]) -> Array:
        """The weight, padded along KH and KW by (before, after) elements of the weight zero point."""
        return np.pad(self.weight, ((0, 0), *padding, (0, 0)), constant_values=self.op.attrs["weight_zp"])


@dataclass(frozen=True)
class _SpaceToDepthWidth:
    """Space-to-depth along the width by a RESHAPE, which costs nothing in NHWC."""

    conv: _Convolution
    columns: _ConvAxis
    leading_zeros: int

    def cycles(self, cost_model: _ConvCostModel) -> float:
        """Estimated cycles."""
        oc, *_, ic = self.conv.weight.shape
        return cost_model.cycles(self.conv.rows, self.columns, ic * self.conv.columns.stride, oc)

    def emit(self) -> Value:
        """Emit the operators; returns the value that replaces the CONV2D's result."""
        x, stride = self.conv.x, self.conv.columns.stride
        n, h, w, c = x.shape
        image = self.conv.build.reshape(x, (n, h, w // stride, stride * c))
        oc, kh, kw, _ = self.conv.weight.shape
        trailing_zeros = self.columns.kernel * stride - self.leading_zeros - kw
        weight = self.conv.pad_weight(((0, 0), (self.leading_zeros, trailing_zeros)))
        weight = weight.reshape(oc, kh, self.columns.kernel, stride * c)
        return self.conv.convolve(image, weight, self.conv.rows, self.columns)


@dataclass(frozen=True)
class _Im2colConv:
    """im2col by an identity convolution, and a convolution of the result. The im2col costs only its write cycles."""

    conv: _Convolution
    im2col_rows: _ConvAxis
    im2col_columns: _ConvAxis
    rows: _ConvAxis
    columns: _ConvAxis

    def cycles(self, cost_model: _ConvCostModel) -> float:
        """Estimated cycles of both convolutions."""
        oc, *_, ic = self.conv.weight.shape
        channels = ic * self.im2col_rows.kernel * self.im2col_columns.kernel
        im2col_cycles = cost_model.cycles(self.im2col_rows, self.im2col_columns, ic, channels)
        return im2col_cycles + cost_model.cycles(self.rows, self.columns, channels, oc)

    def emit(self) -> Value:
        """Emit the operators; returns the value that replaces the CONV2D's result."""
        gh, gw = self.im2col_rows.kernel, self.im2col_columns.kernel
        oc, kh, kw, ic = self.conv.weight.shape
        zero_point = self.conv.op.attrs["input_zp"]
        image = _im2col(self.conv.build, self.conv.x, self.im2col_rows, self.im2col_columns, zero_point)
        sizes = (self.rows.kernel, gh, self.columns.kernel, gw)
        weight = self.conv.pad_weight(((0, sizes[0] * gh - kh), (0, sizes[2] * gw - kw))).reshape(oc, *sizes, ic)
        weight = weight.transpose(0, 1, 3, 2, 4, 5).reshape(oc, sizes[0], sizes[2], gh * gw * ic)
        return self.conv.convolve(image, weight, self.rows, self.columns)


def _im2col(build: Builder, x: Value, rows: _ConvAxis, columns: _ConvAxis, zero_point: int) -> Value:
    """Emit im2col of ``x`` [N, H, W, C] as [N, H', W', KH * KW * C], padded with the zero point."""
    n, h, w, c = x.shape
    channels = rows.kernel * columns.kernel * c
    eye = np.eye(channels).reshape(channels, rows.kernel, columns.kernel, c)
    x = build.slice(x, (0, 0, 0, 0), (n, h + min(rows.pad_after, 0), w + min(columns.pad_after, 0), c))
    pad = (rows.pad_before, max(rows.pad_after, 0), columns.pad_before, max(columns.pad_after, 0))
    return emit_identity_convolution(build, x, eye, pad, (rows.stride, columns.stride), zero_point)


def emit_identity_convolution(
    build: Builder,
    x: Value,
    weight: Array,
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    stride: tuple[int, int] = (1, 1),
    zero_point: int = 0,
) -> Value:
    """Emit a CONV2D that only moves elements: one weight of 1 per output channel, and an exact RESCALE with scale 1."""
    accumulator = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
    zeros = build.const(np.zeros(weight.shape[0]), accumulator)
    kernel = build.const(weight, DType.INT8)
    moved = build.conv2d(x, kernel, zeros, pad=pad, stride=stride, zps=(zero_point, 0))
    return build.rescale(moved, x.dtype, 1.0, 0, zero_point)


@dataclass(frozen=True)
class _NonOverlappingWindowConv:
    """Convolution of non-overlapping windows along the height that have too many elements for im2col.

    On U55 and U65, a TRANSPOSE moves the elements of a window into channels. On U85, where a TRANSPOSE is slow, each
    row of windows becomes an image of the batch instead.
    """

    conv: _Convolution

    def cycles(self, cost_model: _ConvCostModel) -> float:
        """Zero, because this is always cheaper than the original convolution, which Vela splits."""
        return 0.0

    def emit(self) -> Value:
        """Emit the operators; returns the value that replaces the CONV2D's result."""
        build, x, rows = self.conv.build, self.conv.x, self.conv.rows
        n, _, w, c = x.shape
        oc, kh, kw, _ = self.conv.weight.shape
        x = build.slice(x, (0, 0, 0, 0), (n, rows.output_size * kh, w, c))
        columns = self.conv.columns
        if build.target.hardware.transposes_by_convolution:
            image = build.reshape(x, (n * rows.output_size, kh, w, c))
            result = self.conv.convolve(image, self.conv.weight, _ConvAxis(kh, kh, 1, 0, 1), columns)
            return build.reshape(result, self.conv.op.output.shape)
        transposed = build.transpose(build.reshape(x, (n * rows.output_size, kh, w, c)), (0, 2, 1, 3))
        image = build.reshape(transposed, (n, rows.output_size, w, kh * c))
        weight = self.conv.weight.transpose(0, 2, 1, 3).reshape(oc, 1, kw, kh * c)
        return self.conv.convolve(image, weight, _ConvAxis(rows.output_size, 1, 1, 0, rows.output_size), columns)
