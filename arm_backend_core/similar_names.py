"""Suggestions for error messages about an unknown name: the most similar known names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def find_similar_names(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Find up to ``count`` known names that are similar to ``name``, the most similar first; case does not matter."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for an unknown name, or an empty string if no known name is similar."""
    return format_suggestion(find_similar_names(name, known))


def format_suggestion(names: Iterable[str]) -> str:
    """Return "; did you mean 'X' or 'Y'?", or an empty string without names."""
    question = " or ".join(f"'{name}'" for name in names)
    return f"; did you mean {question}?" if question else ""
