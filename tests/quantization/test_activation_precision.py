"""Activation precision: finer scales of attention weights, int16 outputs."""

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


def _output_parameters(result: ExportResult) -> list[tuple[Any, ...]]:
    """Scale, zero point, minimum, maximum and dtype of each output."""
    outputs = result.exported_programs["forward"].graph.output_node().args[0]
    return [node.args[1:6] for node in outputs if is_dequantize(node)]


class Attention(nn.Module):
    """Attention that also returns its weights if ``returns_weights``."""

    def __init__(self, returns_weights: bool = False) -> None:
        super().__init__()
        self.returns_weights = returns_weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        result = weights.transpose(1, 2).transpose(1, 2) @ v
        return (result, weights) if self.returns_weights else result


def _attention_samples(count: int, spread: float, samples: int = 4) -> Samples:
    """q, k and v. The mean of v is not 0, so that the result is more than noise."""
    generator = torch.Generator().manual_seed(0)
    make = lambda n, s: torch.randn(1, n, 16, generator=generator) * s  # noqa: E731
    return [(make(8, spread), make(count, spread), make(count, 1.0) + 0.5) for _ in range(samples)]


@pytest.mark.parametrize(("recipe", "count", "gain"), [(INT8, 64, 10.0), (U55, 64, 10.0), (U85, 600, 20.0)])
def test_attention_weights_of_many_keys_have_finer_scales(recipe: ArmRecipeType, count: int, gain: float) -> None:
    samples = _attention_samples(count, 0.5)
    model = Attention().eval()
    expected = model(*samples[-1])
    found = {}
    for algorithms in (["int16_outputs"], ["attention_scales", "int16_outputs"]):
        result = export(model, ExportRecipe.get_recipe(recipe, algorithms=algorithms), samples[:-1])
        assert not result.report.cpu_operators or recipe is not INT8
        found[len(algorithms)] = sqnr(expected, result.run(*samples[-1]))
    assert found[2] > found[1] + gain
    assert found[2] > 35


@pytest.mark.parametrize(("spread", "scale"), [(0.01, 1 / 64 / 255), (4.0, 1 / 255)])
def test_scale_of_attention_weights_has_a_lower_and_an_upper_bound(spread: float, scale: float) -> None:
    result = export(Attention().eval(), ExportRecipe.get_recipe(INT8), _attention_samples(600, spread))
    softmax = next(node for node in result.exported_programs["forward"].graph.nodes if "softmax" in node.name)
    (quantize,) = softmax.users
    assert quantize.args[1] == pytest.approx(scale, rel=1e-6)
    assert quantize.args[2] == -128


def test_attention_weights_that_are_returned_keep_their_scale() -> None:
    result = export(Attention(returns_weights=True).eval(), ExportRecipe.get_recipe(INT8), _attention_samples(64, 0.5))
    assert _output_parameters(result)[1] == (1 / 256, -128, -128, 127, torch.int8)


class Ends(nn.Module):
    """A convolution, then the function ``end``."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


#: The end of a model, and the type of each output.
ENDS: dict[str, tuple[Callable[[Tensor], Any], list[torch.dtype]]] = {
    "accumulator": (lambda y: y, [torch.int16]),
    "relu": (torch.relu, [torch.int16]),
    "relu6": (nn.functional.relu6, [torch.int16]),
    "scaled": (lambda y: y * 0.5, [torch.int16]),
    "added": (lambda y: y + y.flip(1), [torch.int16]),
    "norm": (nn.LayerNorm(6), [torch.int16]),
    "table": (torch.sigmoid, [torch.int8]),
    "softmax": (lambda y: y.softmax(1), [torch.int8]),
    "moved": (lambda y: y.flip(1), [torch.int8]),
    "also read": (lambda y: (y, y.flip(1)), [torch.int8, torch.int8]),
    "twice": (lambda y: (y, y), [torch.int16, torch.int16]),
}


@pytest.mark.parametrize("name", ENDS)
def test_float_outputs_of_accumulators_are_int16(name: str) -> None:
    torch.manual_seed(0)
    end, types = ENDS[name]
    samples: Samples = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    model = Ends(end).eval()
    result = export(model, ExportRecipe.get_recipe(U55), samples)
    assert [parameters[4] for parameters in _output_parameters(result)] == types
    with torch.no_grad():
        expected, found = model(*samples[0]), result.run(*samples[0])
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
        assert sqnr(one, other) > 30


@pytest.mark.parametrize("how", ["quantized_io", "set_io", "algorithms"])
def test_outputs_are_int8_if_an_option_says_so(how: str) -> None:
    options = {"quantized_io": {"quantized_io": True}, "algorithms": {"algorithms": False}}.get(how, {})
    recipe = ExportRecipe.get_recipe(INT8, **options)
    if how == "set_io":
        assert recipe.quantization_recipe is not None
        assert recipe.quantization_recipe.quantizers is not None
        recipe.quantization_recipe.quantizers[0].set_io(get_symmetric_quantization_config())
    result = export(Ends(torch.relu).eval(), recipe, [(torch.randn(1, 3, 8, 8),)] * 2)
    assert [parameters[4] for parameters in _output_parameters(result)] == [torch.int8]


@pytest.mark.parametrize("positions", [64, 512])
def test_soft_argmax_over_many_positions(positions: int) -> None:
    """With many positions, most weights are small; in steps of 1/256 they would be 0."""

    class SoftArgmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.softmax(-1) * torch.arange(float(positions))).sum(-1, keepdim=True)

    torch.manual_seed(0)
    samples: Samples = [(torch.randn(4, positions),) for _ in range(17)]
    result = export(SoftArgmax().eval(), ExportRecipe.get_recipe(INT8), samples[:-1])
    expected, found = SoftArgmax()(*samples[-1]), result.run(*samples[-1])
    assert sqnr(expected - expected.mean(), found - expected.mean()) > 15
