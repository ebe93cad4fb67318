"""A sample of the TOSA conformance generator's tests; ``python -m tests.tosa.conformance`` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from arm_backend_core.tosa.operators import OPERATORS
from tests.tosa.conformance import __main__ as command
from tests.tosa.conformance.campaign import find_example, find_explanation, run_test, sample_tests
from tests.tosa.conformance.disagreements import KNOWN_DISAGREEMENTS, KnownDisagreement
from tests.tosa.conformance.generation import CONTROL_FLOW, Entry, entries

#: Elements of the largest operand of a sample.
_MAX_ELEMENTS = 2000


def _kinds() -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries():
        found.setdefault(entry.kind, []).append(entry)
    return found


def test_every_emitted_operator_has_conformance_tests() -> None:
    emitted = {kind for kind, record in OPERATORS.items() if not record.is_placeholder}
    assert emitted | {*CONTROL_FLOW} == _kinds().keys()


@pytest.mark.parametrize("kind", sorted(_kinds()))
def test_records_agree_with_the_generator(kind: str) -> None:
    """For each operator: entries of the profiles, and one of an extension.

    Each entry has one test per batch that expects success, and all tests that expect failure.
    """
    of_kind = _kinds()[kind]
    seed = sum(map(ord, kind))
    open_ones, seen = [], 0
    plain = [entry for entry in of_kind if "-ext-" not in entry.group]
    others = [entry for entry in of_kind if entry not in plain]
    for entry in [*plain[:2], *others[seed % max(len(others), 1) :][:1]]:
        for test in sample_tests(entry, 1, 0, max_elements=_MAX_ELEMENTS, max_batches=1):
            outcome = run_test(entry, test, None)
            seen += not outcome.invalid
            open_ones += [
                f"{finding.check} | {entry} | {test.name} | {finding.detail}"
                for finding in outcome.findings
                if find_explanation(outcome, finding) is None
            ]
    assert open_ones == []
    assert seen


_COMPILER_DISAGREEMENTS = [expected for expected in KNOWN_DISAGREEMENTS if expected.check not in ("Vela", "emulator")]


@pytest.mark.parametrize(
    "expected", _COMPILER_DISAGREEMENTS, ids=lambda expected: f"{expected.kinds[0]}-{expected.check}"
)
def test_known_disagreement_still_occurs(expected: KnownDisagreement) -> None:
    """Remove a disagreement that no longer occurs from ``KNOWN_DISAGREEMENTS``."""
    outcome = run_test(*find_example(expected), None)
    assert any(find_explanation(outcome, finding) is expected for finding in outcome.findings), outcome


@pytest.mark.parametrize(("revision", "continues"), [("1a2b3c4", True), ("1a2b3c4-dirty", False)])
def test_outcomes_are_kept_by_revision(
    revision: str, continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "describe_revision", lambda: revision)
    path = command.prepare_outcomes_file(None)
    assert path == Path("build/conformance", revision, "outcomes.jsonl")
    path.write_text("{}")
    assert command.prepare_outcomes_file(None).exists() is continues
