"""Test cases and checks that only ``make verify`` runs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_tests_with_verify_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that check more cases with ``--verify`` with ``verify``: those that read the options."""
    for item in items:
        if "pytestconfig" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.verify)


def mark_verify(values: Iterable[Any]) -> list[Any]:
    """Mark each value, so that its tests run only with ``--verify``."""
    return [pytest.param(value, marks=pytest.mark.verify) for value in values]


def is_thorough(config: pytest.Config, name: str) -> bool:
    """Whether the test case ``name`` runs its expensive checks: one in three, all of them with ``--verify``."""
    return zlib.crc32(name.encode()) % 3 == 0 or bool(config.getoption("verify"))


def combine_pairwise(*parameters: Sequence[Any]) -> list[Any]:
    """List all combinations of the parameters' values. Two thirds of them run only with ``--verify``.

    Each pair of values of two parameters stays in ``make test`` if a third parameter has three values or more.
    """
    numbers = itertools.product(*(range(len(values)) for values in parameters))
    return [
        pytest.param(
            *(values[i] for values, i in zip(parameters, row, strict=True)),
            marks=[pytest.mark.verify] if sum(row) % 3 else [],
        )
        for row in numbers
    ]
