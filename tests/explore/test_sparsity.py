"""2:4 structured sparsity: masks in the NPU's order, zeros in the program, and cycles of sparse weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, compute_sparsity_masks, export
from arm_recipes.explore.advice.sparsity import compute_mask, prune_weights
from arm_recipes.runtime.tosa_deserialize import deserialize
from tests.small_models import Small, images


class Pruned(nn.Module):
    """Convolutions, one of them with a batch norm and uneven channels, and a linear layer that reads their image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 64, 1)
        self.third = nn.Conv2d(64, 24, 3)
        self.classes = nn.Linear(24 * 16, 10)
        with torch.no_grad():
            self.norm.weight[::2] *= 50

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of images [N, 16, 6, 6]."""
        x = torch.relu(self.norm(self.first(x)))
        scores: Tensor = self.classes(torch.relu(self.third(torch.relu(self.second(x)))).flatten(1))
        return scores


SAMPLES = [(torch.randn(4, 16, 6, 6, generator=torch.Generator().manual_seed(i)),) for i in range(8)]
LAYERS = ("first", "second", "third", "classes")


def _prune_2_4(model: Pruned) -> Pruned:
    for name, mask in compute_sparsity_masks(model, SAMPLES[:1]).items():
        module, _, parameter = name.rpartition(".")
        prune.custom_from_mask(model.get_submodule(module), parameter, mask)
    return model


def _prune_unstructured(model: Pruned) -> Pruned:
    for name in LAYERS:
        prune.l1_unstructured(model.get_submodule(name), "weight", 0.6)
    return model


def _weights_of(result: ExportResult) -> list[Any]:
    """Integer weights of the program's convolutions, in order; their zero points are 0."""
    found = []
    for delegate in result.report.delegates:
        for op in deserialize(delegate.tosa).ops:
            if op.kind == "CONV2D":
                assert op.attrs["weight_zp"] == 0
                found.append(op.inputs[1].data)
    return found


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("kind", [_prune_2_4, _prune_unstructured], ids=["2:4", "unstructured"])
@pytest.mark.parametrize("precision", ["INT8", "A16W8", "A8W4"])
def test_pruned_weights_are_zero_in_the_program(precision: str, kind: Callable[[Pruned], Pruned], remove: bool) -> None:
    model = kind(Pruned().eval())
    masks = {name: model.get_buffer(f"{name}.weight_mask") for name in LAYERS}
    for name in LAYERS if remove else ():
        prune.remove(model.get_submodule(name), "weight")
    algorithms = ["cross_layer_equalization", "bias_correction", "gptq", "concat_scales"]
    recipe = ExportRecipe.get_recipe(ArmRecipeType[f"TOSA_{precision}"], algorithms=algorithms)
    weights = _weights_of(export(model, recipe, SAMPLES, progress=False))
    assert len(weights) == len(LAYERS)
    for integers, name in zip(weights, LAYERS, strict=True):
        mask: Any = masks[name].numpy()
        if name == "classes":  # the NPU's order: the channels of a pixel are consecutive
            mask = mask.reshape(10, 24, 4, 4).transpose(0, 2, 3, 1).reshape(10, 1, 1, -1)
        else:
            mask = mask.transpose(0, 2, 3, 1)
        assert not integers[mask == 0].any()
        assert (integers[mask == 1] != 0).mean() > 0.5
        if kind is _prune_2_4:
            assert ((integers.reshape(-1, 4) != 0).sum(1) <= 2).all()


def test_masks_keep_the_two_largest_of_four() -> None:
    weight = torch.tensor([[4.0, -3, 2, 1, 1, 0, -5, 2, 7]])
    assert compute_mask(weight).int().tolist() == [[1, 1, 0, 0, 0, 0, 1, 1, 1]]
    image = torch.randn(8, 12, 3, 3)
    groups = compute_mask(image).sum(1)
    assert torch.equal(groups, torch.full((8, 3, 3), 6))
    integers = torch.tensor([[-128, 3, 127, 2]], dtype=torch.int8)
    assert compute_mask(integers).int().tolist() == [[1, 0, 1, 0]]


def test_masks_of_a_linear_layer_that_reads_an_image() -> None:
    masks = compute_sparsity_masks(Pruned().eval(), SAMPLES)
    assert list(masks) == [f"{name}.weight" for name in LAYERS]
    by_pixel = masks["classes.weight"].reshape(10, 24, 16).transpose(1, 2).reshape(-1, 4)
    assert (by_pixel.sum(1) == 2).all()


def test_layers_that_are_not_pruned() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 1, groups=2))
    assert compute_sparsity_masks(model.eval(), [(torch.randn(1, 3, 8, 8),)]) == {}
    pruned = _prune_2_4(Pruned().eval())
    assert compute_sparsity_masks(pruned, SAMPLES) == {}  # their masks exist


@pytest.mark.parametrize("macs", [256, 1024])
def test_advice_equals_an_export_of_the_pruned_model(macs: int) -> None:
    """The emulator decodes the sparse weights. At 1024 MACs they have the fast encoding for several cores."""
    model, samples = Pruned().eval(), [(x[:1],) for (x,) in SAMPLES]
    pruned = copy.deepcopy(model)
    for name, mask in compute_sparsity_masks(pruned, samples).items():
        pruned.get_parameter(name).data *= mask
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=macs, optimise="performance")
    dense = export(model, recipe, samples, progress=False)
    sparse = export(pruned, recipe, samples, progress=False, verify=True)
    (item,) = [item for item in dense.advice() if item.change == "2:4 sparse weights"]
    estimates = sparse.report.delegates[0].vela
    assert estimates is not None
    assert item.then.cycles == pytest.approx(estimates.total_cycles, rel=0.02)
    assert item.then.cycles < 0.9 * item.now.cycles
    assert "fine-tuning" in item.note
    assert "2:4 sparse weights: the weights are 2:4 sparse already" in sparse.advice().notes


def test_advice_without_gain_names_the_reason() -> None:
    small = export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), images(), progress=False)
    assert prune_weights(small.exported_programs["forward"]) is None
    assert any("no convolution or linear layer has 16 or more input channels" in note for note in small.advice().notes)
    one = nn.Sequential(nn.Conv2d(16, 16, 1), nn.MaxPool2d(2)).eval()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, memory_mode="Sram_Only")
    notes = export(one, recipe, [(torch.randn(1, 16, 32, 32),)], progress=False).advice().notes
    assert any("2:4 sparse weights save nothing" in note for note in notes)
