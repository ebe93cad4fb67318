"""Weights that a program computes from parameters are folded, without a trace of the computation."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm

from arm_backend_core.aten.constant_folding import fold_constant_weights_of_program
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.small_models import Samples, Small

_SAMPLES: Samples = [(torch.linspace(-1, 1, 3 * 36).reshape(1, 3, 6, 6).roll(i),) for i in range(3)]


def _prune(model: Small, remove: bool) -> nn.Module:
    for layer in (model.body[0], model.head):
        prune.l1_unstructured(layer, "weight", 0.5)
        if remove:
            prune.remove(layer, "weight")
    return model.eval()


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.CORTEX_M_INT8])
def test_a_program_does_not_depend_on_prune_remove(recipe: ArmRecipeType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, removed = (
            export(_prune(Small(), remove), ExportRecipe.get_recipe(recipe), _SAMPLES) for remove in (False, True)
        )
    assert len(kept.buffer) == len(removed.buffer)
    assert torch.equal(kept.run(*_SAMPLES[0]), removed.run(*_SAMPLES[0]))
    names = [str(spec.target) for spec in kept.exported_programs["forward"].graph_signature.input_specs]
    assert recipe is ArmRecipeType.TOSA_FP or not any("mask" in name for name in names)


def test_a_captured_pruned_model() -> None:
    program = torch.export.export(_prune(Small(), False), _SAMPLES[0])
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    results = [export(model, recipe, _SAMPLES).buffer for model in (program, _prune(Small(), True))]
    assert len(results[0]) == len(results[1])


def test_weight_norm_is_folded_before_equalization() -> None:
    """The normalized weights are equalized as other weights are."""

    def build(fold: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            first.weight[::2] *= 100
        return nn.Sequential(fold(first), nn.ReLU(), second).eval()

    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about weight_norm
        plain, normalized = (export(build(fold), recipe, _SAMPLES) for fold in (lambda x: x, weight_norm))
    figures = [result.report.methods[0].quantization for result in (plain, normalized)]
    assert all(figure is not None for figure in figures)
    (first_sqnr,), (second_sqnr,) = (list(figure.sqnr.values()) for figure in figures if figure is not None)
    assert abs(first_sqnr - second_sqnr) < 0.5


class _WritesItsWeight(nn.Module):
    """A weight that depends on a counter, which each call increments."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return nn.functional.linear(x, self.linear.weight * self.count, self.linear.bias)


def test_weights_that_depend_on_state_are_not_folded() -> None:
    program = torch.export.export(_WritesItsWeight().eval(), (torch.ones(1, 4),))
    before = [node.target for node in program.graph.nodes]
    fold_constant_weights_of_program(program)
    assert [node.target for node in program.graph.nodes] == before


def test_folded_weights_have_the_names_of_their_layers() -> None:
    program = torch.export.export(_prune(Small(), False), _SAMPLES[0])
    fold_constant_weights_of_program(program)
    assert {"body.0.weight", "head.weight"} <= set(program.state_dict)
    assert not any("mask" in name or "orig" in name for name in program.state_dict)
    assert torch.equal(program.module(check_guards=False)(*_SAMPLES[0]), _prune(Small(), True)(*_SAMPLES[0]))


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
def test_unused_buffers_leave_the_program(recipe: ArmRecipeType) -> None:
    sizes = []
    for unused in (0, 10_000):
        model = Small()
        if unused:
            model.register_buffer("unused", torch.zeros(unused))
        sizes.append(len(export(model.eval(), ExportRecipe.get_recipe(recipe), _SAMPLES).buffer))
    assert sizes[0] == sizes[1]
