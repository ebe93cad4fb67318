"""Costs by layer, memory over time, and budgets, on small models."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from arm_recipes._internal.errors import BudgetError
from arm_recipes.report.npu_layer_costs import LayerCost, apportion
from tests.small_models import Small, images

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
BOTH = pytest.mark.parametrize("recipe", [U55, U85], ids=lambda recipe: recipe.name)


def _export(model: nn.Module, samples: Any, recipe: ArmRecipeType, **options: Any) -> ExportResult:
    return export(model.eval(), ExportRecipe.get_recipe(recipe, **options), samples, progress=False)


class Chained(nn.Module):
    """Operators that are fused and moved: an activation in a TABLE, two functions in one TABLE, a permute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.act = nn.Hardswish()
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Images to rows of channels."""
        y = self.second(self.act(self.first(x)))
        return (y * self.gate(y)).flatten(2).transpose(1, 2)


def _total(result: ExportResult) -> int:
    return sum(delegate.vela.total_cycles for delegate in result.report.delegates if delegate.vela is not None)


@BOTH
def test_fused_operators_share_the_cycles_of_their_operation(recipe: ArmRecipeType) -> None:
    result = _export(Chained(), [(torch.randn(1, 3, 16, 16),) for _ in range(2)], recipe)
    layers = result.report.layers
    assert sum(layer.cycles for layer in layers) == _total(result)
    computing = {layer.module: layer for layer in layers if layer.kind == "layer"}
    assert computing.keys() == {"first", "act", "second", "gate", ""}
    assert computing["second"].cycles > 10 * computing["act"].cycles > 0
    # x * sigmoid(x) is one table: an element each.
    assert computing["gate"].cycles == pytest.approx(computing[""].cycles, abs=2)
    assert computing[""].operators == ("aten.mul.Tensor",)
    assert computing[""].reason == "the model's own forward"
    assert computing["first"].utilization > 0


@BOTH
def test_inserted_operations_have_a_reason(recipe: ArmRecipeType) -> None:
    samples = [(torch.randn(1, 3, 16, 16),) for _ in range(2)]
    between = [layer for layer in _export(Chained(), samples, recipe).report.layers if layer.kind != "layer"]
    assert [(layer.kind, layer.module) for layer in between] == [("boundary", "first")]
    assert "channels_last" in between[0].reason
    channels_last = [(sample[0].to(memory_format=torch.channels_last),) for sample in samples]
    assert all(layer.kind == "layer" for layer in _export(Chained(), channels_last, recipe).report.layers)


class Transposed(nn.Module):
    """A transpose in the model, between two linear layers, which need none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes within rows, then between them."""
        return self.second(self.first(x).transpose(1, 2))


@BOTH
def test_a_transpose_in_the_model_keeps_its_line(recipe: ArmRecipeType) -> None:
    result = _export(Transposed(), [(torch.randn(1, 16, 24),) for _ in range(2)], recipe)
    (moved,) = (layer for layer in result.report.layers if layer.kind == "transpose")
    assert (moved.operators, moved.module) == (("aten.transpose.int",), "")
    assert moved.reason == "the model's own transpose"
    line = int(moved.source.rsplit(":", 1)[1])
    assert "transpose(1, 2)" in Path(__file__).read_text().splitlines()[line - 1]


def test_layers_are_grouped_by_method() -> None:
    result = _export_two()
    assert list(dict.fromkeys(layer.method for layer in result.report.layers)) == ["a", "b"]
    for method in ("a", "b"):
        assert sum(layer.share for layer in result.report.layers if layer.method == method) == pytest.approx(1)
    text = str(result.report)
    assert "Costliest layers of 'a'" in text
    assert "over time of 'b'" in text or "of 'b' over time" in text


def _export_two() -> ExportResult:
    model = Small().eval()
    recipe = ExportRecipe.get_recipe(U85)
    return export({"a": model, "b": model}, recipe, {"a": images(), "b": images()}, progress=False)


def test_the_report_has_layers_as_text_and_json() -> None:
    report = _export(Small(), images(), U85).report
    record = json.loads(json.dumps(report.to_dict()))
    assert [layer["module"] for layer in record["layers"]] == [layer.module for layer in report.layers]
    assert record["memory"][0]["peak_bytes"] == report.memory[0].peak_bytes
    text = str(report)
    assert re.search(r"Costliest layers: \d of \d, 1?\d?\d% of [\d,]+ cycles", text)
    assert re.search(r"body\.0 .*models\.py:\d+", text)
    assert "SRAM of arm_0 over time" in text
    assert "quantized_io=True: the program takes integers" in text
    assert "body.0" in report._repr_html_()


def test_other_backends_have_no_layers() -> None:
    report = _export(Small(), images(), ArmRecipeType.TOSA_INT8).report
    assert (report.layers, report.memory) == ((), ())


@pytest.mark.parametrize(
    ("amount", "shares", "parts"),
    [(10, {"a": 1, "b": 2}, [3, 7]), (1, {"a": 5, "b": 5}, [1, 0]), (0, {"a": 1}, [0]), (7, {"a": 3, "b": 3}, [4, 3])],
)
def test_apportioned_parts_add_up(amount: int, shares: dict[str, int], parts: list[int]) -> None:
    assert list(apportion(amount, shares).values()) == parts


def test_rows_without_a_module_have_a_name() -> None:
    cost = LayerCost("forward", "arm_0", "", "", "rest", (), 1, 1.0, 0, 0.0, 0, 0, "compute", "why")
    assert cost.name == "(Vela)"


# -- budgets -------------------------------------------------------------------------------------------------


def test_a_program_over_the_sram_budget_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    recipe = ExportRecipe.get_recipe(U55, sram_budget=500, optimise="performance")
    with pytest.raises(BudgetError) as error:
        export(Small().eval(), recipe, images(), output=path, progress=False)
    text = str(error.value)
    assert re.match(
        r"sram_budget: the NPU's part of 'forward' needs [\d,]+ B of SRAM with memory mode Shared_Sram", text
    )
    assert "more than the budget of 500 B" in text
    assert re.search(r"[\d,]+ B +result +body\.0 .*models\.py:\d+", text)
    assert 'optimise="ram"' in text
    assert not path.exists()


def test_a_program_over_the_flash_budget_names_the_largest_constants() -> None:
    with pytest.raises(BudgetError, match=r"flash_budget: the delegates alone take [\d,]+ B.*\n.*\n +216 B +body\.0"):
        _export(Small(), images(), U55, flash_budget="1KB")


def test_flash_budget_counts_stored_bytes() -> None:
    fits = _export(Small(), images(), U55)
    assert fits.stored_bytes == len(fits.buffer)
    _export(Small(), images(), U55, flash_budget=fits.stored_bytes)
    with pytest.raises(BudgetError, match="flash_budget: the program takes"):
        _export(Small(), images(), U55, flash_budget=fits.stored_bytes - 1)


def test_sram_budgets_just_above_and_below_the_need() -> None:
    fast = _export(Small(), images(), U55, optimise="performance").report.ram
    assert fast is not None
    needed = fast.sram_bytes
    _export(Small(), images(), U55, sram_budget=needed, optimise="performance")
    with pytest.raises(BudgetError, match="sram_budget: the program needs") as error:
        _export(Small(), images(), U55, sram_budget=f"{needed - 1} B", optimise="performance")
    assert re.search(r"NPU scratch with inputs, outputs and CPU tensors +[\d,]+ B +SRAM\n +runtime", str(error.value))
    with_less = _export(Small(), images(), U55, sram_budget=needed - 1).report
    assert with_less.ram is not None
    assert with_less.ram.sram_bytes < needed
    assert any("compiled again for less SRAM" in note for note in with_less.notes)
    least = _export(Small(), images(), U55, optimise="ram").report.ram
    assert least is not None
    with pytest.raises(BudgetError) as error:
        _export(Small(), images(), U55, sram_budget=least.sram_bytes - 1)
    assert "optimise=" not in str(error.value)
    assert "quantized_io=True" in str(error.value)
    assert re.search(r"Largest inputs and outputs of the program:\n +[\d,]+ B +float32  ", str(error.value))
    with pytest.raises(BudgetError, match="sram_budget: the program needs") as error:
        _export(Small(), images(), U55, sram_budget=with_less.ram.npu[0].bytes, quantized_io=True)
    assert "quantized_io=True" not in str(error.value)


def test_a_budget_is_met_although_the_tensors_of_the_npu_alone_are_smaller() -> None:
    """The float input, of 108 KiB, does not fit beside the places that Vela chooses without a limit."""

    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU())

    layers = [block(3, 16, 2), block(16, 32), block(32, 32, 2), block(32, 64), block(64, 64, 2), block(64, 128, 2)]
    model, samples = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).eval(), [(torch.randn(1, 3, 96, 96),)]
    fast = _export(model, samples, U55).report
    (delegate,) = fast.delegates
    assert delegate.vela is not None
    assert fast.ram is not None
    excess = fast.ram.sram_bytes - delegate.vela.sram_bytes
    assert excess > 30_000
    fitting = _export(model, samples, U55, sram_budget=fast.ram.sram_bytes - excess // 2).report
    assert sum(cost.cycles for cost in fitting.layers) < 1.02 * sum(cost.cycles for cost in fast.layers)


def test_errors_about_the_budget_of_a_board_name_it() -> None:
    with pytest.raises(BudgetError, match=r"budget of [\d,]+ B .*board 'renesas-ra8p1'") as error:
        _export(nn.ConvTranspose2d(3, 64, 3, 8), [(torch.rand(1, 3, 80, 80),)], U55, board="renesas-ra8p1")
    assert "1,703,936 B" in str(error.value)


def test_weights_that_vela_keeps_in_sram_count_at_every_moment() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.LSTM(16, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    report = _export(Recurrent(), [(torch.randn(1, 10, 16),) for _ in range(2)], U55).report
    (used,), (delegate,) = report.memory, report.delegates
    assert delegate.vela is not None
    assert used.bytes == delegate.vela.sram_bytes
    kept = [tensor for tensor in used.peak if tensor.kind == "weights"]
    assert (kept[0].module, max(kept, key=lambda tensor: tensor.bytes)) == ("cell", used.peak[0])
    assert min(moment.bytes for moment in used.moments) > used.peak[0].bytes


@pytest.mark.parametrize(
    ("options", "memories"),
    [({"extra_flags": ["--optimise", "Size"]}, {"Sram"}), ({"memory_mode": "Dedicated_Sram_384KB"}, {"Sram", "Dram"})],
)
def test_memory_of_cascaded_layers_and_of_dedicated_sram(options: dict[str, Any], memories: set[str]) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            widths = [3, 16, 16, 16, 8]
            self.layers = nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    report = _export(Deep(), [(torch.randn(1, 3, 64, 64),) for _ in range(2)], U85, **options).report
    (delegate,) = report.delegates
    assert delegate.vela is not None
    assert {used.memory for used in report.memory} == memories
    for used in report.memory:
        assert max(moment.bytes for moment in used.moments) == used.peak_bytes
        modules = [moment.module for moment in used.moments]
        assert list(dict.fromkeys(modules)) == [f"layers.{i}" for i in range(4)]
    assert next(used.bytes for used in report.memory if used.memory == "Sram") == delegate.vela.sram_bytes
