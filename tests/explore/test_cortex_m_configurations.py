"""Cortex-M processors in a sweep, beside NPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import joblib
import pytest

from arm_recipes import ExportRecipe, Sweep, export, sweep
from arm_recipes.explore.sweep.cortex_m_configurations import list_cortex_m_configurations
from arm_recipes.recipe_types import ArmRecipeType
from tests.small_models import Small, images

FIXED: dict[str, Any] = {"calibration_samples": None, "per_channel": True, "optimise": "auto"}


@pytest.fixture(scope="module")
def result() -> Sweep:
    recipes = ["CORTEX_M_INT8", "ETHOSU_U55_INT8"]
    with joblib.parallel_config(n_jobs=1):
        return sweep(
            Small().eval(),
            recipes,
            images(),
            macs=128,
            memory_modes="Shared_Sram",
            cpus={"cortex-m4": 120, "cortex-m55": None},
        )


def test_one_sweep_has_npus_and_cortex_m_processors(result: Sweep) -> None:
    assert [row.target for row in result.rows] == ["ethos-u55-128", "cortex-m4", "cortex-m55"]
    npu, m4, m55 = (row.estimates for row in result.rows)
    assert npu is not None
    assert m4 is not None
    assert m55 is not None
    assert npu.cycles < m55.cycles < m4.cycles
    assert m4.milliseconds == pytest.approx(m4.cycles / 120e3)
    assert m55.milliseconds is None
    assert all(row.accuracy is not None and row.accuracy > 20 for row in result.rows)


def test_a_row_has_the_figures_of_an_export(result: Sweep) -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu="cortex-m4")
    report = export(Small().eval(), recipe, images(), progress=False).report
    row = result.rows[1]
    assert row.estimates is not None
    assert report.ram is not None
    assert row.estimates.cycles == report.methods[0].cpu_cycles
    assert row.ram_bytes == report.ram.sram_bytes
    assert row.estimates.flash_bytes == report.program_bytes


def test_a_row_without_milliseconds_is_printed_and_plotted(result: Sweep) -> None:
    line = next(line for line in str(result).splitlines() if "cortex-m55" in line)
    assert "CORTEX_M_INT8" in line
    assert result.rows[2] not in result.pareto("milliseconds")
    result.plot()


def test_plot_of_a_processor_names_no_memory_mode_and_excludes_no_operators(result: Sweep) -> None:
    """The cycles of a Cortex-M include operators without an int8 kernel."""
    rows = tuple(replace(row, cpu_operators=2) for row in result.rows)
    traces = [trace for trace in Sweep(rows, result.metric).plot().data if trace.mode == "markers"]
    assert [trace.name for trace in traces if not trace.text and trace.yaxis == "y"] == ["Shared_Sram"]
    texts = {trace.name: trace.text[0] for trace in traces if trace.text}
    assert "2 operators on the CPU" in texts["ethos-u55-128, INT8"]
    assert "operators" not in texts["cortex-m4, INT8"]
    assert "<br>120 MHz<br>" in texts["cortex-m4, INT8"]


def test_default_processor_is_that_of_the_recipe() -> None:
    (configuration,) = list_cortex_m_configurations(None, FIXED)
    assert configuration.processor.cpu == "cortex-m55"


@pytest.mark.parametrize(
    ("cpus", "message"),
    [
        ("cortex-m5", "there is no such Cortex-M; did you mean"),
        ({"cortex-m4": 0}, "cpus: the clock of 'cortex-m4' must be a positive number of MHz, not 0"),
        ([], "cpus is empty"),
    ],
)
def test_invalid_processors_are_errors(cpus: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list_cortex_m_configurations(cpus, FIXED)


def test_cpus_need_the_cortex_m_recipe() -> None:
    with pytest.raises(ValueError, match="cpus: they belong to the recipe CORTEX_M_INT8"):
        sweep(Small().eval(), ["ETHOSU_U55_INT8"], images(), cpus="cortex-m4")
