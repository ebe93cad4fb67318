"""The comparison with what is recorded, on made-up figures, and the file itself."""

from __future__ import annotations

import pytest

from tests.models import expectations, zoo

BEFORE = {"program_bytes": 20_000, "sqnr_db": 30.0}


@pytest.mark.parametrize("after", [{"program_bytes": 20_200}, {"program_bytes": 19_800}, {"sqnr_db": 29.81}, {}])
def test_small_differences_pass(after: expectations.Figures) -> None:
    assert expectations.departures(BEFORE, BEFORE | after) == []


@pytest.mark.parametrize(
    "after",
    [{"program_bytes": 20_201}, {"program_bytes": 19_799}, {"sqnr_db": 29.79}, {"sqnr_db": 30.21}, {"sram_bytes": 1}],
)
def test_worse_and_better_fail(after: expectations.Figures) -> None:
    (departure,) = expectations.departures(BEFORE, BEFORE | after)
    (name,) = after
    assert departure.startswith(name)
    assert "make record" in departure


def test_a_figure_that_is_gone_fails() -> None:
    assert len(expectations.departures(BEFORE, {"program_bytes": 20_000})) == 1


def test_the_file_has_every_model_and_recipe_and_no_other() -> None:
    recipes = [recipe.name for recipe in expectations.GATED]
    assert {model: list(known) for model, known in expectations.recorded().items()} == dict.fromkeys(zoo.NAMES, recipes)
