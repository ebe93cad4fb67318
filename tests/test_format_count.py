"""Counts with their nouns."""

from __future__ import annotations

import pytest

from arm_backend_core.format_count import format_count


@pytest.mark.parametrize(("count", "text"), [(0, "0 samples"), (1, "1 sample"), (1200, "1,200 samples")])
def test_the_noun_is_in_the_plural_unless_the_count_is_one(count: int, text: str) -> None:
    assert format_count(count, "sample") == text
