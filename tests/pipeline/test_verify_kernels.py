"""``verify=True`` for programs of int8 kernels: the runtime's results are compared with the kernels' records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, VerificationError, export
from arm_recipes.pipeline import verify_kernels
from tests.firmware.cortex_m_programs import Small, samples

CORTEX_M = ArmRecipeType.CORTEX_M_INT8


class Window(nn.Module):
    """A linear layer over the inputs of the last two calls."""

    previous: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 4)
        self.register_buffer("previous", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result for this input and the previous one."""
        y: Tensor = self.layer(torch.cat((self.previous, x), 1))
        self.previous.copy_(x)
        return y


class Normalized(nn.Module):
    """An operator in floating point between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """Return a normalized row."""
        y: Tensor = self.norm(self.layer(x))
        return y


@pytest.mark.parametrize("quantized_io", [False, True])
def test_the_note_counts_executions_and_kernels(quantized_io: bool) -> None:
    recipe = ExportRecipe.get_recipe(CORTEX_M, quantized_io=quantized_io)
    result = export(Small().eval(), recipe, samples("small", 6), verify=True)
    kernels = len(result.report.methods[0].kernels)
    assert f"verified: 4 executions of {kernels} int8 kernels, bit-equal" in result.report.notes[-1]


def test_a_difference_from_the_kernels_records_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = verify_kernels._KernelReference.run

    def wrong(reference: Any, inputs: Any) -> list[Any]:
        outputs = run(reference, inputs)
        outputs[1][0, 1, 2, 3] += 1
        return outputs

    monkeypatch.setattr(verify_kernels._KernelReference, "run", wrong)
    message = r"output 'output1' of method 'forward' .* sample 0: 1 of .* elements, the first at \[0, 1, 2, 3\]"
    with pytest.raises(VerificationError, match=message):
        export(Small().eval(), ExportRecipe.get_recipe(CORTEX_M), samples("small"), verify=True)


def test_methods_with_float_operators_are_not_compared() -> None:
    inputs = [(torch.randn(1, 8),) for _ in range(3)]
    result = export(Normalized().eval(), ExportRecipe.get_recipe(CORTEX_M), inputs, verify=True)
    assert "'forward' is not compared, because aten." in result.report.notes[-1]


def test_buffers_keep_their_values_between_samples() -> None:
    inputs = [(torch.randn(1, 8),) for _ in range(3)]
    result = export(Window().eval(), ExportRecipe.get_recipe(CORTEX_M), inputs, verify=True)
    assert "verified: 3 executions" in result.report.notes[-1]
