"""Rows that ``make verify`` runs and ``make test`` leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def later(values: Iterable[Any]) -> list[Any]:
    """The values as parameters of tests that ``make test`` leaves out; tuples are several parameters."""
    return [pytest.param(*_row(value), marks=pytest.mark.verify) for value in values]


def some_of(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations, of which ``make test`` takes a third.

    Values of any two parameters meet in it, if another one has three values or more.
    """
    numbers = itertools.product(*(range(len(values)) for values in parameters))
    return [
        pytest.param(
            *(values[i] for values, i in zip(parameters, row, strict=True)),
            marks=[pytest.mark.verify] if sum(row) % 3 else [],
        )
        for row in numbers
    ]


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
