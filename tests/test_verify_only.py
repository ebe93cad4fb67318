"""The table of sampled tests names tests that exist: another name would be ignored."""

from __future__ import annotations

import re
from pathlib import Path

from tests.verify_only import SAMPLED


def test_sampled_tests_exist() -> None:
    files = list(Path(__file__).parent.rglob("test_*.py"))
    names = {f"{path.stem}::{name}" for path in files for name in re.findall(r"^def (\w+)\(", path.read_text(), re.M)}
    assert SAMPLED.keys() - names == set()
