"""Regression programs of random graphs stay correct."""

from __future__ import annotations

import pytest

from tests.fuzz import oracle
from tests.fuzz.regressions import REGRESSIONS, Regression
from tests.verify_only import is_thorough


@pytest.mark.parametrize(
    ("regression", "target"), [pytest.param(r, t, id=f"{r.name}-{t}") for r in REGRESSIONS for t in r.targets]
)
def test_regression(regression: Regression, target: str, pytestconfig: pytest.Config) -> None:
    thorough = is_thorough(pytestconfig, f"{regression.name}-{target}")
    oracle.check(
        regression.module(), regression.samples(), target, export_twice=thorough, validate_flatbuffers=thorough
    )


def test_returned_constants_run() -> None:
    """ExecuTorch's runtime returns outputs that are constants of the program, folded at export."""
    regression = next(regression for regression in REGRESSIONS if regression.name == "returned_constants")
    oracle.check_runtime(regression.module(), regression.samples(), "TOSA_FP")
