"""Fuzzing campaign: checks many random graphs in child processes; outcomes are recorded, so that a run can continue."""

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
from tests.fuzz.oracle import TARGETS, Failure, NoExpectedResult, check, check_runtime
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink

#: Time limit for a graph, in seconds. If it takes longer, its process is killed and the graph is a failure.
GRAPH_TIMEOUT_SECONDS = 180
#: Every n-th graph is validated by tosa-opt and exported twice; every n-th graph runs in ExecuTorch's runtime.
VALIDATION_INTERVAL, EXPORT_INTERVAL = 4, 20
#: Maximum number of failures with the same cause that a process shrinks.
_MAX_SHRUNK_PER_CAUSE = 3


@dataclass
class Verdict:
    """Outcome of one graph. Its attributes are the keys of a line in the record file.

    Attributes:
        index: number of the graph.
        kind: ``right``, ``undefined`` (PyTorch cannot capture it), or a ``Failure``'s kind.
        cause: cause of the failure, or the reason why the graph is undefined.
        detail: message of the failure.
        drawn: operators of the graph.
        delegated: number of delegated operators.
        refused: other operators with the reason.
        small: source and inputs of a small program with the same failure.
        operators: operators of the small program.
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


def check_program(
    program: Program, target: str, *, thorough: bool, exported: bool
) -> tuple[int, list[tuple[str, str]]]:
    """Check a program. Returns the number of delegated operators, and operator and reason of the others.

    Raises:
        Failure: a check failed.
        NoExpectedResult: there is no expected result.
    """
    samples = [program.samples(seed) for seed in range(3)]
    outcome = check(program.module(), samples, target, export_twice=thorough, validate_flatbuffers=thorough)
    if exported:
        check_runtime(program.module(), samples, target)
    return outcome.delegated, list(outcome.refused.elements())


def check_graph(target: str, seed: int, index: int) -> Verdict:
    """Draw a graph and check it, without shrinking a failure."""
    program = draw(seed, index, integer=TARGETS[target].int16_activations is not None)
    verdict = Verdict(index, drawn=[step.operator for step in program.steps])
    thorough = index % VALIDATION_INTERVAL == 0
    try:
        verdict.delegated, verdict.refused = check_program(
            program, target, thorough=thorough, exported=index % EXPORT_INTERVAL == EXPORT_INTERVAL - 1
        )
    except NoExpectedResult as error:
        verdict.kind, verdict.cause = "undefined", str(error)
    except Failure as failure:
        verdict.kind, verdict.cause, verdict.detail = failure.kind, failure.cause, str(failure)
    return verdict


def shrink_failure(verdict: Verdict, target: str, seed: int, seconds: float) -> None:
    """Shrink the failing program of ``verdict``, and store the small program there."""
    thorough, exported = (
        verdict.kind in ("illegal", "unstable"),
        "runtime" in verdict.cause or "export" in verdict.cause,
    )

    def fails(program: Program) -> bool:
        try:
            check_program(program, target, thorough=thorough, exported=exported)
        except Failure as failure:
            if (failure.kind, failure.cause) == (verdict.kind, verdict.cause):
                verdict.detail = str(failure)
                return True
        except NoExpectedResult:
            pass
        return False

    small = shrink(draw(seed, verdict.index, integer=TARGETS[target].int16_activations is not None), fails, seconds)
    verdict.operators = [step.operator for step in small.steps]
    inputs = [f"{leaf.name}: {leaf.spec}" for leaf in small.leaves if not leaf.constant]
    verdict.small = "\n".join([small.source, *inputs])


# -- the child ---------------------------------------------------------------------------------------------------


def serve(target: str, seed: int, seconds: float) -> None:
    """Read indices from the standard input and answer each with a line of JSON.

    A failure is written once before it is shrunk, and once after, because PyTorch may crash on a smaller program
    (``lstm`` with operands of inconsistent sizes).
    """
    seen: Counter[tuple[str, str]] = Counter()
    for line in sys.stdin:
        signal.alarm(GRAPH_TIMEOUT_SECONDS)  # kills the process, also where native code does not return
        verdict = check_graph(target, seed, int(line))
        if verdict.kind not in ("right", "undefined"):
            seen[verdict.kind, verdict.cause] += 1
            if seconds and seen[verdict.kind, verdict.cause] <= _MAX_SHRUNK_PER_CAUSE:
                print(_UNSHRUNK + json.dumps(asdict(verdict)), file=_ANSWER_STREAM, flush=True)
                signal.alarm(GRAPH_TIMEOUT_SECONDS + int(10 * seconds))
                shrink_failure(verdict, target, seed, seconds)
        signal.alarm(0)
        print(json.dumps(asdict(verdict)), file=_ANSWER_STREAM, flush=True)


_ANSWER_STREAM = sys.stdout
#: Prefix of a failure that is not shrunk yet; the shrunk one follows.
_UNSHRUNK = "not shrunk: "


# -- the parent --------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """Check of the graphs ``range(graphs)`` of a seed on one target.

    Attributes:
        target: name of the target.
        seed: seed of the graphs.
        graphs: number of graphs.
        record: file with one verdict per line; graphs in this file are not checked again.
        workers: number of child processes.
        minutes: time limit.
        shrink: limit of processor time for shrinking one failure, in seconds.
    """

    target: str
    seed: int
    graphs: int
    record: Path
    workers: int = 1
    minutes: float = 1e9
    shrink: float = 20.0

    def run(self) -> Iterator[Verdict]:
        """Yield the verdict of every graph, those of earlier runs first."""
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
        """Send graphs to a child process. If the process dies, its graph has crashed, and a new process follows."""
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
    cause = (
        f"did not finish in {GRAPH_TIMEOUT_SECONDS} s" if code == -signal.SIGALRM else f"the process ended with {code}"
    )
    return Verdict(index, "crashed", cause)


# -- the table ---------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """Counts of verdicts on one target.

    Attributes:
        target: name of the target.
        graphs: number of verdicts.
        kinds: number of verdicts by kind.
        drawn: number of steps by operator.
        delegated: number of delegated operators.
        refused: number of other operators, by operator and reason.
        failures: failures by kind, cause and operators.
    """

    target: str
    graphs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    delegated: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, ...], list[Verdict]] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> bool:
        """Count a verdict. Returns whether it is the first failure with its cause and operators."""
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

    def frequent_refusals(self, most: int = 20) -> list[str]:
        """List the most frequent reasons of refusals, without the operators' names."""
        counts: Counter[str] = Counter()
        for (operator, reason), count in self.refused.items():
            counts[reason.replace(operator, "<operator>")] += count
        return [f"{count:7d}  {reason}" for reason, count in counts.most_common(most)]
