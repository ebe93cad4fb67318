"""Tests that build C++ run again when their sources have changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import cpp_suites
from tests.cpp_suites import ROOT, SOURCES, SUITES, RecordDigest, compute_digest, mark_unchanged, select_suites


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """A test of the suites, and another one of its file."""
    file, (name, *_) = next(iter(SUITES.items()))
    items: list[pytest.Item] = []
    for function in (name, "test_other"):
        item: Any = pytest.Function.from_parent(request.node.parent, name=f"{function}[case]", callobj=lambda: None)
        item.path, item.originalname = ROOT / file, function
        items.append(item)
    return items


def test_the_functions_exist() -> None:
    for file, names in SUITES.items():
        defined = set(re.findall(r"^def (\w+)\(", (ROOT / file).read_text(), re.M))
        assert defined >= set(names), file


def test_every_change_of_a_source_changes_the_digest(tmp_path: Path) -> None:
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / source, tmp_path / source)
    digest = compute_digest(tmp_path)
    assert digest == compute_digest()
    header = tmp_path / "runtime/common/log.h"
    content = header.read_bytes()
    header.write_bytes(content + b"\n")
    assert compute_digest(tmp_path) != digest
    header.write_bytes(content)
    assert compute_digest(tmp_path) == digest
    (tmp_path / "tests/firmware/new.py").touch()
    assert compute_digest(tmp_path) != digest


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="arm_recipes/firmware, a source of the C"):
        compute_digest(tmp_path)


@pytest.mark.parametrize("changed", [False, True])
def test_only_tests_with_unchanged_sources_are_left_out(
    items: list[pytest.Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    record = tmp_path / "record"
    record.write_text("0" * 64 if changed else compute_digest())
    monkeypatch.setattr(cpp_suites, "RECORD", record)
    assert select_suites(items) == items[:1]
    mark_unchanged(items)
    assert [item.get_closest_marker("verify") is not None for item in items] == [not changed, False]


@pytest.mark.parametrize(
    ("failed", "missing", "recorded"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_digest_is_recorded_if_all_tests_passed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    failed: bool,
    missing: bool,
    recorded: bool,
) -> None:
    record = tmp_path / "record"
    monkeypatch.setattr(cpp_suites, "RECORD", record)
    monkeypatch.delattr(request.config, "workerinput", raising=False)
    plugin = RecordDigest()
    functions = [f"{file}::{name}" for file, names in SUITES.items() for name in names]
    for function in functions[missing:]:
        report = pytest.TestReport(f"{function}[case]", ("", 0, ""), {}, "passed", None, "call")
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish(request.session, pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    assert record.exists() is recorded
