"""Calibration coverage: notes of the report name tensors with few distinct values in the samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export

INT8 = ArmRecipeType.TOSA_INT8


class Model(nn.Module):
    """One output is always 0, and the other has two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.dead, self.few = nn.Linear(64, 64), nn.Linear(64, 2)
        with torch.no_grad():
            self.dead.bias.fill_(-100)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.dead(x)), self.few(x)


def test_notes_name_tensors_with_few_calibration_values() -> None:
    result = export(Model().eval(), ExportRecipe.get_recipe(INT8), [(torch.rand(1, 64),) for _ in range(3)])
    notes = [note for note in result.report.notes if note.startswith("calibration: ")]
    assert len(notes) == 2
    assert "relu" in notes[0]
    assert "(0) had only one value in all samples" in notes[0]
    assert "linear" in notes[1]
    assert "fewer than 16 values" in notes[1]
    enough = export(
        nn.Linear(64, 64).eval(),
        ExportRecipe.get_recipe(INT8),
        [(torch.rand(1, 64),) for _ in range(3)],
    )
    assert not enough.report.notes


def test_constant_inputs_share_one_note() -> None:
    class Weighted(nn.Module):
        def forward(self, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
            return x * a + x * b

    samples = [(torch.full((1, 1), 0.5), torch.full((1, 1), 2.0), torch.randn(1, 32)) for _ in range(2)]
    result = export(Weighted().eval(), ExportRecipe.get_recipe(INT8), samples)
    (note,) = [note for note in result.report.notes if note.startswith("calibration: ")]
    assert note.startswith("calibration: input 'a' (0.5), input 'b' (2) had only one value in all samples")
