"""Norm fusion: decomposed norms and log-softmaxes become composite operators, which keep their precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes.stages.quantize import recipe_algorithms
from tests.small_models import Samples
from tests.sqnr import sqnr

INT8, U55, U85 = ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


class DecomposedNorm(nn.Module):
    """A decomposed RMS norm, as in language models, or layer norm between two linear layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).to(torch.float32)
        x = x * torch.tensor([[1.0], [0.01]])  # a row that is small beside the other
        if self.how == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.how == "var":
            y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()
        elif self.how == "channels":  # the mean is taken twice
            x = x.transpose(1, 2)
            square = (x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True)
            y = ((x - x.mean(1, keepdim=True)) / (square + 1e-6) ** 0.5).transpose(1, 2)
        elif self.how == "var_mean":
            var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            y = (x - mean) * torch.reciprocal(torch.sqrt(var + 1e-6))
        elif self.how == "divided":
            y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        else:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.last(self.weight * y.to(torch.float32) if self.how != "unweighted" else y)


@pytest.mark.parametrize(
    ("how", "target"),
    [
        ("weighted", torch.ops.aten.rms_norm.default),
        ("unweighted", torch.ops.aten.rms_norm.default),
        ("divided", torch.ops.aten.rms_norm.default),
        ("centred", torch.ops.aten.layer_norm.default),
        ("var", torch.ops.aten.layer_norm.default),
        ("channels", torch.ops.aten.layer_norm.default),
        ("var_mean", torch.ops.aten.layer_norm.default),
    ],
)
def test_decomposed_norms_are_fused_and_keep_precision(how: str, target: Any) -> None:
    torch.manual_seed(0)
    samples: Samples = [(torch.randn(1, 2, 16),) for _ in range(8)]
    model = DecomposedNorm(how).eval()
    with torch.no_grad():
        expected = model(*samples[-1])[:, 1]
    found = {}
    for algorithms in ([], ["fused_norms", "fused_rms_norms"]):
        result = export(model, ExportRecipe.get_recipe(INT8, algorithms=algorithms), samples[:-1])
        found[len(algorithms)] = sqnr(expected, result.run(*samples[-1])[:, 1])
    targets = [node.target for node in result.exported_programs["forward"].graph.nodes]
    assert target in targets
    assert not {torch.ops.aten.mean.dim, torch.ops.aten.var.correction} & set(targets)
    assert found[2] > max(found[0] + 10, 30)


@pytest.mark.parametrize("recipe", [INT8, U85])
def test_log_of_softmax_is_fused_and_keeps_precision(recipe: ArmRecipeType) -> None:
    """An int8 softmax would be 0 for most operands of the logarithm."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.softmax(x, dim=-1))

    torch.manual_seed(0)
    samples: Samples = [(4 * torch.randn(1, 50),) for _ in range(8)]
    result = export(Model().eval(), ExportRecipe.get_recipe(recipe), samples[:-1])
    assert sqnr(torch.log_softmax(samples[-1][0], -1), result.run(*samples[-1])) > 35


@pytest.mark.parametrize("recipe", [INT8, U55, U85, ArmRecipeType.VGF_INT8])
def test_rms_norm_fusion_is_off_by_default_on_ethos_u(recipe: ArmRecipeType) -> None:
    found: dict[bool, Any] = {}
    for named in (True, False):
        quantization = ExportRecipe.get_recipe(
            recipe, algorithms=["fused_rms_norms"] if named else True
        ).quantization_recipe
        assert quantization is not None
        found[named] = recipe_algorithms(quantization)
    default = found[False]
    assert found[True] == ("fused_rms_norms",)
    assert ("fused_rms_norms" in default) is (recipe not in (U55, U85))
    assert {"bias_correction", "fused_norms"} <= set(default)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, y: x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),  # the norm of another tensor
        lambda x, y: x * torch.rsqrt((x - x.mean(1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, y: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1.0),
        lambda x, y: (x - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1.0),
        lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + y[..., :1]),  # eps is no number
        lambda x, y: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_similar_expressions_that_are_not_norms_are_not_fused(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return norm(x, y)

    samples: Samples = [(torch.rand(1, 2, 16) + 1, torch.rand(1, 2, 16) + 1) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(INT8), samples)
    targets = {node.target for node in result.exported_programs["forward"].graph.nodes}
    assert not targets & {torch.ops.aten.rms_norm.default, torch.ops.aten.layer_norm.default}
    assert sqnr(norm(*samples[0]), result.run(*samples[0])) > 25
