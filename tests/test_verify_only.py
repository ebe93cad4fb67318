"""The table of sampled tests names tests that exist: another name would be ignored."""

from __future__ import annotations

from pathlib import Path

from tests.verify_only import SAMPLED


def test_sampled_tests_exist() -> None:
    sources = {path.stem: path.read_text() for path in Path(__file__).parent.rglob("test_*.py")}
    missing = [name for name in SAMPLED if f"\ndef {name.split('::')[1]}(" not in sources.get(name.split("::")[0], "")]
    assert missing == []
