"""Operators on rows of images keep the layout [N, H, W, C]: sub-spectral norms, means over height or width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.dtype import DType
from arm_backend_core.ops.image_layout import is_stored_as_nhwc, to_nchw, to_nhwc
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_recipes import ArmRecipeType, ExportRecipe, export


class _SubSpectralNorm(nn.Module):
    """A batch norm for each of five bands of rows, as BC-ResNet has it, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(30), nn.Conv2d(6, 4, 1)
        for values in (self.norm.running_mean, self.norm.bias):
            assert values is not None
            nn.init.uniform_(values, -0.5, 0.5)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        n, c, h, w = y.shape
        return self.last(self.norm(y.view(n, c * 5, h // 5, w)).view(n, c, h, w))


class _Mean(nn.Module):
    """A mean over height or width between two convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.first, self.last = dim, nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).mean(self.dim, keepdim=True))


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
@pytest.mark.parametrize("model", [_SubSpectralNorm(), _Mean(2), _Mean(3)], ids=["norm", "height", "width"])
def test_rows_of_an_image_need_no_transposes(model: nn.Module, kind: ArmRecipeType) -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(2, 3, 20, 9),) for _ in range(4)]
    result = export(model.eval(), ExportRecipe.get_recipe(kind), samples)
    (delegate,) = result.report.methods[0].delegates
    operators = delegate.tosa_operators
    assert operators.count("TRANSPOSE") <= 2, operators  # of the input and of the output
    assert "REDUCE_SUM" not in operators
    assert result.compare(samples[:2], layers=False).sqnr > (30 if kind is ArmRecipeType.TOSA_INT8 else 45)


def test_is_image() -> None:
    b = LegalizingBuilder(Graph(), Target.from_tosa_spec("TOSA-1.0+INT"))
    plain = b.graph.add_input((1, 6, 20, 9), DType.INT8, "plain")
    image = to_nchw(b, b.max_pool2d(to_nhwc(b, plain), (3, 3), (1, 1), (1, 1, 1, 1)))
    view = b.reshape(image, (1, 30, 4, 9))
    assert not is_stored_as_nhwc(plain)
    assert is_stored_as_nhwc(image)
    assert not is_stored_as_nhwc(view)
    assert is_stored_as_nhwc(b.narrow(image, 1, 0, 3))
    assert is_stored_as_nhwc(b.reshape(view, image.shape))
