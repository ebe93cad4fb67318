"""What random graphs found stays found."""

from __future__ import annotations

import re

import pytest

from tests.fuzz import oracle
from tests.fuzz.found import FOUND, Found
from tests.verify_only import is_thorough


@pytest.mark.parametrize(
    ("found", "target"), [pytest.param(f, t, id=f"{f.name}-{t}") for f in FOUND for t in f.targets]
)
def test_found(found: Found, target: str, pytestconfig: pytest.Config) -> None:
    thorough = is_thorough(pytestconfig, f"{found.name}-{target}")

    def check() -> None:
        oracle.check(found.module(), found.samples(), target, again=thorough, validated=thorough)

    if target not in found.fails:
        check()
        return
    with pytest.raises(oracle.Failure) as failure:  # where this does not raise, the row's ``fails`` can go
        check()
    assert re.search(found.fails[target], str(failure.value))


def test_returned_constants_run() -> None:
    """The copies of what was computed at export leave ExecuTorch's runtime too."""
    found = next(found for found in FOUND if found.name == "returned_constants")
    oracle.check_runtime(found.module(), found.samples(), "TOSA_FP")
