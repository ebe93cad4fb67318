"""Random TOSA operators: a sample of ``python -m tests.tosa.random_operators``."""

from __future__ import annotations

import re

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.legality import op_refusal
from tests.tosa.random_operators import disagreements, draw_operators


def test_records_agree_with_the_validator_and_the_reference_model() -> None:
    wrong, counts = disagreements(draw_operators(300, seed=7))
    assert not wrong, "\n".join(wrong)
    refused = sum(count for name, count in counts.items() if name.endswith("refused"))
    assert 30 < refused < 120


def test_each_refusal_of_a_record_is_confirmed_by_tosa_opt_or_reference_model() -> None:
    """For each message, apart from its numbers: the first of 20,000 operators that are refused with it."""
    first: dict[str, tuple[Target, Op]] = {}
    for target, op in draw_operators(20000, seed=7):
        try:
            reason = op_refusal(target, op)
        except AssertionError:  # the operator is invalid on every target
            continue
        if reason and " with " in reason:
            words = re.sub(r"\S*\d[^;:]*", "", reason.partition(" with ")[2])
            first.setdefault(words, (target, op))
    wrong, counts = disagreements(list(first.values()))
    assert not wrong, "\n".join(wrong)
    assert len(first) > 40
    assert all(name.endswith("refused") for name in counts)
