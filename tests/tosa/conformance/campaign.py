"""Campaign: runs the tests of the conformance generator, records their outcomes, and tabulates them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.accelerators import ACCELERATORS
from tests.runtime.ethosu_emulator import Emulator
from tests.tosa.conformance import npu
from tests.tosa.conformance.checks import Finding, Verdict, check_test
from tests.tosa.conformance.disagreements import KNOWN_DISAGREEMENTS, KnownDisagreement
from tests.tosa.conformance.generation import CONTROL_FLOW, Entry, SelectedTest, batch_arguments, entries, list_tests
from tests.tosa.conformance.npu import NpuVerdict


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test. Its attributes are the keys of a line in ``outcomes.jsonl``.

    Attributes:
        entry: configuration entry of the test.
        kind: TOSA operator.
        verdict: outcome without an NPU.
        npus: outcomes on the NPUs.
        invalid: the generator's arguments define no valid test.
    """

    entry: str
    kind: str
    verdict: Verdict
    npus: tuple[NpuVerdict, ...] = ()
    invalid: bool = False

    @property
    def findings(self) -> Iterator[Finding]:
        """Disagreements, including those of the NPUs."""
        yield from self.verdict.findings
        for verdict in self.npus:
            if verdict.written == npu.WRONG:
                yield Finding("emulator", f"{verdict.accelerator}: {verdict.detail}")
            elif verdict.written == npu.VELA_REFUSED:
                yield Finding("Vela", f"{verdict.accelerator}: {verdict.detail}")

    def to_json(self) -> str:
        """Return the outcome as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Outcome:
        """Read a line that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(line)
        verdict = fields.pop("verdict")
        findings = tuple(Finding(**finding) for finding in verdict.pop("findings"))
        npus = tuple(NpuVerdict(**verdict) for verdict in fields.pop("npus"))
        return Outcome(verdict=Verdict(findings=findings, **verdict), npus=npus, **fields)


def run_test(entry: Entry, test: SelectedTest, emulator: Emulator | None) -> Outcome:
    """Generate and check one test. With an emulator, also run integer tests that expect success on the NPUs."""
    written = test.write()
    if written is None:
        return Outcome(str(entry), entry.kind, Verdict(test.name, test.fails), invalid=True)
    npus: tuple[NpuVerdict, ...] = ()
    try:
        verdict = check_test(entry, written)
    except Exception as error:
        verdict = Verdict(test.name, test.fails, (Finding("fault", f"{type(error).__name__}: {error}"),))
    refused = any(finding.check in ("refuses", "unread", "fault") for finding in verdict.findings)
    integer = "INT" in written.profiles and verdict.fails is None and entry.kind not in CONTROL_FLOW
    if emulator is not None and integer and not refused:
        npus = tuple(npu.try_on_npu(written, accelerator, emulator) for accelerator in ACCELERATORS)
    return Outcome(str(entry), entry.kind, verdict, npus)


def sample_tests(
    entry: Entry, count: int | None, seed: int, *, max_elements: int | None = None, max_batches: int | None = None
) -> Iterator[SelectedTest]:
    """Select tests from each batch of an entry, reproducibly, and all tests that expect failure.

    Args:
        entry: the configuration entry.
        count: number of tests per batch; None for all.
        seed: seed of the selection.
        max_elements: prefer tests whose largest operand has at most this number of elements.
        max_batches: of the batches of tests that expect success, use only the first ones, at most this number.
    """
    positive = [arguments for arguments in batch_arguments(entry) if "positive" in arguments]
    for arguments in batch_arguments(entry):
        if "positive" in arguments and arguments in positive[max_batches:] and max_batches is not None:
            continue
        tests = list_tests(entry, arguments)
        if max_elements is not None:
            tests = [test for test in tests if test.elements <= max_elements] or tests
        if count is None:
            yield from tests
            continue
        random.Random(f"{seed} {entry}").shuffle(tests)
        yield from (test for i, test in enumerate(tests) if i < count or test.fails is not None)


@dataclass
class Campaign:
    """A run over the configuration entries.

    Attributes:
        path: file of outcomes; tests with an outcome in this file are not run again.
        seed: seed of the selection of tests.
        count: number of tests per batch; None for all.
        operators: the generator's names of the operators to test; empty for all.
        emulator: runs NPU programs; None skips them.
        known: outcomes by entry and test name.
    """

    path: Path
    seed: int
    count: int | None
    operators: Sequence[str] = ()
    emulator: Emulator | None = None
    known: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def run(self) -> Iterator[Outcome]:
        """Yield the outcomes, including those of earlier runs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                outcome = Outcome.from_json(line)
                self.known[outcome.entry, outcome.verdict.test] = outcome
        with self.path.open("a") as file:
            for entry in entries():
                if self.operators and entry.operator not in self.operators:
                    continue
                for test in sample_tests(entry, self.count, self.seed):
                    outcome = self.known.get((str(entry), test.name)) or run_test(entry, test, self.emulator)
                    if (str(entry), test.name) not in self.known:
                        file.write(outcome.to_json() + "\n")
                        file.flush()
                    yield outcome


def find_example(expected: KnownDisagreement) -> tuple[Entry, SelectedTest]:
    """Find the test that shows a known disagreement."""
    entry_name, test_name = expected.example
    entry = next(entry for entry in entries() if str(entry) == entry_name)
    tests = (test for arguments in batch_arguments(entry) for test in list_tests(entry, arguments))
    return entry, next(test for test in tests if test.name == test_name)


def find_explanation(outcome: Outcome, finding: Finding) -> KnownDisagreement | None:
    """Find the known disagreement that explains a finding."""
    return next(
        (expected for expected in KNOWN_DISAGREEMENTS if expected.explains(outcome.kind, outcome, finding)), None
    )


@dataclass
class OutcomeTable:
    """Counts of outcomes by operator.

    Attributes:
        rows: counts by operator.
        unexplained: findings that are no known disagreement.
        seen: number of findings by known disagreement.
    """

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    unexplained: list[tuple[Outcome, Finding]] = field(default_factory=list)
    seen: Counter[KnownDisagreement] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count the outcome of one test."""
        row = self.rows.setdefault(outcome.kind, Counter())
        verdict = outcome.verdict
        row["invalid" if outcome.invalid else "tests"] += 1
        row["to fail"] += verdict.fails is not None and not outcome.invalid
        row["executed"] += verdict.executed
        row["evaluated"] += verdict.evaluated
        for npu_verdict in outcome.npus:
            row[f"{npu_verdict.accelerator} {npu_verdict.written}"] += 1
            row[f"{npu_verdict.accelerator} raw wrong"] += npu_verdict.raw == npu.WRONG
        for finding in outcome.findings:
            expected = find_explanation(outcome, finding)
            row["explained" if expected else "open"] += 1
            if expected is None:
                self.unexplained.append((outcome, finding))
            else:
                self.seen[expected] += 1

    @property
    def stale(self) -> list[KnownDisagreement]:
        """Known disagreements without a finding."""
        return [expected for expected in KNOWN_DISAGREEMENTS if not self.seen[expected]]

    def lines(self) -> Iterator[str]:
        """Format the table, one line per operator.

        Columns: tests, tests that expect failure, tests executed by the reference model and evaluated by the record,
        known and unknown disagreements. Then for each NPU: tests with equal results, not supported by the hardware, too
        large, refused by Vela, wrong, and wrong only without the last passes.
        """
        columns = ("tests", "to fail", "executed", "evaluated", "explained", "open")
        states = (npu.EQUAL, npu.UNSUPPORTED, npu.TOO_LARGE, npu.VELA_REFUSED, npu.WRONG, "raw wrong")
        labels = ("equal", "lacks", "large", "Vela", "wrong", "raw")
        chips = [name.removeprefix("ethos-") for name in ACCELERATORS]
        yield (
            f"{'':24}"
            + "".join(f"{name:>10}" for name in columns)
            + "  "
            + " | ".join(f"{chip} {' '.join(labels)}" for chip in chips)
        )
        total: Counter[str] = Counter()
        for kind, row in sorted(self.rows.items()):
            total.update(row)
            yield _line(kind, row, columns, states)
        yield _line("all", total, columns, states)


def _line(name: str, row: Counter[str], columns: Iterable[str], states: Iterable[str]) -> str:
    counts = "".join(f"{row[column]:10,}" for column in columns)
    npus = " | ".join(" ".join(f"{row[f'{chip} {state}']}" for state in states) for chip in ACCELERATORS)
    return f"{name:24}{counts}  {npus}"
