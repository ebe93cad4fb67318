"""Hardware passes for Ethos-U: the operators that the rewrites emit, and that the results are bit-equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.alternatives.unconditional import apply_unconditional
from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.pipeline import Pass, run, simplify
from arm_backend_core.tosa.passes.space_to_depth import apply_space_to_depth
from arm_backend_core.tosa.passes.transpose_lowering import sink_slices
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.tosa_graphs import build_graph, is_compiled_by_vela

U55, U65, U85 = (
    Target(f"{family}-{macs}", frozenset({"INT"}), frozenset({"int16"}), family, macs)
    for family, macs in (("ethos-u55", 128), ("ethos-u65", 256), ("ethos-u85", 256))
)
TARGETS = (U55, U65, U85)
ANY = Target.from_tosa_spec("TOSA-1.0+INT+int16")
NHWC = (0, 2, 3, 1)


class Net:
    """A graph under construction for one target."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.target = target
        self.graph = Graph()
        self.b = LegalizingBuilder(self.graph, target)
        self.rng = np.random.default_rng(seed)

    def input(self, *shape: int, dtype: DType = DType.INT8) -> Value:
        return self.graph.add_input(shape, dtype, f"input_{len(self.graph.inputs)}")

    def conv(
        self,
        x: Value,
        channels: int,
        kernel: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        pad: tuple[int, int, int, int] = (0, 0, 0, 0),
        zero_point: int = -7,
    ) -> Value:
        """An NHWC convolution with a RESCALE per channel."""
        wide = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
        zero_point = 0 if x.dtype is DType.INT16 else zero_point
        weight = self.b.const(self.rng.integers(-127, 128, (channels, *kernel, x.shape[3])), DType.INT8)
        bias = self.b.const(self.rng.integers(-999, 999, channels), wide)
        y = self.b.conv2d(x, weight, bias, pad=pad, stride=stride, zps=(zero_point, 3))
        return self.b.rescale(y, x.dtype, self.rng.uniform(1e-3, 4e-3, channels), 0, zero_point)

    def check(self, *outputs: Value, choose_alternatives: Pass = lambda graph, target: None) -> list[Op]:
        """Run all passes, assert that the results are bit-equal, and return the operators of the new graph."""
        self.graph.outputs = list(outputs)
        arrays = []
        for value in self.graph.inputs:
            low, high = value.dtype.range
            arrays.append(self.rng.integers(low, high + 1, value.shape).astype(value.dtype.numpy))
        before = reference_model.run(serialize(self.graph), arrays)
        run(self.graph, self.target, choose_alternatives)
        for expected, actual in zip(before, reference_model.run(serialize(self.graph), arrays), strict=True):
            assert expected.shape == actual.shape
            np.testing.assert_array_equal(actual, expected)
        return self.graph.ops

    def convolutions(self) -> list[Op]:
        return [op for op in self.graph.ops if op.kind == "CONV2D"]

    def kinds(self) -> list[str]:
        return [op.kind for op in self.graph.ops]


# -- space-to-depth of strided convolutions -------------------------------------------------------------------


def test_space_to_depth_of_the_width_is_a_reshape() -> None:
    """ResNet's first convolution: 7x7, stride 2, padding 3."""
    net = Net(U55)
    net.check(net.conv(net.input(2, 32, 32, 3), 16, (7, 7), (2, 2), (3, 2, 3, 2)))
    (conv,) = net.convolutions()
    assert conv.attrs["stride"] == [2, 1]
    assert conv.inputs[0].shape == (2, 32, 16, 6)
    assert conv.inputs[1].shape == (16, 7, 4, 6)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.family)
def test_image_of_one_channel_is_gathered_by_a_convolution(target: Target) -> None:
    """DS-CNN's first convolution: 10x4, stride 2, padding (5, 1)."""
    net = Net(target)
    net.check(net.conv(net.input(1, 49, 10, 1), 64, (10, 4), (2, 2), (5, 4, 1, 1)))
    gather, conv = net.convolutions()
    assert gather.attrs["stride"] == [2, 2]
    assert conv.attrs["stride"] == [1, 1]
    weights = gather.inputs[1].data
    assert weights is not None
    assert np.count_nonzero(weights) == weights.shape[0]


def test_rows_that_no_window_reads_need_no_slice() -> None:
    """SqueezeNet's first convolution: 3x3, stride 2 on an even size."""
    net = Net(U85)
    image = net.b.transpose(net.input(1, 3, 32, 32), NHWC)
    net.check(net.conv(image, 64, (3, 3), (2, 2)))
    assert net.convolutions()[-1].inputs[0].shape[2:] == (16, 6)
    for op in net.graph.ops:
        if op.kind == "SLICE":  # a slice of whole rows is contiguous, so that it only changes the address
            assert op.output.shape[2:] == op.inputs[0].shape[2:]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.family)
def test_space_to_depth_of_a_padded_slice_does_not_read_removed_elements(target: Target) -> None:
    net = Net(target)
    cut = net.b.slice(net.input(1, 34, 34, 3), (0, 0, 0, 0), (1, 32, 32, 3))
    net.check(net.conv(cut, 32, (7, 7), (2, 2), (3, 2, 3, 2)))
    assert max(net.convolutions()[-1].attrs["stride"]) <= 2
    assert net.convolutions()[-1].inputs[1].shape[1:3] != (7, 7)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.family)
@pytest.mark.parametrize("size", [8, 16])
def test_patch_embedding_has_only_strides_that_hardware_supports(target: Target, size: int) -> None:
    net = Net(target)
    image = net.b.transpose(net.input(2, 3, 4 * size, 4 * size), NHWC)
    net.check(net.conv(image, 24, (size, size), (size, size)))
    assert all(max(conv.attrs["stride"]) <= 3 for conv in net.convolutions())


@pytest.mark.parametrize("kernel", [4, 16])
def test_a_graph_of_one_convolution_reaches_the_fixpoint(kernel: int) -> None:
    """Each split adds a convolution that may be split again.

    A limit on rewrites computed from the original number of operators would be too small.
    """
    net = Net(U85)
    net.check(net.conv(net.input(1, 64, 64, 3), 8, (kernel, kernel), (16, 16), (2, 2, 2, 2)))
    assert all(max(conv.attrs["stride"]) <= 3 for conv in net.convolutions())


def test_convolution_of_many_channels_is_not_rewritten() -> None:
    net = Net(U55)
    net.check(net.conv(net.input(1, 16, 16, 32), 32, (3, 3), (2, 2), (1, 0, 1, 0)))
    assert net.kinds() == ["CONV2D", "RESCALE"]


def test_other_targets_keep_strides_and_transposes() -> None:
    net = Net(ANY)
    net.check(net.conv(net.b.transpose(net.input(1, 3, 16, 16), NHWC), 8, (7, 7), (2, 2), (3, 2, 3, 2)))
    assert net.kinds() == ["TRANSPOSE", "CONV2D", "RESCALE"]


@pytest.mark.parametrize("seed", range(80))
def test_random_convolutions_keep_every_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = TARGETS[seed % 3]
    net = Net(target, seed)
    dtype = DType.INT16 if rng.random() < 0.3 else DType.INT8
    kernel, stride, pad, size = [], [], [], []
    largest = int(rng.choice([3, 3, 8]))  # U55 supports padding only with strides up to 3
    for _ in range(2):
        k, s = int(rng.integers(1, 9)), min(int(rng.choice([1, 2, 2, 3, 4, 8])), largest)
        before, after = (int(n) for n in rng.integers(0, k, 2)) if largest <= 3 else (0, 0)
        kernel.append(k)
        stride.append(s)
        pad += [before, after]
        size.append(max(k, s * int(rng.integers(1, 7)) + int(rng.choice([0, 0, 1]))))
    x = net.input(int(rng.integers(1, 3)), *size, int(rng.integers(1, 7)), dtype=dtype)
    y = net.conv(x, int(rng.choice([5, 64, 96])), (kernel[0], kernel[1]), (stride[0], stride[1]), tuple(pad))  # type: ignore[arg-type]
    net.check(y)
    for conv in net.convolutions():  # hardware requires less padding than the kernel size
        extent = conv.inputs[1].shape[1:3]
        assert all(amount < extent[side // 2] for side, amount in enumerate(conv.attrs["pad"]))


def test_space_to_depth_is_idempotent() -> None:
    net = Net(U85)
    net.check(net.conv(net.input(1, 49, 10, 1), 64, (10, 4), (2, 2), (5, 4, 1, 1)))
    before = len(net.graph.ops)
    apply_space_to_depth(net.graph, U85)
    assert len(net.graph.ops) == before


# -- lowering of TRANSPOSE -----------------------------------------------------------------------------------


def test_merge_axes() -> None:
    assert merge_axes((1, 3, 8, 8), [0, 2, 3, 1]) == ((3, 64), (1, 0))
    assert merge_axes((2, 1, 3, 4), [2, 3, 1, 0]) == ((2, 12), (1, 0))
    assert merge_axes((2, 3, 4), [1, 0, 2]) == ((2, 3, 4), (1, 0, 2))
    assert merge_axes((2, 3, 1, 4), [0, 1, 2, 3]) == ((24,), (0,))


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
def test_an_image_is_transposed_as_a_matrix_or_by_convolution(dtype: DType) -> None:
    kinds = {}
    for target in TARGETS:
        net = Net(target)
        net.check(net.b.transpose(net.input(1, 3, 16, 18, dtype=dtype), NHWC))
        kinds[target.family] = net.kinds()
    assert kinds["ethos-u85"] == ["RESHAPE", "CONV2D", "RESCALE", "RESHAPE"]
    assert kinds["ethos-u55"] == kinds["ethos-u65"] == ["RESHAPE", "TRANSPOSE", "RESHAPE"]


def test_int32_and_many_rows_keep_their_transpose_on_u85() -> None:
    net = Net(U85)
    many = net.b.transpose(net.input(1, 64, 64, 64), NHWC)
    wide = net.b.transpose(net.input(1, 3, 16, 16, dtype=DType.INT32), NHWC)
    net.check(many, wide)
    assert net.kinds() == ["TRANSPOSE", "TRANSPOSE"]


@pytest.mark.parametrize(
    ("shape", "perms", "dtype", "transposes"),
    [
        ((1, 4, 8, 14, 14, 96), (0, 2, 1, 3, 4, 5), DType.INT8, 1),  # windows of a video
        ((1, 197, 1, 12, 64), (2, 0, 3, 1, 4), DType.INT8, 1),  # heads of a ViT
        ((1, 7, 196, 47, 16), (0, 2, 1, 3, 4), DType.INT8, 1),
        ((3, 32, 96, 1, 384), (0, 3, 4, 1, 2), DType.INT8, 1),
        ((2, 40, 50, 60, 8), (0, 4, 2, 1, 3), DType.INT8, 2),
        ((5, 300, 3, 500), (3, 2, 1, 0), DType.INT8, 2),
        ((2, 8, 300, 300), (0, 2, 3, 1), DType.INT8, 2),
        ((1, 3136, 3, 1, 96), (2, 0, 3, 1, 4), DType.INT8, 1),  # heads of an MViT: an axis is split
        ((12, 768, 2, 64), (1, 2, 0, 3), DType.INT32, 1),
        ((42, 64, 384, 1, 1), (1, 0, 3, 4, 2), DType.INT16, 1),
    ],
)
@pytest.mark.parametrize("family", ["ethos-u55", "ethos-u65"])
def test_a_transpose_that_vela_refuses_is_split_into_supported_ones(
    shape: tuple[int, ...], perms: tuple[int, ...], dtype: DType, transposes: int, family: str
) -> None:
    original = build_graph(lambda b, x: b.transpose(x, perms), (shape, dtype))
    assert not is_compiled_by_vela(family, serialize(original))  # if Vela compiles it, the split is obsolete
    net = Net(U55)
    net.check(net.b.transpose(net.input(*shape, dtype=dtype), perms))
    assert net.kinds().count("TRANSPOSE") == transposes
    assert is_compiled_by_vela(family, serialize(net.graph))


@pytest.mark.parametrize(
    ("before", "shape", "perms"),
    [
        ((1, 3136, 1, 2, 96), (1, 3136, 1, 2, 96), (0, 2, 3, 1, 4)),
        ((1, 3136, 1, 2, 96), (1, 3136, 2, 96), (0, 2, 1, 3)),
        ((3136, 2, 96), (1, 3136, 1, 2, 96), (0, 2, 3, 1, 4)),
        ((1, 3137, 1, 3, 101), (1, 3137, 3, 101), (0, 2, 1, 3)),  # no dimension can be split
    ],
)
@pytest.mark.parametrize("multiplied", [False, True])
def test_transpose_of_attention_heads_with_unit_dimensions_compiles(
    before: tuple[int, ...], shape: tuple[int, ...], perms: tuple[int, ...], multiplied: bool
) -> None:
    net = Net(U55)
    x = net.b.reshape(net.b.rescale(net.input(*before, dtype=DType.INT16), DType.INT8, 0.01), shape)
    y = net.b.reshape(net.b.transpose(x, perms), (shape[-2], x.size // (shape[-2] * shape[-1]), shape[-1]))
    net.check(net.b.matmul(y, net.input(shape[-2], shape[-1], 2)) if multiplied else y)
    assert is_compiled_by_vela("ethos-u55", serialize(net.graph))


def test_a_transpose_that_cannot_be_split_is_refused() -> None:
    for shape, perms in (((1, 3, 70000, 1), (2, 1, 3, 0)), ((251, 3, 1, 1009, 1), (4, 0, 3, 1, 2))):
        original = build_graph(lambda b, x, perms=perms: b.transpose(x, perms), (shape, DType.INT8))
        assert op_refusal(U65, original.ops[0]) == (
            f"{U65.name} has no TRANSPOSE with shape {shape} by {perms} "
            "(every decomposition into swaps exceeds 65536 along an axis)"
        )
        assert not is_compiled_by_vela("ethos-u65", serialize(original))


def test_transpose_before_matmul_has_four_dimensions() -> None:
    net = Net(U85)
    keys, queries = net.b.transpose(net.input(8, 2, 16), (1, 2, 0)), net.input(2, 8, 16)
    net.check(net.b.rescale(net.b.matmul(queries, keys, (3, -2)), DType.INT8, 1e-2))
    transposes = [op for op in net.graph.ops if op.kind == "TRANSPOSE"]
    assert [op.attrs["perms"] for op in transposes] == [[0, 2, 3, 1]]


def test_slice_moves_after_the_transpose() -> None:
    net = Net(U55)
    x = net.b.slice(net.input(1, 3, 16, 16), (0, 0, 0, 0), (1, 3, 15, 15))
    net.graph.outputs = [net.b.transpose(x, NHWC)]
    sink_slices(net.graph, U55)
    net.graph.remove_dead()
    assert net.kinds()[-1] == "SLICE"


# -- convolutions read by SLICEs -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [U55, ANY], ids=lambda target: target.family)
def test_attention_input_projection_is_split(target: Target) -> None:
    """The layer of nn.MultiheadAttention: [rows, 3 * width], split after a permutation."""
    net = Net(target)
    y = net.conv(net.input(1, 1, 6, 16), 48, (1, 1))
    y = net.b.transpose(net.b.reshape(y, (1, 6, 1, 3, 16)), (3, 1, 2, 0, 4))
    y = net.b.reshape(y, (3, 6, 1, 16))
    parts = [net.b.slice(y, (i, 0, 0, 0), (1, 6, 1, 16)) for i in range(3)]
    net.check(*(net.b.table(part, net.rng.integers(-128, 128, 256)) for part in parts))
    assert "SLICE" not in net.kinds()
    assert "TRANSPOSE" not in net.kinds()
    assert [conv.output.shape for conv in net.convolutions()] == [(1, 1, 6, 16)] * 3


@pytest.mark.parametrize(
    ("start", "size"), [((0, 0, 0, 4), (1, 4, 4, 12)), ((0, 0, 0, 8), (1, 4, 4, 4)), ((0, 1, 0, 0), (1, 2, 4, 16))]
)
def test_slices_of_few_channels_or_of_rows_are_not_split(start: tuple[int, ...], size: tuple[int, ...]) -> None:
    net = Net(U55)
    y = net.conv(net.input(1, 4, 4, 8), 16, (1, 1))
    net.check(net.b.slice(y, start, size))
    assert net.kinds() == ["CONV2D", "RESCALE", "SLICE"]


def test_convolution_that_is_read_whole_is_not_computed_twice() -> None:
    net = Net(U55)
    y = net.conv(net.input(1, 4, 4, 8), 16, (1, 1))
    net.check(net.b.slice(y, (0, 0, 0, 0), (1, 4, 4, 8)), net.b.clamp(y, -9, 9))
    assert net.kinds().count("CONV2D") == 1


def test_split_needs_no_hardware_passes() -> None:
    net = Net(ANY)
    y = net.conv(net.input(1, 4, 4, 8), 16, (1, 1))
    net.graph.outputs = [net.b.slice(y, (0, 0, 0, n), (1, 4, 4, 8)) for n in (0, 8)]
    simplify(net.graph, ANY)
    assert net.kinds() == ["CONV2D", "RESCALE"] * 2


# -- Vela workarounds ----------------------------------------------------------------------------------------


def _difference(net: Net, first: float, second: float, dtype: DType = DType.INT16) -> Value:
    x, y = (net.b.rescale(net.input(2, 8, dtype=dtype), DType.INT32, scale) for scale in (first, second))
    return net.b.rescale(net.b.sub(x, y), dtype, 1 / 16)


def _factors(net: Net) -> list[float]:
    """Scale of each RESCALE."""
    return [
        float(op.attrs["multiplier"][0]) * 2.0 ** -int(op.attrs["shift"][0])
        for op in net.graph.ops
        if op.kind == "RESCALE"
    ]


@pytest.mark.parametrize(("dtype", "top"), [(DType.INT16, 2**14), (DType.INT8, 2**19)], ids=["int16", "int8"])
def test_operand_with_the_larger_scale_is_scaled_by_a_power_of_two(dtype: DType, top: int) -> None:
    net = Net(U55)
    net.check(_difference(net, 3, 8, dtype))
    assert _factors(net) == [top * 3 / 8, top, 8 / top / 16]


def test_scales_whose_ratio_is_no_power_of_two_are_not_fused() -> None:
    net = Net(U65)
    net.check(_difference(net, 3, 5))
    assert net.kinds() == ["RESCALE", "RESCALE", "MUL", "SUB", "RESCALE"]


@pytest.mark.parametrize(("target", "scales"), [(U85, (4, 8)), (U55, (4, 4)), (U55, (0.5, 8)), (U55, (2**14, 8))])
def test_scales_that_vela_compiles_correctly_are_unchanged(target: Target, scales: tuple[float, float]) -> None:
    net = Net(target)
    net.check(_difference(net, *scales))
    assert _factors(net) == [*scales, 1 / 16]


def test_scales_of_a_sum_with_two_readers_are_unchanged() -> None:
    net = Net(U55)
    x, y = (net.b.rescale(net.input(2, 8, dtype=DType.INT16), DType.INT32, scale) for scale in (4, 8))
    total = net.b.add(x, y)
    net.check(net.b.rescale(total, DType.INT16, 1 / 16), total)
    assert _factors(net) == [4, 8, 1 / 16]


def test_narrowing_casts_are_lowered_to_shifts_if_values_may_not_fit() -> None:
    net = Net(U55)
    x = net.input(2, 8, dtype=DType.INT32)
    low, high = (net.b.const([[number]], DType.INT32) for number in (-128, 127))
    net.check(net.b.cast(net.b.minimum(net.b.maximum(x, low), high), DType.INT8))
    assert net.kinds() == ["MAXIMUM", "MINIMUM", "CAST"]
    net.check(net.b.cast(x, DType.INT16))
    assert net.kinds() == ["LOGICAL_LEFT_SHIFT", "ARITHMETIC_RIGHT_SHIFT", "CAST"]


def _convolve_a_slice(target: Target, batches: int, dilation: int = 1) -> list[str]:
    net = Net(target)
    part = net.b.slice(net.input(batches, 8, 8, 12), (0, 0, 0, 1), (batches, 8, 8, 10))
    weight = net.b.const(net.rng.integers(-127, 128, (4, 3, 3, 10)), DType.INT8)
    pad, bias = [dilation] * 4, net.b.const([0] * 4, DType.INT32)
    wide = net.b.conv2d(part, weight, bias, pad=pad, dilation=(dilation, dilation))
    net.check(net.b.rescale(wide, DType.INT8, 1e-3))
    return net.kinds()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.family)
def test_convolution_that_vela_splits_reads_a_copy_of_a_slice(target: Target) -> None:
    unchanged, copied = ["SLICE", "CONV2D", "RESCALE"], ["SLICE", "MUL", "RESCALE", "CONV2D", "RESCALE"]
    assert _convolve_a_slice(target, 1) == unchanged
    assert _convolve_a_slice(target, 1, dilation=2) == unchanged
    assert _convolve_a_slice(target, 1, dilation=3) == copied
    assert _convolve_a_slice(target, 2) == copied


@pytest.mark.parametrize(("reduced", "u55", "u85"), [(1, True, False), (2, False, False), (3, True, True)])
def test_reductions_copy_what_they_read_and_write_where_vela_reshapes_them(reduced: int, u55: bool, u85: bool) -> None:
    for target, copies in ((U55, u55), (U85, u85)):
        net = Net(target)
        part = net.b.slice(net.input(1, 4, 5, 8), (0, 0, 0, 1), (1, 4, 5, 6))
        peak = net.b.reduce("REDUCE_MAX", part, reduced)
        net.check(net.b.concat([peak, net.input(*peak.shape)], 0))
        assert net.kinds().count("MUL") == 2 * copies


def test_pad_with_zero_is_not_fused_into_a_convolution_with_another_zero_point() -> None:
    net = Net(U85)
    image = net.b.pad(net.input(1, 8, 8, 4), ((0, 0), (1, 1), (1, 1), (0, 0)), 0)
    net.check(net.conv(image, 8, (3, 3)))
    assert net.kinds() == ["PAD", "MUL", "RESCALE", "CONV2D", "RESCALE"]


def _chain_tables(net: Net, muls: int, *, starts_with_mul: bool = False) -> list[str]:
    """Operators after the passes for the sequence TABLE, ``muls`` MULs, TABLE; optionally a MUL precedes it."""
    x, b = net.input(4, 8, dtype=DType.INT16), net.b
    for i in range(muls + starts_with_mul):
        if i == int(starts_with_mul):
            x = b.rescale(b.table(x, np.arange(-256, 257) * 100), DType.INT16, 1 / 128)
        x = b.rescale(b.mul(x, net.input(4, 8, dtype=DType.INT16)), DType.INT16, 2.0**-15)
    net.check(b.rescale(b.table(x, np.arange(256, -257, -1) * 90), DType.INT16, 1 / 128))
    return net.kinds()


def test_arithmetic_between_tables_is_split_in_halves_if_one_chain_could_hold_both() -> None:
    assert _chain_tables(Net(U85), 1).count("MUL") == 2
    assert _chain_tables(Net(U85), 2).count("MUL") == 3  # only the last MUL is split
    assert _chain_tables(Net(U85), 3).count("MUL") == 3  # no split: a chain has at most three operands
    assert _chain_tables(Net(U85), 1, starts_with_mul=True).count("MUL") == 3
    assert _chain_tables(Net(U85), 2, starts_with_mul=True).count("MUL") == 3
    assert _chain_tables(Net(U55), 1).count("MUL") == 1


def test_arithmetic_after_a_table_with_several_readers_is_not_split() -> None:
    net = Net(U85)
    x, y = net.input(4, 8, dtype=DType.INT16), net.input(4, 8, dtype=DType.INT16)
    first = net.b.rescale(net.b.table(x, np.arange(-256, 257) * 100), DType.INT16, 1 / 128)
    product = net.b.rescale(net.b.mul(first, y), DType.INT16, 2.0**-15)
    net.check(net.b.rescale(net.b.table(product, np.arange(256, -257, -1) * 90), DType.INT16, 1 / 128), first)
    assert net.kinds().count("MUL") == 1


def _summed(net: Net) -> Value:
    shape = (1, 1, 1, 40)
    left, right = (net.b.rescale(net.input(*shape, dtype=DType.INT16), DType.INT32, 1.0) for _ in range(2))
    return net.b.rescale(net.b.add(left, right), DType.INT16, 0.5)


@pytest.mark.parametrize("target", [*TARGETS, ANY], ids=lambda target: target.name)
def test_table_reads_a_copy_of_arithmetic_with_other_readers(target: Target) -> None:
    """Vela fuses the copy, a MUL by 1, with the TABLE."""
    net = Net(target)
    total = _summed(net)
    function = net.b.table(total, np.rint(32767 * np.tanh(np.linspace(-4, 4, 513))))
    net.check(total, net.b.rescale(function, DType.INT16, 1 / 128))
    assert net.kinds().count("MUL") == (1 if target.hardware.is_ethos_u else 0)
    assert net.kinds().count("ADD") == net.kinds().count("TABLE") == 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_rescale_that_vela_does_not_fuse_gets_a_multiplication_by_1(target: Target) -> None:
    net = Net(target)
    total = _summed(net)
    net.check(total, net.b.rescale(total, DType.INT8, 0.007, 0, -5), choose_alternatives=apply_unconditional)
    assert net.kinds().count("MUL") == 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
def test_convolution_with_two_rescales_is_duplicated(target: Target, dtype: DType) -> None:
    """Vela fuses one RESCALE only, and rejects INT48 that is not fused."""
    net = Net(target)
    x = net.input(1, 4, 4, 16, dtype=dtype)
    wide = DType.INT48 if dtype is DType.INT16 else DType.INT32
    ones, zeros = net.b.const(np.full((1, 1, 16, 1), 127), DType.INT8), net.b.const(np.zeros(16), wide)
    sums = net.b.depthwise_conv2d(x, ones, zeros, pad=(0, 0, 0, 0))
    scales = (net.rng.uniform(1e-3, 4e-3, 16) for _ in range(2))
    ops = net.check(*(net.b.rescale(sums, dtype, scale, 0, 0) for scale in scales))
    assert [op.kind for op in ops].count("DEPTHWISE_CONV2D") == 2
    assert is_compiled_by_vela(target.family, serialize(net.graph))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", ["add", "mul", "sub"])
def test_arithmetic_reads_rescales_of_its_own(target: Target, kind: str) -> None:
    """Vela fuses a RESCALE with a single reader. Two residual sums read the same tensor with the same scale."""
    net = Net(target)
    skipped, *others = (net.input(1, 8, 8, 16) for _ in range(3))
    emit = getattr(net.b, kind)
    shared = net.b.rescale(skipped, DType.INT32, 1.0, 4, 0)
    results = [net.b.rescale(emit(net.b.rescale(x, DType.INT32, 1.0, 3, 0), shared), DType.INT8, 0.01) for x in others]
    net.check(*results)
    assert net.kinds().count("RESCALE") == (5 if target.hardware.fuses_shared_rescale else 6)


def test_a_skip_connection_that_two_sums_read_is_not_converted_to_int32() -> None:
    class GlobalSkip(nn.Module):
        """A residual block within a longer skip connection, as in super-resolution networks."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.outer = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
            self.last = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(self.outer(torch.relu(self.inner(y) + y)) + y)

    samples = [(torch.randn(1, 8, 16, 16),) for _ in range(2)]
    result = export(GlobalSkip().eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8), samples)
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert {layer.operator for layer in delegate.vela.layers if layer.cycles}.isdisjoint({"Rescale"})
