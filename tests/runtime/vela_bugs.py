"""Reproducers of Vela's bugs: small graphs that Vela miscompiles; see ``docs/contributors/vela.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.workers.vela import SUPPORTED_RELEASES, Release, installed_release
from tests.tosa_graphs import Body, Input

_U55_U65 = ("ethos-u55-128", "ethos-u65-256")
_U85 = ("ethos-u85-256",)
_SMALLEST_U55 = ("ethos-u55-32", "ethos-u55-64")
_VELA_5_1: tuple[Release, ...] = ((5, 1),)
_VELA_5_2: tuple[Release, ...] = ((5, 2),)
_ALL = (*_U55_U65, *_U85)
_IMAGE, _WIDE_IMAGE = (((1, 4, 6, 8), dtype) for dtype in (DType.INT8, DType.INT16))
_POOLED = (((1, 8, 8, 16), DType.INT8),)
#: Reproducer -> NPUs whose programs write out of bounds.
OUT_OF_BOUNDS = {
    "column_reduction_overflow": _ALL,
    "column_reduction_overflow_beside": _ALL,
    "reversed_of_five": _U85,
    "reversed_and_turned": _U85,
    "batched_pool_stride": _U85,
    "batched_pool_kernel": _U85,
    "joined_average": _U85,
    "joined_average_padded": _U85,
    "joined_average_strided": _U85,
    "lost_rescale_operand_offset": _U55_U65,
    "lost_rescale_operand_offset_scaled": _U55_U65,
    "lost_rescale_operand_offset_widened": _U55_U65,
    "lost_rescale_operand_offset_of_two_slices": _U55_U65,
    "lost_rescale_operand_offset_for_two": _U55_U65,
    "lost_rescale_operand_offset_beside_rescale": _U55_U65,
    "lost_rescale_operand_offset_beside_result": _U55_U65,
    "lost_rescale_operand_offset_again": _U55_U65,
    "reshaped_casts": _U55_U65,
    "reshaped_terms": _U55_U65,
    "reshaped_product": _U55_U65,
    "reshaped_product_widened_twice": _U55_U65,
    "turned_product": _U55_U65,
}
#: Reproducers that read their graph input as uint8. A RESHAPE of this input would cause ``unsigned_beside_view``.
READ_AS_UNSIGNED = frozenset({"lost_channel_scales_unsigned"})
#: Reproducer -> NPUs for which Vela crashes.
CRASHES = {
    "widened_image": _U85,
    "widened_image_depthwise": _U85,
    "widened_image_transposed": _U85,
    "widened_image_sliced": _U85,
    "widened_image_reshaped": _U85,
    "widened_image_zero_point": _U85,
    "widened_image_padded": _U85,
}


@dataclass(frozen=True)
class Reproducer:
    """A graph that Vela miscompiles.

    Attributes:
        name: the bug's name.
        body: function that builds the graph.
        inputs: shapes and types of the graph's inputs.
        miscompiled: accelerators whose programs are wrong.
        accelerators: accelerators that support all operators of the graph.
        releases: releases of Vela that have the bug.
    """

    name: str
    body: Body
    inputs: tuple[Input, ...]
    miscompiled: tuple[str, ...]
    accelerators: tuple[str, ...] = _ALL
    releases: tuple[Release, ...] = SUPPORTED_RELEASES

    @property
    def wrong(self) -> tuple[str, ...]:
        """Accelerators for which the installed Vela's programs are wrong."""
        return self.wrong_with(installed_release())

    def wrong_with(self, release: Release) -> tuple[str, ...]:
        """Accelerators for which the programs of a release of Vela are wrong."""
        return self.miscompiled if release in self.releases else ()

    def crashes(self, accelerator: str) -> bool:
        """Whether the installed Vela crashes on the graph."""
        return accelerator in self.wrong and accelerator in CRASHES.get(self.name, ())

    def writes_out_of_bounds(self, accelerator: str) -> bool:
        """Whether the installed Vela's program writes outside its tensors."""
        return accelerator in self.wrong and accelerator in OUT_OF_BOUNDS.get(self.name, ())


def _narrow(b: Builder, x: Value) -> Value:
    return b.cast(b.add(b.cast(x, DType.INT32), b.cast(x, DType.INT32)), DType.INT8)


def _narrow_in_chain(b: Builder, x: Value) -> Value:
    return b.binary("BITWISE_OR", _narrow(b, x), x)


def _widened_again(b: Builder, x: Value) -> Value:
    return b.cast(_narrow(b, x), DType.INT32)


def _rescaled_difference(b: Builder, x: Value, y: Value) -> Value:
    wide = b.sub(b.rescale(x, DType.INT32, 4.0), b.rescale(y, DType.INT32, 8.0))
    return b.rescale(wide, DType.INT16, 1 / 16)


def _padded_depth(b: Builder, x: Value) -> Value:
    weight, bias = b.const(np.ones((1, 1, 1, 1, 1)), DType.INT8), b.const([5], DType.INT32)
    attrs = {"pad": [1, 0, 0, 0, 0, 0], "stride": [1, 1, 1], "dilation": [1, 1, 1], "acc_type": DType.INT32}
    attrs |= {"local_bound": False, "input_zp": 0, "weight_zp": 0}
    return b.emit("CONV3D", (x, weight, bias), DType.INT32, **attrs)


def _strided_images(b: Builder, x: Value) -> Value:
    weight, bias = b.const(np.full((1, 1, 1, 1), 3), DType.INT8), b.const([5], DType.INT32)
    return b.conv2d(x, weight, bias, pad=(0,) * 4, stride=(1, 4))


def _minimum(b: Builder, x: Value) -> Value:
    return b.reshape(b.reduce("REDUCE_MIN", x, 1), (2, 4))


def _window(b: Builder, x: Value, m: int = 1) -> Value:
    """A padded depthwise convolution with ``m`` results per channel."""
    channels = x.shape[3]
    weight = b.const(np.arange(4 * channels * m).reshape(2, 2, channels, m) - 5, DType.INT8)
    bias = b.const([0] * channels * m, DType.INT32)
    return b.rescale(b.depthwise_conv2d(x, weight, bias, pad=(1, 1, 1, 1)), DType.INT8, 0.125)


def _sliced(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 5).reshape(1, 2, 2, 1), DType.INT8)
    part = b.slice(x, (0, 0, 0, 1), (2, 2, 2, 1))
    return b.rescale(b.conv2d(part, weight, b.const([0], DType.INT32), pad=(1, 1, 1, 1)), DType.INT8, 0.125)


def _sliced_multiplied(b: Builder, x: Value) -> Value:
    return _window(b, b.slice(x, (0, 0, 0, 1), (1, 2, 2, 2)), 2)


def _sliced_dilated(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 5).reshape(1, 2, 2, 1), DType.INT8)
    part = b.slice(x, (0, 1, 0, 0), (1, 6, 6, 1))
    wide = b.conv2d(part, weight, b.const([0], DType.INT32), pad=(0, 0, 0, 0), dilation=(3, 3))
    return b.rescale(wide, DType.INT8, 0.125)


def _sliced_and_dilated(b: Builder, x: Value) -> Value:
    """One operator with two bugs: it reads a SLICE, and its dilation exceeds the rows and columns of the slice."""
    weight = b.const(np.arange(9 * 2 * 3).reshape(3, 3, 3, 2) - 11, DType.INT8)
    part, bias = b.slice(x, (0, 1, 1, 0), (1, 3, 3, 2)), b.const([5, 6, 7], DType.INT32)
    return b.rescale(b.conv2d(part, weight, bias, pad=(6, 5, 6, 5), dilation=(5, 5)), DType.INT8, 0.01)


def _widen(b: Builder, x: Value) -> Value:
    return b.rescale(x, DType.INT16, 1.0)


def _widen_and_slice(b: Builder, x: Value) -> Value:
    return b.slice(_widen(b, x), (0, 1, 2, 0), (1, 3, 4, 8))


def _widen_in_steps(b: Builder, x: Value) -> Value:
    return _widen(b, b.reshape(b.rescale(x, DType.INT32, 1.0), (1, 6, 4, 8)))


def _widen_with_zero_point(b: Builder, x: Value) -> Value:
    return _widen(b, b.rescale(x, DType.INT32, 1.0, 3))


def _pad_and_widen(b: Builder, x: Value) -> Value:
    """The zeros that pad ``x`` are -3 in the widened tensor."""
    return b.rescale(b.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0)), 0), DType.INT16, 1.0, 3)


def _widened_image(
    b: Builder, x: Value, *, kind: str = "CONV2D", widen: Callable[[Builder, Value], Value] = _widen
) -> Value:
    """A convolution of int16 whose image is an int8 tensor widened by RESCALE(1)."""
    image = widen(b, x)
    bias = b.const([5, -6, 7, 8, -9, 1, 2, 3], DType.INT48)
    weights = np.arange(2 * 2 * 8 * 8) % 251 - 125
    if kind == "DEPTHWISE_CONV2D":
        weight = b.const(weights[:32].reshape(2, 2, 8, 1), DType.INT8)
        whole = b.depthwise_conv2d(image, weight, bias, pad=(0, 0, 0, 0))
    elif kind == "TRANSPOSE_CONV2D":
        weight = b.const(weights.reshape(8, 2, 2, 8), DType.INT8)
        whole = b.transpose_conv2d(image, weight, bias, out_pad=(0, 0, 0, 0), stride=(2, 2))
    else:
        whole = b.conv2d(image, b.const(weights.reshape(8, 2, 2, 8), DType.INT8), bias, pad=(0, 0, 0, 0))
    return b.rescale(whole, DType.INT16, 0.25)


def _sliced_transposed(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 10).reshape(1, 3, 3, 1), DType.INT8)
    part = b.slice(x, (0, 1, 0, 0), (1, 2, 2, 1))
    whole = b.transpose_conv2d(part, weight, b.const([0], DType.INT32), out_pad=(0, 0, 0, 0), stride=(2, 2))
    return b.rescale(whole, DType.INT8, 0.125)


def _sliced_maximum(b: Builder, x: Value) -> Value:
    return b.reduce("REDUCE_MAX", b.slice(x, (0, 0, 0, 1), (1, 3, 4, 5)), 3)


def _sliced_among_others(b: Builder, x: Value) -> Value:
    return b.reduce("REDUCE_MAX", b.reshape(b.slice(x, (1, 1), (3, 4)), (1, 1, 3, 4)), 2)


def _sliced_sum(b: Builder, x: Value) -> Value:
    return b.reduce("REDUCE_SUM", b.rescale(b.slice(x, (0, 0, 0, 1), (1, 3, 4, 5)), DType.INT32, 1.0), 3)


def _sliced_and_turned_twice(b: Builder, x: Value, y: Value) -> Value:
    turned = b.reshape(b.transpose(b.slice(x, (1, 0), (3, 4)), (1, 0)), (1, 4, 3))
    return b.rescale(b.matmul(b.transpose(turned, (0, 2, 1)), y), DType.INT8, 0.01)


def _sliced_product(b: Builder, x: Value) -> Value:
    y = b.const(np.arange(24).reshape(2, 3, 4) - 9, DType.INT8)
    return b.rescale(b.matmul(b.slice(x, (0, 0, 1), (2, 4, 3)), y), DType.INT8, 0.125)


def _one_of_five(b: Builder, x: Value, y: Value) -> Value:
    return b.rescale(b.add(b.rescale(x, DType.INT32, 1.0), b.rescale(y, DType.INT32, 1.0)), DType.INT8, 0.5)


def _part_of_five(b: Builder, x: Value, y: Value) -> Value:
    return _one_of_five(b, b.reshape(b.slice(x, (0, 0, 0, 0, 1), (1,) * 5), (1,) * 4), y)


def _sliced_of_five(b: Builder, x: Value, y: Value) -> Value:
    part = b.reshape(b.slice(x, (2, 0, 0), (2, 3, 5)), (1, 1, 2, 3, 5))
    return b.rescale(b.mul(b.rescale(part, DType.INT32, 1.0), b.rescale(y, DType.INT32, 1.0)), DType.INT8, 1 / 128)


def _reversed_of_five(b: Builder, x: Value) -> Value:
    turned = b.transpose(b.reshape(x, (3, 8)), (1, 0))
    return b.reverse(b.reshape(b.reshape(turned, (1, 8, 1, 3)), (1, 8, 1, 1, 3)), 4)


def _reversed_and_turned(b: Builder, x: Value) -> Value:
    return b.transpose(b.reshape(b.reverse(b.reverse(x, 3), 3), (11, 16, 12)), (2, 1, 0))


def _one_number_of_five(b: Builder, x: Value) -> Value:
    return b.maximum(b.const(np.full((1,) * 5, 31), DType.INT32), x)


def _clamped(b: Builder, x: Value) -> Value:
    return b.clamp(b.cast(x, DType.INT8), -50, 50)


def _reshaped_broadcast(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    return b.maximum(x, y), b.maximum(b.reshape(x, (60,)), b.const([5], DType.INT32))


def _reshaped_again(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """The first operand is the result of a RESHAPE; the other operator reads it through a second RESHAPE."""
    first = b.reshape(b.maximum(x, b.const([5], DType.INT32)), (4, 3, 1, 5))
    return b.maximum(first, y), b.maximum(b.reshape(first, (60,)), b.const([7], DType.INT32))


def _read_twice(b: Builder, x: Value) -> Value:
    return b.maximum(b.reshape(x, (10, 1, 8)), b.reshape(x, (1, 10, 8)))


def _raised(b: Builder, x: Value) -> Value:
    return b.maximum(x, b.const(np.full((1,) * x.rank, -7), DType.INT32))


def _read_halves(b: Builder, x: Value) -> Value:
    whole = _raised(b, x)
    return b.minimum(b.slice(whole, (0, 32), (64, 32)), b.slice(whole, (0, 0), (64, 32)))


def _read_rescaled(b: Builder, x: Value) -> Value:
    """An ADD of two overlapping slices of a RESCALE's result."""
    whole, size = b.rescale(x, DType.INT32, 1.0), x.shape[0] - 1
    return b.add(b.slice(whole, (1,), (size,)), b.slice(whole, (0,), (size,)))


def _read_joined(b: Builder, x: Value, y: Value) -> Value:
    whole = b.concat([_raised(b, x), _raised(b, y)], 0)
    return b.minimum(b.slice(whole, (1, 0), (1, 64)), b.slice(whole, (0, 0), (1, 64)))


def _read_padded(b: Builder, x: Value) -> Value:
    """Both parts contain padding rows. In NHCWB16, unused channels separate the memory of the two parts."""
    whole = b.pad(x, ((0, 0), (2, 2), (0, 0), (0, 0)), 0)
    return b.mul(b.slice(whole, (0, 0, 0, 0), (1, 4, 5, 3)), b.slice(whole, (0, 4, 0, 0), (1, 4, 5, 3)))


def _read_part_and_whole(b: Builder, x: Value) -> Value:
    whole = _raised(b, x)
    return b.minimum(whole, b.slice(whole, (0, 0), (64, 1)))


def _read_tiled(b: Builder, x: Value) -> Value:
    whole = b.tile(b.rescale(x, DType.INT16, 128.0), (1, 20))
    halves = (b.rescale(b.slice(whole, (0, start), (20, 10)), DType.INT32, 1.0) for start in (0, 10))
    return b.rescale(b.maximum(*halves), DType.INT16, 1.0)


def _gathered(b: Builder, x: Value, i: Value, y: Value) -> tuple[Value, ...]:
    turned = b.reverse(y, 1)
    joined = b.concat([b.slice(turned, (0, 2, 0), (1, 1, 9)), turned, turned], 1)
    return joined, b.gather(x, _small(b, i))


def _small(b: Builder, i: Value) -> Value:
    return b.binary("BITWISE_AND", i, b.const([[7]], DType.INT32))


def _returned_input(b: Builder, x: Value) -> tuple[Value, ...]:
    return b.reduce("REDUCE_ANY", x, 1), b.emit("IDENTITY", (x,), x.dtype)


def _transposed_table(b: Builder, x: Value, *, last: Callable[[Builder, Value], Value]) -> Value:
    return last(b, b.reverse(_reversed(b, x), 1))


def _turned_wide_table(b: Builder, x: Value) -> Value:
    rising, falling = np.arange(-256, 257) * 100, np.arange(256, -257, -1) * 90
    turned = b.transpose(b.rescale(b.table(x, rising), DType.INT16, 1 / 128), (1, 0, 2))
    return b.rescale(b.table(turned, falling), DType.INT16, 1 / 128)


def _joined_table(b: Builder, x: Value) -> Value:
    return b.pad(_reversed(b, b.transpose(x, (0, 2, 1))), ((0, 0), (0, 0), (2, 0)), 0)


def _crowded_table(b: Builder, x: Value) -> Value:
    return _reversed(b, b.reshape(b.transpose(_mixed(b, x), (0, 3, 1, 2)), (1, 16, 16)))


def _sliced_rank(b: Builder, x: Value) -> Value:
    return _reversed(b, b.reshape(b.slice(x, (0, 1, 0, 0), (2, 5, 3, 4)), (1, 2, 5, 3, 4)))


def _sliced_growth(b: Builder, x: Value) -> Value:
    """The two halves of an image are stacked."""
    halves = [b.slice(x, (0, start, 0, 0), (1, 2, 6, 6)) for start in (2, 0)]
    return b.concat([b.reshape(half, (1, 1, 2, 6, 6)) for half in halves], 1)


def _reversed(b: Builder, x: Value) -> Value:
    return b.table(x, np.arange(-128, 128)[::-1])


def _mixed(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(16 * x.shape[3]).reshape(16, 1, 1, x.shape[3]) % 41 - 20, DType.INT8)
    return b.rescale(b.conv2d(x, weight, b.const([0] * 16, DType.INT32), pad=(0, 0, 0, 0)), DType.INT8, 0.02)


def _twice(b: Builder, x: Value) -> Value:
    return b.rescale(b.add(b.rescale(x, DType.INT32, 1.0), b.rescale(x, DType.INT32, 1.0)), DType.INT8, 0.5)


def _unsigned_channel_scales(b: Builder, x: Value) -> Value:
    return b.rescale(x, DType.INT8, np.linspace(0.5, 0.9, 8), 130, 4, input_unsigned=True)


def _unsigned_beside_view(b: Builder, x: Value) -> tuple[Value, ...]:
    return b.rescale(x, DType.INT8, 1.0, 128, input_unsigned=True), b.reshape(x, (24, 8))


def _cancelled_transpose(b: Builder, x: Value, y: Value) -> Value:
    turned = b.transpose(b.reshape(_mixed(b, x), (1, 9, 4, 16)), (0, 1, 3, 2))
    return b.matmul(y, b.reshape(turned, (9, 16, 4)))


def _cancelled_transpose_and_returned(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    image = _reversed(b, x)
    return image, b.matmul(y, b.reshape(b.transpose(image, (0, 1, 3, 2)), (9, 16, 4)))


def _cancelled_transpose_without_ones(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """The RESHAPE only removes a dimension of size 1, and Vela treats three dimensions as four."""
    image = _twice(b, x)
    return image, b.matmul(y, b.transpose(b.reshape(image, (9, 4, 16)), (0, 2, 1)))


def _cancelled_transpose_input(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """An output is a graph input, through an IDENTITY as the last passes emit it."""
    product = b.matmul(y, b.reshape(b.transpose(x, (0, 1, 3, 2)), (9, 16, 4)))
    return b.emit("IDENTITY", (x,), x.dtype), product


def _cancelled_transpose_view(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """An output is another RESHAPE of the same tensor."""
    rows = _twice(b, x)
    turned = b.transpose(b.reshape(rows, (1, 9, 4, 16)), (0, 1, 3, 2))
    return b.reshape(rows, (24, 24)), b.matmul(y, b.reshape(turned, (9, 16, 4)))


def _summed_view(b: Builder, x: Value) -> tuple[Value, ...]:
    turned = b.transpose(b.reshape(x, (9, 4, 16)), (0, 2, 1))
    return b.reshape(x, (9, 64)), b.reduce("REDUCE_SUM", b.rescale(turned, DType.INT32, 1.0), 1)


def _turned_to_sum(b: Builder, x: Value) -> Value:
    turned = b.transpose(b.reshape(_mixed(b, x), (9, 4, 16)), (0, 2, 1))
    return b.rescale(b.reduce("REDUCE_SUM", b.rescale(turned, DType.INT32, 1.0), 1), DType.INT8, 0.1)


def _returned_reshape(b: Builder, x: Value) -> tuple[Value, ...]:
    image = b.reshape(_twice(b, x), (4, 4, 18))
    return image, b.transpose(image, (2, 1, 0))


def _returned_reshape_of_reshape(b: Builder, x: Value) -> tuple[Value, ...]:
    image = b.reshape(_twice(b, x), (9, 1, 3, 2))
    return image, b.transpose(b.reshape(image, (9, 3, 2)), (0, 2, 1))


def _returned_source(b: Builder, x: Value) -> tuple[Value, ...]:
    image = b.reshape(x, (1, 4, 3))
    again = b.transpose(b.reshape(b.transpose(image, (0, 2, 1)), (3, 4)), (1, 0))
    return _twice(b, again), b.reshape(x, (4, 1, 3))


def _returned_transpose(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    turned = b.reshape(b.transpose(x, (0, 2, 3, 1)), (8, 16, 5))
    return turned, b.matmul(y, turned)


def _averaged(b: Builder, x: Value, kernel: tuple[int, int] = (4, 4), stride: tuple[int, int] = (4, 4)) -> Value:
    return b.avg_pool2d(x, kernel, stride, (2, 2, 2, 2))


def _averaged_into(b: Builder, x: Value, kernel: tuple[int, int], stride: tuple[int, int], axis: int | None) -> Value:
    """A padded pool that writes into a CONCAT along ``axis``, or into a PAD if it is None."""
    pooled = _averaged(b, x, kernel, stride)
    part = b.slice(x, (0, 0, 0, 0), pooled.shape)
    if axis is None:
        return b.pad(pooled, ((0, 0), (1, 2), (2, 1), (0, 3)), 0)
    return b.concat((b.emit("BITWISE_NOT", (part,), x.dtype), pooled), axis)


def _dilated(b: Builder, x: Value, *, itself: bool) -> Value:
    """A convolution with dilation; with ``itself`` it pads itself, else a PAD precedes it."""
    weight = b.const(np.arange(6).reshape(1, 1, 2, 3), DType.INT8)
    pad = (0, 0, 3, 3) if itself else (0, 0, 0, 0)
    image = x if itself else b.pad(x, ((0, 0), (0, 0), (3, 3), (0, 0)), 0)
    wide = b.conv2d(image, weight, b.const([7], DType.INT32), pad=pad, dilation=(1, 4), zps=(-int(itself), 0))
    return b.rescale(wide, DType.INT8, 0.125)


def _widened(b: Builder, x: Value) -> Value:
    return b.pad(x, ((0, 0), (0, 0), (0, 3)), 0)


def _square(b: Builder, x: Value, perms: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    return _widened(b, b.reshape(b.transpose(x, perms), shape))


def _turned_images(b: Builder, x: Value) -> Value:
    """The result of the second TRANSPOSE is read in the shape of the TRANSPOSE's operand."""
    turned = b.transpose(b.reshape(b.transpose(x, (1, 0)), (16, 4, 8)), (1, 0, 2))
    return b.rescale(b.reshape(turned, (4, 4, 4, 8)), DType.INT16, 128.0)


def _column(b: Builder, x: Value) -> Value:
    """Four reductions of a column, so that one result overwrites another inside the memory."""
    number = np.arange(-128, 128)
    rows = [b.reshape(b.table(x, table), (2, 5)) for table in (number, -1 - number, number // 2, number[::-1] // 3)]
    first, second, third, fourth = (b.rescale(b.reduce("REDUCE_MAX", row, 1), DType.INT32, 1.0) for row in rows)
    return b.rescale(b.add(b.add(first, second), b.add(third, fourth)), DType.INT8, 0.25)


def _unreached(b: Builder, *images: Value) -> tuple[Value, ...]:
    weight = b.const(np.arange(8).reshape(1, 2, 2, 2), DType.INT8)
    sums = [
        b.transpose_conv2d(x, weight, b.const([bias], DType.INT32), out_pad=(0, 0, 0, 1), stride=(2, 2), zps=(0, 3))
        for x, bias in zip(images, (500, -500), strict=True)
    ]
    return tuple(b.rescale(x, DType.INT8, 0.1) for x in sums)


def _column_beside(b: Builder, x: Value) -> tuple[Value, ...]:
    return b.reduce("REDUCE_MAX", b.reshape(x, (1, 8)), 1), b.reverse(b.reshape(x, (1, 8, 1)), 1)


def _joined_maximum(b: Builder, x: Value) -> Value:
    return b.concat([b.const(np.zeros((1, 3, 4, 1)), DType.INT8), b.reduce("REDUCE_MAX", x, 3)], 3)


def _joined_multiplied(b: Builder, x: Value) -> Value:
    return b.concat([b.const(np.zeros((1, 1, 3, 4)), DType.INT8), _window(b, x, 2)], 1)


def _padded(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 5).reshape(1, 2, 2, 1), DType.INT8)
    image = b.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), 0)
    wide = b.conv2d(image, weight, b.const([0], DType.INT32), pad=(0, 0, 0, 0), zps=(-7, 0))
    return b.rescale(wide, DType.INT8, 0.125)


def _padded_images(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 4).reshape(1, 1, 3, 1), DType.INT8)
    image = b.reshape(b.pad(x, ((0, 0), (2, 0), (0, 0)), 0), (2, 1, 8, 1))
    return b.rescale(b.conv2d(image, weight, b.const([0], DType.INT32), pad=(0, 0, 0, 0)), DType.INT8, 0.125)


def _padded_and_reshaped(b: Builder, x: Value) -> Value:
    """Height and width of the padded image are exchanged by a RESHAPE."""
    weight = b.const(np.arange(1, 33).reshape(1, 2, 2, 8), DType.INT8)
    image = b.reshape(b.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0)), 0), (1, 7, 5, 8))
    return b.rescale(b.conv2d(image, weight, b.const([0], DType.INT32), pad=(0, 0, 0, 0)), DType.INT8, 0.004)


def _reshaped_select(b: Builder, x: Value) -> Value:
    turned = b.gather(b.reshape(x, (1, 80, 1)), b.const([np.arange(80)[::-1]], DType.INT32))
    large = b.compare("GREATER", b.cast(x, DType.INT32), b.const([5], DType.INT32))
    return b.select(large, b.reshape(turned, (80,)), x)


def _returned_mask(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    mask = b.compare("GREATER", x, y)
    return mask, b.reshape(mask, (8,)), b.select(mask, x, y)


def _equal_weights(b: Builder, x: Value) -> tuple[Value, ...]:
    weight = b.const(np.array([3, -2]).reshape(1, 1, 1, 2), DType.INT8)
    biases = [b.const([bias], DType.INT32) for bias in (50, -500, 300)]
    return tuple(b.rescale(b.conv2d(x, weight, bias, pad=(0, 0, 0, 0)), DType.INT8, 0.1) for bias in biases)


def _equal_weights_of_sums(b: Builder, x: Value) -> tuple[Value, ...]:
    weight = b.const(np.array([3, -2]).reshape(1, 1, 1, 2), DType.INT8)
    first, second = (b.conv2d(x, weight, b.const([bias], DType.INT32), pad=(0, 0, 0, 0)) for bias in (50, -500))
    scaled = ((first, 0.1), (first, 0.2), (second, 0.3), (second, 0.4))
    return tuple(b.rescale(value, DType.INT8, scale) for value, scale in scaled)


def _equal_depthwise(b: Builder, x: Value) -> tuple[Value, ...]:
    weight = b.const(np.arange(8).reshape(2, 2, 2, 1) - 3, DType.INT8)
    biases = [b.const([bias, bias], DType.INT32) for bias in (50, -500)]
    wide = [b.depthwise_conv2d(x, weight, bias, pad=(0, 0, 1, 0), dilation=(1, 2)) for bias in biases]
    return tuple(b.rescale(value, DType.INT8, 0.1) for value in wide)


def _padding_alone(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 5).reshape(1, 2, 2, 1), DType.INT8)
    wide = b.conv2d(x, weight, b.const([9], DType.INT32), pad=(0, 0, 1, 3), dilation=(1, 3))
    return b.rescale(wide, DType.INT8, 0.125)


def _reshaped_activation(b: Builder, x: Value) -> Value:
    return b.clamp(b.reshape(b.transpose(x, (1, 0)), (2, 1, 1, 4)), -50, 60)


def _reshaped_table(b: Builder, x: Value) -> Value:
    return b.table(b.reshape(b.reduce("REDUCE_MAX", x, 1), (2, 1, 1, 6)), np.arange(127, -129, -1))


def _rescaled_part(b: Builder, x: Value, scale: float) -> Value:
    return b.rescale(b.slice(x, (0, 0, 0, 1), (1, 3, 4, 5)), DType.INT32, scale)


def _fine(b: Builder, x: Value) -> Value:
    """Shift int32 values right into the range that a RESCALE supports."""
    return b.arithmetic_right_shift(x, b.const(np.full((1,) * x.rank, 12), DType.INT32), round=True)


def _rescaled_rows(b: Builder, x: Value) -> Value:
    return b.rescale(b.slice(_fine(b, x), (0, 1, 0, 0), (1, 2, 4, 6)), DType.INT8, 1e-4)


def _rescaled_parts(b: Builder, x: Value) -> Value:
    """Two RESCALEs of slices, whose scales an ADD cannot fuse."""
    first, second = (b.slice(x, (0, 0, 0, start), (1, 3, 4, 5)) for start in (0, 1))
    return b.add(b.rescale(first, DType.INT32, 0.3), b.rescale(second, DType.INT32, 0.7))


def _widened_difference(b: Builder, x: Value) -> Value:
    """Vela merges the two RESCALEs after the SUB, and then fuses no RESCALE into the SUB."""
    first, second = (b.slice(x, (0, 0, 0, start), (1, 3, 4, 5)) for start in (0, 1))
    difference = b.sub(b.rescale(first, DType.INT32, 2.0**14), b.rescale(second, DType.INT32, 9000.3))
    return b.rescale(b.rescale(difference, DType.INT16, 2.0**-15), DType.INT32, 1.0)


def _reshaped_choice(b: Builder, x: Value) -> Value:
    """A SELECT and its comparison read a RESHAPE of a RESCALE's result."""
    rows = b.reshape(b.rescale(x, DType.INT8, 1e-7), (2, 12))
    above = b.compare("GREATER", b.cast(rows, DType.INT32), b.const(np.full((1, 1), 5), DType.INT32))
    return b.select(above, rows, b.const(np.full((1, 1), 7), DType.INT8))


def _clipped_sums(b: Builder, x: Value) -> Value:
    """int48 sums of a convolution; the RESCALE by 1 clips them to int16."""
    weight = b.const(np.arange(16).reshape(4, 1, 1, 4) * 30 - 100, DType.INT8)
    sums = b.conv2d(x, weight, b.const([5000, 3, 2, 1], DType.INT48), pad=(0, 0, 0, 0))
    return b.rescale(sums, DType.INT16, 1.0)


def _long_scale(b: Builder, x: Value) -> Value:
    """A RESCALE with a 31-bit multiplier reads the clipped sums."""
    return b.rescale(_clipped_sums(b, x), DType.INT8, 0.012)


def _repeated_ones(b: Builder, x: Value) -> Value:
    """One operator reads a RESCALE's result twice, reshaped without the dimension of size 1."""
    rows = b.reshape(b.rescale(x, DType.INT32, 0.5), x.shape[1:])
    return b.minimum(rows, rows)


def _shifted_cast(b: Builder, x: Value) -> Value:
    """The CAST reads values from -133 to 122, beyond int8."""
    return b.cast(b.rescale(x, DType.INT32, 1.0, 5), DType.INT8)


def _shifted_parts(b: Builder, x: Value, y: Value) -> Value:
    """Two RESCALEs of the same scale 2^19, which Vela's ADD cannot fuse."""
    total = b.add(b.rescale(b.tile(x, (1, 1, 1, 8)), DType.INT32, 2.0**19), b.rescale(y, DType.INT32, 2.0**19))
    return b.rescale(total, DType.INT8, 2.0**-20)


def _summed_parts(b: Builder, x: Value) -> Value:
    """Not affected: an ADD fuses two RESCALEs by 1, and a REDUCE_SUM fuses one."""
    first, second = (b.slice(x, (0, 0, 0, start), (1, 3, 4, 5)) for start in (0, 1))
    total = b.add(b.rescale(first, DType.INT32, 1.0), b.rescale(second, DType.INT32, 1.0))
    along = b.reduce("REDUCE_SUM", b.rescale(first, DType.INT32, 1.0), 2)
    return b.rescale(b.add(total, along), DType.INT8, 0.05)


def _rescaled_for_two(b: Builder, x: Value) -> tuple[Value, ...]:
    """An ADD and a REDUCE_SUM read the same RESCALE."""
    part, other = (b.rescale(b.slice(x, (0, 0, 0, i), (1, 3, 4, 5)), DType.INT32, 1.0) for i in (1, 0))
    return b.add(part, other), b.reduce("REDUCE_SUM", part, 2)


def _rescaled_beside_result(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """The other operand of the ADD is also an output, so that it stays int32."""
    other = b.rescale(y, DType.INT32, 1.0)
    return b.add(_rescaled_part(b, x, 1.0), other), other


def _rescaled_beside_rescale(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """As ``_rescaled_for_arithmetic``, but Vela merges the RESCALE of the other operand with the RESCALE before it."""
    return _rescaled_for_arithmetic(b, x, b.rescale(y, DType.INT8, 1e-7))


def _rescaled_join_beside_shared(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """A MUL could fuse both RESCALEs. It shares one with another MUL, and Vela fuses the other into the CONCAT."""
    shared = b.rescale(b.const(np.arange(5).reshape(1, 1, 1, 5), DType.INT8), DType.INT32, 1.0)
    joined = b.concat([b.slice(x, (0, 0, 0, start), (1, 3, 4, size)) for start, size in ((0, 2), (3, 3))], 3)
    return b.mul(b.rescale(joined, DType.INT32, 1.0), shared), b.mul(_fine(b, y), shared)


def _rescaled_for_arithmetic(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    """Two elementwise operators read the same RESCALE."""
    part, other = _rescaled_part(b, x, 1.0), b.rescale(y, DType.INT32, 1.0)
    return b.add(part, other), b.mul(other, part)


def _joined_channel_scales(b: Builder, x: Value, *, wide: bool) -> Value:
    """A per-channel RESCALE of a CONCAT of int8 tensors or, with ``wide``, of the int32 sums of two convolutions."""
    parts = [x, x]
    if wide:
        weights = [b.const(np.full((6, 1, 1, 6), weight), DType.INT8) for weight in (2, 3)]
        parts = [b.conv2d(x, weight, b.const([0] * 6, DType.INT32), pad=(0, 0, 0, 0)) for weight in weights]
    return b.rescale(b.concat(parts, 3), DType.INT8, np.linspace(0.1, 0.9, 12), 0 if wide else 3, 4)


def _two_slices_of_rescale(b: Builder, x: Value, scale: float, shape: tuple[int, ...]) -> tuple[Value, ...]:
    """Two operators read overlapping slices of one RESCALE's result."""
    rows, (height, width) = b.reshape(b.rescale(x, DType.INT32, scale), shape), shape[-2:]
    parts = [b.slice(rows, (0,) * (len(shape) - 2) + (i, 0), (*shape[:-2], height - 1, width)) for i in (0, 1)]
    numbers = [b.const(np.full((1,) * len(shape), number), DType.INT32) for number in (7, 9)]
    return tuple(b.add(part, number) for part, number in zip(parts, numbers, strict=True))


def _product_of_parts(b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
    """The product of the first and the last two columns of a RESHAPE."""
    rows, columns = b.reshape(x, shape), shape[-1]
    first = (0,) * (len(shape) - 1)
    left, right = (b.slice(rows, (*first, start), (*shape[:-1], 2)) for start in (0, columns - 2))
    return b.mul(left, right)


def _upsampled_parts(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(-3, 5).reshape(1, 2, 2, 2), DType.INT8)
    upsampled = b.transpose_conv2d(x, weight, b.const([0], DType.INT32), out_pad=(0, 0, 0, 0), stride=(2, 2))
    return _product_of_parts(b, b.rescale(upsampled, DType.INT8, 0.03), (2, 4, 4, 6))


def _averaged_parts(b: Builder, x: Value) -> Value:
    return _product_of_parts(b, b.rescale(b.avg_pool2d(x, (2, 2), (1, 1), (1, 1, 1, 1)), DType.INT8, 0.5), (10, 50))


def _maximum_parts(b: Builder, x: Value) -> Value:
    return _product_of_parts(b, b.rescale(b.reduce("REDUCE_MAX", x, 2), DType.INT8, 0.5), (2, 4, 4))


def _square_of_slice(b: Builder, x: Value) -> Value:
    scaled = b.reshape(b.rescale(b.slice(x, (0, 0, 1, 0), (2, 4, 1, 4)), DType.INT8, 0.5), (2, 4, 4))
    return b.mul(scaled, scaled)


def _chosen(b: Builder, x: Value, y: Value) -> Value:
    large = b.compare("GREATER", b.cast(x, DType.INT32), b.const(np.full((1,) * x.rank, 5), DType.INT32))
    return b.rescale(b.select(large, x, y), DType.INT32, 2.0)


def _read_by_one(b: Builder, x: Value, kind: str) -> Value:
    return b.emit(kind, (b.rescale(x, DType.INT32, 3.0),), DType.INT32)


def _product_rescaled(b: Builder, x: Value, first: float, second: float, dtype: DType, zero_point: int) -> Value:
    product = b.mul(x, b.const(np.full((1,) * x.rank, 3), DType.INT8))
    return b.rescale(b.rescale(product, DType.INT8, first), dtype, second, 0, zero_point)


def _channels_moved(b: Builder, x: Value) -> Value:
    """The sums of the convolution exceed int8, so that the first RESCALE clips."""
    weight, bias = b.const(np.full((3, 1, 1, 6), 3), DType.INT8), b.const([0] * 3, DType.INT32)
    wide = b.conv2d(x, weight, bias, pad=(0, 0, 0, 0))
    return b.rescale(b.rescale(wide, DType.INT8, 0.5), DType.INT8, 1.0, 0, 5)


def _peaks_apart(b: Builder, x: Value) -> Value:
    """Vela executes each window of a stride over 3 as a separate operation."""
    return b.rescale(b.max_pool2d(x, (4, 4), (4, 4), (0, 0, 0, 0)), DType.INT32, 3.0)


def _joined_upsampling(b: Builder, x: Value) -> Value:
    return b.concat([b.const(np.zeros((1, 5, 6, 5)), DType.INT8), _transpose_convolution(b, x, 1)], 0)


def _cast_parts(b: Builder, x: Value) -> Value:
    """Two CASTs read the same slice of a RESCALE's result."""
    part = b.slice(b.rescale(_fine(b, x), DType.INT8, 1e-4), (0, 1, 0, 0), (1, 2, 4, 6))
    return b.add(b.cast(part, DType.INT32), b.cast(part, DType.INT32))


def _reshaped_casts(b: Builder, x: Value) -> Value:
    rows = b.reshape(b.rescale(_fine(b, x), DType.INT8, 1e-4), (6, 12))
    return b.add(b.cast(rows, DType.INT32), b.cast(rows, DType.INT32))


def _reshaped_terms(b: Builder, x: Value) -> tuple[Value, ...]:
    """RESCALE, RESHAPE and another RESCALE, whose result an ADD and a MUL read."""
    rows = b.rescale(b.reshape(b.rescale(_fine(b, x), DType.INT8, 1e-4), (6, 12)), DType.INT32, 1.0)
    number = b.const([[7]], DType.INT32)
    return b.add(rows, rows), b.mul(rows, number)


def _shared_product(b: Builder, x: Value, move: Callable[[Builder, Value], Value]) -> tuple[Value, ...]:
    """Two MULs read the result of a scaled MUL in another shape."""
    product = b.rescale(b.mul(x, b.const(np.full((1,) * x.rank, 3), DType.INT8)), DType.INT8, 0.3)
    term = b.rescale(move(b, product), DType.INT32, 1.0)
    return tuple(b.mul(term, b.const(np.full((1,) * term.rank, number), DType.INT32)) for number in (5, 7))


def _reshaped_to_16_bits(b: Builder, x: Value) -> Value:
    return b.rescale(b.reshape(x, (1, 4)), DType.INT16, 1.0)


def _padded_twice(b: Builder, x: Value) -> Value:
    first = b.pad(x, ((0, 0), (1, 1), (0, 1), (0, 1)), 0)
    return b.pad(b.rescale(first, DType.INT8, 0.6, 0, 5), ((1, 0), (0, 1), (0, 0), (0, 0)), 0)


def _padded_lookup(b: Builder, x: Value) -> Value:
    """Vela cannot fuse the RESCALE into the int8 TABLE before it."""
    found = b.table(x, np.arange(127, -129, -1).astype(np.int8))
    return b.pad(b.rescale(found, DType.INT32, 0.6), ((1, 0), (1, 1), (1, 1), (1, 1)), 0)


def _bits_scaled(b: Builder, x: Value) -> Value:
    scaled = b.rescale(x, DType.INT8, 0.6)
    return b.binary("BITWISE_AND", scaled, b.const(np.full((1,) * x.rank, 7), DType.INT8))


def _zeros_counted(b: Builder, x: Value) -> Value:
    """CLZ reads two RESCALEs that Vela merges."""
    scaled = b.rescale(b.rescale(x, DType.INT16, 128.0), DType.INT32, 1.0)
    return b.emit("CLZ", (scaled,), DType.INT32)


def _cast_rescaled(b: Builder, x: Value) -> Value:
    return b.rescale(b.cast(x, DType.INT32), DType.INT8, 1.0)


def _chosen_scaled(b: Builder, x: Value, condition: Value) -> Value:
    return b.select(condition, b.rescale(x, DType.INT8, 0.6), b.const(np.full((1,) * x.rank, 3), DType.INT8))


def _peaks_widened(b: Builder, x: Value) -> Value:
    peaks = _pooled(b, b.rescale(x, DType.INT8, 1.0, 0, 5))
    return b.rescale(b.rescale(peaks, DType.INT16, 1.0), DType.INT16, 128.0)


def _narrowed_cast(b: Builder, x: Value) -> Value:
    """The CAST keeps the low 16 bits of int32 values, as lowering emits it for narrow integer types."""
    places = b.const(np.full((1,) * x.rank, 16), DType.INT32)
    low = b.arithmetic_right_shift(b.logical_left_shift(x, places), places, round=True)
    return b.rescale(b.cast(low, DType.INT16), DType.INT8, 1.0, 0, 5)


def _moved_past_widening(b: Builder, x: Value) -> Value:
    narrow = b.rescale(_fine(b, x), DType.INT8, 1e-3)
    return b.rescale(b.rescale(narrow, DType.INT32, 1.0), DType.INT8, 1.0, 0, 5)


def _product_turned(b: Builder, x: Value) -> Value:
    """The TRANSPOSE of the product only moves a dimension of size 1."""
    narrow = b.rescale(b.matmul(x, b.const(np.full((1, 4, 1), 9), DType.INT8)), DType.INT8, 1.0)
    return b.rescale(b.transpose(narrow, (0, 2, 1)), DType.INT16, 256.0)


def _rescaled_part_again(b: Builder, x: Value) -> Value:
    """Two RESCALEs of a slice, which Vela merges."""
    return b.rescale(b.rescale(b.slice(x, (0, 0, 0, 1), (1, 3, 4, 5)), DType.INT8, 1.0), DType.INT32, 0.5)


def _rescaled_join_again(b: Builder, x: Value) -> Value:
    return b.rescale(b.rescale(_twice_over(b, x), DType.INT8, 1.0), DType.INT32, 0.5)


def _turned_difference(b: Builder, x: Value) -> Value:
    """The TRANSPOSE of the difference only moves a dimension of size 1."""
    difference = b.sub(b.rescale(x, DType.INT32, 3.0), b.rescale(x, DType.INT32, 1.0))
    return b.rescale(b.transpose(difference, (1, 2, 3, 0)), DType.INT16, 2.0**-6)


def _twice_clipped(b: Builder, x: Value) -> Value:
    clipped = b.rescale(b.rescale(x, DType.INT8, 2.0), DType.INT32, 1.0)
    return b.add(clipped, clipped)


def _clipped_to_int16(b: Builder, x: Value, y: Value) -> Value:
    """The NPU reads both operands as int8, if Vela fuses the RESCALE to int16."""
    clipped = b.rescale(b.rescale(x, DType.INT16, 1000.0), DType.INT32, 1.0)
    return b.add(clipped, b.rescale(y, DType.INT32, 1.0))


def _clipped_beside_shared(b: Builder, x: Value, y: Value) -> tuple[Value, ...]:
    shared = b.rescale(b.rescale(x, DType.INT8, 0.5), DType.INT32, 1.0)
    clipped = b.rescale(b.rescale(y, DType.INT8, 3.0), DType.INT32, 1.0)
    return b.add(shared, b.rescale(y, DType.INT32, 1.0)), b.maximum(shared, clipped)


def _least_narrowed(b: Builder, x: Value) -> Value:
    term = b.rescale(b.rescale(x, DType.INT8, 3.0), DType.INT32, 1.0)
    return b.minimum(term, term)


def _summed_after_two(b: Builder, x: Value) -> Value:
    """A sum of terms with scales 2 and 1; Vela merges the two RESCALEs of the first term."""
    double = b.rescale(b.rescale(x, DType.INT16, 2.0), DType.INT32, 1.0)
    return b.rescale(b.add(double, b.rescale(x, DType.INT32, 1.0)), DType.INT8, 0.2)


def _joined_rescale(b: Builder, x: Value) -> Value:
    beside = b.const(np.arange(36).reshape(1, 3, 4, 3), DType.INT8)
    return b.concat([beside, b.rescale(_fine(b, x), DType.INT8, 1e-4)], 3)


def _padded_rescale(b: Builder, x: Value) -> Value:
    return b.pad(b.rescale(x, DType.INT32, 3.0), ((0, 0), (1, 0), (0, 0), (2, 0)), 5)


def _twice_over(b: Builder, x: Value) -> Value:
    return b.concat([x, x], 1)


def _padded_again(b: Builder, x: Value) -> Value:
    return b.pad(b.rescale(_twice_over(b, x), DType.INT8, 0.7), ((0, 0), (0, 1), (0, 0), (0, 2)), 5)


def _concatenated_again(b: Builder, x: Value) -> Value:
    return b.concat([x, b.rescale(b.reshape(b.tile(x, (1, 1, 1, 2)), (1, 6, 4, 6)), DType.INT8, 0.7, 3, -4)], 1)


def _scaled_join(b: Builder, x: Value, *, last: bool = False) -> Value:
    """A RESCALE of a CONCAT, before a RESHAPE; with ``last``, after a RESHAPE and first in another CONCAT."""
    joined = _twice_over(b, x)
    scaled = b.rescale(b.reshape(joined, (1, 6, 4, 6)) if last else joined, DType.INT8, 0.7)
    return b.concat([scaled, x], 1) if last else b.pad(b.reshape(scaled, (1, 4, 6, 6)), ((0, 0), (1, 0)) * 2, 5)


def _joined_scaled(b: Builder, x: Value) -> Value:
    """Not affected: a RESCALE that is first in the CONCAT, and one that Vela fuses into the convolution before it."""
    return b.concat([b.rescale(_fine(b, b.rescale(x, DType.INT32, 1e4)), DType.INT8, 0.1), _mixed(b, x)], 3)


def _unclipped(b: Builder, x: Value, scale: float) -> Value:
    wide = b.rescale(x, DType.INT32, 1.0)
    clipped = b.rescale(b.mul(wide, b.const(np.full((1,) * x.rank, 1000), DType.INT32)), DType.INT16, 1.0)
    return b.add(b.rescale(clipped, DType.INT32, scale), wide)


def _unclipped_sum(b: Builder, x: Value) -> Value:
    wide = b.rescale(x, DType.INT32, 1.0)
    clipped = b.rescale(b.add(wide, b.const(np.full((1,) * x.rank, 100), DType.INT32)), DType.INT8, 1.0)
    return b.add(b.rescale(b.reshape(clipped, (x.size,)), DType.INT32, 2.0), b.reshape(wide, (x.size,)))


def _long_gather(b: Builder, x: Value) -> Value:
    return b.gather(x, b.const(np.arange(1 << 16)[None] % x.shape[1], DType.INT32))


def _resized(b: Builder, x: Value) -> Value:
    wide = b.resize(x, (1, 1, 1, 1), (0, 0), (0, 0), "BILINEAR")
    return b.reshape(b.rescale(wide, DType.INT16, 0.5), (1, 10, 1, 1))


def _tables(b: Builder, x: Value, y: Value) -> Value:
    rising, falling = np.arange(-256, 257) * 100, np.arange(256, -257, -1) * 90
    first = b.rescale(b.table(x, rising), DType.INT16, 1 / 128)
    product = b.rescale(b.mul(first, y), DType.INT16, 2.0**-15)
    return b.rescale(b.table(product, falling), DType.INT16, 1 / 128)


def _tables_of_two_widths(b: Builder, x: Value, y: Value) -> Value:
    rising, falling = np.arange(-128, 128), np.arange(256, -257, -1) * 90
    product = b.rescale(b.mul(b.table(x, rising), y), DType.INT16, 2.0)
    return b.rescale(b.table(product, falling), DType.INT16, 1 / 128)


def _pooled(b: Builder, x: Value) -> Value:
    return b.max_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0))


def _scaled_peaks(b: Builder, x: Value) -> Value:
    """An integer scale past a RESHAPE, with an output zero point and a CLAMP after it."""
    peaks = b.reshape(b.reduce("REDUCE_MAX", x, 2), (4, 8))
    return b.clamp(b.rescale(peaks, DType.INT8, 2.0, 0, 3), -50, 60)


def _scaled_twice(b: Builder, x: Value) -> Value:
    """A RESCALE past a RESCALE by 1, which Vela removes."""
    return b.rescale(b.rescale(_pooled(b, x), DType.INT32, 1.0), DType.INT8, 0.9)


def _channel_scales(b: Builder, x: Value, *, pooled: bool) -> Value:
    return b.rescale(_pooled(b, x) if pooled else x, DType.INT8, np.linspace(0.5, 0.9, 8), 0 if pooled else 3, 4)


def _scaled_clipped(b: Builder, x: Value) -> Value:
    return b.rescale(b.clamp(_pooled(b, x), -50, 60), DType.INT8, 0.7)


def _scaled_by_two(b: Builder, x: Value) -> tuple[Value, ...]:
    """Not affected: the maximum has two readers, so that Vela fuses neither RESCALE into it."""
    peaks = _pooled(b, x)
    return b.rescale(b.reshape(peaks, (6, 8)), DType.INT8, 0.7), b.rescale(peaks, DType.INT8, 0.6)


def _average(b: Builder, x: Value) -> Value:
    return b.avg_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0))


REPRODUCERS = (
    Reproducer("narrowing_cast", _narrow, (((2, 8), DType.INT8),), _U55_U65),
    Reproducer("chained_cast", _narrow_in_chain, (((2, 8), DType.INT8),), _U85, _U85),
    Reproducer("chained_casts", _widened_again, (((2, 8), DType.INT8),), _ALL),
    Reproducer("unequal_scales", _rescaled_difference, (((2, 8), DType.INT16), ((2, 8), DType.INT16)), _U55_U65),
    Reproducer(
        "lost_maximum_scale",
        lambda b, x: b.rescale(_pooled(b, x), DType.INT8, 0.7),
        (_IMAGE,),
        _U55_U65,
        releases=_VELA_5_1,
    ),
    Reproducer(
        "scaled_wide_maximum",
        lambda b, x: b.rescale(_pooled(b, x), x.dtype, 0.7),
        (_WIDE_IMAGE,),
        _U55_U65,
        releases=_VELA_5_1,
    ),
    Reproducer("scaled_peaks", _scaled_peaks, (_IMAGE,), _U55_U65, releases=_VELA_5_1),
    Reproducer("scaled_twice", _scaled_twice, (_IMAGE,), _U55_U65, releases=_VELA_5_1),
    Reproducer("lost_channel_scales", partial(_channel_scales, pooled=False), (_IMAGE,), _U55_U65),
    Reproducer("lost_channel_scales_unsigned", _unsigned_channel_scales, (_IMAGE,), _U55_U65),
    Reproducer("lost_channel_scales_of_maxima", partial(_channel_scales, pooled=True), (_IMAGE,), _U55_U65),
    Reproducer("reduce_min", _minimum, (((2, 3, 4), DType.INT8),), _U55_U65),
    Reproducer(
        "scalar_broadcast_high_rank", _one_of_five, (((1,) * 5, DType.INT8), ((2, 1, 1, 1, 3), DType.INT8)), _U55_U65
    ),
    Reproducer("part_of_five", _part_of_five, (((1, 1, 1, 2, 2), DType.INT8), ((1, 2, 2, 3), DType.INT8)), _U55_U65),
    Reproducer("sliced_batches", _sliced, (((2, 2, 2, 2), DType.INT8),), _ALL),
    Reproducer("sliced_multiplied", _sliced_multiplied, (((1, 2, 2, 3), DType.INT8),), _ALL),
    Reproducer("sliced_dilated", _sliced_dilated, (((1, 7, 6, 1), DType.INT8),), _ALL),
    Reproducer("sliced_and_dilated", _sliced_and_dilated, (((1, 5, 5, 2), DType.INT8),), _ALL),
    Reproducer("sliced_transposed", _sliced_transposed, (((1, 3, 2, 1), DType.INT8),), _ALL),
    Reproducer("sliced_maximum", _sliced_maximum, (((1, 3, 4, 6), DType.INT8),), _ALL),
    Reproducer("sliced_among_others", _sliced_among_others, (((4, 5), DType.INT8),), _ALL),
    Reproducer("sliced_sum", _sliced_sum, (((1, 3, 4, 6), DType.INT8),), _ALL),
    Reproducer("sliced_product", _sliced_product, (((2, 4, 4), DType.INT8),), _U55_U65),
    Reproducer(
        "sliced_and_turned_twice", _sliced_and_turned_twice, (((4, 4), DType.INT8), ((1, 4, 1), DType.INT8)), _U55_U65
    ),
    Reproducer("slice_rank_mismatch", _sliced_rank, (((2, 7, 3, 4), DType.INT8),), _ALL),
    Reproducer("slice_rank_growth", _sliced_growth, (((1, 4, 6, 6), DType.INT8),), _U85),
    Reproducer("column_reduction_overflow", _column, (((2, 5, 1), DType.INT8),), _ALL),
    Reproducer("column_reduction_overflow_beside", _column_beside, (((8,), DType.INT8),), _ALL),
    Reproducer("joined_maximum", _joined_maximum, (((1, 3, 4, 6), DType.INT8),), _ALL),
    Reproducer("joined_average", partial(_averaged_into, kernel=(9, 9), stride=(1, 1), axis=3), _POOLED, _U85, _U85),
    Reproducer(
        "joined_average_padded", partial(_averaged_into, kernel=(9, 9), stride=(1, 1), axis=None), _POOLED, _U85, _U85
    ),
    Reproducer(
        "joined_average_strided", partial(_averaged_into, kernel=(4, 4), stride=(4, 4), axis=1), _POOLED, _U85, _U85
    ),
    Reproducer("joined_multiplied", _joined_multiplied, (((1, 2, 2, 2), DType.INT8),), _ALL),
    Reproducer("padded_zero", _padded, (((1, 4, 4, 1), DType.INT8),), _ALL),
    Reproducer("padded_images", _padded_images, (((2, 6, 1), DType.INT8),), _ALL, releases=_VELA_5_1),
    Reproducer("padded_and_reshaped", _padded_and_reshaped, (_IMAGE,), _ALL, releases=_VELA_5_1),
    Reproducer("sliced_of_five", _sliced_of_five, (((6, 3, 5), DType.INT8), ((4, 1, 2, 1, 1), DType.INT8)), _ALL),
    Reproducer("reversed_of_five", _reversed_of_five, (((3, 8, 1, 1), DType.INT8),), _U85, _U85),
    Reproducer("reversed_and_turned", _reversed_and_turned, (((11, 16, 1, 12), DType.INT8),), _U85, _U85),
    Reproducer("one_number_of_five", _one_number_of_five, (((2, 3, 2, 4, 5), DType.INT32),), _U55_U65),
    Reproducer("clamped_cast", _clamped, (((6, 8), DType.INT32),), _U55_U65),
    Reproducer(
        "reshaped_broadcast", _reshaped_broadcast, (((4, 3, 1, 5), DType.INT32), ((4, 1, 3, 5), DType.INT32)), _U55_U65
    ),
    Reproducer("reshaped_again", _reshaped_again, (((60,), DType.INT32), ((4, 1, 3, 5), DType.INT32)), _U55_U65),
    Reproducer(
        "batched_activation",
        lambda b, x: _reversed(b, _mixed(b, x)),
        (((2, 3, 5, 6), DType.INT8),),
        _ALL,
        releases=_VELA_5_1,
    ),
    Reproducer(
        "batched_activation_of_a_view",
        lambda b, x: _reversed(b, b.reshape(_twice(b, x), (3, 2, 4, 10))),
        (((24, 10), DType.INT8),),
        _ALL,
        releases=_VELA_5_1,
    ),
    Reproducer(
        "cancelled_transpose",
        _cancelled_transpose,
        (((1, 1, 36, 5), DType.INT8), ((9, 4, 16), DType.INT8)),
        _ALL,
        releases=_VELA_5_1,
    ),
    Reproducer(
        "cancelled_transpose_and_returned",
        _cancelled_transpose_and_returned,
        (((1, 9, 4, 16), DType.INT8), ((9, 4, 16), DType.INT8)),
        _ALL,
    ),
    Reproducer(
        "cancelled_transpose_without_ones",
        _cancelled_transpose_without_ones,
        (((1, 9, 4, 16), DType.INT8), ((9, 4, 16), DType.INT8)),
        _ALL,
    ),
    Reproducer(
        "cancelled_transpose_input",
        _cancelled_transpose_input,
        (((1, 9, 4, 16), DType.INT8), ((9, 4, 16), DType.INT8)),
        _ALL,
    ),
    Reproducer(
        "cancelled_transpose_view",
        _cancelled_transpose_view,
        (((576,), DType.INT8), ((9, 4, 16), DType.INT8)),
        _ALL,
    ),
    Reproducer("summed_view", _summed_view, (((576,), DType.INT8),), _ALL),
    Reproducer("turned_to_sum", _turned_to_sum, (((1, 1, 36, 5), DType.INT8),), _ALL, releases=_VELA_5_1),
    Reproducer("returned_reshape", _returned_reshape, (((4, 4, 1, 18), DType.INT8),), _ALL),
    Reproducer("returned_reshape_of_reshape", _returned_reshape_of_reshape, (((9, 3, 2), DType.INT8),), _ALL),
    Reproducer("returned_source", _returned_source, (((4, 3), DType.INT8),), _ALL),
    Reproducer(
        "returned_transpose",
        _returned_transpose,
        (((1, 5, 8, 16), DType.INT8), ((8, 3, 16), DType.INT8)),
        _ALL,
    ),
    Reproducer("widened_image", _widened_image, (_IMAGE,), _U85, _U85),
    Reproducer("widened_image_depthwise", partial(_widened_image, kind="DEPTHWISE_CONV2D"), (_IMAGE,), _U85, _U85),
    Reproducer("widened_image_transposed", partial(_widened_image, kind="TRANSPOSE_CONV2D"), (_IMAGE,), _U85, _U85),
    Reproducer(
        "widened_image_sliced",
        partial(_widened_image, widen=_widen_and_slice),
        (_IMAGE,),
        _U85,
        _U85,
        releases=_VELA_5_2,
    ),
    Reproducer("widened_image_reshaped", partial(_widened_image, widen=_widen_in_steps), (_IMAGE,), _U85, _U85),
    Reproducer(
        "widened_image_zero_point", partial(_widened_image, widen=_widen_with_zero_point), (_IMAGE,), _U85, _U85
    ),
    Reproducer("widened_image_padded", partial(_widened_image, widen=_pad_and_widen), (_IMAGE,), _ALL),
    Reproducer("padding_only_phase", partial(_dilated, itself=True), (((5, 1, 1, 3), DType.INT8),), _ALL),
    Reproducer("padding_only_phase_behind_pad", partial(_dilated, itself=False), (((5, 1, 1, 3), DType.INT8),), _ALL),
    Reproducer(
        "overwritten_indices",
        _gathered,
        (((1, 21, 1), DType.INT8), ((1, 16), DType.INT32), ((1, 4, 9), DType.INT8)),
        _U85,
        _U85,
    ),
    Reproducer("returned_input", _returned_input, (((3, 4), DType.BOOL),), _U85, _U85),
    Reproducer("transposed_table", partial(_transposed_table, last=_reversed), (((6, 4, 10), DType.INT8),), _U85),
    Reproducer(
        "transposed_clamp",
        partial(_transposed_table, last=lambda b, x: b.clamp(x, -9, 90)),
        (((6, 4, 10), DType.INT8),),
        _U85,
    ),
    Reproducer("turned_wide_table", _turned_wide_table, (((6, 4, 10), DType.INT16),), _U85),
    Reproducer("unwritten_table_result", _joined_table, (((1, 2, 16), DType.INT8),), _U55_U65),
    Reproducer("table_overflow", _crowded_table, (((1, 4, 4, 4), DType.INT8),), _SMALLEST_U55, (*_SMALLEST_U55, *_ALL)),
    Reproducer("equal_weights", _equal_weights, (((1, 3, 4, 2), DType.INT8),), _ALL),
    Reproducer("equal_weights_of_sums", _equal_weights_of_sums, (((1, 3, 4, 2), DType.INT8),), _ALL),
    Reproducer("unclipped", partial(_unclipped, scale=1.0), (((2, 3, 4), DType.INT8),), _ALL),
    Reproducer("unclipped_sum", _unclipped_sum, (((2, 3, 4), DType.INT8),), _U85, _U85),
    Reproducer("equal_depthwise_weights", _equal_depthwise, (((1, 3, 4, 2), DType.INT8),), _ALL),
    Reproducer("unreached_output", _unreached, (((1, 3, 4, 2), DType.INT8),) * 2, _U55_U65),
    Reproducer("padding_alone", _padding_alone, (((1, 2, 1, 1), DType.INT8),), _ALL),
    Reproducer("reshaped_activation", _reshaped_activation, (((2, 4), DType.INT8),), _ALL, releases=_VELA_5_1),
    Reproducer("reshaped_table", _reshaped_table, (((3, 5, 4), DType.INT8),), _ALL, releases=_VELA_5_1),
    Reproducer(
        "lost_rescale_operand_offset",
        partial(_rescaled_part, scale=1.0),
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_scaled",
        partial(_rescaled_part, scale=3.7),
        (((1, 3, 4, 6), DType.INT16),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer("rescaled_rows", _rescaled_rows, (((1, 3, 4, 6), DType.INT32),), _U55_U65, releases=_VELA_5_2),
    Reproducer(
        "lost_rescale_operand_offset_of_two_slices",
        _rescaled_parts,
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_of_equal_scales",
        _shifted_parts,
        (((1, 1, 3, 1), DType.INT8), ((1, 1, 3, 8), DType.INT8)),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_widened",
        _widened_difference,
        (((1, 3, 4, 6), DType.INT16),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_for_two",
        _rescaled_for_two,
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_beside_result",
        _rescaled_beside_result,
        (((1, 3, 4, 6), DType.INT8), ((1, 3, 4, 5), DType.INT8)),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "rescaled_join_beside_shared",
        _rescaled_join_beside_shared,
        (((1, 3, 4, 6), DType.INT8), ((1, 3, 4, 5), DType.INT32)),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_beside_rescale",
        _rescaled_beside_rescale,
        (((1, 3, 4, 6), DType.INT8), ((1, 3, 4, 5), DType.INT32)),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "rescaled_join",
        lambda b, x: b.rescale(_twice_over(b, x), DType.INT32, 3.0),
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "rescaled_tiles",
        lambda b, x: b.rescale(b.reshape(b.tile(x, (1, 2, 1, 1)), (144,)), DType.INT8, 1e-7),
        (((1, 3, 4, 6), DType.INT32),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "rescaled_pad",
        lambda b, x: b.rescale(b.pad(x, ((0, 0), (1, 0), (0, 0), (2, 0)), 5), DType.INT32, 1.0),
        (((1, 3, 4, 6), DType.INT16),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "duplicated_rescale_slice",
        partial(_two_slices_of_rescale, scale=3.0, shape=(1, 3, 4, 6)),
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "duplicated_rescale_reshape",
        partial(_two_slices_of_rescale, scale=3.0, shape=(12, 6)),
        (((1, 3, 4, 6), DType.INT8),),
        _U85,
        _U85,
        _VELA_5_2,
    ),
    Reproducer("upsampled_parts", _upsampled_parts, (((8, 2, 3, 2), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer("averaged_parts", _averaged_parts, (((4, 4, 4, 5), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer("maximum_parts", _maximum_parts, (((2, 4, 4, 4), DType.INT8),), _U85, _U85, _VELA_5_2),
    Reproducer("square_of_slice", _square_of_slice, (((2, 4, 4, 4), DType.INT8),), _U85, _U85, _VELA_5_2),
    Reproducer(
        "clipped_product",
        partial(_product_rescaled, first=1.0, second=128.0, dtype=DType.INT16, zero_point=0),
        (((1, 3, 4, 6), DType.INT8),),
        _ALL,
    ),
    Reproducer(
        "clipped_rescale", lambda b, x: b.rescale(_pooled(b, x), DType.INT32, 3.0), (_IMAGE,), _U85, releases=_VELA_5_2
    ),
    Reproducer("clipped_choice", _chosen, (_IMAGE, _IMAGE), _U85, _U85, _VELA_5_2),
    *(
        Reproducer(f"rescaled_{kind.lower()}", partial(_read_by_one, kind=kind), (_IMAGE,), _U85)
        for kind in ("ABS", "CLZ")
    ),
    Reproducer("rescaled_peaks", _peaks_apart, (((1, 8, 8, 4), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer(
        "unclipped_scaled",
        partial(_product_rescaled, first=1.0, second=0.7, dtype=DType.INT8, zero_point=0),
        (((1, 3, 4, 6), DType.INT8),),
        _ALL,
    ),
    Reproducer(
        "unclipped_sums",
        lambda b, x: b.rescale(_clipped_sums(b, x), DType.INT32, 3.0),
        (((1, 2, 3, 4), DType.INT16),),
        _ALL,
    ),
    Reproducer(
        "unclipped_zero_point_grown",
        lambda b, x: b.rescale(b.rescale(x, DType.INT8, 3.0, 5), DType.INT8, 1.0, 0, 5),
        (((1, 2, 3, 4), DType.INT8),),
        _ALL,
        releases=_VELA_5_2,
    ),
    Reproducer("unclipped_zero_point", _channels_moved, (((1, 3, 4, 6), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer(
        "lost_upsampling_offset", _joined_upsampling, (((1, 3, 4, 6), DType.INT8),), _U55_U65, releases=_VELA_5_2
    ),
    Reproducer("merged_concats", _padded_again, (((1, 3, 4, 6), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer("merged_concats_tiled", _concatenated_again, (((1, 3, 4, 6), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer(
        "joined_channel_scales",
        partial(_joined_channel_scales, wide=False),
        (((1, 3, 4, 6), DType.INT8),),
        _U85,
        _U85,
        _VELA_5_2,
    ),
    Reproducer(
        "joined_channel_scales_of_sums",
        partial(_joined_channel_scales, wide=True),
        (((1, 3, 4, 6), DType.INT8),),
        _ALL,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_result_offset", _joined_rescale, (((1, 3, 4, 6), DType.INT32),), _U55_U65, releases=_VELA_5_2
    ),
    Reproducer(
        "lost_rescale_result_offset_padded",
        _padded_rescale,
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "lost_rescale_operand_offset_again",
        _rescaled_part_again,
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "rescaled_join_again", _rescaled_join_again, (((1, 3, 4, 6), DType.INT8),), _U55_U65, releases=_VELA_5_2
    ),
    Reproducer("unequal_scales_turned", _turned_difference, (((1, 2, 3, 4), DType.INT16),), _U55_U65),
    Reproducer(
        "unequal_scales_after_two", _summed_after_two, (((1, 2, 3, 4), DType.INT8),), _U55_U65, releases=_VELA_5_2
    ),
    Reproducer("unclipped_operand", _least_narrowed, (((1, 2, 3, 4), DType.INT16),), _U85, releases=_VELA_5_2),
    Reproducer("twice_clipped", _twice_clipped, (((2, 3, 4), DType.INT8),), _U85, releases=_VELA_5_2),
    Reproducer("clipped_to_int16", _clipped_to_int16, (((2, 3, 4), DType.INT8),) * 2, _U85, releases=_VELA_5_2),
    Reproducer(
        "clipped_beside_shared", _clipped_beside_shared, (((2, 3, 4), DType.INT8),) * 2, _U85, releases=_VELA_5_2
    ),
    Reproducer(
        "duplicated_rescale_slice_of_casts", _cast_parts, (((1, 3, 4, 6), DType.INT32),), _U55_U65, releases=_VELA_5_2
    ),
    Reproducer("reshaped_casts", _reshaped_casts, (((1, 3, 4, 6), DType.INT32),), _ALL, releases=_VELA_5_2),
    Reproducer("reshaped_terms", _reshaped_terms, (((1, 3, 4, 6), DType.INT32),), _ALL, releases=_VELA_5_2),
    Reproducer(
        "reshaped_product",
        partial(_shared_product, move=lambda b, x: b.reshape(x, (1, 4))),
        (((1, 4, 1), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "reshaped_product_widened_twice",
        partial(_shared_product, move=_reshaped_to_16_bits),
        (((1, 4, 1), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer(
        "turned_product",
        partial(_shared_product, move=lambda b, x: b.transpose(x, (0, 2, 1))),
        (((1, 4, 1), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer("merged_concats_padded", _padded_twice, (((1, 3, 4, 6), DType.INT8),), _ALL, releases=_VELA_5_2),
    Reproducer(
        "lost_rescale_result_offset_of_table",
        _padded_lookup,
        (((1, 3, 4, 6), DType.INT8),),
        _U55_U65,
        releases=_VELA_5_2,
    ),
    Reproducer("rescaled_bits", _bits_scaled, (_IMAGE,), _U85, _U85),
    Reproducer("lost_operand_scale", _zeros_counted, (_IMAGE,), _U85),
    Reproducer("rescaled_wider_cast", _cast_rescaled, (_WIDE_IMAGE,), _U85),
    Reproducer("lost_select_scale", _chosen_scaled, (_IMAGE, (_IMAGE[0], DType.BOOL)), _U85, _U85, _VELA_5_2),
    Reproducer("clipped_peaks_widened", _peaks_widened, (_WIDE_IMAGE,), _U85, releases=_VELA_5_2),
    Reproducer(
        "chained_cast_reshaped",
        lambda b, x: b.emit("BITWISE_NOT", (b.reshape(b.cast(x, DType.INT8), (1, 24)),), DType.INT8),
        (((1, 2, 3, 4), DType.INT32),),
        _U85,
        _U85,
    ),
    Reproducer("rescaled_cast", _narrowed_cast, (((2, 3, 4), DType.INT32),), _U85),
    Reproducer("shifted_cast", _shifted_cast, (((1, 8, 8, 4), DType.INT8),), _U85, _U85),
    Reproducer("truncated_multiplier", _long_scale, (((1, 2, 3, 4), DType.INT16),), _U85, _U85),
    Reproducer("reshaped_choice", _reshaped_choice, (((1, 2, 3, 4), DType.INT32),), _U85, _U85, releases=_VELA_5_2),
    Reproducer("reshaped_ones", _repeated_ones, (((1, 2, 3, 4), DType.INT16),), _U55_U65, releases=_VELA_5_2),
    Reproducer(
        "unclipped_zero_point_past_widening",
        _moved_past_widening,
        (((2, 3, 4), DType.INT32),),
        _ALL,
        releases=_VELA_5_2,
    ),
    Reproducer("unclipped_turned", _product_turned, (((1, 5, 4), DType.INT8),), _ALL),
    Reproducer("reshaped_select", _reshaped_select, (((80,), DType.INT16),), _U85, _U85),
    Reproducer("returned_mask", _returned_mask, (((2, 4), DType.INT32), ((2, 4), DType.INT32)), _U85, _U85),
    Reproducer("two_tables", _tables, (((2, 8), DType.INT16), ((2, 8), DType.INT16)), _U85),
    Reproducer("two_tables_of_two_widths", _tables_of_two_widths, (((2, 8), DType.INT8), ((2, 8), DType.INT8)), _U85),
)
#: Bugs of operators that no lowering emits; they need no workaround.
NOT_EMITTED = (
    Reproducer("batched_conv_stride", _strided_images, (((2, 1, 5, 1), DType.INT8),), _ALL, releases=_VELA_5_1),
    Reproducer("padded_depth", _padded_depth, (((1, 3, 4, 3, 1), DType.INT8),), _U55_U65, _U55_U65),
    Reproducer(
        "narrow_shift",
        lambda b, x: b.emit("LOGICAL_RIGHT_SHIFT", (x, b.const([[3]], x.dtype)), x.dtype),
        (((4, 8), DType.INT8),),
        _U85,
        _U85,
    ),
    Reproducer("unsigned_beside_view", _unsigned_beside_view, (_IMAGE,), _ALL),
    Reproducer("long_gather", _long_gather, (((1, 5, 2), DType.INT8),), _U85, _U85),
    Reproducer("identity_resize", _resized, (((1, 1, 1, 10), DType.INT16),), _U85, _U85),
    Reproducer("batched_pool_stride", _averaged, (((2, 8, 8, 6), DType.INT8),), _U85, _U85),
    Reproducer(
        "batched_pool_kernel",
        partial(_averaged, kernel=(12, 12), stride=(1, 1)),
        (((2, 8, 8, 6), DType.INT8),),
        _U85,
        _U85,
    ),
)


#: Graphs close to those above that Vela compiles correctly; passes leave them unchanged.
COMPILED_CORRECTLY = (
    Reproducer("summed_parts", _summed_parts, (((1, 3, 4, 6), DType.INT8),), ()),
    Reproducer(
        "rescaled_for_arithmetic",
        _rescaled_for_arithmetic,
        (((1, 3, 4, 6), DType.INT8), ((1, 3, 4, 5), DType.INT8)),
        (),
    ),
    Reproducer(
        "strided_sums",
        lambda b, x: b.rescale(_convolution(b, x, pad=(0, 0, 0, 0), stride=(4, 4)), DType.INT32, 1.0),
        (((1, 11, 11, 4), DType.INT8),),
        (),
    ),
    Reproducer(
        "widened_average",
        lambda b, x: b.rescale(b.avg_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0)), DType.INT32, 3.0),
        (_IMAGE,),
        (),
    ),
    Reproducer("joined_scaled", _joined_scaled, (((1, 3, 4, 6), DType.INT8),), ()),
    Reproducer("scaled_join", _scaled_join, (((1, 3, 4, 6), DType.INT8),), ()),
    Reproducer("scaled_join_first", partial(_scaled_join, last=True), (((1, 3, 4, 6), DType.INT8),), ()),
    Reproducer(
        "number_of_five",
        lambda b, x: b.maximum(x, b.const([[[[[31]]]]], DType.INT32)),
        (((2, 3, 2, 4, 5), DType.INT32),),
        (),
    ),
    Reproducer(
        "sliced_image",
        lambda b, x: _reversed(b, b.slice(x, (1, 0, 0, 0), (2, 5, 3, 4))),
        (((4, 5, 3, 4), DType.INT8),),
        (),
    ),
    Reproducer("activation_of_arithmetic", lambda b, x: _reversed(b, _twice(b, x)), (((3, 2, 4, 10), DType.INT8),), ()),
    Reproducer("activation_of_an_image", lambda b, x: _reversed(b, _mixed(b, x)), (((1, 3, 5, 6), DType.INT8),), ()),
    Reproducer(
        "broadcast", lambda b, x, y: b.maximum(x, y), (((4, 3, 1, 5), DType.INT32), ((4, 1, 3, 5), DType.INT32)), ()
    ),
    Reproducer(
        "gathered_and_read",
        lambda b, x, i: _reversed(b, b.gather(x, _small(b, i))),
        (((1, 21, 4), DType.INT8), ((1, 5), DType.INT32)),
        (),
        _U85,
    ),
    Reproducer(
        "one_number_by_another",
        lambda b, x: b.maximum(x, b.const(np.full((1,) * 5, 3), DType.INT32)),
        (((1,) * 5, DType.INT32),),
        (),
    ),
    Reproducer("moved_maximum", lambda b, x: b.rescale(_pooled(b, x), DType.INT8, 1.0, 0, 3), (_IMAGE,), ()),
    Reproducer("scaled_clipped_maximum", _scaled_clipped, (_IMAGE,), ()),
    Reproducer("maximum_scaled_by_two", _scaled_by_two, (_IMAGE,), ()),
    Reproducer("scaled_average", lambda b, x: b.rescale(_average(b, x), DType.INT8, 0.7), (_IMAGE,), ()),
    Reproducer("turned", lambda b, x: _widened(b, b.transpose(x, (1, 0, 2))), (((7, 5, 9), DType.INT8),), ()),
    Reproducer("turned_image", lambda b, x: b.transpose(x, (0, 3, 1, 2)), (((1, 8, 8, 64), DType.INT8),), ()),
)


# -- operators that read a SLICE and write into a CONCAT; Vela may split them ----------------------------


def _convolution(b: Builder, x: Value, **attrs: Any) -> Value:
    weight = b.const(np.arange(9 * 5 * x.shape[3]).reshape(5, 3, 3, x.shape[3]) % 41 - 20, DType.INT8)
    return b.rescale(b.conv2d(x, weight, b.const([0] * 5, DType.INT32), **attrs), DType.INT8, 0.01)


def _transpose_convolution(b: Builder, x: Value, step: int) -> Value:
    weight = b.const(np.arange(9 * 5 * x.shape[3]).reshape(5, 3, 3, x.shape[3]) % 41 - 20, DType.INT8)
    bias = b.const([0] * 5, DType.INT32)
    whole = b.transpose_conv2d(x, weight, bias, out_pad=(0, 0, 0, 0), stride=(step, step))
    return b.rescale(whole, DType.INT8, 0.01)


def _product(b: Builder, x: Value) -> Value:
    n, h, w, c = x.shape
    y = b.const(np.arange(n * h * c * 4).reshape(n * h, c, 4) % 41 - 20, DType.INT8)
    wide = b.rescale(b.matmul(b.reshape(x, (n * h, w, c)), y), DType.INT8, 0.01)
    return b.reshape(wide, (n, h, w, 4))


def _sum(b: Builder, x: Value, axis: int) -> Value:
    return b.rescale(b.reduce("REDUCE_SUM", b.rescale(x, DType.INT32, 1.0), axis), DType.INT8, 0.1)


def _extreme(b: Builder, x: Value, kind: str, axis: int) -> Value:
    return b.reduce(kind, x, axis)


_FRAME = (1, 1, 1, 1)
_BODIES: dict[str, Callable[[Builder, Value], Value]] = {
    "convolution": lambda b, x: _convolution(b, x, pad=(0, 0, 0, 0)),
    "convolution_padded": lambda b, x: _convolution(b, x, pad=_FRAME),
    "convolution_strided": lambda b, x: _convolution(b, x, pad=_FRAME, stride=(2, 2)),
    "convolution_dilated_by_2": lambda b, x: _convolution(b, x, pad=(2, 2, 2, 2), dilation=(2, 2)),
    "convolution_dilated_by_3": lambda b, x: _convolution(b, x, pad=(0, 0, 0, 0), dilation=(3, 3)),
    "depthwise": lambda b, x: _window(b, x),
    "depthwise_multiplied": lambda b, x: _window(b, x, 2),
    "transpose_convolution": lambda b, x: _transpose_convolution(b, x, 1),
    "transpose_convolution_strided": lambda b, x: _transpose_convolution(b, x, 2),
    "max_pool": lambda b, x: b.max_pool2d(x, (3, 3), (1, 1), _FRAME),
    "avg_pool": lambda b, x: b.avg_pool2d(x, (3, 3), (1, 1), _FRAME),
    "product": _product,
    **{f"sum_{axis}": partial(_sum, axis=axis) for axis in range(4)},
    **{f"maximum_{axis}": partial(_extreme, kind="REDUCE_MAX", axis=axis) for axis in range(4)},
    **{f"minimum_{axis}": partial(_extreme, kind="REDUCE_MIN", axis=axis) for axis in range(4)},
    "table": lambda b, x: b.table(x, np.arange(-128, 128)[::-1]),
    "transpose": lambda b, x: b.transpose(x, (0, 2, 3, 1)),
    "reverse": lambda b, x: b.reverse(x, 2),
}
SLICED_OPERATORS = tuple(_BODIES)


def reproduce_sliced(name: str, axis: int, batches: int) -> Reproducer:
    """Build a graph in which an operator reads a SLICE along ``axis``, and a CONCAT reads its result."""
    shape = (batches, 9, 7, 6)
    start = tuple(int(i == axis) for i in range(4))
    whole = tuple(size + 2 * before for size, before in zip(shape, start, strict=True))

    def body(b: Builder, x: Value) -> Value:
        y = _BODIES[name](b, b.slice(x, start, shape))
        frame = (*y.shape[:axis], 1, *y.shape[axis + 1 :])
        beside = b.const(np.arange(y.size // y.shape[axis]).reshape(frame) % 99, y.dtype)
        return b.concat([beside, y, beside], axis)

    return Reproducer(f"{name} along {axis} of {batches}", body, ((whole, DType.INT8),), ())


#: Operations that start too early in Vela's stream; the compiler lowers their BLOCKDEP.
STARTS_TOO_EARLY = [
    Reproducer("square", partial(_square, perms=(1, 0, 2), shape=(7, 7, 9)), (((7, 7, 9), DType.INT8),), _U55_U65),
    Reproducer(
        "square_at_last", partial(_square, perms=(0, 3, 2, 1), shape=(7, 7, 9)), (((7, 3, 3, 7), DType.INT8),), _U55_U65
    ),
    Reproducer(
        "square_at_first",
        partial(_square, perms=(1, 2, 0, 3), shape=(7, 3, 21)),
        (((7, 7, 3, 3), DType.INT8),),
        _U55_U65,
    ),
    Reproducer("read_twice", _read_twice, (((10, 8), DType.INT32),), _U85, releases=_VELA_5_1),
    Reproducer("read_part_and_whole", _read_part_and_whole, (((64, 64), DType.INT32),), _U85, releases=_VELA_5_1),
    Reproducer("read_rescaled_blocks", _read_rescaled, (((1000,), DType.INT8),), _U85, releases=_VELA_5_1),
    Reproducer("read_halves", _read_halves, (((64, 64), DType.INT32),), _U55_U65),
    Reproducer("read_halves", _read_halves, (((64, 64), DType.INT32),), _U85, releases=_VELA_5_1),
    Reproducer("read_rescaled", _read_rescaled, (((180,), DType.INT8),), _U55_U65, releases=_VELA_5_1),
    Reproducer("read_joined", _read_joined, (((1, 64), DType.INT32),) * 2, _U55_U65),
    Reproducer("read_joined", _read_joined, (((1, 64), DType.INT32),) * 2, _U85, releases=_VELA_5_1),
    Reproducer("read_tiled", _read_tiled, (((20, 1), DType.INT8),), _U55_U65),
    Reproducer("read_tiled", _read_tiled, (((20, 1), DType.INT8),), _U85, releases=_VELA_5_1),
    Reproducer("read_padded", _read_padded, (((1, 4, 5, 3), DType.INT8),), _U55_U65),
    Reproducer("read_padded", _read_padded, (((1, 4, 5, 3), DType.INT8),), _U85, releases=_VELA_5_1),
    Reproducer("turned_images", _turned_images, (((32, 16), DType.INT8),), _U55_U65),
]
