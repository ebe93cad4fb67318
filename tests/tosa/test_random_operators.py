"""Random TOSA operators: a few hundred of those of ``python -m tests.tosa.random_operators``."""

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


def test_one_of_the_judges_refuses_what_each_condition_of_a_record_refuses() -> None:
    """The first of 20000 operators for each sentence, its numbers left out."""
    first: dict[str, tuple[Target, Op]] = {}
    for target, op in draw_operators(20000, seed=7):
        try:
            reason = op_refusal(target, op)
        except AssertionError:  # what no graph may have
            continue
        if reason and " with " in reason:
            words = re.sub(r"\S*\d[^;:]*", "", reason.partition(" with ")[2])
            first.setdefault(words, (target, op))
    wrong, counts = disagreements(list(first.values()))
    assert not wrong, "\n".join(wrong)
    assert len(first) > 40
    assert all(name.endswith("refused") for name in counts)
