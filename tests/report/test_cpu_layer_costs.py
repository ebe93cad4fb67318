"""Costs of layers on the CPU, and the report of a Cortex-M program."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from arm_recipes._internal.errors import BudgetError
from arm_recipes.report.cpu_layer_costs import estimate_cpu_layers
from tests.small_models import Small, images


def _recipe(**options: object) -> ExportRecipe:
    return ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, **{"cpu": "cortex-m4", **options})


@pytest.fixture(scope="module")
def result() -> ExportResult:
    return export(Small().eval(), _recipe(), images(), progress=False)


def test_layers_add_up_to_the_cycles_of_the_program(result: ExportResult) -> None:
    (method,) = result.report.methods
    assert method.cpu_cycles == sum(cost.cycles for cost in result.report.layers)
    assert sum(cost.share for cost in result.report.layers) == pytest.approx(1)
    assert all(cost.delegate == "" and 0 <= cost.utilization < 1 for cost in result.report.layers)


def test_layers_are_those_of_the_model(result: ExportResult) -> None:
    names = {name for name, _ in Small().named_modules()}
    layers = [cost for cost in result.report.layers if cost.kind == "layer"]
    assert layers
    assert all(cost.module in names for cost in layers)
    kinds = {cost.kind for cost in result.report.layers}
    assert "boundary" in kinds  # the casts of float inputs and outputs


def test_kernels_have_macs_and_cycles(result: ExportResult) -> None:
    (method,) = result.report.methods
    assert sum(call.macs for call in method.kernels) == sum(cost.macs for cost in method.cpu_layers) > 0
    assert all(call.cycles is not None and call.cycles > 0 for call in method.kernels)


def test_the_report_marks_cpu_cycles_as_estimates(result: ExportResult) -> None:
    text = str(result.report)
    assert "on the CPU (estimate)" in text
    assert "cycles (estimate)" in text
    assert f"{result.report.methods[0].cpu_cycles:,} cycles" in text
    record = json.loads(json.dumps(result.report.to_dict()))
    assert record["methods"][0]["cpu_cycles"] == result.report.methods[0].cpu_cycles
    assert "the estimate of the CPU&#x27;s cycles" in result.report.page().text
    assert "estimate for Cortex-M4 with DSP extension, " in result.report.page().text


def test_no_estimates_without_a_processor() -> None:
    assert estimate_cpu_layers("forward", torch.fx.GraphModule(nn.Module(), torch.fx.Graph()), None) == ()


def test_a_faster_processor_needs_fewer_cycles() -> None:
    cycles = [
        export(Small().eval(), _recipe(cpu=cpu), images(), progress=False).report.methods[0].cpu_cycles
        for cpu in ("cortex-m0plus", "cortex-m4", "cortex-m55", "cortex-m85")
    ]
    assert cycles == sorted(cycles, key=lambda count: -(count or 0))


def test_a_program_over_a_budget_is_an_error_with_its_ram(result: ExportResult) -> None:
    ram = result.report.ram
    assert ram is not None
    assert ram.npu == ()
    with pytest.raises(BudgetError, match=f"the program needs {ram.sram_bytes:,} B") as error:
        export(Small().eval(), _recipe(sram_budget=ram.sram_bytes - 1), images(), progress=False)
    assert "memory mode" not in str(error.value)
    with pytest.raises(BudgetError, match="flash_budget: the program takes"):
        export(Small().eval(), _recipe(flash_budget="1KiB"), images(), progress=False)
    export(Small().eval(), _recipe(sram_budget=ram.sram_bytes), images(), progress=False)
