"""Local response normalization as a convolution, a table and a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arm_backend_core.aten.local_response_norm import rewrite_local_response_norms
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.sqnr import sqnr

aten = torch.ops.aten


def _rewrite(model: nn.Module, *inputs: Tensor) -> tuple[torch.fx.GraphModule, set[object]]:
    module = torch.export.export(model.eval(), inputs).module()
    rewrite_local_response_norms(module)
    module.recompile()
    return module, {node.target for node in module.graph.nodes}


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", [(2, 7, 9), (1, 12, 5, 6), (2, 6, 3, 4, 5)])
def test_channels_of_any_rank_are_convolved(shape: tuple[int, ...], size: int) -> None:
    x = torch.randn(*shape)
    norm = nn.LocalResponseNorm(size, alpha=0.5, k=2.0)
    module, targets = _rewrite(norm, x)
    assert aten.conv2d.default in targets
    assert not targets & {aten.avg_pool2d.default, aten.avg_pool3d.default, aten.div.Tensor}
    torch.testing.assert_close(module(x), norm(x))


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_strided_windows_of_channels() -> None:
    x = torch.randn(2, 8, 5, 6)
    pool = _Function(lambda x: F.avg_pool3d(F.pad(x.unsqueeze(1), (0, 0, 0, 0, 1, 2)), (4, 1, 1), (2, 1, 1)).squeeze(1))
    module, targets = _rewrite(pool, x)
    assert aten.conv2d.default in targets
    torch.testing.assert_close(module(x), pool(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x[:, :1], (3, 1), (1, 1)),  # rows of an image with one channel
        lambda x: F.avg_pool3d(F.pad(x.unsqueeze(1), (0, 0, 0, 0, 1, 1), value=1.0), (3, 1, 1), 1),
        lambda x: F.avg_pool3d(F.pad(x.unsqueeze(1), (1, 0, 0, 0, 1, 1)), (3, 1, 1), 1),
        lambda x: F.avg_pool3d(x.unsqueeze(1), (1, 3, 3), 1),
        lambda x: F.avg_pool3d(x.unsqueeze(1), (3, 1, 1), 1, ceil_mode=True),
        lambda x: F.avg_pool3d(x.unsqueeze(1), (1, 1, 1), 1, divisor_override=2),
    ],
)
def test_other_poolings_stay(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 4, 6, 5)
    pool = _Function(function)
    module, targets = _rewrite(pool, x)
    assert aten.conv2d.default not in targets
    torch.testing.assert_close(module(x), pool(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mean: x / (mean * 0.5 + 0.0) ** 0.75,  # the reciprocal of 0 is infinite
        lambda x, mean: x / (mean * -0.5 + 1.0) ** 2,
        lambda x, mean: x / (mean + 1.0) ** -0.75,
        lambda x, mean: x / (x + 1.0) ** 2,
    ],
)
def test_divisions_by_powers_without_a_bound_stay(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, F.avg_pool3d((x * x).unsqueeze(1), (1, 1, 1), 1).squeeze(1))

    x = torch.randn(2, 8, 3, 4)
    module, targets = _rewrite(Model(), x)
    assert aten.div.Tensor in targets
    torch.testing.assert_close(module(x), Model()(x), equal_nan=True)


@pytest.mark.parametrize("recipe", ["ETHOSU_U55_INT8", "ETHOSU_U85_INT8", "TOSA_A16W8", "CORTEX_M_INT8"])
def test_programs_are_whole_and_right(recipe: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5, alpha=0.1)).eval()
    samples = [(torch.randn(1, 3, 12, 12),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), samples)
    assert not result.report.cpu_operators or recipe.startswith("CORTEX")
    for delegate in result.report.delegates:
        assert delegate.vela is None or delegate.vela.sram_bytes < 64 * 1024
    (x,) = samples[0]
    assert sqnr(model(x).detach(), result.run(x)) > 34
