"""Planned memories: where tensors are placed, what they add up to, and errors if they do not fit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import arm_recipes
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, load
from arm_recipes._internal.errors import BudgetError, ExportError
from tests.runtime.host_programs import Counting, CpuBetween
from tests.small_models import vectors

U85 = ArmRecipeType.ETHOSU_U85_INT8


def _exported(**options: Any) -> ExportResult:
    return arm_recipes.export(CpuBetween().eval(), ExportRecipe.get_recipe(U85, **options), vectors(2))


@cache
def _default() -> ExportResult:
    return _exported(shared_scratch=False)


def _sizes(result: ExportResult) -> list[int]:
    """Bytes of each planned memory."""
    return list(result.executorch_program.executorch_program.execution_plan[0].non_const_buffer_sizes)[1:]


def _npu_bytes() -> int:
    ram = _default().report.ram
    assert ram is not None
    return sum(part.bytes for part in ram.npu)


@pytest.mark.parametrize("memory", [{"dtcm": 2000, "sram": None}, {"dtcm": 128, "ocram": "1KiB", "sram": "1 MB"}])
def test_tensors_fill_the_first_memory_that_has_room(memory: dict[str, Any]) -> None:
    result = _exported(memory=memory)
    sizes = _sizes(result)
    assert sum(sizes) >= sum(_sizes(_default()))
    assert all(
        size is None or used <= arm_recipes.recipe.options.parse_bytes(size)
        for used, size in zip(sizes, memory.values(), strict=False)
    )
    assert sizes[0] > 0
    ram = result.report.ram
    assert ram is not None
    assert list(ram.to_dict()["memories"].items()) == list(ram.bytes_by_memory.items())
    assert sum(ram.bytes_by_memory.values()) == ram.total_bytes
    assert 0 < ram.bytes_by_memory["DTCM"] <= sizes[0]
    assert ram.sram_bytes == ram.bytes_by_memory["SRAM"]
    assert "RAM by memory" in str(result.report)
    for sample in vectors(2):
        expected = _default().program().execute(*sample)
        assert all(map(torch.equal, load(result.buffer).execute(*sample), expected))


def test_one_memory_is_planned_as_without_the_option() -> None:
    assert _sizes(_exported(memory={"sram": None})) == _sizes(_default())
    assert "RAM by memory" not in str(_default().report)


def test_npu_scratch_counts_against_its_memory() -> None:
    budget = _npu_bytes() + 300  # 300 bytes are left for tensors
    result = _exported(memory={"sram": budget, "dram": None})
    ram = result.report.ram
    assert ram is not None
    assert _sizes(result)[0] <= 300
    assert ram.bytes_by_memory["SRAM"] <= budget
    assert ram.bytes_by_memory["DRAM"] > 0
    assert next(part for part in ram.cpu if part.name == "runtime").memory == "DRAM"  # SRAM has no room for it


def test_a_memory_that_the_npu_alone_exceeds_is_named() -> None:
    with pytest.raises(BudgetError, match=rf"'sram' needs {_npu_bytes():,} B and has 100 B.*the NPU alone") as error:
        _exported(memory={"sram": 100, "dram": None})
    assert "a larger budget for sram" in str(error.value)


def test_tensors_that_fit_no_memory_are_an_error() -> None:
    with pytest.raises(BudgetError, match=r"memory: sram, dtcm cannot hold .* up to [\d,]+ B") as error:
        _exported(memory={"sram": _npu_bytes() + 100, "dtcm": 100})
    text = str(error.value)
    assert "100 B available of" in text
    assert f"{_npu_bytes():,} B are the NPU's" in text
    assert "one more memory" in text


def test_a_memory_that_the_npu_fills_is_an_error() -> None:
    with pytest.raises(BudgetError, match="memory: sram cannot hold"):
        _exported(memory={"sram": _npu_bytes()})


def test_allocations_of_the_runtime_count_against_the_budget() -> None:
    ram = _default().report.ram
    assert ram is not None
    with pytest.raises(BudgetError, match=r"and ExecuTorch's runtime"):
        _exported(memory={"sram": ram.sram_bytes - 50})


def test_option_memory_refuses_several_methods() -> None:
    methods = {"count": Counting().eval(), "between": CpuBetween().eval()}
    recipe = ExportRecipe.get_recipe(U85, memory={"dtcm": 100, "sram": None})
    with pytest.raises(ExportError, match="memory: the program has the methods between, count"):
        arm_recipes.export(methods, recipe, dict.fromkeys(methods, vectors(2)))


def test_state_keeps_its_values_in_a_second_memory() -> None:
    recipe = ExportRecipe.get_recipe(U85, memory={"dtcm": 16, "sram": None})
    counting, plain = (
        arm_recipes.export(Counting().eval(), chosen, vectors(2)).program()
        for chosen in (recipe, ExportRecipe.get_recipe(U85))
    )
    for sample in vectors(3):
        assert all(map(torch.equal, counting.execute(*sample), plain.execute(*sample)))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (["sram"], "not a dict"),
        ({}, "names no memory"),
        ({"SRAM": 1}, "is no name of a memory"),
        ({"sram": "many"}, "the size of 'sram', 'many', is not a number of bytes"),
        ({"sram": None, "dram": 5}, "'sram' has no limit, .* put it last"),
    ],
)
def test_wrong_values_of_option_memory_are_refused(memory: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportRecipe.get_recipe(U85, memory=memory)
