"""Comparison with recorded figures (invented ones here), and completeness of the file."""

from __future__ import annotations

import itertools

import pytest

from arm_backend_core.workers.vela import SUPPORTED_RELEASES
from tests.models import expectations, zoo

BEFORE = {"program_bytes": 20_000, "sqnr_db": 30.0}


@pytest.mark.parametrize("after", [{"program_bytes": 20_200}, {"program_bytes": 19_800}, {"sqnr_db": 29.81}, {}])
def test_differences_within_the_tolerance_are_not_listed(after: expectations.Figures) -> None:
    assert expectations.list_differences(BEFORE, BEFORE | after) == []


@pytest.mark.parametrize(
    "after",
    [{"program_bytes": 20_201}, {"program_bytes": 19_799}, {"sqnr_db": 29.69}, {"sqnr_db": 30.31}, {"sram_bytes": 1}],
)
def test_worse_and_better_figures_are_listed(after: expectations.Figures) -> None:
    (difference,) = expectations.list_differences(BEFORE, BEFORE | after)
    (name,) = after
    assert difference.startswith(name)
    assert "make record" in difference


def test_a_missing_figure_is_listed() -> None:
    assert len(expectations.list_differences(BEFORE, {"program_bytes": 20_000})) == 1


def test_the_file_has_every_model_and_recipe_and_no_other() -> None:
    recipes = [recipe.name for recipe in expectations.RECORDED_RECIPES]
    known = expectations.read_file()
    assert {model: list(of_model) for model, of_model in known.items()} == dict.fromkeys(zoo.NAMES, recipes)
    releases = [f"vela {major}.{minor}" for major, minor in SUPPORTED_RELEASES]
    for model, recipe in itertools.product(zoo.NAMES, recipes):
        found = [name for name, value in known[model][recipe].items() if isinstance(value, dict)]
        assert found == (releases if recipe.startswith("ETHOSU") else []), (model, recipe)


def test_figures_of_one_release_leave_those_of_others() -> None:
    found = expectations.update_release({}, BEFORE, "ETHOSU_U55_INT8", (5, 2))
    found = expectations.update_release(found, BEFORE | {"program_bytes": 1}, "ETHOSU_U55_INT8", (5, 1))
    assert list(found) == ["sqnr_db", "vela 5.1", "vela 5.2"]
    assert expectations.select_release(found, (5, 2)) == BEFORE
    assert expectations.select_release(found, (5, 1)) == BEFORE | {"program_bytes": 1}
    assert expectations.update_release(found, BEFORE, "TOSA_INT8", (5, 1)) == BEFORE
