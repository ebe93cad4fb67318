"""What recipes do beyond rounding to the ranges that calibration shows; biases are in test_precisions.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.nodes import is_dequantize
from arm_backend_core.quantization import get_symmetric_quantization_config
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from arm_recipes.stages.quantize import algorithms_of

INT8, U55, U85 = ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
Samples = list[tuple[Tensor, ...]]


def _sqnr(expected: Tensor, found: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (expected - found).square().sum()))


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
        found[len(algorithms)] = _sqnr(expected, result.run(*samples[-1]))
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
        assert _sqnr(one, other) > 30


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
    assert _sqnr(expected - expected.mean(), found - expected.mean()) > 15


class Written(nn.Module):
    """A norm written out as models of language have it, or as a layer norm, between a layer and what reads it."""

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
def test_norms_that_are_written_out_keep_precision(how: str, target: Any) -> None:
    torch.manual_seed(0)
    samples: Samples = [(torch.randn(1, 2, 16),) for _ in range(8)]
    model = Written(how).eval()
    with torch.no_grad():
        expected = model(*samples[-1])[:, 1]
    found = {}
    for algorithms in ([], ["fused_norms", "fused_rms_norms"]):
        result = export(model, ExportRecipe.get_recipe(INT8, algorithms=algorithms), samples[:-1])
        found[len(algorithms)] = _sqnr(expected, result.run(*samples[-1])[:, 1])
    targets = [node.target for node in result.exported_programs["forward"].graph.nodes]
    assert target in targets
    assert not {torch.ops.aten.mean.dim, torch.ops.aten.var.correction} & set(targets)
    assert found[2] > max(found[0] + 10, 30)


@pytest.mark.parametrize("recipe", [INT8, U85])
def test_the_logarithm_of_a_softmax(recipe: ArmRecipeType) -> None:
    """What int8 holds of a softmax is 0 for most of what the logarithm is asked for."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.softmax(x, dim=-1))

    torch.manual_seed(0)
    samples: Samples = [(4 * torch.randn(1, 50),) for _ in range(8)]
    result = export(Model().eval(), ExportRecipe.get_recipe(recipe), samples[:-1])
    assert _sqnr(torch.log_softmax(samples[-1][0], -1), result.run(*samples[-1])) > 35


@pytest.mark.parametrize("recipe", [INT8, U55, U85, ArmRecipeType.VGF_INT8])
def test_what_an_npu_pays_for_is_made_there_where_it_is_named(recipe: ArmRecipeType) -> None:
    found: dict[bool, Any] = {}
    for named in (True, False):
        quantization = ExportRecipe.get_recipe(
            recipe, algorithms=["fused_rms_norms"] if named else True
        ).quantization_recipe
        assert quantization is not None
        found[named] = algorithms_of(quantization)
    usual = found[False]
    assert found[True] == ("fused_rms_norms",)
    assert ("fused_rms_norms" in usual) is (recipe not in (U55, U85))
    assert {"bias_correction", "fused_norms"} <= set(usual)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, y: x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),  # of something else
        lambda x, y: x * torch.rsqrt((x - x.mean(1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, y: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1.0),
        lambda x, y: (x - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1.0),
        lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + y[..., :1]),  # eps is no number
        lambda x, y: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_what_is_no_such_norm_is_left_alone(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return norm(x, y)

    samples: Samples = [(torch.rand(1, 2, 16) + 1, torch.rand(1, 2, 16) + 1) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(INT8), samples)
    targets = {node.target for node in result.exported_programs["forward"].graph.nodes}
    assert not targets & {torch.ops.aten.rms_norm.default, torch.ops.aten.layer_norm.default}
    assert _sqnr(norm(*samples[0]), result.run(*samples[0])) > 25


def test_a_row_of_zeros_stays_one_before_a_norm() -> None:
    """What rounded weights add on average is nothing in a row of zeros (padding), and a norm would make much of it."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.layer(x).reshape(1, 2, 32), dim=-1)

    samples: Samples = [(torch.rand(1, 2, 16) * torch.tensor([[1.0], [0.0]]),) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(INT8), samples)
    assert not result.run(*samples[0])[:, 1].any()


class Sums(nn.Module):
    """Adds constants one after the other: of which some are larger together than each is."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for term in self.terms:
            x = x + term
        return x


@pytest.mark.parametrize(
    ("shapes", "count"), [([(1, 4, 8), (4, 8), (8,)], 1), ([(4, 1), (8,)], 2), ([(4, 1), (8,), (1, 4, 8)], 2)]
)
def test_constants_are_added_before_the_program_runs(shapes: list[tuple[int, ...]], count: int) -> None:
    torch.manual_seed(0)
    model = Sums(*shapes).eval()
    samples: Samples = [(torch.randn(1, 4, 8),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(INT8), samples)
    (delegate,) = result.report.delegates
    assert delegate.tosa_operators.count("ADD") == count
    with torch.no_grad():
        assert _sqnr(model(*samples[0]), result.run(*samples[0])) > 30
