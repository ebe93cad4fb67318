"""Patch-based inference: stages, refusals, and bit-equal programs that compute the first layers in patches."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.memory_reduction.patch_based_inference import (
    Area,
    IndexRange,
    PatchStage,
    count_recomputed_work,
    match_stage,
    rewrite_to_patches,
    split_image,
)
from arm_backend_core.memory_reduction.patch_search import copy_graph
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.passes.pipeline import assert_serializable, run_last_passes
from arm_backend_core.tosa.serialize import serialize

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def target() -> Target:
    return EthosUCompileSpec("ethos-u55-128").target


def _conv(b: Builder, x: Value, channels: int, kernel: tuple[int, int], **options: object) -> Value:
    """A convolution with random weights, rescaled to int8."""
    weight = b.const(RNG.integers(-127, 128, (channels, *kernel, x.shape[3])), DType.INT8)
    bias = b.const(RNG.integers(-999, 1000, channels), DType.INT32)
    return b.rescale(b.conv2d(x, weight, bias, zps=(3, 0), **options), DType.INT8, np.full(channels, 0.004), 0, -5)  # type: ignore[arg-type]


def _depthwise(b: Builder, x: Value, kernel: tuple[int, int], **options: object) -> Value:
    weight = b.const(RNG.integers(-127, 128, (*kernel, x.shape[3], 1)), DType.INT8)
    bias = b.const(np.zeros(x.shape[3]), DType.INT32)
    sums = b.conv2d(x, weight, bias, depthwise=True, zps=(-5, 0), **options)  # type: ignore[arg-type]
    return b.rescale(sums, DType.INT8, np.full(x.shape[3], 0.01), 0, 7)


def _add(b: Builder, x: Value, y: Value) -> Value:
    wide = [b.rescale(value, DType.INT32, 2.0**10, -5) for value in (x, y)]
    return b.rescale(b.add(*wide), DType.INT8, 2.0**-11, 0, 1)


def _residual(b: Builder, x: Value) -> Value:
    """Strided, depthwise and pointwise convolutions, a residual connection, and a strided end."""
    first = _conv(b, x, 8, (3, 3), pad=(1, 0, 1, 0), stride=(2, 2))
    wide = _depthwise(b, _conv(b, first, 16, (1, 1), pad=(0,) * 4), (3, 3), pad=(1, 1, 1, 1))
    joined = _add(b, first, _conv(b, wide, 8, (1, 1), pad=(0,) * 4))
    return _depthwise(b, joined, (3, 3), pad=(1, 0, 1, 0), stride=(2, 2))


def _pools(b: Builder, x: Value) -> Value:
    """Pools with padding, a dilated convolution, a concatenation of channels, a table."""
    dilated = _conv(b, x, 4, (3, 2), pad=(2, 2, 1, 0), dilation=(2, 1))
    pooled = b.max_pool2d(dilated, (3, 3), (1, 1), (1, 1, 1, 1))
    average = b.avg_pool2d(dilated, (3, 3), (1, 1), (1, 1, 1, 1))
    joined = b.concat([pooled, average], 3)
    return b.table(b.max_pool2d(joined, (2, 2), (2, 2), (0, 0, 0, 0)), np.arange(-128, 128)[::-1])


def _graph(target: Target, build: Callable[[Builder, Value], Value], shape: tuple[int, ...]) -> tuple[Graph, Value]:
    graph = Graph()
    b = Builder(graph, target)
    x = graph.add_input(shape, DType.INT8, "x")
    if shape[1] == 3:  # channels first
        planes = b.transpose(b.reshape(x, (1, 3, shape[2] * shape[3])), (0, 2, 1))
        x = b.reshape(planes, (1, *shape[2:], 3))
    result = build(b, x)
    graph.outputs = [_conv(b, result, 3, (1, 1), pad=(0,) * 4)]
    return graph, result


def _position(graph: Graph, value: Value) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.output is value)


@pytest.mark.parametrize("build", [_residual, _pools])
@pytest.mark.parametrize("shape", [(1, 24, 20, 3), (1, 3, 16, 28), (2, 16, 16, 5)])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (3, 2), (4, 4)])
def test_patches_give_bit_equal_results(
    target: Target, build: Callable[[Builder, Value], Value], shape: tuple[int, ...], grid: tuple[int, int]
) -> None:
    graph, result = _graph(target, build, shape)
    patched = copy_graph(graph)
    stage = match_stage(patched, patched.ops[_position(graph, result)].output)
    assert isinstance(stage, PatchStage), stage
    patches = split_image(stage.result, *grid)
    assert count_recomputed_work(stage, patches) > 0
    rewrite_to_patches(patched, target, stage, patches)
    patched.verify()
    for each in (graph, patched):
        run_last_passes(each, target)
        assert_serializable(each, target)
    assert sum(op.kind == "SLICE" for op in patched.ops) >= grid[0] * grid[1] - 1
    x = RNG.integers(-128, 128, shape, dtype=np.int8)
    (expected,), (computed,) = (reference_model.run(serialize(each), [x]) for each in (graph, patched))
    assert np.ptp(expected.astype(int)) > 20
    np.testing.assert_array_equal(computed, expected)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda b, x: b.reshape(x, (1, 8, 32, 4)), "the result of RESHAPE does not depend on windows of pixels"),
        (lambda b, x: b.reshape(x, (16, 16, 4)), r"the result of .*RESHAPE.* is not an image"),
        (lambda b, x: b.concat([x, x], 1), "the result of CONCAT does not depend on windows of pixels"),
        (lambda b, x: _add(b, x, b.max_pool2d(x, (16, 16), (1, 1), (0,) * 4)), "ADD broadcasts a computed operand"),
        (lambda b, x: _conv(b, x, 4, (3, 1), pad=(1, 1, 0, 1)), "a window of CONV2D may contain padding only"),
        (lambda b, x: x, "the stage has no operators"),
    ],
)
def test_refusals_name_the_operator(target: Target, build: Callable[[Builder, Value], Value], reason: str) -> None:
    graph = Graph()
    b = Builder(graph, target)
    result = build(b, graph.add_input((1, 16, 16, 4), DType.INT8, "x"))
    stage = match_stage(graph, result)
    assert isinstance(stage, str)
    assert re.search(reason, stage)


def test_a_value_that_is_read_later_is_not_inside_a_stage(target: Target) -> None:
    graph = Graph()
    b = Builder(graph, target)
    first = _conv(b, graph.add_input((1, 16, 16, 4), DType.INT8, "x"), 4, (3, 3), pad=(1,) * 4)
    second = _conv(b, first, 4, (3, 3), pad=(1,) * 4)
    graph.outputs = [second, first]
    stage = match_stage(graph, second)
    assert isinstance(stage, str)
    assert "is also read after the stage" in stage
    assert isinstance(match_stage(graph, first), PatchStage)


def test_grids_cover_the_image() -> None:
    grid = split_image(Value((1, 5, 4, 1), DType.INT8), 2, 3)
    assert [patch.rows for patch in (row[0] for row in grid)] == [IndexRange(0, 2), IndexRange(2, 5)]
    assert [patch.columns for patch in grid[0]] == [IndexRange(0, 1), IndexRange(1, 2), IndexRange(2, 4)]
    assert sum(patch.pixels for row in grid for patch in row) == 20
    assert Area(IndexRange(0, 2), IndexRange(1, 2)).bounding_box(Area(IndexRange(1, 3), IndexRange(0, 1))) == Area(
        IndexRange(0, 3), IndexRange(0, 2)
    )
