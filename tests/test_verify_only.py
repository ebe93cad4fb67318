"""The table of sampled tests names tests that exist: another name would be ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kept_cases import KEPT_CASES
from tests.verify_only import SAMPLED, list_missing_cases, mark_sampled


def test_sampled_tests_exist() -> None:
    files = list(Path(__file__).parent.rglob("test_*.py"))
    names = {f"{path.stem}::{name}" for path in files for name in re.findall(r"^def (\w+)\(", path.read_text(), re.M)}
    assert SAMPLED.keys() - names == set()
    assert KEPT_CASES.keys() - SAMPLED.keys() == set()


def test_each_sampled_test_keeps_a_case(request: pytest.FixtureRequest) -> None:
    """The first case that no other mark excludes."""
    names = [f"test_alternatives_are_bit_equal[{i}]" for i in range(9)]
    path = Path("test_chooser.py")
    items = [pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in names]
    for item in items:
        item.path, item.originalname = path, "test_alternatives_are_bit_equal"
    items[0].add_marker(pytest.mark.verify)
    mark_sampled(items)
    marked = [item.get_closest_marker("verify") is not None for item in items]
    assert marked[:2] == [True, False]
    assert any(marked[2:])


def test_kept_cases_are_not_sampled_out(request: pytest.FixtureRequest) -> None:
    name, cases = next(iter(KEPT_CASES.items()))
    stem, _, function = name.partition("::")
    items = [
        pytest.Function.from_parent(request.node.parent, name=f"{function}[{case}]", callobj=lambda: None)
        for case in ("first", *cases)
    ]
    for item in items:
        item.path, item.originalname = Path(f"{stem}.py"), function
    mark_sampled(items)
    assert not any(item.get_closest_marker("verify") for item in items)
    assert not any(missing.startswith(name) for missing in list_missing_cases(items))
    assert f"{name}[{cases[0]}]" in list_missing_cases(items[:1])
