"""The selection of ``make test`` keeps every statement, and every function with a quick case."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import case_selection
from tests.case_selection import (
    Measure,
    Measured,
    digest_unselected,
    list_missing_cases,
    mark_unselected,
    read_measured,
    select_cases,
    split_name,
)
from tests.line_coverage import ROOT


def _measured(function: str, case: str, seconds: float, lines: str) -> Measured:
    return Measured(function, case, seconds, frozenset(lines))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "selected_cases.json"
    path.write_text('{"test_a.py::test_rows": ["first"], "test_a.py::test_slow": []}')
    monkeypatch.setattr(case_selection, "RECORD", path)
    tests = [("test_a.py::test_rows", "first"), ("test_a.py::test_rows", "second"), ("test_a.py::test_slow", "")]
    unselected = tmp_path / "unselected_cases.json"
    unselected.write_text(json.dumps(digest_unselected(tests, json.loads(path.read_text()))))
    monkeypatch.setattr(case_selection, "UNSELECTED", unselected)
    return path


def _items(request: pytest.FixtureRequest, *nodeids: str) -> list[pytest.Item]:
    items: list[pytest.Item] = []
    for nodeid in nodeids:
        item: Any = pytest.Function.from_parent(request.node.parent, name=nodeid, callobj=lambda: None)
        item._nodeid = nodeid
        items.append(item)
    return items


def test_quick_functions_run_whole() -> None:
    assert select_cases([_measured("quick", str(i), 0.2, "a") for i in range(4)]) == {}


def test_every_line_is_executed_in_little_time() -> None:
    tests = [
        _measured("rows", "all of them", 9.0, "abcd"),
        _measured("rows", "ab", 0.6, "ab"),
        _measured("rows", "bc", 0.6, "bc"),
        _measured("rows", "cd", 0.6, "cd"),
        _measured("slow", "", 5.0, "ab"),
        _measured("slow but alone", "", 5.0, "x"),
    ]
    assert select_cases(tests) == {"rows": ["ab", "cd"], "slow": []}


def test_a_function_without_lines_of_its_own_runs_its_quickest_case() -> None:
    tests = [_measured("first", "", 0.1, "ab"), _measured("rows", "a", 1.5, "a"), _measured("rows", "b", 1.1, "b")]
    assert select_cases(tests) == {"rows": ["b"]}


def test_cases_that_are_not_selected_are_marked(request: pytest.FixtureRequest, record: Path) -> None:
    """A new case of a recorded function runs."""
    names = [
        "test_rows[first]",
        "test_rows[second]",
        "test_slow",
        "test_new[x]",
        "test_rows[first]@group",
        "test_rows[3rd]",
    ]
    items = _items(request, *(f"test_a.py::{name}" for name in names))
    mark_unselected(items)
    assert [item.get_closest_marker("verify") is not None for item in items] == [False, True, True, False, False, False]


def test_tests_that_do_not_exist_are_listed(request: pytest.FixtureRequest, record: Path) -> None:
    assert list_missing_cases(_items(request, "test_a.py::test_rows[first]", "test_a.py::test_slow")) == []
    missing = list_missing_cases(_items(request, "test_a.py::test_rows[second]"))
    assert missing == ["test_a.py::test_slow", "test_a.py::test_rows[first]"]


def test_the_recorded_tests_exist(request: pytest.FixtureRequest) -> None:
    """In a run of all tests; a run of some of them does not know the others."""
    assert request.config.stash[case_selection.MISSING] == [], "rename or delete them in tests/selected_cases.json"


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("a.py::test_b", ("a.py::test_b", "")),
        ("a.py::test_b@group", ("a.py::test_b", "")),
        ("a.py::test_b[c[0]-d]@group", ("a.py::test_b", "c[0]-d")),
    ],
)
def test_names_of_functions_and_cases(nodeid: str, expected: tuple[str, str]) -> None:
    assert split_name(nodeid) == expected


def test_measured_tests_are_read_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plugin = Measure(tmp_path)
    (item,) = _items(request, "test_a.py::test_rows[first]")
    hook = plugin.pytest_runtest_protocol(item)
    next(hook)
    with pytest.raises(StopIteration):
        next(hook)
    (measured,) = read_measured(tmp_path)
    assert (measured.function, measured.case) == ("test_a.py::test_rows", "first")
    assert measured.seconds >= 0


def test_the_functions_that_always_run_exist() -> None:
    for function in case_selection._ALWAYS:
        file, _, name = function.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), function
        assert case_selection._read().get(function) != [], f"{function}: run make selection"
