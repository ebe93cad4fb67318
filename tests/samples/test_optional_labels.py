"""Items of a ``DataLoader`` that may be labels or an optional input of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, export
from arm_recipes.explore.sweep.sweep import capture_model


class _Optional(torch.nn.Module):
    """A model with an optional input."""

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        """Add the offset, one number per item."""
        return x * 2 if offset is None else x * 2 + offset.reshape(-1, 1)


def test_integers_of_a_loader_that_may_be_labels_or_an_input_are_refused() -> None:
    recipe, x = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), torch.rand(4, 3)
    loader = DataLoader(TensorDataset(x, torch.arange(4)), batch_size=2)
    with pytest.raises(ValueError, match=r"item 1 of the DataLoader's batches is int64\[2\].*optional input 'offset'"):
        export(_Optional().eval(), recipe, loader)
    without = export(_Optional().eval(), recipe, [(batch[0],) for batch in loader])
    assert [tensor.name for tensor in without.inputs] == ["x"]
    both = export(_Optional().eval(), recipe, [tuple(batch) for batch in loader])
    assert [tensor.name for tensor in both.inputs] == ["x", "offset"]
    for labels in (torch.arange(4).reshape(4, 1), torch.rand(4) > 0.5, torch.rand(4, 1) > 0.5):
        loader = DataLoader(TensorDataset(x, labels), batch_size=2)
        with pytest.raises(ValueError, match=r"\[2(, 1)?\], which may be labels or the optional input 'offset'"):
            export(_Optional().eval(), recipe, loader)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_floats_of_a_loader_that_become_an_optional_input_are_noted(shape: tuple[int, ...]) -> None:
    recipe, x = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), torch.rand(4, 3)
    floats = DataLoader(TensorDataset(x, torch.rand(shape)), batch_size=2)
    with pytest.warns(ArmRecipesWarning, match=r"item 1 of the DataLoader's batches, float32\[2.*input 'offset'"):
        result = export(_Optional().eval(), recipe, floats)
    assert [tensor.name for tensor in result.inputs] == ["x", "offset"]
    masks = DataLoader(TensorDataset(x, torch.rand(4, 1, 1)), batch_size=2)
    assert not [note for note in export(_Optional().eval(), recipe, masks).report.notes if "offset" in note]


class _Loss(torch.nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, with labels."""
        return x * 2 if labels is None else (x * 2 - labels).abs().mean()


def test_items_of_a_loader_for_a_parameter_named_labels_are_refused() -> None:
    loader = DataLoader(TensorDataset(torch.rand(4, 3), torch.rand(4, 3)), batch_size=2)
    with pytest.raises(ValueError, match=r"float32\[2, 3\], which may be labels or the optional input 'labels'"):
        export(_Loss().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), loader)


@pytest.mark.filterwarnings("ignore")
def test_sweeps_refuse_integers_that_may_be_labels() -> None:
    loader = DataLoader(TensorDataset(torch.rand(4, 3), torch.arange(4)), batch_size=2)
    with pytest.raises(ValueError, match="which may be labels or the optional input 'offset'"):
        capture_model(_Optional(), loader, "sweep")
