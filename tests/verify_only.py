"""Parameters of tests that ``make verify`` runs and ``make test`` leaves out."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_verify(values: Iterable[Any]) -> list[Any]:
    """Mark each value, so that only ``--verify`` runs it."""
    return [pytest.param(value, marks=pytest.mark.verify) for value in values]


def is_thorough(config: pytest.Config, name: str) -> bool:
    """Whether the test case ``name`` runs its expensive checks: one in three, all of them with ``--verify``."""
    return zlib.crc32(name.encode()) % 3 == 0 or bool(config.getoption("verify"))


def select_third(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations of the parameters' values; only ``--verify`` runs two thirds of them.

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
