"""``ExportResult.for_target``: the program equals that of a complete export, or the call is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipe, ArmRecipesWarning, ArmRecipeType, BudgetError, ExportRecipe, ExportResult, export
from arm_recipes.pipeline.retarget import retarget_recipe
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.capture import Capture
from arm_recipes.stages.quantize import FastQuantizeStage
from tests.small_models import ConstantHeads, Small, images

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


class Counter(nn.Module):
    """Add a moving sum of the inputs to a layer's result."""

    sum: Tensor
    layer: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("sum", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (1, 8) to the same shape."""
        self.sum.copy_(0.5 * self.sum + x)
        return self.layer(x) + self.sum


class Step(nn.Module):
    """The second method of a ``Counter``: it reads the state."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        """Map (1, 8) to the same shape."""
        return x * self.counter.sum


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def result(model: nn.Module) -> ExportResult:
    return export(model, ExportRecipe.get_recipe(U85, macs=256, quantized_io=True), images(), progress=False)


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(owner.__name__)
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, call)

    watch(Capture, "__call__")
    watch(FastQuantizeStage, "run")
    return calls


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (None, {"macs": 128}),
        (None, {"memory_mode": "Dedicated_Sram_512KB"}),
        (None, {"optimise": "size", "search_alternatives": False}),
        (None, {"macs": 512, "external": True}),
        (U55, {"macs": 64}),
        ("ethosu-u65-int8", {}),
        (None, {"board": "corstone-300"}),
    ],
)
def test_a_retargeted_program_equals_that_of_a_complete_export(
    model: nn.Module, result: ExportResult, recipe: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_calls(monkeypatch)
    other = result.for_target(recipe, progress=False, **options)
    assert calls == []
    assert isinstance(other.recipe, ArmRecipe)
    complete = export(model, other.recipe, images(), progress=False)
    assert calls
    assert other.buffer == complete.buffer
    assert other.data_file == complete.data_file
    assert other.report.methods == complete.report.methods
    assert other.report.notes == complete.report.notes
    assert other.report.context == complete.report.context
    assert other.report.ram == complete.report.ram
    assert "quantize" not in other.report.seconds
    assert other.recipe.options["quantized_io"]


def test_a_retargeted_result_is_verified_compared_saved_and_retargeted(
    model: nn.Module, result: ExportResult, tmp_path: Path
) -> None:
    other = result.for_target(macs=128, verify=True, progress=False)
    assert any("verify" in note or "bit" in note for note in other.report.notes)
    sample = Inputs(*images()[0])
    assert torch.equal(other.run_dequantized(sample), result.run_dequantized(sample))
    assert other.compare(images(), progress=False).outputs == result.compare(images(), progress=False).outputs
    other.save(tmp_path / "model.pte", reference=True, etrecord=True)
    assert (tmp_path / "model.etrecord").exists()
    again = other.for_target(memory_mode="Dedicated_Sram_512KB", progress=False)
    assert isinstance(again.recipe, ArmRecipe)
    assert again.recipe.options["macs"] == 128
    assert again.buffer == export(model, again.recipe, images(), progress=False).buffer


def test_retargeting_of_methods_with_state_and_of_a_float_recipe() -> None:
    torch.manual_seed(0)
    counter = Counter().eval()
    methods = {"forward": counter, "step": Step(counter).eval()}
    samples = {name: [(torch.randn(1, 8),) for _ in range(3)] for name in methods}
    first = export(methods, ExportRecipe.get_recipe(U85), samples, progress=False)
    other = first.for_target(U55, progress=False)
    assert other.buffer == export(methods, ExportRecipe.get_recipe(U55), samples, progress=False).buffer
    floating = export(counter, ExportRecipe.get_recipe("TOSA_FP"), samples["forward"], progress=False)
    changed = floating.for_target(steps_per_call=None, progress=False)
    assert changed.buffer == floating.buffer


def test_a_cached_result_exports_once_for_its_targets(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        cached = export(model, ExportRecipe.get_recipe(U55), images(), cache_dir=tmp_path, progress=False)
    assert cached.report.cached
    calls = _count_calls(monkeypatch)
    others = [cached.for_target(macs=macs, progress=False) for macs in (64, 256)]
    assert calls.count("FastQuantizeStage") == 1
    for other in others:
        assert isinstance(other.recipe, ArmRecipe)
        assert other.buffer == export(model, other.recipe, images(), progress=False).buffer


def test_a_second_export_for_size_reuses_the_quantized_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = export(Small().eval(), ExportRecipe.get_recipe(U55, optimise="performance"), images(), progress=False)
    small = fast.for_target(optimise="size", progress=False)
    assert fast.report.ram is not None
    budget = fast.report.ram.sram_bytes - 1
    calls = _count_calls(monkeypatch)
    with pytest.warns(ArmRecipesWarning, match="compiled again for less SRAM"):
        fitting = fast.for_target(optimise="auto", sram_budget=budget, progress=False)
    assert calls == []
    model = Small().eval()
    with pytest.warns(ArmRecipesWarning, match="compiled again for less SRAM"):
        fitting = export(model, ExportRecipe.get_recipe(U55, sram_budget=budget), images(), progress=False)
    assert calls.count("FastQuantizeStage") == 1
    assert sum("compiled again for less SRAM" in note for note in fitting.report.notes) == 1
    relaxed = fitting.for_target(sram_budget=None, progress=False)
    assert isinstance(relaxed.recipe, ArmRecipe)
    assert "optimise" not in relaxed.recipe.options
    assert len(small.buffer) == len(fitting.buffer)
    with pytest.raises(BudgetError):
        fitting.for_target(sram_budget=1000, progress=False)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("ETHOSU_U85_A16W8", {}, "ETHOSU_U85_A16W8 quantizes in another way than ETHOSU_U85_INT8"),
        ("TOSA_INT8", {}, "TOSA_INT8 quantizes in another way"),
        ("CORTEX_M_INT8", {}, "CORTEX_M_INT8 quantizes in another way"),
        (None, {"per_channel": False}, "per_channel is an option of quantization"),
        (None, {"quantized_io": False}, "quantized_io is an option of quantization"),
        (None, {"min_sqnr": 20}, "min_sqnr is an option of quantization"),
        (None, {"macs": 100}, "macs=100"),
        (None, {"mac": 128}, "unknown argument 'mac'"),
    ],
)
def test_changes_of_quantization_are_refused(
    result: ExportResult, recipe: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        result.for_target(recipe, progress=False, **options)


def test_an_unchanged_option_of_quantization_is_accepted(result: ExportResult) -> None:
    assert result.for_target(quantized_io=True, per_channel=True, progress=False).buffer == result.buffer


def test_other_calibration_samples_are_refused() -> None:
    samples = images()
    recipe = ExportRecipe.get_recipe(U85, calibration_samples=samples)
    assert retarget_recipe(recipe, None, {"calibration_samples": list(samples), "macs": 512}).options["macs"] == 512
    with pytest.raises(ValueError, match="calibration_samples is an option of quantization"):
        retarget_recipe(recipe, None, {"calibration_samples": images()})


def test_a_model_that_another_npu_quantizes_differently_is_refused() -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(4, 8, 8),) for _ in range(2)]
    result = export(ConstantHeads().eval(), ExportRecipe.get_recipe(U85), samples, progress=False)
    with pytest.raises(ValueError, match=r"quantized in another way for ethos-u55-128: .*splits_matmuls"):
        result.for_target(U55, progress=False)
    assert result.for_target(macs=512, progress=False).report.delegates


def test_a_changed_model_is_refused() -> None:
    torch.manual_seed(0)
    counter = Counter().eval()
    samples = [(torch.randn(1, 8),)] * 2
    result = export(counter, ExportRecipe.get_recipe(U85), samples, progress=False)
    assert result.for_target(progress=False).buffer == result.buffer
    counter(*samples[0])
    with pytest.raises(ValueError, match=r"the model has changed since the export: 'sum' of 'forward' was written"):
        result.for_target(macs=512, progress=False)
    counter.sum.zero_()
    assert result.for_target(progress=False).buffer == result.buffer
    with torch.no_grad():
        counter.layer.weight.mul_(2)
    with pytest.raises(ValueError, match=r"the model has changed since the export: 'layer.weight' of 'forward'"):
        result.for_target(macs=512, progress=False)


def test_a_recipe_of_another_package_is_refused(model: nn.Module) -> None:
    combined = ExportRecipe.combine(
        [ExportRecipe.get_recipe(U85), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)], "both"
    )
    result = export(model, combined, images(), progress=False)
    with pytest.raises(ValueError, match="not one of ArmRecipeType"):
        result.for_target(macs=128)
