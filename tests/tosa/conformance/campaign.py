"""Runs the tests of the conformance generator, remembers what became of each, and makes a table of it."""

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
from tests.tosa.conformance.disagreements import EXPECTED, Expected
from tests.tosa.conformance.generation import CONTROL_FLOW, Entry, Listed, batches, entries, listed
from tests.tosa.conformance.judge import Finding, Verdict, judge
from tests.tosa.conformance.npu import NpuVerdict


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        invalid: the generator found while writing it that its arguments make no test.
    """

    entry: str
    kind: str
    verdict: Verdict
    npus: tuple[NpuVerdict, ...] = ()
    invalid: bool = False

    @property
    def findings(self) -> Iterator[Finding]:
        """Disagreements, those of the NPUs included."""
        yield from self.verdict.findings
        for verdict in self.npus:
            if verdict.written == npu.WRONG:
                yield Finding("emulator", f"{verdict.accelerator}: {verdict.detail}")
            elif verdict.written == npu.VELA:
                yield Finding("Vela", f"{verdict.accelerator}: {verdict.detail}")

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Outcome:
        """The inverse of ``to_json``."""
        told: dict[str, Any] = json.loads(line)
        verdict = told.pop("verdict")
        findings = tuple(Finding(**finding) for finding in verdict.pop("findings"))
        npus = tuple(NpuVerdict(**verdict) for verdict in told.pop("npus"))
        return Outcome(verdict=Verdict(findings=findings, **verdict), npus=npus, **told)


def attempt(entry: Entry, test: Listed, emulator: Emulator | None) -> Outcome:
    """Write one test, judge it, and run it on the NPUs if there is an emulator and it is one of integers to work."""
    written = test.write()
    if written is None:
        return Outcome(str(entry), entry.kind, Verdict(test.name, test.fails), invalid=True)
    npus: tuple[NpuVerdict, ...] = ()
    try:
        verdict = judge(entry, written)
    except Exception as error:
        verdict = Verdict(test.name, test.fails, (Finding("fault", f"{type(error).__name__}: {error}"),))
    refused = any(finding.question in ("refuses", "unread", "fault") for finding in verdict.findings)
    integer = "INT" in written.profiles and verdict.fails is None and entry.kind not in CONTROL_FLOW
    if emulator is not None and integer and not refused:
        npus = tuple(npu.attempt(written, accelerator, emulator) for accelerator in ACCELERATORS)
    return Outcome(str(entry), entry.kind, verdict, npus)


def sampled(
    entry: Entry, count: int | None, seed: int, *, most_elements: int | None = None, most_batches: int | None = None
) -> Iterator[Listed]:
    """So many tests of each batch of an entry, the same for a seed, and all that are to fail.

    Args:
        most_elements: smaller tests are preferred.
        most_batches: of tests to work; the first.
    """
    positive = [arguments for arguments in batches(entry) if "positive" in arguments]
    for arguments in batches(entry):
        if "positive" in arguments and arguments in positive[most_batches:] and most_batches is not None:
            continue
        tests = listed(entry, arguments)
        if most_elements is not None:
            tests = [test for test in tests if test.elements <= most_elements] or tests
        if count is None:
            yield from tests
            continue
        random.Random(f"{seed} {entry}").shuffle(tests)
        yield from (test for i, test in enumerate(tests) if i < count or test.fails is not None)


@dataclass
class Campaign:
    """A run over all entries, or those of some operators. What is in the file already is not run again."""

    path: Path
    seed: int
    count: int | None
    operators: Sequence[str] = ()
    emulator: Emulator | None = None
    known: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def run(self) -> Iterator[Outcome]:
        """Outcomes, earlier ones included."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                outcome = Outcome.from_json(line)
                self.known[outcome.entry, outcome.verdict.test] = outcome
        with self.path.open("a") as file:
            for entry in entries():
                if self.operators and entry.operator not in self.operators:
                    continue
                for test in sampled(entry, self.count, self.seed):
                    outcome = self.known.get((str(entry), test.name)) or attempt(entry, test, self.emulator)
                    if (str(entry), test.name) not in self.known:
                        file.write(outcome.to_json() + "\n")
                        file.flush()
                    yield outcome


def example(expected: Expected) -> tuple[Entry, Listed]:
    """The test that shows a disagreement."""
    wanted, name = expected.example
    entry = next(entry for entry in entries() if str(entry) == wanted)
    tests = (test for arguments in batches(entry) for test in listed(entry, arguments))
    return entry, next(test for test in tests if test.name == name)


def explained(outcome: Outcome, finding: Finding) -> Expected | None:
    """The reason that is written down for a disagreement."""
    return next((expected for expected in EXPECTED if expected.explains(outcome.kind, outcome, finding)), None)


@dataclass
class Table:
    """What became of all tests, by operator."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    unexplained: list[tuple[Outcome, Finding]] = field(default_factory=list)
    seen: Counter[Expected] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one test."""
        row = self.rows.setdefault(outcome.kind, Counter())
        verdict = outcome.verdict
        row["invalid" if outcome.invalid else "tests"] += 1
        row["to fail"] += verdict.fails is not None and not outcome.invalid
        row["executed"] += verdict.executed
        row["evaluated"] += verdict.evaluated
        for of_npu in outcome.npus:
            row[f"{of_npu.accelerator} {of_npu.written}"] += 1
            row[f"{of_npu.accelerator} raw wrong"] += of_npu.raw == npu.WRONG
        for finding in outcome.findings:
            expected = explained(outcome, finding)
            row["explained" if expected else "open"] += 1
            if expected is None:
                self.unexplained.append((outcome, finding))
            else:
                self.seen[expected] += 1

    @property
    def stale(self) -> list[Expected]:
        """Disagreements that are written down and were not seen."""
        return [expected for expected in EXPECTED if not self.seen[expected]]

    def lines(self) -> Iterator[str]:
        """Of each operator its tests, those to fail, those executed by the reference model and by the record itself,
        disagreements that are explained and that are open; for each NPU tests that are equal, that the hardware lacks,
        that are too large, that Vela refuses, that are wrong, and that are wrong before the last passes alone.
        """
        columns = ("tests", "to fail", "executed", "evaluated", "explained", "open")
        states = (npu.EQUAL, npu.HARDWARE, npu.LARGE, npu.VELA, npu.WRONG, "raw wrong")
        short = ("equal", "lacks", "large", "Vela", "wrong", "raw")
        chips = [name.removeprefix("ethos-") for name in ACCELERATORS]
        yield (
            f"{'':24}"
            + "".join(f"{name:>10}" for name in columns)
            + "  "
            + " | ".join(f"{chip} {' '.join(short)}" for chip in chips)
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
