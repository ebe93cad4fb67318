"""Alternatives: bit-equal in the reference model and in Vela's programs, and chosen by the cost model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core import delegate
from arm_backend_core.alternatives import (
    alternatives_pass,
    attention_heads,
    attention_matmul,
    broadcast_tiles,
    channel_permutation,
    channels_as_taps,
    concat_copies,
    cost_model,
    dilation,
    packed_channels,
    pad_channels,
    pixel_rows,
    pixel_shuffle,
    short_axis_concat,
    size_or_speed,
    space_to_depth_folding,
    strided_slices,
    transpose_split,
    transposed_convolution,
)
from arm_backend_core.alternatives import factorized_pools as pools
from arm_backend_core.alternatives import pixels_as_channels as pixels
from arm_backend_core.alternatives.choose import Alternative, CostFunction, choose_alternatives
from arm_backend_core.alternatives.cost_model import Cost, VelaCostModel
from arm_backend_core.alternatives.deferred import pickle_graph, unpickle_graph
from arm_backend_core.alternatives.unconditional import apply_unconditional
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.dtype import DType
from arm_backend_core.errors import CompileError, InternalError
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.pipeline import run_last_passes
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.accelerators import ACCELERATORS
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa_graphs import build_graph, estimate_npu_cycles, make_target
from tests.verify_only import mark_verify

SPECS = [EthosUCompileSpec(name) for name in ACCELERATORS]


def draw_costs(rng: np.random.Generator) -> CostFunction:
    """Make a cost function for which the last alternative of a region is the cheapest, or a random one."""

    def ask(graphs: Sequence[Graph]) -> list[Cost | None]:
        falling = np.arange(len(graphs), 0, -1)
        return [Cost(int(cost), 0) for cost in (falling if rng.random() < 0.5 else rng.permutation(falling))]

    return ask


class Case:
    """A graph under construction, with a random generator."""

    def __init__(self, seed: int, spec: EthosUCompileSpec) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec = spec
        self.graph = Graph()
        self.b = LegalizingBuilder(self.graph, spec.target)

    def randint(self, low: int, high: int) -> int:
        """Draw an integer; both bounds are included."""
        return int(self.rng.integers(low, high + 1))

    def input(self, *shape: int, dtype: DType = DType.INT8) -> Value:
        return self.graph.add_input(shape, dtype, f"x{len(self.graph.inputs)}")

    def conv(self, x: Value, channels: int, kernel: tuple[int, int] = (1, 1), **attrs: Any) -> Value:
        weight = self.b.const(self.rng.integers(-127, 128, (channels, *kernel, x.shape[3])), DType.INT8)
        bias = self.b.const(self.rng.integers(-999, 999, channels), DType.INT32)
        attrs.setdefault("pad", (0, 0, 0, 0))
        y = self.b.conv2d(x, weight, bias, zps=(self.randint(-20, 20), self.randint(-9, 9)), **attrs)
        return self.b.rescale(y, DType.INT8, self.rng.uniform(1e-3, 4e-3, channels), 0, self.randint(-20, 20))

    def check(self, alternative: Alternative | None, emulator: Emulator) -> list[str]:
        """Apply an alternative and compare results before and after; return the operator kinds of the new graph."""
        arrays = [self.rng.integers(*_limits(x), x.shape).astype(x.dtype.numpy) for x in self.graph.inputs]
        expected = reference_model.run(serialize(self.graph), arrays)
        if alternative is None:
            transpose_split.drop_unit_dimensions(self.graph, self.spec.target)
            apply_unconditional(self.graph, self.spec.target)
        else:
            choose_alternatives(self.graph, self.spec.target, [alternative], draw_costs(self.rng))
        run_last_passes(self.graph, self.spec.target)
        flatbuffer = serialize(self.graph)
        payload = compile_ethosu(flatbuffer, self.spec, delegate="", find_operator=lambda _: None)
        kinds = [(array.dtype.name, array.shape) for array in expected]
        for results in (
            reference_model.run(flatbuffer, arrays),
            emulator.run(read_payload(payload.data), arrays, kinds),
        ):
            for ours, theirs in zip(results, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        return [op.kind for op in self.graph.ops]


def _limits(value: Value) -> tuple[int, int]:
    low, high = value.dtype.range
    return int(low), int(high) + 1


def _max_pools(case: Case) -> list[Value]:
    """Max pools of several window sizes and paddings on one tensor."""
    shape = (case.randint(1, 2), case.randint(9, 14), case.randint(9, 14), case.randint(1, 20))
    x = case.input(*shape, dtype=DType.INT16 if case.rng.random() < 0.3 else DType.INT8)
    made = []
    for _ in range(case.randint(1, 3)):
        kernel = [case.randint(1, 9), case.randint(1, 9)]
        pad = [case.randint(0, size - 1) for size in kernel for _ in range(2)]
        made.append(case.b.max_pool2d(x, kernel, (1, 1), pad))
    return made


def _channel_shuffle(case: Case) -> list[Value]:
    """A channel shuffle whose result is sliced; convolutions read some of the slices."""
    groups, each = case.randint(2, 4), case.randint(2, 9)
    n, h, w, c = case.randint(1, 2), case.randint(2, 6), case.randint(2, 6), groups * each
    x = case.b.reshape(case.conv(case.input(n, h, w, 8), c), (n, h, w, groups, each))
    x = case.b.reshape(case.b.transpose(x, (0, 1, 2, 4, 3)), (n, h, w, c))
    cut = case.randint(1, c - 1)
    first = case.b.slice(x, (0, 0, 0, 0), (n, h, w, cut))
    second = case.b.slice(x, (0, 0, 0, cut), (n, h, w, c - cut))
    made = [case.conv(second, case.randint(1, 20), (3, 1), pad=(1, 1, 0, 0)), case.conv(second, 4)]
    return [*made, first] if case.rng.random() < 0.5 else [*made, case.conv(first, 5), x]


def _without_activations(case: Case) -> list[Value]:
    """Operators without an activation, each in front of several kinds of readers."""
    x = case.input(case.randint(1, 2), 9, 8, case.randint(1, 20))
    dilation, stride = case.randint(1, 3), case.randint(1, 2)
    y = case.conv(x, 12, (3, 3), pad=(dilation,) * 4, dilation=(dilation, dilation))
    weight = case.b.const(case.rng.integers(-127, 128, (3, 3, 12, case.randint(1, 2))), DType.INT8)
    bias = case.b.const(case.rng.integers(-999, 999, 12 * weight.shape[3]), DType.INT32)
    z = case.b.rescale(case.b.depthwise_conv2d(y, weight, bias, pad=(1, 1, 1, 1)), DType.INT8, 0.01)
    p = case.b.max_pool2d(y, (3, 3), (stride, stride), (1, 1, 1, 1)) if stride == 1 else y
    b = case.b
    total = b.add(b.rescale(y, DType.INT32, 3.5), b.rescale(p, DType.INT32, 2.5))
    product = b.mul(b.rescale(y, DType.INT32, 1.0), b.rescale(p, DType.INT32, 1.0))
    results = [b.rescale(total, DType.INT8, 0.1), b.rescale(product, DType.INT8, 0.01)]
    return [b.concat([y, z], 3), *results, b.reshape(p, (p.size,)), b.transpose(y, (0, 3, 1, 2))]


def _affine_rows(case: Case, rows: int = 64) -> list[Value]:
    """INT32 rows times one constant per column plus another one, as at the end of a layer normalization."""
    b, columns = case.b, case.randint(2, 20)
    factors, offsets = (b.const(case.rng.integers(-(2**30), 2**30, (1, 1, columns)), DType.INT32) for _ in range(2))
    x = b.rescale(case.input(1, case.randint(rows, 2 * rows), columns, dtype=DType.INT16), DType.INT32, 2.0**14)
    return [b.rescale(b.add(offsets, b.mul(x, factors, 31)), DType.INT16, 2.0**-15)]


def _dilated_convolution(case: Case) -> list[Value]:
    """A one-dimensional dilated convolution, sometimes depthwise, with a PAD in front of it or its own padding."""
    n, length, c = case.randint(1, 2), case.randint(12, 40), case.randint(1, 12)
    kernel, step, zero_point = case.randint(1, 4), case.randint(1, 5), case.randint(-20, 20)
    front, after = (case.randint(0, (kernel - 1) * step) for _ in range(2))
    front = front - front % step if case.rng.random() < 0.6 else front
    length = length - length % step if case.rng.random() < 0.6 else length
    b, is_int16 = case.b, case.rng.random() < 0.2
    x = case.input(n, length, c, dtype=DType.INT16 if is_int16 else DType.INT8)
    zero_point = 0 if is_int16 else zero_point
    if front + after and case.rng.random() < 0.7:  # Vela miscompiles a PAD by 0; no pass leaves one
        x = b.pad(x, [(0, 0), (front, after), (0, 0)], zero_point)
        front = after = 0
    image = b.reshape(x, (n, 1, x.shape[1], c))
    depthwise = case.rng.random() < 0.4
    shape = (1, kernel, c, 1) if depthwise else (case.randint(1, 20), 1, kernel, c)
    weight = b.const(case.rng.integers(-127, 128, shape), DType.INT8)
    channels = c if depthwise else shape[0]
    bias = b.const(case.rng.integers(-999, 999, channels), DType.INT48 if is_int16 else DType.INT32)
    conv = b.depthwise_conv2d if depthwise else b.conv2d
    y = conv(image, weight, bias, pad=(0, 0, front, after), dilation=(1, step), zps=(zero_point, 0 if is_int16 else 5))
    scales = case.rng.uniform(1e-3, 4e-3, channels)
    return [b.reshape(b.rescale(y, x.dtype, scales, 0, 0), (n, y.shape[2], channels))]


def _attention(case: Case, *, joined_by_convolution: bool = False) -> list[Value]:
    """Attention whose heads are side by side in the results of linear layers and for the layer that reads them.

    With ``joined_by_convolution``, the result has the heads one behind the other. A convolution reads it, as in
    ``attention_heads.MERGE_HEADS``, or the program returns it.
    """
    rows, count, size = case.randint(1, 9), case.randint(2, 4), 8 * case.randint(1, 2)
    x, b = case.input(1, 1, rows, 16), case.b
    split = [b.reshape(case.conv(x, count * size), (1, rows, count, size)) for _ in range(3)]
    query, key, value = (b.transpose(y, (0, 2, 3, 1) if i == 1 else (0, 2, 1, 3)) for i, y in enumerate(split))
    if case.rng.random() < 0.5:  # as SEPARATE_HEADS writes them
        query = b.concat([case.conv(x, size) for _ in range(count)], 1)
    flat = [b.reshape(y, y.shape[1:]) for y in (query, key, value)]
    scores = b.rescale(b.matmul(flat[0], flat[1], (3, -5)), DType.INT8, 0.002, 0, -9)
    context = b.rescale(b.matmul(scores, flat[2], (-9, 4)), DType.INT8, 0.01, 0, 6)
    context, place = b.reshape(context, (1, count, rows, size)), case.rng.random()
    if joined_by_convolution:
        return [case.conv(context, 12, (count, 1)) if place < 0.7 else context]
    joined = b.transpose(context, (0, 2, 1, 3) if place < 0.5 else (2, 0, 1, 3))
    return [case.conv(b.reshape(joined, (1, 1, rows, count * size)), 12)]


def _odd_pointwise_convolutions(case: Case) -> list[Value]:
    """Pointwise convolutions of images with an odd number of rows or columns, between other operators."""
    b, height = case.b, case.randint(3, 9)
    x = case.conv(case.input(1, height, 7 if height % 2 == 0 else case.randint(2, 9), 8), case.randint(5, 40))
    y = case.conv(x, case.randint(17, 64))
    extra = case.randint(0, 3)
    if extra == 1:
        y = b.clamp(y, -100, 90)
    elif extra == 2:
        y = b.table(y, case.rng.integers(-128, 128, 256).astype(np.int8))
    elif extra == 3:
        y = b.concat([y, x], 3)
    return [case.conv(y, 5, (3, 3), pad=(1, 1, 1, 1)), b.rescale(b.rescale(x, DType.INT32, 2.0), DType.INT8, 0.4)]


def _few_channel_convolutions(case: Case) -> list[Value]:
    """Convolutions of few channels, some with a TABLE or CLAMP, whose input has other readers."""
    b, height = case.b, case.randint(4, 9)
    x = case.conv(
        case.input(case.randint(1, 2), height, 16 if height % 2 else case.randint(8, 15), 4), case.randint(17, 32)
    )
    y = case.conv(x, case.randint(1, 24), dilation=(case.randint(1, 2), case.randint(1, 2)))
    extra = case.randint(0, 2)
    if extra == 1:
        y = b.clamp(y, -100, 90)
    elif extra == 2:
        y = b.table(y, case.rng.integers(-128, 128, 256).astype(np.int8))
    return [case.conv(y, 5, (3, 3), pad=(1, 1, 1, 1)), b.rescale(b.rescale(x, DType.INT32, 2.0), DType.INT8, 0.4)]


def _expansion(case: Case, channels: int) -> list[Value]:
    """The expansion of an inverted residual block from few channels, and its depthwise convolution."""
    b, size = case.b, 28
    x = case.conv(case.conv(case.input(1, size, size, 16), channels), 96)
    weight = b.const(case.rng.integers(-127, 128, (5, 5, 96, 1)), DType.INT8)
    y = b.depthwise_conv2d(x, weight, b.const(np.zeros(96), DType.INT32), pad=(2, 1, 2, 1), stride=(2, 2))
    return [case.conv(b.rescale(y, DType.INT8, 1e-3), 40)]


def _skip_connection(case: Case, size: int = 16) -> list[Value]:
    """A concatenation of an image that a pooling reads too, of a view of a deeper one, and of a part of another."""
    b, shape = case.b, (1, size, size, case.randint(5, 24))
    skip = case.conv(case.input(1, size, size, 4), shape[3])
    pooled = b.max_pool2d(skip, (2, 2), (2, 2), (0, 0, 0, 0))
    deep = case.conv(pooled, 4 * case.randint(4, 8))
    view = b.reshape(deep, (1, size, size, deep.shape[3] // 4))
    part = b.slice(case.conv(skip, 20), (0, 0, 0, 3), (1, size, size, 16))
    parts = [skip, view, part] if case.rng.random() < 0.5 else [view, skip]
    return [case.conv(b.concat(parts, 3), 5, (3, 3), pad=(1, 1, 1, 1))]


def _repeated_vectors(case: Case, size: int = 20) -> list[Value]:
    """A tensor that is repeated along dimensions of size 1, concatenated with another one."""
    b, dtype = case.b, (DType.INT8, DType.INT16, DType.INT32)[case.randint(0, 2)]
    shape = (1, size, case.randint(5, 9), case.randint(3, 40))[: case.randint(3, 4)]
    repeated = [axis for axis in range(1, len(shape)) if case.rng.random() < 0.5] or [1]
    x = case.input(*(1 if axis in repeated else n for axis, n in enumerate(shape)), dtype=dtype)
    y = b.tile(x, [n if axis in repeated else 1 for axis, n in enumerate(shape)])
    results = [b.concat([case.input(*shape, dtype=dtype), y], case.randint(1, len(shape) - 1))]
    if case.rng.random() < 0.5:
        results.append(y)
    return results


def _few_channel_arithmetic(case: Case) -> list[Value]:
    """Arithmetic of two slices of few channels; one result has a reader outside of the chain."""
    b, channels = case.b, case.randint(1, 4)
    shape = (1, case.randint(60, 90), case.randint(30, 40), channels)
    x = case.input(*shape[:3], 2 * channels)
    left, right = (b.rescale(b.slice(x, (0, 0, 0, i * channels), shape), DType.INT32, 2.0**8) for i in range(2))
    product = b.rescale(b.mul(b.rescale(left, DType.INT16, 0.5), b.rescale(right, DType.INT16, 0.5)), DType.INT32, 1e-3)
    total = b.rescale(b.add(product, b.const(np.full((1, 1, 1, 1), 77), DType.INT32)), DType.INT8, 2e-2, 0, 5)
    y = b.clamp(total, -90, 100)
    return [b.concat([y, total], 3), case.conv(y, 3)]


def _concat_of_inputs(case: Case) -> list[Value]:
    """Inputs and a computed tensor of one shape, concatenated along a short last dimension."""
    b, dtype = case.b, (DType.INT8, DType.INT16)[case.randint(0, 1)]
    shape = (1, case.randint(20, 40), case.randint(30, 40), case.randint(1, 2))
    parts = [case.input(*shape, dtype=dtype) for _ in range(case.randint(2, 4))]
    parts[0] = b.clamp(parts[0], -90, 100)
    return [b.concat(parts, 3), *parts[: case.randint(0, 1)]]


def _transposed_convolution(case: Case) -> list[Value]:
    """A transposed convolution with cropping or padding of its result, sometimes with a CLAMP, and its readers."""
    b, stride, c = case.b, (case.randint(1, 3), case.randint(2, 3)), case.randint(1, 9)
    if case.spec.accelerator != "ethos-u85-256":
        stride = (2, 2)
    x = case.input(case.randint(1, 2), case.randint(2, 7), case.randint(2, 7), case.randint(1, 9))
    kernel = tuple(case.randint(step, 5) for step in stride)
    out_pad = [case.randint(1 - kernel[i // 2], 1) for i in range(4)]
    weight = b.const(case.rng.integers(-127, 128, (c, *kernel, x.shape[3])), DType.INT8)
    bias = b.const(case.rng.integers(-999, 999, c), DType.INT32)
    y = b.transpose_conv2d(x, weight, bias, out_pad=out_pad, stride=stride, zps=(case.randint(-20, 20), 0))
    y = b.rescale(y, DType.INT8, case.rng.uniform(1e-3, 4e-3, c), 0, case.randint(-20, 20))
    return [case.conv(b.clamp(y, -100, 90) if case.rng.random() < 0.5 else y, 5), *([y] * case.randint(0, 1))]


def _depth_to_space(case: Case, *, by_convolution: bool = True) -> list[Value]:
    """A convolution or an addition, whose channels become pixels or are permuted, and a reader."""
    b, n, high, wide = case.b, case.randint(1, 2), case.randint(1, 2), case.randint(2, 3)
    one, plain = case.randint(2, 5), case.rng.random() < 0.4
    kernel, stride = ((1, 1), (1, 1)) if plain else ((3, 3), (case.randint(1, 2), 1))
    x = case.input(n, case.randint(2, 9), case.randint(2, 9), case.randint(1, 9))
    groups = [(one, high, wide), (high, wide, one)][case.randint(0, 1)]
    y = case.conv(x, high * wide * one, kernel, pad=(0, 0, 0, 0) if plain else (1, 1, 1, 1), stride=stride)
    if not by_convolution:
        other = b.rescale(case.input(*y.shape), DType.INT32, 0.7, 3)
        y = b.rescale(b.add(b.rescale(y, DType.INT32, 1.3), other), DType.INT8, 0.6, 0, case.randint(-9, 9))
    activation, place = case.randint(0, 2), case.randint(0, 1)
    table = case.rng.integers(-128, 128, 256).astype(np.int8)

    def bounded(value: Value, at: int) -> Value:
        if at != place or not activation:
            return value
        return b.clamp(value, -100, 90) if activation == 1 else b.table(value, table)

    rows, columns = y.shape[1:3]
    apart = b.reshape(bounded(y, 0), (n, rows, columns, *groups))
    shuffled = (0, 1, 4, 2, 5, 3) if groups[0] == one else (0, 1, 3, 2, 4, 5)
    pixels = (0, shuffled[5], *shuffled[1:5])  # [N, C, H, W]
    perms = [shuffled, pixels, [0, *(1 + case.rng.permutation(5))]][case.randint(0, 2)]
    z = b.transpose(apart, [int(axis) for axis in perms])
    image = b.reshape(bounded(z, 1), (n, z.shape[1] * z.shape[2], z.shape[3] * z.shape[4], z.shape[5]))
    return [case.conv(image, 5, (3, 3), pad=(1, 1, 1, 1))] if case.rng.random() < 0.5 else [image]


def _space_to_depth(case: Case) -> list[Value]:
    """A convolution behind space-to-depth of an NHWC or NCHW image, with the channels in any order."""
    b, n, high, wide, c = case.b, case.randint(1, 2), case.randint(1, 4), case.randint(1, 4), case.randint(1, 9)
    rows, columns = case.randint(3, 9), case.randint(3, 9)
    image, wanted = (n, rows, high, columns, wide, c), (0, 1, 3)
    front = case.rng.random() < 0.4
    x = case.input(*((n, c, rows * high, columns * wide) if front else (n, rows * high, columns * wide, c)))
    if front:  # [N, C, H, SH, W, SW]
        image, wanted = (n, c, rows, high, columns, wide), (0, 2, 4)
    else:
        x = case.conv(x, c) if case.rng.random() < 0.5 else x
    channels = case.rng.permutation([axis for axis in range(6) if axis not in wanted])
    y = b.transpose(b.reshape(x, image), [*wanted, *(int(axis) for axis in channels)])
    if case.rng.random() < 0.4:  # a linear layer
        return [case.conv(b.reshape(y, (1, 1, n * rows * columns, high * wide * c)), 9)]
    y, stride = b.reshape(y, (n, rows, columns, high * wide * c)), [case.randint(1, 2) for _ in range(2)]
    pad = [int(amount) for amount in case.rng.integers(0, 3, 4)]
    for axis, size in enumerate((rows, columns)):  # whole strides, as TOSA wants
        pad[2 * axis + 1] += -(size + pad[2 * axis] + pad[2 * axis + 1] - 3) % stride[axis]
    return [case.conv(y, 7, (3, 3), pad=pad, stride=stride)]


def _concatenated_slices(case: Case) -> list[Value]:
    """Slices of an image, strided or contiguous, that are concatenated along any dimension."""
    b, high, wide, is_strided = case.b, case.randint(1, 3), case.randint(2, 3), case.rng.random() < 0.7
    shape = (case.randint(1, 2), high * case.randint(1, 4), wide * case.randint(1, 4), case.randint(1, 9))
    x, parts = case.input(*shape, dtype=(DType.INT8, DType.INT8, DType.INT16)[case.randint(0, 2)]), []
    for place in range(high * wide):
        part, at = x, divmod(place, wide) if case.rng.random() < 0.97 else (0, 0)
        for axis, (count, i) in enumerate(zip((high, wide), at, strict=True), 1):
            size = shape[axis] // count
            if is_strided:
                groups = b.reshape(part, (*part.shape[:axis], size, count, *part.shape[axis + 1 :]))
                part = b.reshape(b.narrow(groups, axis + 1, i, 1), (*part.shape[:axis], size, *part.shape[axis + 1 :]))
            else:
                part = b.narrow(part, axis, i * size, size)
        parts.append(part)
    order = case.rng.permutation(len(parts)) if case.rng.random() < 0.3 else range(len(parts))
    y = b.concat([parts[i] for i in order], case.randint(0, 3))
    return [case.conv(y, 5) if y.dtype is DType.INT8 else y, *([parts[0]] if case.rng.random() < 0.2 else [])]


def _residual(case: Case) -> list[Value]:
    """A residual connection around a convolution that reads its input in another shape."""
    b, shape = case.b, (case.randint(1, 2), case.randint(1, 6), 2 * case.randint(1, 5), case.randint(1, 20))
    n, h, w, c = shape
    x = case.conv(case.input(n, h, w, 4), c)
    y = b.reshape(case.conv(b.reshape(x, (n, h, w // 2, 2 * c)), 2 * c), shape)
    kinds = ("add", "sub", "mul") if case.rng.random() < 0.5 else ("add",)
    terms = [b.rescale(value, DType.INT32, 0.7 if value is x else 1.3, 3) for value in (x, y)]
    total = getattr(b, kinds[case.randint(0, len(kinds) - 1)])(*terms)
    result = b.rescale(total, DType.INT8, 0.02 if total.producer.kind == "MUL" else 0.6, 0, -4)
    again = case.conv(b.reshape(result, (n, h, w // 2, 2 * c)), 2 * c)
    return [again, case.conv(result, 3), *([x] if case.rng.random() < 0.3 else [])]


def _int16_rows(case: Case) -> list[Value]:
    """A linear layer that reads one int16 row of the full range, with a scale per tensor or per channel."""
    b, size, channels = case.b, 8 * case.randint(16, 24), case.randint(128, 140)
    x = case.input(1, 1, 1, size, dtype=DType.INT16)
    weight = b.const(case.rng.integers(-127, 128, (channels, 1, 1, size)), DType.INT8)
    bias = b.const(case.rng.integers(-(10**6), 10**6, case.randint(0, 1) * (channels - 1) + 1), DType.INT48)
    sums = b.conv2d(x, weight, bias, pad=(0, 0, 0, 0))
    scales = case.rng.uniform(1e-4, 1e-2, channels) if case.rng.random() < 0.7 else 2e-4
    return [b.rescale(sums, (DType.INT16, DType.INT8)[case.randint(0, 1)], scales, 0, 0)]


def _one_pixel_convolution(case: Case, channels: tuple[int, int] = (33, 90)) -> list[Value]:
    """A convolution of one pixel, behind another convolution or a RESHAPE."""
    size = case.randint(*channels)
    x = case.conv(case.input(1, 1, 1, 24), size) if case.rng.random() < 0.5 else case.input(1, 1, size, 1)
    return [case.conv(case.b.reshape(x, (1, 1, 1, size)), -(-(1 << 14) // size) + case.randint(0, 30)), x]


def _transpose(case: Case) -> list[Value]:
    """A TRANSPOSE of up to six dimensions of an input or a computed tensor, and a reader in its shape or another."""
    b, rank = case.b, case.randint(3, 6)
    shape = [int(case.rng.choice((1, 2, 3, 4, 7, 8, 16))) for _ in range(rank)]
    while np.prod(shape) > 6000:
        shape[int(np.argmax(shape))] //= 2
    x = case.input(*shape, dtype=(DType.INT8, DType.INT8, DType.INT16)[case.randint(0, 2)])
    before, behind = case.randint(0, 2), case.randint(0, 4)
    if before == 1:
        x = b.rescale(x, DType.INT8, 0.4, 0, 3)
    elif before == 2 and x.dtype is DType.INT8:
        x = b.table(x, case.rng.integers(-128, 128, 256).astype(np.int8))
    y = b.transpose(x, [int(axis) for axis in case.rng.permutation(rank)])
    results, size = [y], int(np.prod(shape))
    if behind == 1:
        results = [b.clamp(y, -100, 90)]
    elif behind == 2 and y.dtype is DType.INT8:
        results = [case.conv(b.reshape(y, (1, size // y.shape[-1], 1, y.shape[-1])), 5)]
    elif behind == 3 and y.dtype is DType.INT8:
        lead = int(np.prod(y.shape[:-2]))
        right = case.input(lead, y.shape[-1], 5)
        results = [b.rescale(b.matmul(b.reshape(y, (lead, *y.shape[-2:])), right), DType.INT8, 1e-3)]
    elif behind == 4:
        results = [b.concat([y, y], case.randint(0, rank - 1)), b.reshape(y, (size,))]
    return results


ALTERNATIVE_CASES: list[tuple[str, Alternative | None, Callable[[Case], list[Value]]]] = [
    ("factorized_pools", pools.FACTORIZED_POOLS, _max_pools),
    ("channel_permutation", channel_permutation.CHANNEL_PERMUTATION, _channel_shuffle),
    ("folded_dilation", dilation.FOLDED_DILATION, _dilated_convolution),
    ("separate_heads", attention_heads.SEPARATE_HEADS, _attention),
    ("merge_heads", attention_heads.MERGE_HEADS, _attention),
    ("matmul_per_head", attention_matmul.MATMUL_PER_HEAD, _attention),
    ("transposed_matmul", attention_matmul.TRANSPOSED_MATMUL, partial(_attention, joined_by_convolution=True)),
    ("pixels_as_channels", pixels.PIXELS_AS_CHANNELS, _few_channel_convolutions),
    ("channels_as_taps", channels_as_taps.CHANNELS_AS_TAPS, _few_channel_convolutions),
    ("concat_copies", concat_copies.CONCAT_COPIES, _skip_connection),
    ("broadcast_tiles", broadcast_tiles.BROADCAST_TILES, _repeated_vectors),
    ("pixel_rows", pixel_rows.PIXEL_ROWS, _odd_pointwise_convolutions),
    ("sub_pixel_convolution", transposed_convolution.SUB_PIXEL_CONVOLUTION, _transposed_convolution),
    ("pixel_shuffle", pixel_shuffle.PIXEL_SHUFFLE, _depth_to_space),
    (
        "pixel_shuffle_by_identity",
        pixel_shuffle.PIXEL_SHUFFLE_BY_IDENTITY,
        partial(_depth_to_space, by_convolution=False),
    ),
    ("space_to_depth", space_to_depth_folding.SPACE_TO_DEPTH, _space_to_depth),
    ("strided_slices", strided_slices.STRIDED_SLICES, _concatenated_slices),
    ("pad_channels", pad_channels.PAD_CHANNELS, _one_pixel_convolution),
    ("pad_slow_channels", pad_channels.PAD_SLOW_CHANNELS, partial(_one_pixel_convolution, channels=(9, 32))),
    ("packed_channels", packed_channels.PACKED_CHANNELS, _few_channel_arithmetic),
    ("short_axis_concat", short_axis_concat.SHORT_AXIS_CONCAT, _concat_of_inputs),
    ("merged_transpose", transpose_split.MERGED_TRANSPOSE, _transpose),
    ("transpose_sequence", transpose_split.TRANSPOSE_SEQUENCE, _transpose),
    ("unit_dimensions", None, _transpose),
    ("residual_connection", None, _residual),
    ("clamps_for_estimates", None, _without_activations),
    ("int16_as_int8_rows", None, _int16_rows),
    ("constants_fetched_once", None, _affine_rows),
]


@pytest.mark.parametrize("seed", [*range(6), *mark_verify(range(6, 18))])
@pytest.mark.parametrize(("alternative", "draw"), [pytest.param(*row[1:], id=row[0]) for row in ALTERNATIVE_CASES])
def test_alternatives_are_bit_equal(
    alternative: Alternative | None, draw: Callable[[Case], list[Value]], seed: int, emulator: Emulator
) -> None:
    is_for_u85 = alternative in (
        broadcast_tiles.BROADCAST_TILES,
        channels_as_taps.CHANNELS_AS_TAPS,
        concat_copies.CONCAT_COPIES,
        pad_channels.PAD_SLOW_CHANNELS,
        pixel_rows.PIXEL_ROWS,
        attention_matmul.MATMUL_PER_HEAD,
        transpose_split.MERGED_TRANSPOSE,
        transpose_split.TRANSPOSE_SEQUENCE,
    )
    case = Case(
        seed, SPECS[2 if is_for_u85 else seed % (2 if alternative is attention_matmul.TRANSPOSED_MATMUL else 3)]
    )
    case.graph.outputs = draw(case)
    case.check(alternative, emulator)


@pytest.mark.parametrize(
    ("alternative", "draw", "ratio"),
    [
        pytest.param(channels_as_taps.CHANNELS_AS_TAPS, partial(_expansion, channels=24), 0.75, id="channels_as_taps"),
        pytest.param(concat_copies.CONCAT_COPIES, partial(_skip_connection, size=64), 0.95, id="concat_copies"),
        pytest.param(broadcast_tiles.BROADCAST_TILES, partial(_repeated_vectors, size=200), 0.5, id="broadcast_tiles"),
    ],
)
def test_the_cost_model_chooses_it_on_u85_and_vela_estimates_fewer_cycles(
    alternative: Alternative, draw: Callable[[Case], list[Value]], ratio: float
) -> None:
    cycles = []
    for alternatives in ([], [alternative]):
        case = Case(3, SPECS[2])
        case.graph.outputs = draw(case)
        estimate = VelaCostModel(case.spec.configuration).estimate
        chosen = choose_alternatives(case.graph, case.spec.target, alternatives, estimate)
        assert [choice.name for choice in chosen] == [item.name for item in alternatives]
        apply_unconditional(case.graph, case.spec.target)
        run_last_passes(case.graph, case.spec.target)
        (cost,) = estimate([case.graph])
        assert cost is not None
        cycles.append(cost.cycles)
    assert cycles[1] < ratio * cycles[0]


def test_merged_heads_ignore_the_dilation_of_a_1x1_kernel() -> None:
    """The dilation of a 1x1 kernel has no effect. The kernel over heads must not have it."""
    case = Case(0, SPECS[0])
    heads, tokens, size = 3, 5, 8
    x = case.input(1, heads, tokens, size)
    merged = case.b.reshape(case.b.transpose(x, (0, 2, 1, 3)), (1, 1, tokens, heads * size))
    case.graph.outputs = [case.conv(merged, 12, dilation=(2, 2))]
    array = case.rng.integers(-128, 128, x.shape).astype(np.int8)
    (expected,) = reference_model.run(serialize(case.graph), [array])

    def prefer_last(graphs: Sequence[Graph]) -> list[Cost | None]:
        return [Cost(cost, 0) for cost in range(len(graphs), 0, -1)]

    (choice,) = choose_alternatives(case.graph, case.spec.target, [attention_heads.MERGE_HEADS], prefer_last)
    assert choice.occurrences == 1
    (result,) = reference_model.run(serialize(case.graph), [array])
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_short_axis_concat_of_single_channels_saves_cycles(spec: EthosUCompileSpec) -> None:
    """CONCAT takes 8 cycles for each of these 16,384 elements. The convolution needs a multiple of 4 rows."""
    case = Case(0, spec)
    case.graph.outputs = [case.b.concat([case.input(1, 128, 64, 1) for _ in range(2)], 3)]
    (choice,) = choose_alternatives(
        case.graph, spec.target, [short_axis_concat.SHORT_AXIS_CONCAT], VelaCostModel(spec.configuration).estimate
    )
    assert choice.saved_cycles > 60_000


@pytest.mark.parametrize(
    ("size", "weight_value", "is_applied"), [(128, 127, True), (520, 125, True), (520, 127, False)]
)
def test_int16_as_int8_rows_is_applied_if_the_sums_fit_int32(size: int, weight_value: int, is_applied: bool) -> None:
    """520 * 127 * 2**15 exceeds int32. If the sums fit, the rewrite saves at least 20% of the cycles."""
    graphs = []
    for rewrite in (lambda graph, target: None, apply_unconditional):
        case = Case(0, SPECS[2])
        weight = case.b.const(np.full((128, 1, 1, size), weight_value), DType.INT8)
        bias = case.b.const(np.zeros(1), DType.INT48)
        x = case.input(1, 1, 1, size, dtype=DType.INT16)
        sums = case.b.conv2d(x, weight, bias, pad=(0, 0, 0, 0))
        case.graph.outputs = [case.b.rescale(sums, DType.INT16, 1e-3)]
        rewrite(case.graph, case.spec.target)
        run_last_passes(case.graph, case.spec.target)
        graphs.append(case.graph)
    assert ("CONCAT" in [op.kind for op in graphs[1].ops]) == is_applied
    before, after = VelaCostModel(SPECS[2].configuration).estimate(graphs)
    assert before is not None
    assert after is not None
    assert after.cycles < 0.8 * before.cycles if is_applied else after == before


def test_int16_as_int8_rows_subtracts_the_zero_point_of_the_weights() -> None:
    case = Case(0, SPECS[2])
    weight = case.b.const(case.rng.integers(-127, 128, (128, 1, 1, 128)), DType.INT8)
    x = case.input(1, 1, 1, 128, dtype=DType.INT16)
    sums = case.b.conv2d(x, weight, case.b.const(np.zeros(1), DType.INT48), pad=(0, 0, 0, 0), zps=(0, 9))
    case.graph.outputs = [case.b.rescale(sums, DType.INT16, 1e-3)]
    array = case.rng.integers(-(1 << 15), 1 << 15, x.shape).astype(np.int16)
    (expected,) = reference_model.run(serialize(case.graph), [array])
    apply_unconditional(case.graph, case.spec.target)
    assert "CONCAT" in [op.kind for op in case.graph.ops]
    (result,) = reference_model.run(serialize(case.graph), [array])
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("rows", [64, 16])
def test_constants_of_many_rows_are_fetched_once(rows: int) -> None:
    """For few rows only with Vela 5.2, whose estimate counts all four bytes of an element."""
    is_applied = rows == 64 or vela.installed_release() > (5, 1)
    graphs = []
    for rewrite in (lambda graph, target: None, apply_unconditional):
        case = Case(5, SPECS[0])
        case.graph.outputs = _affine_rows(case, rows)
        rewrite(case.graph, case.spec.target)
        run_last_passes(case.graph, case.spec.target)
        graphs.append(case.graph)
    assert [op.kind for op in graphs[1].ops].count("MAXIMUM") == 2 * is_applied


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "is_applied"),
    [
        ("MUL", DType.INT8, (1, 64, 1, 1), True),
        ("MUL", DType.INT8, (1, 1, 1, 8), False),
        ("MUL", DType.INT16, (1, 64, 1, 1), True),
        ("MUL", DType.INT16, (1, 1, 1, 8), True),
        ("MUL", DType.INT16, (1, 64, 8, 8), False),
        ("ADD", DType.INT8, (1, 64, 1, 1), True),
        ("ADD", DType.INT8, (1, 1, 1, 8), False),
        ("ADD", DType.INT16, (1, 64, 1, 1), False),
    ],
)
def test_narrow_constants_are_fetched_once(
    kind: str, dtype: DType, shape: tuple[int, ...], is_applied: bool, emulator: Emulator
) -> None:
    graphs = []
    for rewrite in (lambda graph, target: None, apply_unconditional):
        case = Case(0, SPECS[0])
        b, constant = case.b, case.b.const(case.rng.integers(-120, 120, shape), dtype)
        zero_point = 5 if dtype is DType.INT8 else 0
        operands = [case.input(1, 64, 8, 8, dtype=dtype), constant]
        if kind == "ADD" or dtype is DType.INT8:
            operands = [b.rescale(x, DType.INT32, 1.0, zero_point) for x in operands]
        left, right = operands
        result = b.mul(left, right) if kind == "MUL" else b.add(left, right)
        case.graph.outputs = [b.rescale(result, dtype, 0.01, 0, zero_point)]
        rewrite(case.graph, case.spec.target)
        run_last_passes(case.graph, case.spec.target)
        graphs.append(case.graph)
    multiplications = [[op.kind for op in graph.ops].count("MUL") for graph in graphs]
    assert multiplications[1] == multiplications[0] + is_applied
    before, after = VelaCostModel(SPECS[0].configuration).estimate(graphs)
    assert before is not None
    assert after is not None
    assert after.cycles < before.cycles * (0.5 if is_applied else 1.01)
    case.graph = graphs[0]
    case.check(None, emulator)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
def test_rescale_after_a_max_pool_becomes_a_mul_where_vela_5_1_loses_it(dtype: DType, emulator: Emulator) -> None:
    """Vela 5.1 loses the scale on U55 and U65. The CLAMPs are for its estimate."""
    graphs = []
    for spec in SPECS:
        case = Case(5, spec)
        peaks = case.b.max_pool2d(case.input(1, 32, 32, 32, dtype=dtype), (2, 2), (2, 2), (0, 0, 0, 0))
        case.graph.outputs = [case.b.rescale(peaks, dtype, 0.7)]
        graphs.append(case.check(None, emulator))
    bounded = ["MAX_POOL2D", "CLAMP", "MUL", "RESCALE", "CLAMP"]
    kept = ["MAX_POOL2D", "RESCALE"] if dtype is DType.INT8 else ["MAX_POOL2D", "MUL", "RESCALE"]
    is_lost = vela.installed_release() == (5, 1)
    assert graphs == [bounded if is_lost and spec.target.family != "ethos-u85" else kept for spec in SPECS]


@pytest.mark.parametrize(("size", "is_padded"), [(144, True), (160, False)])
def test_channels_are_padded_to_whole_weight_blocks(size: int, is_padded: bool) -> None:
    """Padding 144 channels to 160 saves at least 5% of the cycles; 160 channels stay."""
    graphs = []
    for alternatives in ([], [pad_channels.PAD_CHANNELS]):
        case = Case(0, SPECS[0])
        weight = np.clip(np.rint(case.rng.normal(0, 45, (576, 1, 1, size))), -127, 127)
        bias = case.b.const(np.zeros(576), DType.INT32)
        sums = case.b.conv2d(case.input(1, 1, 1, size), case.b.const(weight, DType.INT8), bias, pad=(0, 0, 0, 0))
        case.graph.outputs = [case.b.rescale(sums, DType.INT8, 1e-3)]
        choose_alternatives(case.graph, case.spec.target, alternatives, VelaCostModel(case.spec.configuration).estimate)
        run_last_passes(case.graph, case.spec.target)
        graphs.append(case.graph)
    assert ("PAD" in [op.kind for op in graphs[1].ops]) == is_padded
    before, after = VelaCostModel(SPECS[0].configuration).estimate(graphs)
    assert before is not None
    assert after is not None
    assert after.cycles < 0.95 * before.cycles if is_padded else after == before


# -- cost model ----------------------------------------------------------------------------------------------------


def _pool(size: int, spec: EthosUCompileSpec = SPECS[0]) -> Graph:
    case = Case(0, spec)
    case.graph.outputs = [case.b.max_pool2d(case.input(1, 14, 14, 16), (size, size), (1, 1), (size // 2,) * 4)]
    return case.graph


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, of a process without cached estimates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("arm_backend_core.alternatives.cost_model._cache", {})
    return tmp_path / "arm-recipes" / "cycle_estimates"


def test_an_estimate_is_cached_in_memory_and_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = VelaCostModel(SPECS[0].configuration)
    first = estimator.estimate([_pool(5), _pool(9), _pool(5)])
    assert first[0] == first[2] != first[1]
    assert all(cost is not None and cost.cycles > 0 for cost in first)
    monkeypatch.setattr("arm_backend_core.workers.vela.compile_tosa", _must_not_be_called)
    assert estimator.estimate([_pool(9), _pool(5)]) == [first[1], first[0]]
    monkeypatch.setattr("arm_backend_core.alternatives.cost_model._cache", {})  # as in a new process
    assert VelaCostModel(SPECS[0].configuration).estimate([_pool(5)]) == first[:1]
    assert [file.suffix for file in cache.iterdir()] == [".json"]
    with pytest.raises(AssertionError, match="asked again"):  # another NPU has other estimates
        VelaCostModel(SPECS[2].configuration).estimate([_pool(5)])


def _must_not_be_called(*_: object) -> None:
    raise AssertionError("asked again")


@pytest.mark.parametrize("content", ["", "[]", '{"a": 5}', '{"a": ["x", 1]}'])
def test_a_damaged_cache_file_is_replaced(cache: Path, content: str) -> None:
    expected = VelaCostModel(SPECS[0].configuration).estimate([_pool(5)])
    (file,) = cache.iterdir()
    file.write_text(content)
    cost_model._cache.clear()
    assert VelaCostModel(SPECS[0].configuration).estimate([_pool(5)]) == expected
    cost_model._cache.clear()
    assert len(json.loads(file.read_text())) == 1


def test_estimates_need_no_writable_cache(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "arm-recipes").write_text("a file where the folder would be")
    assert VelaCostModel(SPECS[0].configuration).estimate([_pool(5)])[0] is not None


@pytest.mark.parametrize("error", [WorkerError("RuntimeError", "", (), ""), WorkerDied("crashed with SIGSEGV", "")])
def test_a_graph_that_vela_refuses_has_no_estimate(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("arm_backend_core.workers.vela.compile_tosa", fail)
    assert VelaCostModel(SPECS[0].configuration).estimate([_pool(5)]) == [None]
    graph = _pool(9)
    assert (
        choose_alternatives(
            graph, SPECS[0].target, alternatives_pass.ALTERNATIVES, VelaCostModel(SPECS[0].configuration).estimate
        )
        == []
    )
    assert [op.kind for op in graph.ops] == ["MAX_POOL2D"]


# -- choices --------------------------------------------------------------------------------------------


def test_an_unpickled_graph_equals_the_original() -> None:
    graph = _pool(13)
    build = LegalizingBuilder(graph, SPECS[0].target)
    for _ in range(3000):  # deeper than pickle's recursion limit
        graph.outputs = [build.clamp(graph.outputs[0], -50, 50)]
    again = unpickle_graph(pickle_graph(graph))
    again.verify()
    assert serialize(again) == serialize(graph)
    assert pickle_graph(again) == pickle_graph(graph)
    assert again.new_name("CLAMP") == graph.new_name("CLAMP")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.accelerator)
def test_large_pools_become_chains_that_share_their_first_pools(spec: EthosUCompileSpec) -> None:
    case = Case(0, spec)
    x = case.input(1, 14, 14, 64)
    pools = [case.b.max_pool2d(x, (size, size), (1, 1), (size // 2,) * 4) for size in (5, 9, 13)]
    case.graph.outputs = [case.b.concat([x, *pools], 3)]
    factorized, *copies = choose_alternatives(
        case.graph, spec.target, alternatives_pass.ALTERNATIVES, VelaCostModel(spec.configuration).estimate
    )
    assert factorized.occurrences == 3
    assert factorized.saved_cycles > 0
    kernels = [str(op.attrs["kernel"]) for op in case.graph.ops if op.kind == "MAX_POOL2D"]
    assert sorted(kernels) == ["[1, 5]"] * 3 + ["[5, 1]"] * 3
    assert len(copies) == (spec.accelerator == "ethos-u85-256")  # of x, which the pools read too


def test_a_channel_shuffle_becomes_convolutions() -> None:
    case = Case(1, SPECS[2])
    x = case.b.reshape(case.conv(case.input(1, 28, 28, 8), 116), (1, 28, 28, 2, 58))
    x = case.b.reshape(case.b.transpose(x, (0, 1, 2, 4, 3)), (1, 28, 28, 116))
    case.graph.outputs = [case.conv(case.b.slice(x, (0, 0, 0, 58), (1, 28, 28, 58)), 58)]
    assert choose_alternatives(
        case.graph, SPECS[2].target, alternatives_pass.ALTERNATIVES, VelaCostModel(SPECS[2].configuration).estimate
    )
    assert {op.kind for op in case.graph.ops} == {"CONV2D", "RESCALE"}


def test_a_pixel_shuffle_becomes_convolutions() -> None:
    case = Case(1, SPECS[2])
    x = case.b.reshape(case.conv(case.input(1, 24, 24, 8), 64, (3, 3), pad=(1,) * 4), (1, 24, 24, 16, 2, 2))
    x = case.b.reshape(case.b.transpose(x, (0, 1, 4, 2, 5, 3)), (1, 48, 48, 16))
    case.graph.outputs = [case.conv(x, 16, (3, 3), pad=(1,) * 4)]
    assert choose_alternatives(
        case.graph, SPECS[2].target, alternatives_pass.ALTERNATIVES, VelaCostModel(SPECS[2].configuration).estimate
    )
    kinds = [op.kind for op in case.graph.ops]
    assert (kinds.count("CONV2D"), kinds.count("TRANSPOSE")) == (3, 0)


def test_space_to_depth_becomes_a_convolution() -> None:
    case = Case(1, SPECS[2])
    x = case.b.reshape(case.conv(case.input(1, 48, 48, 8), 16), (24, 2, 24, 2, 16))
    x = case.b.reshape(case.b.transpose(x, (0, 2, 4, 1, 3)), (1, 24, 24, 64))
    case.graph.outputs = [case.conv(x, 16, (3, 3), pad=(1,) * 4)]
    assert choose_alternatives(
        case.graph, SPECS[2].target, alternatives_pass.ALTERNATIVES, VelaCostModel(SPECS[2].configuration).estimate
    )
    assert [op.inputs[1].shape for op in case.graph.ops if op.kind == "CONV2D"] == [(16, 1, 1, 8), (16, 6, 3, 32)]
    assert "TRANSPOSE" not in [op.kind for op in case.graph.ops]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.accelerator)
def test_concatenated_strided_slices_need_no_slice_and_concat(spec: EthosUCompileSpec) -> None:
    case = Case(1, spec)
    image = case.b.reshape(case.input(1, 3, 48, 48), (1, 3, 24, 2, 24, 2))
    parts = [case.b.slice(image, (0, 0, 0, i, 0, j), (1, 3, 24, 1, 24, 1)) for j in range(2) for i in range(2)]
    x = case.b.concat([case.b.reshape(part, (1, 3, 24, 24)) for part in parts], 1)
    case.graph.outputs = [case.conv(case.b.transpose(x, (0, 2, 3, 1)), 16, (3, 3), pad=(1,) * 4)]
    assert choose_alternatives(
        case.graph, spec.target, alternatives_pass.ALTERNATIVES, VelaCostModel(spec.configuration).estimate
    )
    assert {op.kind for op in case.graph.ops}.isdisjoint(("SLICE", "CONCAT"))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.accelerator)
def test_folded_dilation_removes_pad_and_dilation(spec: EthosUCompileSpec) -> None:
    case = Case(2, spec)
    x = case.b.pad(case.input(1, 64, 32), [(0, 0), (16, 0), (0, 0)], 0)
    weight = case.b.const(case.rng.integers(-127, 128, (32, 1, 3, 32)), DType.INT8)
    bias = case.b.const(np.zeros(32), DType.INT32)
    y = case.b.conv2d(case.b.reshape(x, (1, 1, 80, 32)), weight, bias, pad=(0, 0, 0, 0), dilation=(1, 8))
    case.graph.outputs = [case.b.rescale(y, DType.INT8, 0.01)]
    assert choose_alternatives(
        case.graph, spec.target, alternatives_pass.ALTERNATIVES, VelaCostModel(spec.configuration).estimate
    )
    assert [op.kind for op in case.graph.ops] == ["RESHAPE", "CONV2D", "RESCALE", "RESHAPE"]
    assert case.graph.ops[1].attrs["pad"] == [2, 0, 0, 0]
    assert case.graph.ops[1].inputs[0].shape == (1, 8, 8, 32)


def test_clamps_change_estimates_but_no_command() -> None:
    """Only Vela 5.1 needs them: the estimate of 5.2 is the same without them."""
    is_older, made = vela.installed_release() == (5, 1), []
    for bounds in (False, True):
        case = Case(3, SPECS[0])
        case.graph.outputs = [case.conv(case.input(1, 28, 28, 16), 96)]
        if bounds:
            apply_unconditional(case.graph, SPECS[0].target)
        assert ("CLAMP" in [op.kind for op in case.graph.ops]) == (bounds and is_older)
        made.append(compile_ethosu(serialize(case.graph), SPECS[0], delegate="", find_operator=lambda _: None))
    assert made[0].data == made[1].data
    assert made[0].vela is not None
    assert made[1].vela is not None
    assert (made[1].vela.total_cycles < made[0].vela.total_cycles) == is_older


class _Pools(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(x, 9, 1, 4)


class _Heads(torch.nn.Module):
    """Attention with one linear layer for queries, keys and values, which one permute or three transposes separate."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together, self.layer = together, torch.nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x).view(1, 32, 3, 4, 16)
        parts = made.permute(2, 0, 3, 1, 4) if self.together else [part.transpose(1, 2) for part in made.unbind(2)]
        return torch.softmax(parts[0] @ parts[1].transpose(-1, -2), -1) @ parts[2]


@pytest.mark.parametrize("search_alternatives", [True, False])
def test_transpose_of_five_dimensions_costs_as_much_as_of_four(search_alternatives: bool) -> None:
    """Each took 93,372 cycles instead of 14,392 with a dimension of size 1 between the others."""
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, search_alternatives=search_alternatives)
    samples = [(torch.randn(1, 32, 64),) for _ in range(2)]
    together, apart = (export(_Heads(together=way).eval(), recipe, samples).report.delegates for way in (True, False))
    cycles = [sum(made.vela.total_cycles for made in each if made.vela) for each in (together, apart)]
    assert cycles[0] <= 1.05 * cycles[1]


def test_the_report_names_the_chosen_alternatives() -> None:
    x = torch.randn(1, 8, 14, 14).to(memory_format=torch.channels_last)
    tuned, usual = (
        export(_Pools(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, search_alternatives=search), [(x,)])
        for search in (True, False)
    )
    assert any("1 factorized max pools" in note for note in tuned.report.notes)
    assert not any("factorized max pools" in note for note in usual.report.notes)
    (first,), (second,) = (result.report.methods[0].delegates for result in (tuned, usual))
    assert first.vela is not None
    assert second.vela is not None
    assert first.vela.total_cycles < second.vela.total_cycles
    assert torch.equal(tuned.run(x)[0], usual.run(x)[0])


def test_if_vela_fails_on_alternatives_the_original_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Vela fails on this graph too, its first error is raised."""
    compiled, tried = size_or_speed.compile_payload, list[bool]()

    def failing(spec: EthosUCompileSpec, *arguments: Any, **keywords: Any) -> Payload:
        tried.append(spec.search_alternatives)
        if spec.search_alternatives or len(tried) > 2:
            raise CompileError(f"Vela crashed ({len(tried)})", delegate="arm_0")
        return compiled(spec, *arguments, **keywords)

    monkeypatch.setattr(size_or_speed, "compile_payload", failing)
    monkeypatch.setattr(delegate, "bisect_failure", lambda *_: None)
    model, samples = torch.nn.Conv2d(3, 4, 3).eval(), [(torch.rand(1, 3, 8, 8),) for _ in range(2)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)
    assert tried == [True, False]
    assert len(result.report.delegates) == 1
    assert any("search_alternatives is disabled" in note and "(1)" in note for note in result.report.notes)
    with pytest.raises(CompileError, match=r"Vela crashed \(3\)"):
        export(model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)


def test_a_failing_alternative_does_not_stop_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program lacks the alternative, and a note says so. In strict mode it is an error."""

    def failing(*_: object) -> None:
        raise IndexError("of channels")

    monkeypatch.setattr(alternatives_pass, "ALTERNATIVES", (replace(pools.FACTORIZED_POOLS, rule=failing),))
    x = torch.randn(1, 8, 14, 14).to(memory_format=torch.channels_last)
    with pytest.raises(InternalError, match="factorized max pools' raised IndexError: of channels"):
        export(_Pools(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8), [(x,)])
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")
    result = export(_Pools(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8), [(x,)])
    assert any("factorized max pools' raised IndexError: of channels" in note for note in result.report.notes)
    assert len(result.report.delegates) == 1


def _widened_table(b: Builder, x: Value) -> Value:
    narrow = b.rescale(b.table(x, np.arange(-256, 257) * 100), DType.INT16, 1 / 128)
    return b.logical_left_shift(b.rescale(narrow, DType.INT32, 1.0), b.const([[3]], DType.INT32))


@pytest.mark.parametrize("accelerator", ["ethos-u55-128", "ethos-u85-256"])
@pytest.mark.parametrize("width", [512, 1])
def test_int16_table_results_are_widened_as_the_npu_does(accelerator: str, width: int) -> None:
    """Bit-equal, with fewer cycles; for a column on U85, Vela 5.1 estimates as many."""
    target = make_target(accelerator)
    before, after = (build_graph(_widened_table, ((8, width), DType.INT16)) for _ in range(2))
    apply_unconditional(after, target)
    after.remove_dead()
    x = np.random.default_rng(0).integers(-(2**15), 2**15, (8, width)).astype(np.int16)
    (expected,), (actual,) = (reference_model.run(serialize(g), [x]) for g in (before, after))
    assert np.array_equal(expected, actual)
    cycles = [estimate_npu_cycles(accelerator.rpartition("-")[0], serialize(g)) for g in (before, after)]
    assert cycles[1] < cycles[0] or (width == 1 and cycles[1] <= cycles[0])


@pytest.mark.parametrize(("release", "clamps"), [((5, 1), 1), ((5, 2), 0)])
def test_clamps_for_estimates_are_only_for_vela_5_1(release: vela.Release, clamps: int) -> None:
    written = build_graph(lambda b, x: b.max_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0)), ((1, 4, 4, 8), DType.INT8))
    apply_unconditional(written, make_target("ethos-u55-128", release))
    written.remove_dead()
    assert [op.kind for op in written.ops].count("CLAMP") == clamps


def test_the_note_names_cycles_that_less_sram_costs() -> None:
    choices = [
        alternatives_pass.Choice("pools", 2, 100),
        alternatives_pass.Choice("elementwise operators on packed channels", 3, -7),
    ]
    assert alternatives_pass.describe_choices(choices) == (
        "bit-equal alternatives save 100 cycles by Vela's estimate: 2 pools; "
        "bit-equal alternatives save memory for 7 more cycles: 3 elementwise operators on packed channels"
    )


@pytest.mark.parametrize("rows", [1000, 1024])
@pytest.mark.parametrize("recipe", [ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U65_INT8])
def test_a_softmax_chain_with_a_broadcast_is_not_packed(recipe: ArmRecipeType, rows: int) -> None:
    """Vela fuses RESCALE and SUB of a softmax, and miscompiles them with a RESHAPE between."""
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)).eval()
    samples = [(3 * torch.randn(rows, 8),) for _ in range(2)]
    result = export(model, ExportRecipe.get_recipe(recipe), samples, verify=True)
    assert (result.run(*samples[0]) - model(*samples[0])).abs().max() < 0.05
