"""A few hundred of the operators that ``python -m tests.tosa.drawn`` draws by the ten thousand."""

from __future__ import annotations

from tests.tosa.drawn import disagreements, draw_operators


def test_records_agree_with_the_validator_and_the_reference_model() -> None:
    wrong, counts = disagreements(draw_operators(300, seed=7))
    assert not wrong, "\n".join(wrong)
    refused = sum(count for name, count in counts.items() if name.endswith("refused"))
    assert 30 < refused < 120
