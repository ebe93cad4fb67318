"""Operators for which no CPU kernel exists, or whose kernel would fail, are found at export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.export import export as executorch_export
from torch import Tensor, nn

from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, RunError, export
from arm_recipes._internal.errors import NotRunnableError
from arm_recipes.stages.edge.check_kernels import CheckRunnable, find_not_runnable
from tests.small_models import Small, Sorting, images, vectors

FP, INT8 = ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8
Q, DQ = torch.ops.quantized_decomposed.quantize_per_tensor, torch.ops.quantized_decomposed.dequantize_per_tensor


class Neighbour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nextafter(x + 1, x) * 2


def _recipe(kind: ArmRecipeType, **options: Any) -> ExportRecipe:
    return ExportRecipe.get_recipe(kind, **options)


@pytest.mark.parametrize("recipe", [FP, INT8, ArmRecipeType.ETHOSU_U55_INT8], ids=lambda recipe: recipe.name)
def test_a_missing_kernel_is_warned_about_and_reported(recipe: ArmRecipeType) -> None:
    with pytest.warns(
        ArmRecipesWarning, match=r"'forward' will not run: (.|\n)*aten\.nextafter\.default \(.*test_check_kernels"
    ):
        result = export(Neighbour().eval(), _recipe(recipe), vectors())
    (method,) = result.report.methods
    (found,) = method.not_runnable
    assert found.operator == "aten.nextafter.default"
    assert found.reason.startswith("no kernel aten::nextafter.out: use another operator, or link")
    assert any("test_check_kernels.py" in source for source in found.sources)
    assert "Operators without a CPU kernel\n  1 x aten.nextafter.default  no kernel" in str(result.report)
    assert result.report.to_dict()["methods"][0]["not_runnable"][0]["operator"] == "aten.nextafter.default"
    if recipe is FP:
        with pytest.raises(RunError, match=r"aten::nextafter\.out"):
            result.run(*vectors(1)[0])


def test_require_runnable_raises_or_silences_the_warning() -> None:
    for attempt in (
        lambda: export(Neighbour().eval(), _recipe(FP, require_runnable=True), vectors()),
        lambda: executorch_export(Neighbour().eval(), vectors(), _recipe(FP, require_runnable=True)),
    ):
        with pytest.raises(
            NotRunnableError, match=r"require_runnable: 'forward' will not run(.|\n)*aten\.nextafter\.default"
        ):
            attempt()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArmRecipesWarning)
        silent = export(Neighbour().eval(), _recipe(FP, require_runnable=False), vectors())
        assert silent.report.methods[0].not_runnable
        for model, samples in ((Small(), images()), (Sorting(), vectors())):
            for recipe in (FP, INT8, ArmRecipeType.VGF_INT8):
                result = export(model.eval(), _recipe(recipe, require_runnable=True), samples)
                assert result.report.methods[0].not_runnable == ()


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _per_channel(scale_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        scales, zeros = torch.ones(4, dtype=scale_dtype), torch.zeros(4, dtype=torch.int64)
        return torch.ops.quantized_decomposed.quantize_per_channel(x, scales, zeros, 0, -128, 127, torch.int8)

    return function


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: Q(x, float("inf"), 0, -128, 127, torch.int8), "its scale is inf: calibrate with"),
        (lambda x: Q(x, 0.0, 0, -128, 127, torch.int8), "its scale is 0.0"),
        (lambda x: DQ(x.to(torch.int8), 1e-310, 0, -128, 127, torch.int8), "its scale is 1e-310"),
        (lambda x: Q(x.bfloat16(), 0.5, 0, -128, 127, torch.int8), "its kernel does not support bfloat16: convert to"),
        (
            lambda x: DQ(x.to(torch.int8), 0.5, 0, -128, 127, torch.int8, out_dtype=torch.bfloat16),
            "its kernel does not support bfloat16: convert to float32",
        ),
        (_per_channel(torch.float32), "its kernel needs float64 scales, these are float32"),
        (lambda x: x.to(torch.uint16) + 1, "its kernel does not support uint16: convert to another type in the model"),
        (torch.sort, "no kernel aten::sort.values"),
        (
            lambda x: torch.conv3d(x.reshape(1, 1, 1, 1, -1), torch.ones(1, 1, 1, 1, 2)),
            "its kernel supports 1D and 2D convolutions only",
        ),
    ],
)
def test_kernels_that_would_fail(function: Callable[[Tensor], Tensor], reason: str) -> None:
    found = find_not_runnable(_graph(function))
    assert found
    assert all(operator.reason.startswith(reason) for operator in found), found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Q(x, 0.5, 0, -128, 127, torch.int8),
        lambda x: Q(x.half(), 0.5, 0, -128, 127, torch.int8),
        _per_channel(torch.float64),
        lambda x: torch.topk(x, 2).values.double() * 2,
        lambda x: x.bfloat16() + 1,
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: x[x > 0] * 2,
        lambda x: x * x.sum().item(),
    ],
)
def test_kernels_that_run(function: Callable[[Tensor], Tensor]) -> None:
    assert find_not_runnable(_graph(function)) == ()


def _graph(function: Callable[[Tensor], Tensor]) -> torch.fx.Graph:
    program = torch.export.export(Function(function), (torch.rand(4, 4),))
    edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert CheckRunnable(False)(edge) == []
    return edge.exported_program().graph
