"""Means and sums: the kernels that compute them, their memory, and their error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from arm_recipes.runtime.tensor_info import TensorInfo


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
def test_whole_dimensions(reduce: Callable[[Tensor], Tensor]) -> None:
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
