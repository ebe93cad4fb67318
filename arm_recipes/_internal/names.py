"""Unknown names: suggest the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X? (allowed: ...)" for an unknown name; without the question if no name is near."""
    names = list(known)
    near = get_close_matches(name.upper(), names, n=1)
    allowed = f"allowed: {', '.join(names)}"
    return f"did you mean {near[0]}? ({allowed})" if near else allowed
