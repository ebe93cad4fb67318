"""Text of a number of items."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """The count with its noun, in the plural unless the count is 1: "1 sample", "1,200 samples"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
