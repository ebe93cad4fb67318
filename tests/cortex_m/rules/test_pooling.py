"""Pooling, means and softmax become kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from arm_recipes.runtime.tensor_info import TensorInfo
from tests.cortex_m.lowering import Case, Shape, check, check_refused

_F = nn.functional


def _pool(name: str, layer: nn.Module, shape: Shape, *, isa: str = "mve", steps: int = 1, kernels: str = "") -> Case:
    return Case(name, layer, [shape], isa=isa, steps=steps, kernels=kernels)


POOLS = [
    _pool("max 2", nn.MaxPool2d(2), (1, 3, 6, 5), kernels="1 quantized_max_pool2d_nhwc"),
    _pool("max 3 s2 p1", nn.MaxPool2d(3, 2, 1), (2, 3, 7, 6)),
    _pool("max 2x3", nn.MaxPool2d((2, 3), (1, 2), (1, 0)), (1, 3, 6, 7)),
    _pool("max ceil", nn.MaxPool2d(2, ceil_mode=True), (1, 3, 7, 5)),
    _pool("max ceil p1", nn.MaxPool2d(3, 2, 1, ceil_mode=True), (1, 3, 6, 8)),
    _pool("max ceil whole", nn.MaxPool2d(2, ceil_mode=True), (1, 3, 6, 4), kernels="0 pad"),
    _pool("max ceil dropped", nn.MaxPool2d(2, 3, 1, ceil_mode=True), (1, 3, 5, 6)),
    _pool("max one channel ceil", nn.MaxPool2d(3, 2, ceil_mode=True), (1, 1, 6, 8)),
    _pool("max 1x1 stride", nn.MaxPool2d(1, 2), (1, 3, 6, 8)),
    _pool("max 1d", nn.MaxPool1d(3, 2, 1), (2, 3, 9)),
    _pool("max 1d ceil", nn.MaxPool1d(2, ceil_mode=True), (1, 3, 9)),
    _pool("max unbatched", nn.MaxPool2d(2), (3, 6, 5)),
    _pool("max 1d unbatched", nn.MaxPool1d(2), (3, 6)),
    _pool("max relu", nn.Sequential(nn.MaxPool2d(2), nn.ReLU()), (1, 3, 6, 5)),
    _pool("relu max", nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), (1, 3, 6, 5)),
    _pool("average 2", nn.AvgPool2d(2), (1, 3, 6, 5)),
    _pool("average 3 s2 p1", nn.AvgPool2d(3, 2, 1), (2, 3, 7, 6)),
    _pool("average 3 p1 exclude", nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 3, 7, 6)),
    _pool("average exclude, batch", nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 3, 7, 6)),
    _pool("average ceil", nn.AvgPool2d(2, ceil_mode=True), (1, 3, 7, 5)),
    _pool("average ceil exclude", nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 3, 6, 8)),
    _pool("average ceil whole", nn.AvgPool2d(2, ceil_mode=True), (1, 3, 6, 4)),
    _pool("average divisor", nn.AvgPool2d(2, divisor_override=3), (1, 3, 6, 4)),
    _pool("average batch", nn.AvgPool2d(2), (2, 3, 6, 5)),
    _pool("average 1d", nn.AvgPool1d(3, 2, 1), (1, 3, 9)),
    _pool("average 1d batch", nn.AvgPool1d(4), (2, 3, 9)),
    _pool("average 1d exclude", nn.AvgPool1d(3, 2, 1, count_include_pad=False), (1, 3, 9)),
    _pool("average unbatched", nn.AvgPool2d(2), (3, 6, 5)),
    _pool("average 2x1", nn.AvgPool2d((2, 1), (1, 1)), (1, 3, 6, 5)),
    _pool("average one channel", nn.AvgPool2d(2), (1, 1, 6, 5)),
    _pool("average one channel p1", nn.AvgPool2d(3, 1, 1), (1, 1, 6, 5)),
    # One step of the average, whose scale is larger than that of its positive part.
    _pool("average relu", nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), (1, 3, 6, 5), steps=4),
    _pool("adaptive 1", nn.AdaptiveAvgPool2d(1), (1, 3, 5, 4)),
    _pool("adaptive 1 batch", nn.AdaptiveAvgPool2d(1), (2, 3, 5, 4)),
    _pool("adaptive 2x3", nn.AdaptiveAvgPool2d((2, 3)), (1, 3, 4, 6)),
    _pool("adaptive None", nn.AdaptiveAvgPool2d((None, 1)), (1, 3, 5, 4)),
    _pool("adaptive 1d", nn.AdaptiveAvgPool1d(2), (2, 3, 6)),
    _pool("adaptive max", nn.AdaptiveMaxPool2d(1), (1, 3, 5, 4)),
    _pool("adaptive max 2", nn.AdaptiveMaxPool2d(2), (1, 3, 4, 4)),
    _pool("adaptive max 1d", nn.AdaptiveMaxPool1d(1), (1, 3, 5)),
    *(_pool(f"max on {isa}", nn.MaxPool2d(3, 2, 1), (1, 3, 7, 6), isa=isa) for isa in ("dsp", "scalar")),
    *(_pool(f"average on {isa}", nn.AvgPool2d(3, 2), (1, 3, 7, 6), isa=isa) for isa in ("dsp", "scalar")),
    _pool("global max", nn.MaxPool2d((5, 4)), (1, 3, 5, 4)),
    _pool("lp pool", nn.LPPool2d(2, 2), (1, 3, 4, 4)),
    _pool("max 3d", nn.MaxPool3d(2), (1, 3, 4, 6, 5), kernels="2 quantized_max_pool2d_nhwc"),
    _pool("max 3d ceil", nn.MaxPool3d(3, 2, 1, ceil_mode=True), (2, 2, 4, 5, 6)),
    _pool("max 3d of planes", nn.MaxPool3d((1, 2, 2)), (1, 3, 4, 6, 5), kernels="1 quantized_max_pool2d_nhwc"),
    _pool("average 3d", nn.AvgPool3d(2), (1, 3, 4, 6, 5), steps=2),
    _pool("average 3d p1", nn.AvgPool3d(3, 2, 1), (1, 3, 5, 6, 5), steps=2),
    _pool("adaptive 3d", nn.AdaptiveAvgPool3d(1), (1, 3, 4, 6, 5), steps=2),
    Case(
        "max 3d of a convolution",
        nn.Sequential(nn.Conv3d(2, 4, 3), nn.MaxPool3d(2)),
        [(1, 2, 6, 7, 6)],
        kernels="2 transpose, 2 quantized_max_pool2d_nhwc",
    ),
    Case("max of a convolution", nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2)), [(1, 2, 7, 6)]),
    Case("average of a convolution", nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2)), [(1, 2, 7, 6)]),
    Case("max, channels last", nn.MaxPool2d(2), [(1, 3, 6, 5)], channels_last=True),
]

_SHAPE = (2, 3, 4, 5)
_DIMS = list(chain.from_iterable(combinations(range(4), n) for n in (1, 2, 3, 4)))
REDUCTIONS = [
    *(Case(f"mean {dims}", lambda x, dims=dims: x.mean(dims), [_SHAPE]) for dims in _DIMS),
    *(Case(f"sum {dims}", lambda x, dims=dims: x.sum(dims), [_SHAPE]) for dims in _DIMS),
    *(Case(f"mean {dims} kept", lambda x, dims=dims: x.mean(dims, keepdim=True), [_SHAPE]) for dims in _DIMS[::3]),
    *(Case(f"sum {dims} kept", lambda x, dims=dims: x.sum(dims, keepdim=True), [_SHAPE]) for dims in _DIMS[::3]),
    *(
        Case(
            f"mean {dims} of conv",
            lambda x, dims=dims: _F.conv2d(x, torch.eye(3)[:, :, None, None]).mean(dims),
            [_SHAPE],
        )
        for dims in _DIMS[::2]
    ),
    Case("mean of all", torch.mean, [_SHAPE]),
    Case("sum of all", torch.sum, [_SHAPE]),
    Case("mean rank 1", lambda x: x.mean(0), [(7,)]),
    Case("mean of one", lambda x: x.mean(1), [(3, 1)]),
    Case("mean rank 0", lambda x: x.mean(), [()]),
    Case("mean negative", lambda x: x.mean(-1), [(2, 3, 1)]),
    Case("mean rank 5", lambda x: x.mean((1, 3)), [(2, 3, 2, 2, 3)]),
    Case("mean of 3000", lambda x: x.mean(1), [(2, 3000)]),
    Case("sum of 3000", lambda x: x.sum(1), [(2, 3000)]),
    Case("mean relu", lambda x: x.mean(1).relu(), [(3, 4)]),
    Case("mean of relu", lambda x: x.relu().mean(1), [(3, 4)]),
    Case("mean positive", lambda x: x.mean((2, 3)), [_SHAPE], low=1.0),
    Case("mean times number", lambda x: x.mean(1) * 4, [(3, 4)]),
    Case("norm", lambda x: torch.linalg.vector_norm(x, dim=1), [(3, 8)]),
    *(Case(f"sum on {isa}", lambda x: x.sum(1), [(2, 3, 4)], isa=isa) for isa in ("dsp", "scalar")),
]

_RANKS = {1: (7,), 2: (3, 7), 3: (2, 3, 5), 4: (2, 3, 4, 5), 5: (2, 1, 3, 2, 4)}
SOFTMAX = [
    *(Case(f"softmax rank {rank} dim {dim}", lambda x, dim=dim: x.softmax(dim), [shape])
      for rank, shape in _RANKS.items() for dim in (*range(rank), -1)),
    Case("softmax wide range", lambda x: (x * 20).softmax(1), [(2, 9)]),
    Case("softmax narrow range", lambda x: (x / 50).softmax(1), [(2, 9)]),
    Case("softmax of one", lambda x: x.softmax(1), [(2, 1)]),
    Case("softmax of 511", lambda x: x.softmax(1), [(2, 511)]),
    Case("softmax of 512", lambda x: x.softmax(1), [(2, 512)]),
    *(Case(f"softmax on {isa}", lambda x: x.softmax(1), [(2, 9)], isa=isa) for isa in ("dsp", "scalar")),
    Case("softmax scaled", lambda x: x.softmax(1) * 5, [(2, 9)]),
    Case("softmin", lambda x: _F.softmin(x, 1), [(2, 9)]),
    Case("softmax of conv", lambda x: _F.conv2d(x, torch.eye(3)[:, :, None, None]).softmax(1), [_SHAPE]),
    Case("softmax, products", lambda x, y: (x @ y.mT).softmax(-1) @ y, [(2, 3, 4), (2, 5, 4)], steps=3),
    Case("gumbel-like", lambda x: torch.sigmoid(x).softmax(-1), [(3, 5)]),
]  # fmt: skip


@pytest.mark.parametrize("case", [*POOLS, *REDUCTIONS, *SOFTMAX], ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    check(case)


REFUSALS = {
    "dilation": (Case("", nn.MaxPool2d(2, dilation=2), [(1, 3, 6, 8)]), "the pooling kernels have no dilation"),
    "windows of several sizes": (
        Case("", nn.AdaptiveAvgPool2d((2, 3)), [(1, 3, 5, 7)]),
        "the windows of adaptive pooling have different sizes",
    ),
    "ceil_mode and padding that counts": (
        Case("", nn.AvgPool2d(3, 2, 1, ceil_mode=True), [(1, 3, 6, 8)]),
        "with ceil_mode, the kernels compute only averages that exclude padding",
    ),
    "softmax of a scalar": (Case("", lambda x: x.softmax(0), [()]), "a tensor without dimensions"),
    "sum of a scalar": (Case("", lambda x: x.sum(-1), [()]), "a tensor without dimensions"),
    "long rows": (Case("", lambda x: x.softmax(1), [(2, 513)]), "nearly uniform rows of 513 elements"),
    "long rows without MVE": (Case("", lambda x: x.softmax(1), [(2, 512)], isa="dsp"), "rows up to 511 are exact"),
    "very long rows": (Case("", lambda x: x.softmax(1), [(1, 5000)]), "rows have at most 4095 elements"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check_refused(*REFUSALS[name])


def test_sums_over_windows_of_a_batch() -> None:
    """The depthwise kernel refuses batches, so another kernel computes them."""
    case = Case("average", nn.AvgPool2d(3, 2, 1), [(2, 3, 7, 6)], kernels="1 quantized_conv2d_nhwc")
    check(case).check_executorch_run(case.sample())


class _Reduced(nn.Module):
    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._reduce = nn.Conv2d(3, 8, 3, padding=1), reduce

    def forward(self, x: Tensor) -> Tensor:
        return self._reduce(torch.relu(self.layer(x)))


def _export(reduce: Callable[[Tensor], Tensor], size: int) -> tuple[nn.Module, ExportResult, Tensor]:
    torch.manual_seed(0)
    model = _Reduced(reduce).eval()
    x = torch.randn(1, 3, size, size)
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, quantized_io=True)
    return model, export(model, recipe, [(x,), (-x,)]), x


def _kernels(result: ExportResult) -> list[str]:
    return [call.kernel for call in result.report.methods[0].kernels]


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.sum((2, 3)),
        lambda x: x.mean(-1),
        nn.AdaptiveAvgPool2d(1),
        nn.AvgPool2d(16),
        lambda x: x.mean((2, 3)).clamp(0.1, 0.3),
    ],
    ids=["mean", "sum", "rows", "adaptive", "pool", "clamp"],
)
def test_reductions_of_whole_dimensions(reduce: Callable[[Tensor], Tensor]) -> None:
    model, result, x = _export(reduce, 16)
    assert "quantized_depthwise_conv2d_nhwc" not in _kernels(result)
    [source], [target] = result.inputs, result.outputs
    real = _to_real(result.run(source.quantize(x)), target)
    assert target.scale is not None
    expected = model(_to_real(source.quantize(x), source))
    noise = (real - expected).abs().max() / expected.abs().max()
    assert noise < 0.02


def test_memory_of_a_large_mean() -> None:
    # A depthwise convolution with weights of 1 had 496 scratch bytes for each pixel, and 8 weights.
    _, result, _ = _export(lambda x: x.mean((2, 3)), 64)
    [call] = [call for call in result.report.methods[0].kernels if call.kernel == "quantized_batch_matmul"]
    assert call.scratch_bytes == 4 * 8
    assert len(result.buffer) < 3 * 64 * 64 + 8 * 1024


def _to_real(x: Tensor, info: TensorInfo) -> Tensor:
    assert info.scale is not None
    assert info.zero_point is not None
    return (x.float() - info.zero_point) * info.scale
