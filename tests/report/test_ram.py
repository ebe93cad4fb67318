"""RAM of a program: the parts add up to the firmware's pools, plus the constants if these are in RAM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from executorch.export import ExportRecipe

from arm_recipes import ArmRecipeType, ExportResult, export
from arm_recipes.report.ram import Ram, npu_ram_parts
from tests.small_models import Small, images

U55, U65, U85 = (ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85"))


def _export(recipe: ArmRecipeType, **options: Any) -> tuple[ExportResult, Ram]:
    result = export(Small().eval(), ExportRecipe.get_recipe(recipe, **options), images(), progress=False)
    assert result.report.ram is not None
    return result, result.report.ram


def _parts(ram: Ram) -> dict[str, tuple[int, str]]:
    return {part.name: (part.bytes, part.memory) for part in ram.parts}


@pytest.mark.xdist_group("firmware")
@pytest.mark.parametrize(
    ("recipe", "options", "constants"),
    [
        (U55, {}, None),
        (U55, {"quantized_io": True}, None),
        (U55, {"memory_mode": "Sram_Only"}, "SRAM"),
        (U65, {}, "DRAM"),
        (U85, {}, "SRAM"),
    ],
)
def test_parts_of_ram_are_the_pools_of_the_firmware(
    recipe: ArmRecipeType, options: dict[str, Any], constants: str | None, tmp_path: Path
) -> None:
    result, ram = _export(recipe, **options)
    pools = result.save_firmware(tmp_path / "firmware").pools
    needed = pools.temp + pools.fast_scratch + sum(pools.shared)
    needed += sum(method.method_allocator + method.planned for method in pools.methods)
    size, memory = _parts(ram).get("NPU constants", (0, None))
    assert memory == constants
    assert ram.total_bytes == needed + size
    assert ram.sram_bytes + ram.dram_bytes == ram.total_bytes
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert size in (0, delegate.vela.constant_bytes)
    assert delegate.vela.constant_bytes > delegate.vela.weight_bytes


def test_with_activations_in_dram_only_the_fast_scratch_is_in_sram() -> None:
    _, ram = _export(U65)
    assert {name for name, (_, memory) in _parts(ram).items() if memory == "SRAM"} == {"NPU fast scratch"}


def test_the_report_names_the_sum_and_its_parts() -> None:
    result, ram = _export(U55)
    text = str(result.report)
    assert f"RAM that a board needs: {ram.total_bytes:,} B\n  NPU scratch with inputs, outputs and CPU tensors" in text
    first = f"{ram.parts[0].bytes:,} B NPU scratch with inputs, outputs and CPU tensors"
    assert str(ram).startswith(f"{ram.total_bytes:,} B = {first} + ")
    assert json.loads(json.dumps(result.report.to_dict()))["ram"]["total_bytes"] == ram.total_bytes


def test_programs_for_other_targets_have_no_ram_figures() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), images(), progress=False)
    assert result.report.ram is None
    assert "RAM" not in str(result.report)


def test_without_delegates_there_are_no_parts_of_the_npu() -> None:
    assert npu_ram_parts(()) == ()
