"""Activation precision: finer steps for attention weights, int16 for outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.nodes import is_dequantize
from arm_backend_core.quantization import get_symmetric_quantization_config
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from tests.small_models import Samples
from tests.sqnr import sqnr

INT8, U55, U85 = ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


def _grids(result: ExportResult) -> list[tuple[Any, ...]]:
    """Scale, zero point, least, most and type of each output."""
    outputs = result.exported_programs["forward"].graph.output_node().args[0]
    return [node.args[1:6] for node in outputs if is_dequantize(node)]


class Attention(nn.Module):
    """Over keys of which none stands out; with the weights themselves as another result, if so asked."""

    def __init__(self, told: bool = False) -> None:
        super().__init__()
        self.told = told

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        result = weights.transpose(1, 2).transpose(1, 2) @ v
        return (result, weights) if self.told else result


def _keys(count: int, spread: float, samples: int = 4) -> Samples:
    """q, k and v; v has a mean, lest the result be nothing but noise."""
    generator = torch.Generator().manual_seed(0)
    make = lambda n, s: torch.randn(1, n, 16, generator=generator) * s  # noqa: E731
    return [(make(8, spread), make(count, spread), make(count, 1.0) + 0.5) for _ in range(samples)]


@pytest.mark.parametrize(("recipe", "count", "gain"), [(INT8, 64, 10.0), (U55, 64, 10.0), (U85, 600, 20.0)])
def test_weights_of_many_keys_are_in_finer_steps(recipe: ArmRecipeType, count: int, gain: float) -> None:
    samples = _keys(count, 0.5)
    model = Attention().eval()
    expected = model(*samples[-1])
    found = {}
    for algorithms in (["int16_outputs"], ["int16_attention", "int16_outputs"]):
        result = export(model, ExportRecipe.get_recipe(recipe, algorithms=algorithms), samples[:-1])
        assert not result.report.cpu_operators or recipe is not INT8
        found[len(algorithms)] = sqnr(expected, result.run(*samples[-1]))
    assert found[2] > found[1] + gain
    assert found[2] > 35


@pytest.mark.parametrize(("spread", "least"), [(0.01, 1 / 64 / 255), (4.0, 1 / 255)])
def test_steps_are_neither_finer_than_the_sums_nor_beyond_one(spread: float, least: float) -> None:
    result = export(Attention().eval(), ExportRecipe.get_recipe(INT8), _keys(600, spread))
    softmax = next(node for node in result.exported_programs["forward"].graph.nodes if "softmax" in node.name)
    (quantize,) = softmax.users
    assert quantize.args[1] == pytest.approx(least, rel=1e-6)
    assert quantize.args[2] == -128


def test_weights_that_are_a_result_keep_their_range() -> None:
    result = export(Attention(told=True).eval(), ExportRecipe.get_recipe(INT8), _keys(64, 0.5))
    assert _grids(result)[1] == (1 / 256, -128, -128, 127, torch.int8)


class Ends(nn.Module):
    """A convolution that ends in one of several ways."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


#: The end of a model, and the type of each output.
ENDS: dict[str, tuple[Callable[[Tensor], Any], list[torch.dtype]]] = {
    "sums": (lambda y: y, [torch.int16]),
    "relu": (torch.relu, [torch.int16]),
    "relu6": (nn.functional.relu6, [torch.int16]),
    "scaled": (lambda y: y * 0.5, [torch.int16]),
    "added": (lambda y: y + y.flip(1), [torch.int16]),
    "norm": (nn.LayerNorm(6), [torch.int16]),
    "table": (torch.sigmoid, [torch.int8]),
    "softmax": (lambda y: y.softmax(1), [torch.int8]),
    "moved": (lambda y: y.flip(1), [torch.int8]),
    "read too": (lambda y: (y, y.flip(1)), [torch.int8, torch.int8]),
    "twice": (lambda y: (y, y), [torch.int16, torch.int16]),
}


@pytest.mark.parametrize("name", ENDS)
def test_results_that_become_float_are_int16_where_sums_give_them(name: str) -> None:
    torch.manual_seed(0)
    end, types = ENDS[name]
    samples: Samples = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    model = Ends(end).eval()
    result = export(model, ExportRecipe.get_recipe(U55), samples)
    assert [grid[4] for grid in _grids(result)] == types
    with torch.no_grad():
        expected, found = model(*samples[0]), result.run(*samples[0])
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
        assert sqnr(one, other) > 30


@pytest.mark.parametrize("how", ["quantized_io", "set_io", "algorithms"])
def test_results_are_int8_where_that_is_asked_for(how: str) -> None:
    options = {"quantized_io": {"quantized_io": True}, "algorithms": {"algorithms": False}}.get(how, {})
    recipe = ExportRecipe.get_recipe(INT8, **options)
    if how == "set_io":
        assert recipe.quantization_recipe is not None
        assert recipe.quantization_recipe.quantizers is not None
        recipe.quantization_recipe.quantizers[0].set_io(get_symmetric_quantization_config())
    result = export(Ends(torch.relu).eval(), recipe, [(torch.randn(1, 3, 8, 8),)] * 2)
    assert [grid[4] for grid in _grids(result)] == [torch.int8]


@pytest.mark.parametrize("places", [64, 512])
def test_the_place_that_a_softmax_tells(places: int) -> None:
    """Of many places each has a small part, in steps of 1/256 none."""

    class Place(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.softmax(-1) * torch.arange(float(places))).sum(-1, keepdim=True)

    torch.manual_seed(0)
    samples: Samples = [(torch.randn(4, places),) for _ in range(17)]
    result = export(Place().eval(), ExportRecipe.get_recipe(INT8), samples[:-1])
    expected, found = Place()(*samples[-1]), result.run(*samples[-1])
    assert sqnr(expected - expected.mean(), found - expected.mean()) > 15
