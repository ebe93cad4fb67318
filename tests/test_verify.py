"""The parts of ``make verify``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.verify import VELA_TESTS, Part, run_part, select_parts

ROOT = Path(__file__).resolve().parents[1]


def test_a_part_that_has_passed_is_not_run_again(tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    script = f"open({str(counter)!r}, 'a').write('x'); print('7 passed')"
    part = Part("counted", (sys.executable, "-c", script))
    assert [run_part(part, tmp_path) for _ in range(2)] == ["7 passed", "7 passed"]
    assert counter.read_text() == "x"


def test_a_part_that_failed_keeps_its_output_and_is_run_again(tmp_path: Path) -> None:
    failing = Part("part", (sys.executable, "-c", "print('1 failed'); raise SystemExit(1)"))
    assert run_part(failing, tmp_path) is None
    assert "1 failed" in (tmp_path / "part.log").read_text()
    assert run_part(Part("part", (sys.executable, "-c", "print('1 passed')")), tmp_path) == "1 passed"


def test_the_tests_of_the_older_vela_exist() -> None:
    assert [name for name in VELA_TESTS if not (ROOT / name).exists()] == []


def test_names_of_parts_select_by_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    parts, parser = [Part(name, ()) for name in ("tests-ops", "tests-qat", "golden")], argparse.ArgumentParser()
    assert [part.name for part in select_parts(parser, parts, ["tests"])] == ["tests-ops", "tests-qat"]
    assert select_parts(parser, parts, None) == parts
    with pytest.raises(SystemExit):
        select_parts(parser, parts, ["test_ops"])
    assert "no part begins with 'test_ops'; there are: tests-ops, tests-qat, golden" in capsys.readouterr().err
