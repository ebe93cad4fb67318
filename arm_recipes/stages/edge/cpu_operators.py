"""Operators that stay on the CPU, grouped by name and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuOperator:
    """Operators of one kind that stay on the CPU for one reason.

    Attributes:
        operator: name of the operator.
        count: number of nodes.
        reason: why they are not delegated; in ``MethodReport.not_runnable``, why ExecuTorch cannot run them.
        sources: source lines in the user's model, without duplicates.
    """

    operator: str
    count: int
    reason: str
    sources: tuple[str, ...]


def group_operators(operators: Iterable[tuple[str, str, str]]) -> tuple[CpuOperator, ...]:
    """Group (name, reason, source line) tuples by name and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason, source in operators:
        groups.setdefault((name, reason), []).append(source)
    return tuple(
        CpuOperator(name, len(sources), reason, tuple(dict.fromkeys(filter(None, sources))))
        for (name, reason), sources in groups.items()
    )
