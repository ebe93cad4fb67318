"""The passes on small graphs: which operators remain, and that the results are bit-equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.layout_assignment import assign_layouts, movement_cost
from arm_backend_core.tosa.passes.layout_modes import propagate_through_reshape
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.peephole_movement import reshape_groups
from arm_backend_core.tosa.passes.pipeline import RULES, assert_serializable, run, simplify
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, rewrite_to_fixpoint
from arm_backend_core.tosa.passes.table import compose_tables
from arm_backend_core.tosa.serialize import serialize

TARGET = Target.from_tosa_spec("TOSA-1.0+INT+FP+int16+doubleround")
NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


class Net:
    """A graph under construction, as the lowering rules emit it: NCHW between operators."""

    def __init__(self, seed: int = 0) -> None:
        self.graph = Graph()
        self.b = LegalizingBuilder(self.graph, TARGET)
        self.rng = np.random.default_rng(seed)

    def input(self, *shape: int, dtype: DType = DType.INT8) -> Value:
        return self.graph.add_input(shape, dtype, f"input_{len(self.graph.inputs)}")

    def random(self, shape: tuple[int, ...], dtype: DType, limit: int = 127) -> Value:
        if dtype.is_float:
            return self.b.const(self.rng.standard_normal(shape), dtype)
        return self.b.const(self.rng.integers(-limit, limit + 1, shape), dtype)

    def conv(self, x: Value, channels: int, kernel: int, stride: int = 1, depthwise: bool = False) -> Value:
        """An NCHW convolution with "same" padding and, on int8, a RESCALE per channel."""
        accumulator = DType.FP32 if x.dtype.is_float else DType.INT32
        in_channels, pad = x.shape[1], [kernel // 2] * 4
        shape = (kernel, kernel, in_channels, 1) if depthwise else (channels, kernel, kernel, in_channels)
        weight, bias = self.random(shape, x.dtype), self.random((channels,), accumulator)
        write = self.b.depthwise_conv2d if depthwise else self.b.conv2d
        zps = (0, 0) if x.dtype.is_float else (3, 0)
        y = write(self.b.transpose(x, NHWC), weight, bias, pad=pad, stride=(stride, stride), zps=zps)
        if not x.dtype.is_float:
            y = self.b.rescale(y, DType.INT8, self.rng.uniform(1e-3, 2e-3, channels), 0, 3)
        return self.b.transpose(y, NCHW)

    def linear(self, x: Value, features: int) -> Value:
        """A linear layer on the last dimension, as a 1x1 convolution."""
        rows = int(np.prod(x.shape[:-1]))
        flat = self.b.reshape(x, (1, 1, rows, x.shape[-1]))
        weight = self.random((features, 1, 1, x.shape[-1]), DType.INT8)
        bias = self.random((features,), DType.INT32)
        y = self.b.conv2d(flat, weight, bias, pad=[0] * 4)
        y = self.b.rescale(y, DType.INT8, self.rng.uniform(1e-3, 2e-3, features))
        return self.b.reshape(y, (*x.shape[:-1], features))

    def binary(self, kind: str, a: Value, b: Value) -> Value:
        """A quantized elementwise operator through int32."""
        wide = [self.b.rescale(v, DType.INT32, 64.0 * scale, 3) for v, scale in ((a, 1.0), (b, 0.7))]
        scale = 1e-5 if kind == "mul" else 1 / 96
        return self.b.rescale(getattr(self.b, kind)(*wide), DType.INT8, scale, 0, 3)

    def table(self, x: Value) -> Value:
        return self.b.table(x, self.rng.integers(-128, 128, 256))

    def pool(self, x: Value, kernel: int) -> Value:
        y = self.b.max_pool2d(self.b.transpose(x, NHWC), (kernel, kernel), (kernel, kernel), [0] * 4)
        return self.b.transpose(y, NCHW)

    def mean(self, x: Value) -> Value:
        y = self.b.avg_pool2d(self.b.transpose(x, NHWC), x.shape[2:], (1, 1), [0] * 4)
        return self.b.transpose(y, NCHW)

    def kinds(self) -> list[str]:
        return [op.kind for op in self.graph.ops]

    def count(self, kind: str) -> int:
        return self.kinds().count(kind)


def results(net: Net) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    arrays = []
    for value in net.graph.inputs:
        integers, floats = rng.integers(-128, 128, value.shape), rng.standard_normal(value.shape)
        arrays.append((floats if value.dtype.is_float else integers).astype(value.dtype.numpy))
    return reference_model.run(serialize(net.graph), arrays)


def check(net: Net, *outputs: Value, passes: Callable[[Graph, Target], None] = run) -> list[str]:
    """Run ``passes``, compare the results before and after, and return the remaining operators."""
    net.graph.outputs = list(outputs)
    before = results(net)
    signatures = [(value.shape, value.dtype) for value in net.graph.outputs]
    passes(net.graph, TARGET)
    net.graph.verify()
    assert [(value.shape, value.dtype) for value in net.graph.outputs] == signatures
    for expected, actual in zip(before, results(net), strict=True):
        if expected.dtype == np.float32:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(actual, expected)
    return net.kinds()


# -- local rules ---------------------------------------------------------------------------------------------


def test_reshape_groups_are_the_shortest_runs() -> None:
    assert reshape_groups((1, 4, 6, 5), (1, 24, 5)) == [([0], [0]), ([1, 2], [1]), ([3], [2])]
    assert reshape_groups((6, 4), (4, 6)) == [([0, 1], [0, 1])]
    assert reshape_groups((2, 1, 3), (2, 3)) == [([0, 1], [0]), ([2], [1])]
    assert reshape_groups((), (1, 1)) == [([], [0, 1])]


def test_layout_passes_reshape_only_when_joined_dimensions_stay_together() -> None:
    assert propagate_through_reshape((2, 8, 3, 4), (2, 8, 12), NHWC) == (0, 2, 1)
    assert propagate_through_reshape((2, 8, 12), (2, 8, 3, 4), (0, 2, 1)) == NHWC
    assert propagate_through_reshape((2, 8, 3, 4), (2, 96), NHWC) is None


def test_operators_on_constants_are_folded() -> None:
    net = Net()
    x = net.input(2, 3, dtype=DType.INT32)
    c = net.b.const(np.arange(-3, 3).reshape(3, 2), DType.INT8)
    wide = net.b.transpose(net.b.rescale(c, DType.INT32, 1.3, 1), (1, 0))
    wide = net.b.mul(net.b.unary("CLZ", net.b.sub(wide, net.b.const([[5]], DType.INT32))), wide)
    assert check(net, net.b.add(x, wide), passes=simplify) == ["ADD"]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16, DType.INT32])
def test_folded_rescale_is_exact(dtype: DType, double: bool) -> None:
    net = Net()
    c = net.random((4, 64), DType.INT32, 1 << 20)
    x = net.input(4, 64, dtype=dtype)
    scaled = net.b.rescale(c, dtype, np.tile([1e-4, 0.37, 1.7, 0.25], 16), 0, 0, round_double=double)
    joined = net.b.concat([scaled, x], 0)
    assert check(net, joined, passes=simplify) == ["CONCAT"]


def test_folded_int16_table_and_shifts_are_exact() -> None:
    net = Net()
    c = net.b.const(np.arange(-32768, 32767, 97), DType.INT16)
    y = net.b.table(c, net.rng.integers(-16000, 16000, 513))
    y = net.b.arithmetic_right_shift(y, net.b.const([5], DType.INT32), round=True)
    y = net.b.binary("BITWISE_XOR", y, net.b.logical_right_shift(y, net.b.const([3], DType.INT32)))
    y = net.b.binary("INTDIV", y, net.b.const([-7], DType.INT32))
    x = net.input(*y.shape, dtype=DType.INT32)
    assert check(net, net.b.maximum(x, y), passes=simplify) == ["MAXIMUM"]


def test_folding_does_not_inflate_constants() -> None:
    net = Net()
    x = net.input(300, 300)
    tiled = net.b.tile(net.random((1, 300), DType.INT8), (300, 1))
    assert check(net, net.b.concat([x, tiled], 1), passes=simplify) == ["TILE", "CONCAT"]


@pytest.mark.parametrize(("dtype", "bias"), [(DType.INT8, DType.INT32), (DType.INT16, DType.INT48), (DType.FP32,) * 2])
def test_convolution_that_reads_only_padding_becomes_its_bias(dtype: DType, bias: DType) -> None:
    """The windows of one row are at rows -2 and 1; the image has only row 0."""
    net = Net()
    x, y = net.input(2, 1, 6, 3, dtype=dtype), net.input(2, 2, 6, 4, dtype=dtype)
    weight = net.random((4, 1, 1, 3), dtype if dtype.is_float else DType.INT8)
    zps = (3, 0) if dtype is DType.INT8 else (0, 0)
    sums = net.b.conv2d(x, weight, net.random((4,), bias), pad=(2, 1, 0, 0), stride=(3, 1), zps=zps)
    scaled = sums if dtype.is_float else net.b.rescale(sums, dtype, 0.25)
    assert check(net, net.b.concat([scaled, y], 3), passes=simplify) == ["CONCAT"]


def test_equal_operators_are_shared() -> None:
    net = Net()
    x = net.input(2, 6)
    parts = [net.b.table(net.b.reverse(x, 1), np.arange(256) // 2) for _ in range(3)]
    other = net.b.table(net.b.reverse(x, 0), np.arange(256) // 2)
    assert check(net, net.b.concat([*parts, other], 0), passes=eliminate_common_subexpressions) == [
        "REVERSE",
        "TABLE",
        "REVERSE",
        "TABLE",
        "CONCAT",
    ]


def test_reshapes_merge_and_vanish_around_elementwise_operators() -> None:
    net = Net()
    x = net.input(1, 6, 16)
    kinds = check(net, net.linear(net.table(net.linear(x, 32)), 16), passes=simplify)
    assert kinds == ["RESHAPE", "CONV2D", "RESCALE", "TABLE", "CONV2D", "RESCALE", "RESHAPE"]


def test_reshape_sinks_below_binary_operators_and_their_constants() -> None:
    net = Net()
    x = net.input(1, 1, 6, 16, dtype=DType.INT32)
    y = net.b.add(net.b.reshape(x, (6, 4, 4)), net.random((1, 4, 4), DType.INT32))
    y = net.b.maximum(y, net.b.unary("ABS", y))
    assert check(net, net.b.reshape(y, (1, 1, 6, 16)), passes=simplify) == ["ADD", "ABS", "MAXIMUM"]


def test_reshape_sinks_below_slices_and_narrow_constants() -> None:
    net = Net()
    rows = net.b.reshape(net.input(1, 1, 1, 8, dtype=DType.INT16), (1, 8))
    known = net.b.rescale(net.b.const(np.arange(4).reshape(1, 4), DType.INT16), DType.INT32, 2.5)
    parts = [net.b.rescale(net.b.slice(rows, (0, 4 * i), (1, 4)), DType.INT32, 1.0) for i in range(2)]
    total = net.b.reshape(net.b.add(net.b.add(parts[0], known), parts[1]), (1, 1, 1, 4))
    assert "RESHAPE" not in check(net, total)


def test_slices_of_a_concat_that_are_concatenated_again_cancel() -> None:
    net = Net()
    x, y = net.input(2, 8, 3), net.input(2, 4, 3)
    joined = net.b.concat([x, y], 1)
    parts = [net.b.slice(joined, (0, i, 0), (2, 2, 3)) for i in (0, 2, 4, 6)]
    whole = net.b.reverse(net.b.concat(parts, 1), 2)
    assert check(net, whole, passes=simplify) == ["REVERSE"]


def test_slices_of_a_rescaled_concat_are_the_rescaled_operands() -> None:
    """The real and the imaginary part of a complex tensor that was rescaled."""
    net = Net()
    x, y = net.input(2, 8, 1), net.input(2, 8, 1)
    scaled = net.b.clamp(net.b.rescale(net.b.concat([x, y], 2), DType.INT8, 0.5, 3, -7), -50, 50)
    wide = [net.b.rescale(net.b.slice(scaled, (0, 0, i), (2, 8, 1)), DType.INT32, 1.0) for i in (0, 1)]
    kinds = check(net, net.b.maximum(*wide), passes=simplify)
    assert sorted(kinds) == ["CLAMP"] * 2 + ["MAXIMUM"] + ["RESCALE"] * 4


@pytest.mark.parametrize("width", [1, 2])
def test_a_rescaled_concat_stays_if_a_slice_reads_another_part(width: int) -> None:
    net = Net()
    x, y = net.input(2, 8, 2), net.input(2, 8, 2)
    scaled = net.b.rescale(net.b.concat([x, y], 2), DType.INT8, 0.5, 3, -7)
    parts = [net.b.slice(scaled, (0, 0, 0), (2, 8, 2)), net.b.slice(scaled, (0, 0, 1), (2, 8, width))]
    kinds = check(net, net.b.concat([net.b.rescale(z, DType.INT8, 0.5) for z in parts], 2), passes=simplify)
    assert kinds.count("CONCAT") == 2


def test_slices_pads_and_concats_merge() -> None:
    net = Net()
    x = net.input(2, 8, 3)
    y = net.b.slice(net.b.slice(x, (0, 2, 0), (2, 5, 3)), (1, 1, 0), (1, 3, 3))
    y = net.b.pad(net.b.pad(y, [(0, 0), (1, 0), (0, 1)], 4), [(0, 0), (1, 2), (0, 0)], 4)
    y = net.b.concat([net.b.concat([y, y], 2), y], 2)
    assert check(net, y, passes=simplify) == ["SLICE", "PAD", "CONCAT"]


def test_tile_becomes_broadcast() -> None:
    net = Net()
    x, y = net.input(2, 8, 3, dtype=DType.INT32), net.input(1, 8, 1, dtype=DType.INT32)
    assert check(net, net.b.add(x, net.b.tile(y, (2, 1, 3))), passes=simplify) == ["ADD"]
    net = Net()
    y = net.input(1, 8, 1, dtype=DType.INT32)
    tiled = net.b.tile(y, (2, 1, 3))
    assert check(net, net.b.add(tiled, net.b.unary("ABS", tiled)), passes=simplify) == ["TILE", "ABS", "ADD"]
    net = Net()
    both = [net.b.tile(net.input(1, 8, 1, dtype=DType.INT32), (2, 1, 3)) for _ in range(2)]
    assert check(net, net.b.add(*both), passes=simplify) == ["TILE", "ADD"]  # one gives the sum its shape


def test_pad_is_fused_into_convolution_and_max_pool() -> None:
    for fill, kinds in ((3, ["CONV2D"]), (0, ["PAD", "CONV2D"])):
        net = Net()
        x = net.b.pad(net.input(1, 5, 5, 4), [(0, 0), (1, 2), (2, 0), (0, 0)], fill)
        weight, bias = net.random((8, 3, 3, 4), DType.INT8), net.random((8,), DType.INT32)
        assert check(net, net.b.conv2d(x, weight, bias, pad=[0] * 4, zps=(3, 0)), passes=simplify) == kinds
    for fill, kinds in ((-128, ["MAX_POOL2D"]), (0, ["PAD", "MAX_POOL2D"])):
        net = Net()
        x = net.b.pad(net.input(1, 5, 5, 4), [(0, 0), (1, 1), (1, 1), (0, 0)], fill)
        assert check(net, net.b.max_pool2d(x, (3, 3), (2, 2), [0] * 4), passes=simplify) == kinds


@pytest.mark.parametrize("padding", [[(0, 0), (0, 0), (0, 0), (0, 1)], [(0, 0), (3, 0), (0, 0), (0, 0)]])
def test_pad_of_channels_or_as_large_as_the_kernel_is_not_fused(padding: list[tuple[int, int]]) -> None:
    net = Net()
    x = net.b.pad(net.input(1, 5, 5, 4), padding, 3)
    weight, bias = net.random((8, 3, 3, x.shape[3]), DType.INT8), net.random((8,), DType.INT32)
    assert check(net, net.b.conv2d(x, weight, bias, pad=[0] * 4, zps=(3, 0)), passes=simplify) == ["PAD", "CONV2D"]


def test_tiles_merge() -> None:
    net = Net()
    y = net.b.tile(net.b.tile(net.input(1, 8, 2), (2, 1, 3)), (1, 2, 2))
    assert check(net, y, passes=simplify) == ["TILE"]


def test_pad_is_not_fused_into_average_pool() -> None:
    net = Net()
    x = net.b.pad(net.input(1, 4, 4, 4), [(0, 0), (1, 1), (1, 1), (0, 0)], 0)
    assert check(net, net.b.avg_pool2d(x, (3, 3), (1, 1), [0] * 4)) == ["PAD", "AVG_POOL2D"]


def test_clamps_merge() -> None:
    for bounds in ((-10, 50, -20, 40), (-10, 0, 5, 40), (5, 40, -10, 0)):
        net = Net()
        x = net.b.reverse(net.input(4, 64), 0)
        y = net.b.clamp(net.b.clamp(x, *bounds[:2]), *bounds[2:])
        assert check(net, y, passes=simplify) == ["REVERSE", "CLAMP"]


def test_clamp_to_the_whole_range_is_removed() -> None:
    net = Net()
    y = net.b.clamp(net.b.reverse(net.input(4, 64), 0), -128, 127)
    assert check(net, y, passes=simplify) == ["REVERSE"]


@pytest.mark.parametrize("scale", [1.0, 4.0, 1024.0])
def test_widening_rescale_merges_into_the_next(scale: float) -> None:
    net = Net()
    wide = net.b.rescale(net.input(16, 256), DType.INT32, scale, 5)
    y = net.b.rescale(wide, DType.INT16, 0.0371 / scale)
    assert check(net, y, passes=simplify) == ["RESCALE"]


@pytest.mark.parametrize(("dtype", "scale", "zero_point"), [(DType.INT8, 0.71, -128), (DType.INT16, 128.0, -3)])
def test_rescale_of_an_unsigned_input_merges_into_the_next(dtype: DType, scale: float, zero_point: int) -> None:
    net = Net()
    signed = net.b.rescale(net.input(16, 256), DType.INT8, 1.0, 128, input_unsigned=True)
    assert check(net, net.b.rescale(signed, dtype, scale, zero_point), passes=simplify) == ["RESCALE"]
    assert net.graph.ops[0].attrs["input_zp"] == 128 + zero_point


def test_rescale_of_an_unsigned_input_does_not_merge_into_int32() -> None:
    net = Net()  # TOSA has no RESCALE of unsigned values to int32
    signed = net.b.rescale(net.input(16, 256), DType.INT8, 1.0, 128, input_unsigned=True)
    wide = net.b.rescale(signed, DType.INT32, 3.0, 5)
    assert check(net, wide, passes=simplify) == ["RESCALE", "RESCALE"]


def test_rescale_of_an_unsigned_input_is_composed_into_a_table() -> None:
    net = Net()
    signed = net.b.rescale(net.input(4, 256), DType.INT8, 1.0, 128, input_unsigned=True)
    assert check(net, net.b.clamp(net.table(signed), -100, 90), passes=compose_tables) == ["TABLE"]


def test_inexact_rescales_are_not_merged() -> None:
    net = Net()
    narrow = net.b.rescale(net.input(16, 256, dtype=DType.INT16), DType.INT8, 0.01)
    assert check(net, net.b.rescale(narrow, DType.INT32, 100.0), passes=simplify) == ["RESCALE", "RESCALE"]
    net = Net()
    wide = net.b.rescale(net.input(16, 256), DType.INT32, 0.7)
    assert check(net, net.b.rescale(wide, DType.INT16, 100.0), passes=simplify) == ["RESCALE", "RESCALE"]


def test_chain_of_int8_functions_becomes_one_table() -> None:
    net = Net()
    x = net.input(4, 256)
    y = net.b.clamp(net.b.rescale(net.table(x), DType.INT8, 1.7, 3, -4), -100, 90)
    assert check(net, y, passes=compose_tables) == ["TABLE"]


def test_int8_function_with_two_branches_becomes_one_table() -> None:
    net = Net()
    x = net.input(4, 256)
    assert check(net, net.binary("mul", x, net.table(x)), passes=compose_tables) == ["TABLE"]


def test_chain_with_another_reader_of_its_middle_is_not_composed() -> None:
    net = Net()
    middle = net.table(net.input(4, 256))
    assert check(net, net.table(middle), middle, passes=compose_tables) == ["TABLE", "TABLE"]


def test_batch_norm_folds_into_float_convolution() -> None:
    for depthwise in (False, True):
        net = Net()
        y = net.conv(net.input(1, 8, 6, 6, dtype=DType.FP32), 8, 3, depthwise=depthwise)
        for step in (net.b.sub, net.b.mul, net.b.mul, net.b.add):
            y = step(y, net.random((1, 8, 1, 1), DType.FP32))
        kind = "DEPTHWISE_CONV2D" if depthwise else "CONV2D"
        assert check(net, y) == ["TRANSPOSE", kind, "TRANSPOSE"]


def test_convolution_with_two_readers_keeps_its_weights() -> None:
    net = Net()
    y = net.conv(net.input(1, 8, 6, 6, dtype=DType.FP32), 8, 1)
    scaled = net.b.mul(y, net.random((1, 8, 1, 1), DType.FP32))
    assert check(net, net.b.maximum(y, scaled)).count("MUL") == 1


def test_outputs_are_distinct_results() -> None:
    net = Net()
    x = net.input(2, 4)
    y = net.table(x)
    same = net.b.reshape(net.b.reshape(x, (8,)), (2, 4))
    assert check(net, same, y, y) == ["TABLE", "IDENTITY", "IDENTITY"]


def test_one_result_can_be_three_outputs() -> None:
    """The hardware passes share equal operators, but each output needs its own."""
    net = Net()
    y = net.table(net.input(2, 4))
    npu = Target("ethos-u55-128", frozenset({"INT"}), frozenset(), "ethos-u55", 128)
    net.graph.outputs = [y, y, y]
    run(net.graph, npu)
    assert len(set(net.graph.outputs)) == 3
    assert net.kinds() == ["TABLE", "IDENTITY", "IDENTITY"]


def test_illegal_graph_after_the_passes_is_an_error() -> None:
    net = Net()
    y = net.table(net.input(2, 4))
    net.graph.outputs = [y, y]
    with pytest.raises(AssertionError, match="two outputs are the same value"):
        assert_serializable(net.graph, TARGET)
    net.graph.outputs = [y]
    net.graph.ops[0].attrs["table"] = np.zeros(3, np.int8)
    with pytest.raises(AssertionError, match="a table of shape"):
        assert_serializable(net.graph, TARGET)


def test_rules_that_undo_each_other_are_an_error() -> None:
    net = Net()
    net.graph.outputs = [net.b.unary("BITWISE_NOT", net.input(2, 4))]

    def swap(op: Op, rewriter: Rewriter) -> Value:
        return rewriter.builder.unary("BITWISE_NOT", op.inputs[0])

    with pytest.raises(AssertionError, match="rules for BITWISE_NOT undo each other"):
        rewrite_to_fixpoint(net.graph, TARGET, {"BITWISE_NOT": [swap]})


def test_equal_constants_are_stored_once() -> None:
    """Also large constants in separate arrays."""
    table = np.arange(30000, dtype=np.int8).reshape(100, 300)
    sizes = []
    for copies in (1, 4):
        net = Net()
        total = net.input(100, 300)
        for _ in range(copies):
            total = net.b.concat([total, net.b.const(table.copy(), DType.INT8)], 0)
        net.graph.outputs = [total]
        sizes.append(len(serialize(net.graph)))
    assert sizes[1] - sizes[0] < 5000


def test_equal_operators_on_large_constants_are_shared() -> None:
    net = Net()
    x = net.input(300, 300)
    weights = net.rng.integers(-128, 128, (300, 300))
    parts = [net.b.concat([x, net.b.const(weights, DType.INT8)], 0) for _ in range(2)]
    kinds = check(
        net, net.b.concat([net.b.reverse(part, 0) for part in parts], 1), passes=eliminate_common_subexpressions
    )
    assert kinds == ["CONCAT", "REVERSE", "CONCAT"]


def test_a_large_int8_constant_is_stored_as_int8() -> None:
    net = Net()
    wide = net.b.rescale(net.random((64, 256), DType.INT8), DType.INT32, 1024.0, 3)
    total = net.b.add(wide, net.b.rescale(net.input(64, 256), DType.INT32, 512.0, 1))
    assert check(net, net.b.rescale(total, DType.INT8, 1e-3)).count("RESCALE") == 3
    assert len(serialize(net.graph)) < 2 * 64 * 256


def test_constant_output_is_an_identity() -> None:
    net = Net()
    x = net.input(2, 4)
    folded = net.table(net.random((1, 4), DType.INT8))
    net.graph.outputs = [net.table(x), folded]
    run(net.graph, TARGET)
    assert net.kinds() == ["TABLE", "IDENTITY"]
    results(net)


def test_make_outputs_distinct_leaves_distinct_outputs_unchanged() -> None:
    net = Net()
    net.graph.outputs = [net.table(net.input(2, 4))]
    make_outputs_distinct(net.graph, TARGET)
    assert net.kinds() == ["TABLE"]


# -- layout --------------------------------------------------------------------------------------------------


def transposes(net: Net, *outputs: Value) -> int:
    return check(net, *outputs).count("TRANSPOSE")


def residual(net: Net, x: Value, channels: int) -> Value:
    y = net.b.clamp(net.conv(x, channels, 3), 3, 127)
    return net.b.clamp(net.binary("add", x, net.conv(y, channels, 3)), 3, 127)


def inverted_residual(net: Net, x: Value, channels: int, wide: int) -> Value:
    """MobileNetV3: expand, depthwise, squeeze and excite, project, add."""
    y = net.table(net.conv(net.table(net.conv(x, wide, 1)), wide, 3, depthwise=True))
    gate = net.table(net.conv(net.b.clamp(net.conv(net.mean(y), 4, 1), 3, 127), wide, 1))
    return net.binary("add", x, net.conv(net.binary("mul", y, gate), channels, 1))


def test_residual_network_keeps_only_boundary_transposes() -> None:
    net = Net()
    y = net.pool(net.conv(net.input(1, 3, 16, 16), 8, 3), 2)
    for _ in range(3):
        y = residual(net, y, 8)
    assert transposes(net, y) == 2


def test_classifier_needs_one_transpose() -> None:
    net = Net()
    y = net.conv(net.input(2, 3, 8, 8), 16, 3)
    for _ in range(3):
        y = inverted_residual(net, y, 16, 24)
    flat = net.b.reshape(net.mean(y), (2, 16))
    assert transposes(net, net.linear(flat, 10)) == 1


def test_flatten_before_linear_permutes_the_weights() -> None:
    net = Net()
    y = net.b.clamp(net.conv(net.input(2, 3, 8, 8), 8, 3), 3, 127)
    y = net.linear(net.table(net.b.reshape(y, (2, 8 * 64))), 10)
    assert transposes(net, y) == 1


def test_vision_transformer_patches_need_one_transpose() -> None:
    net = Net()
    y = net.conv(net.input(1, 3, 8, 8), 16, 1)
    tokens = net.b.transpose(net.b.reshape(y, (1, 16, 64)), (0, 2, 1))
    assert transposes(net, net.linear(tokens, 16)) == 1


def test_attention_transposes_each_operand_once() -> None:
    net = Net()
    x = net.input(1, 6, 16)
    heads = [net.b.reshape(net.linear(x, 16), (1, 6, 4, 4)) for _ in range(3)]
    q, k, v = (net.b.reshape(net.b.transpose(h, (0, 2, 1, 3)), (4, 6, 4)) for h in heads)
    scores = net.b.rescale(net.b.matmul(q, net.b.transpose(k, (0, 2, 1))), DType.INT8, 1e-2)
    mixed = net.b.rescale(net.b.matmul(net.table(scores), v), DType.INT8, 1e-2)
    joined = net.b.transpose(net.b.reshape(mixed, (1, 4, 6, 4)), (0, 2, 1, 3))
    assert transposes(net, net.linear(net.b.reshape(joined, (1, 6, 16)), 16)) == 4


def test_transpose_passes_concat_pad_slice_reduce_and_tile() -> None:
    net = Net()
    x = net.conv(net.input(1, 3, 8, 8), 4, 3)
    y = net.b.concat([x, net.conv(x, 4, 1), net.b.reverse(x, 1)], 1)
    y = net.b.pad(net.b.slice(y, (0, 2, 1, 0), (1, 9, 7, 8)), [(0, 0), (1, 2), (0, 1), (3, 0)], 5)
    peak = net.b.tile(net.b.reduce("REDUCE_MAX", y, 2), (1, 1, 2, 1))
    y = net.conv(net.b.concat([y, peak], 2), 4, 1)
    assert transposes(net, y) == 2


def test_transpose_passes_argmax_of_channels() -> None:
    net = Net()
    y = net.conv(net.input(1, 3, 8, 8), 5, 3)
    assert transposes(net, net.b.argmax(y, 1)) == 1


def test_pad_below_transpose_reaches_its_convolution() -> None:
    net = Net()
    x = net.conv(net.input(1, 3, 8, 8), 4, 3)
    y = net.conv(net.b.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)], 3), 4, 3)
    assert "PAD" not in check(net, y)


def test_transpose_is_placed_where_the_type_is_narrower() -> None:
    """A second input in NCHW is transposed while it is int8, not where it meets the others as int32."""
    net = Net()
    x = net.conv(net.input(1, 3, 8, 8), 8, 3)
    y = net.conv(net.binary("add", x, net.input(1, 8, 8, 8)), 8, 3)
    check(net, y)
    moved = [op for op in net.graph.ops if op.kind == "TRANSPOSE"]
    assert [op.inputs[0].dtype for op in moved] == [DType.INT8] * 3


def test_transposes_of_dimensions_of_size_one_are_reshapes() -> None:
    net = Net()
    y = net.b.transpose(net.b.reverse(net.input(1, 16, 1, 4), 1), (0, 2, 1, 3))
    assert transposes(net, net.b.reverse(y, 3)) == 0


def test_per_channel_rescale_keeps_its_channels_last() -> None:
    net = Net()
    x = net.b.transpose(net.input(1, 4, 6, 8), NHWC)
    y = net.b.transpose(net.b.rescale(x, DType.INT8, np.linspace(0.5, 0.8, 4)), NCHW)
    assert transposes(net, y) == 2


def test_repeating_the_layout_pass_changes_nothing() -> None:
    net = Net()
    y = inverted_residual(net, net.conv(net.input(2, 3, 8, 8), 16, 3), 16, 24)
    check(net, y)
    before = list(map(repr, net.graph.ops))
    assign_layouts(net.graph, TARGET)
    assert list(map(repr, net.graph.ops)) == before


def _count_calls(net: Net) -> int:
    """Number of function calls of the passes: a measure of work that does not depend on the machine's load."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        run(net.graph, TARGET)
    finally:
        sys.setprofile(previous)
    return calls


def blocks(operators: int) -> Net:
    net = Net()
    y = net.conv(net.input(1, 3, 8, 8), 16, 3)
    while len(net.graph.ops) < operators:
        y = inverted_residual(net, y, 16, 24)
    net.graph.outputs = [y]
    return net


def patches(operators: int) -> Net:
    """As im2col: a CONCAT of many SLICEs of one value."""
    net = Net()
    x = net.input(1, 4, 128, 128)
    slices = [net.b.slice(x, (0, 0, i % 100, i // 100), (1, 4, 28, 28)) for i in range(operators // 2)]
    net.graph.outputs = [net.b.concat([net.b.reshape(part, (1, 4, 784)) for part in slices], 1)]
    return net


def rows(operators: int) -> Net:
    """A sum of the rows of one value."""
    net = Net()
    x = net.input(operators // 2, 16, dtype=DType.INT32)
    total = net.b.slice(x, (0, 0), (1, 16))
    for i in range(1, operators // 2):
        total = net.b.add(total, net.b.slice(x, (i, 0), (1, 16)))
    net.graph.outputs = [total]
    return net


@pytest.mark.parametrize("write", [blocks, patches, rows])
def test_work_of_the_pipeline_grows_with_the_graph_and_no_faster(write: Callable[[int], Net]) -> None:
    _count_calls(write(60))  # fills the caches
    short, long = _count_calls(write(600)), _count_calls(write(1800))
    assert long < 3.6 * short, long / short


def test_inverted_residual_blocks_keep_only_boundary_transposes() -> None:
    net = blocks(600)
    run(net.graph, TARGET)
    assert net.count("TRANSPOSE") == 2


def test_chain_of_1500_operators_becomes_one_table() -> None:
    net = Net()
    total = net.b.rescale(net.input(4, 256), DType.INT32, 1024.0, 3)
    for _ in range(1500):
        total = net.b.add(total, net.b.const([[1]], DType.INT32))
    assert check(net, net.b.rescale(total, DType.INT8, 1e-4)) == ["TABLE"]


# -- random graphs -------------------------------------------------------------------------------------------


_STEPS = """transpose transpose transpose reshape reshape unary unary binary binary constant broadcast
    convolve convolve slice concat pad reduce reverse tile maximum maxpool sum multiply"""


class RandomNet(Net):
    """Each step reads existing int8 values and appends one."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__(seed)
        self.values = [self.input(1, 4, 4, 6), self.input(2, 3, 4, 1), self.input(2, 12)]
        for _ in range(steps):
            step = self.rng.choice(_STEPS.split())
            value = getattr(self, f"_{step}")(self.pick())
            if 0 < value.size <= 4096:
                self.values.append(value)

    def pick(self) -> Value:
        recent = self.values[-6:] if self.rng.random() < 0.7 else self.values
        return recent[self.rng.integers(len(recent))]

    def _transpose(self, x: Value) -> Value:
        perms = tuple(int(i) for i in self.rng.permutation(x.rank))
        return self.b.transpose(x, NHWC if x.rank == 4 and self.rng.random() < 0.5 else perms)

    def _reshape(self, x: Value) -> Value:
        shape: list[int] = []
        rest = x.size
        while rest > 1 and len(shape) < 3:
            factors = [n for n in range(1, rest + 1) if rest % n == 0]
            shape.append(int(self.rng.choice(factors)))
            rest //= shape[-1]
        return self.b.reshape(x, [*shape, rest])

    def _unary(self, x: Value) -> Value:
        low, high = sorted(int(v) for v in self.rng.integers(-128, 128, 2))
        scales = self.rng.uniform(0.5, 2, x.shape[-1])
        return [
            lambda: self.table(x),
            lambda: self.b.clamp(x, low, high),
            lambda: self.b.rescale(x, DType.INT8, scales, 2, -1),
            lambda: self.b.rescale(x, DType.INT8, float(scales[0]), 2, -1),
            lambda: self.b.rescale(self.b.rescale(x, DType.INT32, 4.0, 1), DType.INT8, 0.3),
        ][self.rng.integers(5)]()

    def _maximum(self, x: Value) -> Value:
        others = [value for value in self.values if value.shape == x.shape]
        return self.binary("maximum", x, others[self.rng.integers(len(others))])

    def _binary(self, x: Value) -> Value:
        return self.binary(str(self.rng.choice(["add", "sub", "mul"])), x, self.table(x))

    def _constant(self, x: Value) -> Value:
        shape = tuple(int(n) if self.rng.random() < 0.5 else 1 for n in x.shape)
        return self.binary("add", x, self.random(shape, DType.INT8))

    def _broadcast(self, x: Value) -> Value:
        axis = int(self.rng.integers(x.rank))
        peak = self.b.reduce("REDUCE_MAX", x, axis)
        if self.rng.random() < 0.3:
            peak = self.b.tile(peak, [n if d == axis else 1 for d, n in enumerate(x.shape)])
        return self.binary("sub", x, peak)

    def _convolve(self, x: Value) -> Value:
        image = x if x.rank == 4 else self.b.reshape(x, (1, x.shape[0], 1, x.size // x.shape[0]))
        depthwise = bool(self.rng.random() < 0.3)
        channels = image.shape[1] if depthwise else int(self.rng.integers(1, 6))
        return self.conv(image, channels, int(self.rng.choice([1, 3])), depthwise=depthwise)

    def _multiply(self, x: Value) -> Value:
        if self.rng.random() < 0.5:
            return self.linear(x, int(self.rng.integers(1, 9)))
        a = self.b.reshape(x, (1, -(-x.size // x.shape[-1]), x.shape[-1]))
        return self.b.rescale(self.b.matmul(a, self.b.transpose(a, (0, 2, 1))), DType.INT8, 1e-3)

    def _maxpool(self, x: Value) -> Value:
        if x.rank != 4 or min(x.shape[2:]) < 2:
            return self.table(x)
        return self.pool(self.b.slice(x, [0] * 4, (*x.shape[:2], 2, 2)), 2)

    def _slice(self, x: Value) -> Value:
        start = [int(self.rng.integers(0, n)) for n in x.shape]
        size = [int(self.rng.integers(1, n - a + 1)) for n, a in zip(x.shape, start, strict=True)]
        return self.b.slice(x, start, size)

    def _concat(self, x: Value) -> Value:
        axis = int(self.rng.integers(x.rank))
        same_rank = [v for v in self.values if v.rank == x.rank]
        fits = [v for v in same_rank if np.delete(v.shape, axis).tolist() == np.delete(x.shape, axis).tolist()]
        return self.b.concat([x, *fits][:3], axis)

    def _pad(self, x: Value) -> Value:
        amounts = [(int(a), int(b)) for a, b in self.rng.integers(0, 2, (x.rank, 2))]
        return self.b.pad(x, amounts, int(self.rng.integers(-5, 5)))

    def _reduce(self, x: Value) -> Value:
        kind = str(self.rng.choice(["REDUCE_MAX", "REDUCE_MIN"]))
        return self.b.reduce(kind, x, int(self.rng.integers(x.rank)))

    def _sum(self, x: Value) -> Value:
        wide = self.b.rescale(x, DType.INT32, 1.0)
        total = self.b.reduce("REDUCE_SUM", wide, int(self.rng.integers(x.rank)))
        return self.b.rescale(total, DType.INT8, 0.1)

    def _reverse(self, x: Value) -> Value:
        return self.b.reverse(x, int(self.rng.integers(x.rank)))

    def _tile(self, x: Value) -> Value:
        return self.b.tile(x, [int(n) for n in self.rng.integers(1, 3, x.rank)])


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_keep_every_bit(seed: int) -> None:
    net = RandomNet(seed, steps=25)
    read = net.graph.users()
    outputs = [value for value in net.values if value.producer is not None and value not in read]
    cost = movement_cost(net.graph)
    check(net, *outputs)
    assert movement_cost(net.graph) <= cost + 8  # a RESHAPE may be duplicated for each of its readers
    kinds = sorted(net.kinds())
    run(net.graph, TARGET)
    assert sorted(net.kinds()) == kinds


def test_reshape_that_cancels_nothing_moves_before_the_widening() -> None:
    net = Net()
    x = net.b.reshape(net.b.reverse(net.input(1, 4, 4, 8), 1), (1, 16, 8))
    total = net.b.reduce("REDUCE_SUM", net.b.rescale(x, DType.INT32, 1.0, 3), 1)
    assert check(net, total) == ["REVERSE", "RESHAPE", "RESCALE", "REDUCE_SUM"]
    assert net.graph.ops[1].output.dtype is DType.INT8


def test_scalar_reshapes_reach_a_fixpoint() -> None:
    net = Net()
    x, y = net.input(1, dtype=DType.INT32), net.input(1, 1, dtype=DType.INT32)
    z = net.b.maximum(net.b.reshape(x, (1, 1)), y)
    check(net, net.b.reshape(net.b.unary("ABS", net.b.add(z, y)), (1,)), passes=simplify)
    assert not apply_once(net.graph, TARGET, RULES)


def test_int16_accumulators_are_never_transposed() -> None:
    """TOSA has no INT48 TRANSPOSE: the transposed values are int16, before or after."""
    net = Net()
    x = net.input(1, 4, 6, 6, dtype=DType.INT16)
    weight, bias = net.random((8, 3, 3, 4), DType.INT8), net.random((8,), DType.INT48)
    y = net.b.conv2d(net.b.transpose(x, NHWC), weight, bias, pad=[1] * 4)
    y = net.b.transpose(net.b.rescale(y, DType.INT16, 1e-3), NCHW)
    y = net.b.transpose(net.b.concat([y, net.b.clamp(y, 0, 3000)], 1), NHWC)
    weight = net.random((8, 1, 1, 16), DType.INT8)
    y = net.b.rescale(net.b.conv2d(y, weight, bias, pad=[0] * 4), DType.INT16, 1e-3)
    assert transposes(net, net.b.transpose(y, NCHW)) == 2


def test_concat_groups_of_many_values_are_not_merged() -> None:
    """CONCAT has at most 64 operands: merging the groups of the builder would never end."""
    net = Net()
    joined = net.b.concat([net.input(1, 2) for _ in range(150)], 0)
    net.graph.outputs = [joined]
    assert [len(op.inputs) for op in net.graph.ops] == [64, 64, 22, 3]
    assert not apply_once(net.graph, TARGET, RULES)
