"""Many graphs in processes of their own: what each came to, kept in a file so that a run can be taken up again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from tests.fuzz.generator import draw
from tests.fuzz.oracle import TARGETS, Failure, Undefined, check, check_runtime
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink

#: A graph that takes longer, in seconds, is a failure; its process is killed.
LIMIT = 180
#: One graph in so many is validated by tosa-opt and exported twice; one in so many goes through ExecuTorch's runtime.
VALIDATED, EXPORTED = 4, 20
#: Failures of one cause that a process makes small.
_SHRUNK = 3


@dataclass
class Verdict:
    """What one graph came to.

    Attributes:
        kind: ``right``, ``undefined`` (PyTorch cannot capture it), or a ``Failure``'s kind.
        cause: of the failure, or why it is undefined.
        small: source, inputs and operators of a small program that fails alike.
    """

    index: int
    kind: str = "right"
    cause: str = ""
    detail: str = ""
    drawn: list[str] = field(default_factory=list)
    delegated: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    small: str = ""
    operators: list[str] = field(default_factory=list)


def judged(program: Program, target: str, *, thorough: bool, exported: bool) -> tuple[int, list[tuple[str, str]]]:
    """Operators delegated, and (operator, reason) of the others. Raises ``Failure`` or ``Undefined``."""
    samples = [program.samples(seed) for seed in range(3)]
    outcome = check(program.module(), samples, target, again=thorough, validated=thorough)
    if exported:
        check_runtime(program.module(), samples, target)
    return outcome.delegated, list(outcome.refused.elements())


def attempt(target: str, seed: int, index: int) -> Verdict:
    """Draw a graph and judge it; a failure is not made small yet."""
    program = draw(seed, index, integer=TARGETS[target].wide is not None)
    verdict = Verdict(index, drawn=[step.operator for step in program.steps])
    thorough = index % VALIDATED == 0
    try:
        verdict.delegated, verdict.refused = judged(
            program, target, thorough=thorough, exported=index % EXPORTED == EXPORTED - 1
        )
    except Undefined as error:
        verdict.kind, verdict.cause = "undefined", str(error)
    except Failure as failure:
        verdict.kind, verdict.cause, verdict.detail = failure.kind, failure.cause, str(failure)
    return verdict


def make_small(verdict: Verdict, target: str, seed: int, seconds: float) -> None:
    """Note a small program that fails as ``verdict`` says."""
    thorough, exported = (
        verdict.kind in ("illegal", "unstable"),
        "runtime" in verdict.cause or "export" in verdict.cause,
    )

    def fails(program: Program) -> bool:
        try:
            judged(program, target, thorough=thorough, exported=exported)
        except Failure as failure:
            if (failure.kind, failure.cause) == (verdict.kind, verdict.cause):
                verdict.detail = str(failure)
                return True
        except Undefined:
            pass
        return False

    small = shrink(draw(seed, verdict.index, integer=TARGETS[target].wide is not None), fails, seconds)
    verdict.operators = [step.operator for step in small.steps]
    inputs = [f"{leaf.name}: {leaf.drawn}" for leaf in small.leaves if not leaf.constant]
    verdict.small = "\n".join([small.source, *inputs])


# -- the child ---------------------------------------------------------------------------------------------------


def serve(target: str, seed: int, seconds: float) -> None:
    """Read indices from the standard input and answer each with a line of JSON.

    A failure is written once before it is shrunk, and once after, because PyTorch may crash on a smaller program
    (``lstm`` with operands of inconsistent sizes).
    """
    seen: Counter[tuple[str, str]] = Counter()
    for line in sys.stdin:
        signal.alarm(LIMIT)  # kills the process, also where native code does not return
        verdict = attempt(target, seed, int(line))
        if verdict.kind not in ("right", "undefined"):
            seen[verdict.kind, verdict.cause] += 1
            if seconds and seen[verdict.kind, verdict.cause] <= _SHRUNK:
                print(_UNSHRUNK + json.dumps(asdict(verdict)), file=_ANSWERS, flush=True)
                signal.alarm(LIMIT + int(10 * seconds))
                make_small(verdict, target, seed, seconds)
        signal.alarm(0)
        print(json.dumps(asdict(verdict)), file=_ANSWERS, flush=True)


_ANSWERS = sys.stdout
#: Prefix of a failure that is not shrunk yet; the shrunk one follows.
_UNSHRUNK = "not shrunk: "


# -- the parent --------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """Graphs ``range(graphs)`` of ``seed`` on one target.

    Attributes:
        record: a file of verdicts, one a line; graphs that are in it are not run again.
        shrink: seconds of computing to make one failure small.
    """

    target: str
    seed: int
    graphs: int
    record: Path
    workers: int = 1
    minutes: float = 1e9
    shrink: float = 20.0

    def run(self) -> Iterator[Verdict]:
        """Every verdict, those of earlier runs first."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        known = (
            [Verdict(**json.loads(line)) for line in self.record.read_text().splitlines()]
            if self.record.exists()
            else []
        )
        yield from known
        left = sorted(set(range(self.graphs)) - {verdict.index for verdict in known})
        todo, answers = iter(left), Queue[Verdict | None]()
        lock, end = threading.Lock(), time.monotonic() + 60 * self.minutes
        threads = [threading.Thread(target=self._work, args=(todo, lock, end, answers)) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        running = len(threads)
        with self.record.open("a") as file:
            while running:
                verdict = answers.get()
                if verdict is None:
                    running -= 1
                    continue
                print(json.dumps(asdict(verdict)), file=file, flush=True)
                yield verdict

    def _work(self, todo: Iterator[int], lock: Any, end: float, answers: Queue[Verdict | None]) -> None:
        """One child after the other: a child that dies is a crash of the graph it had."""
        child = None
        try:
            while time.monotonic() < end:
                with lock:
                    index = next(todo, None)
                if index is None:
                    break
                child = child if child is not None and child.poll() is None else self._child()
                answers.put(_ask(child, index))
        finally:
            if child is not None:
                child.kill()
            answers.put(None)

    def _child(self) -> subprocess.Popen[str]:
        arguments = ["--serve", "--target", self.target, "--seed", str(self.seed), "--shrink", str(self.shrink)]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def _ask(child: subprocess.Popen[str], index: int) -> Verdict:
    assert child.stdin is not None
    assert child.stdout is not None
    failure = ""
    try:
        print(index, file=child.stdin, flush=True)
        line = child.stdout.readline()
        if line.startswith(_UNSHRUNK):
            failure, line = line.removeprefix(_UNSHRUNK), child.stdout.readline()
    except OSError:
        line = ""
    if line.startswith("{"):
        return Verdict(**json.loads(line))
    code = child.wait()
    if failure:
        return Verdict(**json.loads(failure))
    cause = f"did not finish in {LIMIT} s" if code == -signal.SIGALRM else f"the process ended with {code}"
    return Verdict(index, "crashed", cause)


# -- the table ---------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """Counts over verdicts."""

    target: str
    graphs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    delegated: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, ...], list[Verdict]] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> bool:
        """Count; True if it is the first failure of its cause and operators."""
        self.graphs += 1
        self.kinds[verdict.kind] += 1
        self.drawn.update(verdict.drawn)
        self.delegated += verdict.delegated
        self.refused.update((operator, reason) for operator, reason in verdict.refused)
        if verdict.kind in ("right", "undefined"):
            return False
        alike = self.failures.setdefault((verdict.kind, verdict.cause, *sorted(set(verdict.operators))), [])
        alike.append(verdict)
        return len(alike) == 1

    HEADER = (
        "target            graphs  steps  operators  delegated  refused  undefined  wrong  illegal  unstable  crashed"
    )

    def __str__(self) -> str:
        kinds = "".join(
            f"  {self.kinds[k]:{len(k)}d}" for k in ("undefined", "wrong", "illegal", "unstable", "crashed")
        )
        return (
            f"{self.target:16s}  {self.graphs:6d}  {self.drawn.total():5d}  {len(self.drawn):9d}  {self.delegated:9d}"
            f"  {self.refused.total():7d}{kinds}"
        )

    def reasons(self, most: int = 20) -> list[str]:
        """The most frequent reasons of refusals, without the operator's name."""
        counts: Counter[str] = Counter()
        for (operator, reason), count in self.refused.items():
            counts[reason.replace(operator, "<operator>")] += count
        return [f"{count:7d}  {reason}" for reason, count in counts.most_common(most)]
