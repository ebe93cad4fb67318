"""Suggestions for unknown names: case does not matter, and a name that resembles nothing gets none."""

from __future__ import annotations

import pytest

from arm_backend_core.similar_names import find_similar_names, format_suggestion, suggest_name

KNOWN = ["ETHOSU_U55_INT8", "ETHOSU_U65_INT8", "TOSA_FP", "Shared_Sram"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("ETHOS_U55_INT8", "; did you mean 'ETHOSU_U55_INT8'?"),
        ("shared_sram", "; did you mean 'Shared_Sram'?"),
        ("tosa-fp", "; did you mean 'TOSA_FP'?"),
        ("x", ""),
        ("", ""),
    ],
)
def test_the_most_similar_name_is_suggested(name: str, suggestion: str) -> None:
    assert suggest_name(name, KNOWN) == suggestion


def test_several_names_start_with_the_most_similar() -> None:
    names = find_similar_names("ethosu_u65", KNOWN, 2)
    assert names == ["ETHOSU_U65_INT8", "ETHOSU_U55_INT8"]
    assert format_suggestion(names) == "; did you mean 'ETHOSU_U65_INT8' or 'ETHOSU_U55_INT8'?"


def test_one_module_compares_names() -> None:
    """Every other module calls this one, so that all messages have one form."""
    from tests.import_graph import CORE, RECIPES, list_imports, list_sources

    importers = [
        path.stem for package in (CORE, RECIPES) for path in list_sources(package) if "difflib" in list_imports(path)
    ]
    assert importers == ["similar_names"]
