"""Quantized inputs: an input with several scales gets the finest one; int8 inputs can be uint8."""

from __future__ import annotations

import warnings

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

import arm_recipes
from arm_backend_core.aten.input_scales import quantize_inputs_as_uint8, quantize_inputs_once
from arm_recipes import ArmRecipeType
from tests.sqnr import sqnr
from tests.verify_only import mark_verify

Q = torch.ops.quantized_decomposed.quantize_per_tensor.default
DQ = torch.ops.quantized_decomposed.dequantize_per_tensor.default


class Joined(nn.Module):
    """An input that is concatenated with features of 20 times its range; ``first``: the input is the first operand."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 4, 3, padding=1), first

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu() * 20
        return torch.as_tensor(self.b(torch.cat([x, y] if self.first else [y, x], 1)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("recipe", ["TOSA_INT8", *mark_verify(["TOSA_A16W8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8"])])
@torch.no_grad()
def test_an_input_of_a_convolution_and_a_concatenation_is_quantized(recipe: str, first: bool) -> None:
    model = Joined(first).eval()
    samples = [(torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),) for seed in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", arm_recipes.ArmRecipesWarning)
        result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe], quantized_io=True), samples)
    (method,) = result.report.methods
    assert not method.boundary
    (x,) = method.inputs
    assert x.dtype == ("int16" if "A16" in recipe else "int8")
    assert x.scale is not None
    assert x.scale < 1.1 / (1 << (14 if "A16" in recipe else 8))
    assert len(method.delegates) == 1
    outputs = [method.outputs[0].dequantize(result.run(x.quantize(*sample))) for sample in samples]
    assert sqnr([model(*sample) for sample in samples], outputs) > 37


class Scaled(nn.Module):
    """Quantizes its input with each scale; with ``plain``, it also reads the input in float."""

    def __init__(self, *scales: float, plain: bool = False) -> None:
        super().__init__()
        self.scales, self.plain = scales, plain

    def forward(self, x: Tensor) -> Tensor:
        parts = [DQ(Q(x, scale, 0, -128, 127, torch.int8), scale, 0, -128, 127, torch.int8) for scale in self.scales]
        return torch.stack([*parts, x] if self.plain else parts)


@pytest.mark.parametrize(
    ("model", "scales"),
    [
        (Scaled(0.5, 0.25, 0.5, 1.0), [0.25]),
        (Scaled(0.5, 0.5), [0.5, 0.5]),
        (Scaled(0.5, 0.25, plain=True), [0.5, 0.25]),
    ],
)
def test_the_finest_scale_is_that_of_the_input(model: Scaled, scales: list[float]) -> None:
    x = torch.linspace(-20, 20, 64)
    program = torch.export.export(model, (x,))
    result = quantize_inputs_once("forward", program)
    (node,) = [node for node in result.graph.nodes if node.op == "placeholder"]
    assert [user.args[1] for user in node.users if user.target is Q] == scales
    assert (result is program) is (len(scales) > 1)
    result.graph.lint()
    assert (result.module()(x) - program.module()(x)).abs().max() <= 1


def test_an_int8_input_becomes_uint8() -> None:
    x = torch.linspace(-20, 20, 64)
    program = torch.export.export(Scaled(0.25, 0.25), (x,))
    result = quantize_inputs_as_uint8("forward", program)
    (node,) = [node for node in result.graph.nodes if node.op == "placeholder"]
    (quantize,) = node.users
    assert quantize.args[1:] == (0.25, 128, 0, 255, torch.uint8)
    assert quantize.meta["val"].dtype is torch.uint8
    result.graph.lint()
    assert torch.equal(result.module()(x), program.module()(x))


class MutatedInput(nn.Module):
    """Quantizes its input and mutates it."""

    def forward(self, x: Tensor) -> Tensor:
        y = DQ(Q(x, 0.5, 0, -128, 127, torch.int8), 0.5, 0, -128, 127, torch.int8)
        x.copy_(y)
        return y


class Int16Input(nn.Module):
    """Quantizes its input to int16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(DQ(Q(x, 0.5, 0, -32768, 32767, torch.int16), 0.5, 0, -32768, 32767, torch.int16))


@pytest.mark.parametrize("model", [Scaled(0.5, 0.25), Scaled(0.5, plain=True), Int16Input(), MutatedInput()])
def test_other_inputs_are_left_as_they_are(model: nn.Module) -> None:
    program = torch.export.export(model, (torch.linspace(-20, 20, 64),)).run_decompositions({})
    assert quantize_inputs_as_uint8("forward", program) is program
