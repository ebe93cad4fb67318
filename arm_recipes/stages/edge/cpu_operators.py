"""Operators that stay on the CPU, grouped by name and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class CpuOperator:
    """Operators of one kind that stay on the CPU for one reason.

    Attributes:
        sources: lines of the user's model that they come from.
    """

    operator: str
    count: int
    reason: str
    sources: tuple[str, ...]


def group_operators(operators: Iterable[tuple[str, str, str]]) -> tuple[CpuOperator, ...]:
    """Operators as (name, reason, source line), those of one name and reason as one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason, source in operators:
        groups.setdefault((name, reason), []).append(source)
    return tuple(
        CpuOperator(name, len(sources), reason, tuple(dict.fromkeys(filter(None, sources))))
        for (name, reason), sources in groups.items()
    )
