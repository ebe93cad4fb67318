"""Advice: figures equal those of an export with the change, and only improvements are listed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from arm_recipes.explore.advice.per_tensor_weights import use_per_tensor_scales
from arm_recipes.explore.advice.result import Advice, AdviceList, Cost
from tests.small_models import Small, images

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


class Odd(nn.Module):
    """Convolutions of 17 and 32 channels, and of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd = nn.Conv2d(3, 17, 3, padding=1)
        self.even = nn.Conv2d(17, 32, 3, stride=2, padding=1)
        self.classes = nn.Linear(32, 17)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images."""
        return self.classes(torch.relu(self.even(torch.relu(self.odd(x)))).mean((2, 3)))


SAMPLES = [(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)]


def _export(recipe: ArmRecipeType, **options: Any) -> ExportResult:
    return export(
        Odd().eval(), ExportRecipe.get_recipe(recipe, shared_scratch=False, **options), SAMPLES, progress=False
    )


def _cost(result: ExportResult) -> Cost:
    (delegate,) = result.report.delegates
    vela, ram = delegate.vela, result.report.ram
    assert vela is not None
    assert ram is not None
    sram = sum(part.bytes for part in ram.npu if part.memory == "SRAM")
    return Cost(vela.total_cycles, sram, vela.dram_bytes, vela.flash_bytes)


@pytest.mark.parametrize("recipe", [U55, U85], ids=lambda recipe: recipe.name)
def test_advice_equals_an_export_with_the_change(recipe: ArmRecipeType) -> None:
    result = _export(recipe, optimise="performance")
    advice = result.advice()
    assert advice.tried > len(advice) > 1 or recipe is U55
    changes = {item.change: item for item in advice}
    small = changes.pop("optimise='size'")
    assert small.now == _cost(result)
    assert small.then == _cost(_export(recipe, optimise="size"))
    assert small.then.sram_bytes < small.now.sram_bytes
    for change, item in changes.items():
        if change.startswith("memory_mode="):
            assert item.then == _cost(_export(recipe, memory_mode=change.split("'")[1], optimise="performance"))
            assert "constants in" in item.note
    (fewer,) = [item for change, item in changes.items() if "channels" in change]
    assert (fewer.change, fewer.module) == ("16 channels in place of 17", "odd")
    assert "test_advise.py:" in fewer.source
    assert fewer.then.cycles < 0.9 * fewer.now.cycles
    assert json.loads(json.dumps(advice.to_dict()))["items"][0]["then"]["cycles"] == advice.items[0].then.cycles
    assert "16 channels in place of 17" in str(advice)
    assert "<table>" in advice._repr_html_()


def test_changes_that_the_recipe_contains_are_not_tried() -> None:
    advice = _export(U55, extra_flags=["--optimise=Size"], memory_mode="Sram_Only").advice()
    assert not any("optimise" in item.change or "Sram_Only" in item.change for item in advice)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_note_counts_the_bytes_of_float_inputs_and_outputs(quantized: bool) -> None:
    notes = _export(U55, quantized_io=quantized).advice().notes
    assert any(note.startswith("quantized_io=True: saves up to 12.1 KiB") for note in notes) is not quantized


def test_per_tensor_scales_do_not_clip_weights() -> None:
    model = Odd().eval()
    program = export(model, ExportRecipe.get_recipe(U55), SAMPLES, progress=False).exported_programs["forward"]
    changed = use_per_tensor_scales(program)
    assert changed is not None
    targets = [str(node.target) for node in changed.graph.nodes]
    assert not any("per_channel" in target for target in targets)
    # Weights and biases of three layers change in the copy.
    (before, after) = ({**each.state_dict, **each.constants} for each in (program, changed))
    assert len([name for name in before if not before[name].equal(after[name])]) == 6
    expected, found = (each.module(check_guards=False)(*SAMPLES[0]) for each in (program, changed))
    assert (expected - found).abs().max() < 0.1 * expected.abs().max()
    assert use_per_tensor_scales(changed) is None


@pytest.mark.parametrize(
    ("then", "better", "trade_off"),
    [
        (Cost(99, 100, 0, 0), True, False),
        (Cost(100, 90, 0, 0), True, False),
        (Cost(128, 90, 0, 0), False, True),
        (Cost(90, 101, 0, 0), False, True),
        (Cost(90, 90, 10, 0), False, True),
        (Cost(100, 100, 0, 0), False, False),
        (Cost(99_999, 100_000, 0, 0), False, False),
        (Cost(101, 100, 0, -5), False, False),
    ],
)
def test_costs_that_fall_and_rise_are_a_trade_off(then: Cost, better: bool, trade_off: bool) -> None:
    scale = 1000 if then.cycles > 1000 else 1
    item = Advice("x", Cost(100 * scale, 100 * scale, 0, 0), then)
    assert (item.is_better, item.is_trade_off, item.saves) == (better, trade_off, better or trade_off)


def test_trade_offs_are_a_section() -> None:
    now = Cost(100, 100, 0, 0)
    advice = AdviceList((Advice("a", now, Cost(90, 100, 0, 0)), Advice("b", now, Cost(128, 50, 0, 0))), 3)
    better, trade_offs = (section for section in advice.sections())
    assert better[0] == "1 of 3 changes lower the cost"
    assert [row[0] for row in better[1]] == ["change", "a"]
    assert trade_offs[0] == "1 trade-off: lower one cost and raise another"
    assert [row[0] for row in trade_offs[1]] == ["change", "b"]


def test_constants_that_a_memory_mode_places_in_sram_count_as_sram() -> None:
    result = _export(U55, memory_mode="Sram_Only")
    vela = result.report.delegates[0].vela
    assert vela is not None
    assert vela.constant_bytes == vela.flash_bytes > 0
    assert 0 <= _cost(result).sram_bytes - vela.sram_bytes - vela.constant_bytes < 32


def test_an_empty_list_of_advice_says_so() -> None:
    assert str(AdviceList((), 3, ("x: why",))) == "0 of 3 changes lower the cost\n  none\nNotes\n  x: why"


def test_advice_for_other_recipes_raises() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), images(), progress=False)
    with pytest.raises(ValueError, match="advice is for programs of Ethos-U recipes"):
        result.advice()


def test_advice_for_a_program_without_delegates_raises() -> None:
    result = export(torch.nn.Identity(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), images())
    with pytest.raises(ValueError, match="this program has none: see report"):
        result.advice()
