"""What the project makes of one test of the conformance generator, and whether that is what the generator expects.

The questions are those of ``Finding.question``:

* ``accepts``: the operator's record accepts what TOSA forbids (ERROR_IF, REQUIRE, level), or what a profile has not.
* ``refuses``: the record refuses what a profile and its extensions have.
* ``unread``: the flatbuffer of a test that is to work is not read.
* ``round trip``: the graph that is read, written and read again is another one, or computes something else.
* ``reference``: the reference model does not run what the record accepts.
* ``evaluation``: the record's own evaluation differs from the reference model.
* ``fault``: an exception, which none of these may end in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.targets.target import PROFILES, Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.operators import evaluate
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.tosa_deserialize import deserialize
from tests.tosa.conformance import model
from tests.tosa.conformance.generation import VERSIONS, Entry, Generated

Array = np.ndarray[Any, Any]
#: Multiply-accumulates of the largest test that is executed, and elements of its largest tensor, padding included.
MOST_WORK, MOST_ELEMENTS = 5_000_000, 2_000_000


@dataclass(frozen=True)
class Finding:
    """A disagreement: the question that it answers, and what was seen."""

    question: str
    detail: str


@dataclass(frozen=True)
class Verdict:
    """What became of one test.

    Attributes:
        findings: disagreements; none where all is as it should be.
        executed: whether the reference model ran both flatbuffers.
        evaluated: whether the record computed the result too.
    """

    test: str
    fails: str | None
    findings: tuple[Finding, ...] = ()
    executed: bool = False
    evaluated: bool = False


def refusal(graph: Graph, profile: str, extensions: Sequence[str], version: str) -> str | None:
    """Why the profile with these extensions has not all operators of a graph, or None.

    There may be no such target, and a shape that is not its operator's is a reason too.
    """
    try:
        wanted = Target.from_tosa_spec("+".join(("TOSA-1.0", profile, *extensions)))
    except ValueError as error:
        return str(error)
    if version != VERSIONS[0]:
        wanted = replace(wanted, version=(1, 1))
    for op in graph.walk():
        if op.regions:
            continue
        try:
            reason = op_refusal(wanted, op)
        except AssertionError as error:
            reason = str(error)
        if reason is not None:
            return reason
    return None


def judge(entry: Entry, test: Generated) -> Verdict:
    """Read, check, write, execute and evaluate one test."""
    findings: list[Finding] = []
    executed = evaluated = False
    try:
        graph = deserialize(test.flatbuffer)
    except PayloadError as error:
        if test.fails is None:
            findings.append(Finding("unread", str(error)))
        return Verdict(test.name, test.fails, tuple(findings))
    if test.fails is not None:
        findings += _forbidden(entry, test, graph)
        return Verdict(test.name, test.fails, tuple(findings))
    findings += _allowed(entry, test, graph)
    if any(finding.question == "refuses" for finding in findings):  # the serializer writes what a record describes
        return Verdict(test.name, test.fails, tuple(findings))
    if any(value.data is not None for part in _graphs(graph) for value in part.outputs):
        findings.append(Finding("round trip", "a constant is returned"))
        return Verdict(test.name, test.fails, tuple(findings))
    again = serialize(graph)
    if described(deserialize(again)) != described(graph):
        findings.append(Finding("round trip", "the graph is another one"))
    if is_small(graph, MOST_WORK, MOST_ELEMENTS):
        executed = True
        more, evaluated = _executed(test, graph, again)
        findings += more
    return Verdict(test.name, test.fails, tuple(findings), executed, evaluated)


def is_small(graph: Graph, work: int, elements: int) -> bool:
    """Whether no operator has more multiply-accumulates, and no tensor, with its padding, more elements."""
    return all(op.work <= work and _elements(op) <= elements for op in graph.walk())


def _elements(op: Op) -> int:
    axes = window_axes(op) if "pad" in op.attrs else None
    padded = prod(axis.input_size + axis.pad_before + axis.pad_after for axis in axes) if axes is not None else 0
    return max(padded, *(value.size for value in (*op.inputs, op.output)))


def _graphs(graph: Graph) -> list[Graph]:
    return [graph, *(inner for op in graph.walk() for inner in op.regions)]


def _forbidden(entry: Entry, test: Generated, graph: Graph) -> Iterator[Finding]:
    for profile in test.profiles:
        if refusal(graph, profile, test.extensions, entry.version) is None:
            yield Finding("accepts", f"{test.fails} with {profile}: {_text(graph)}")


def _allowed(entry: Entry, test: Generated, graph: Graph) -> Iterator[Finding]:
    """It is there with a profile that has it and all extensions that it needs, and with less it is not."""
    for profile in test.profiles:
        reason = refusal(graph, profile, test.extensions, entry.version)
        if reason is not None:
            yield Finding("refuses", f"{profile} with {', '.join(test.extensions) or 'no extension'}: {reason}")
    control = any(op.regions for op in graph.ops)
    for profile in PROFILES:
        fewer = [[x for x in test.extensions if x != missing] for missing in test.extensions if not control]
        for extensions in fewer if profile in test.profiles else [list(test.extensions)]:
            if refusal(graph, profile, extensions, entry.version) is None and not control:
                had = ", ".join(extensions) or "no extension"
                yield Finding(
                    "accepts", f"{profile} with {had}, needs {test.profiles} {test.extensions}: {_text(graph)}"
                )


def _executed(test: Generated, graph: Graph, again: bytes) -> tuple[list[Finding], bool]:
    try:
        expected = model.run(test.flatbuffer, graph, test.inputs)
    except ArmBackendError as error:
        return [Finding("reference", str(error))], False
    results = model.run(again, deserialize(again), test.inputs)
    types = [value.dtype for value in graph.outputs]
    ours, theirs = ([model.stored(x, t) for x, t in zip(side, types, strict=True)] for side in (results, expected))
    if not _equal(ours, theirs):
        return [Finding("round trip", "the result is another one")], False
    evaluated = evaluation(graph, test.inputs)
    if evaluated is None:
        return [], False
    difference = differing(evaluated, theirs[0])
    return [Finding("evaluation", f"{difference}: {_text(graph)}")] if difference else [], True


def differing(ours: Array, theirs: Array) -> str:
    """How many elements differ, and the first of them; nothing where none does."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype}{ours.shape} for {theirs.dtype}{theirs.shape}"
    equal = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    wrong = np.flatnonzero(~equal.ravel())
    first = f", first {ours.ravel()[wrong[0]]!r} for {theirs.ravel()[wrong[0]]!r}" if wrong.size else ""
    return f"{wrong.size} of {ours.size}{first}" if wrong.size else ""


def evaluation(graph: Graph, inputs: Sequence[Array]) -> Array | None:
    """The record's result of a graph of one operator; None where it computes none."""
    if len(graph.ops) != 1 or graph.ops[0].regions or len(graph.outputs) != 1:
        return None
    (op,) = graph.ops
    given = dict(zip(graph.inputs, inputs, strict=True))
    arrays = [model.stored(given[x], x.dtype) if x.data is None else x.data for x in op.inputs]
    return evaluate(op, arrays)


def _equal(left: Sequence[Array], right: Sequence[Array]) -> bool:
    """Equal to the bit but for what is not a number: TOSA has one of these, and the serializer writes one."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=True))
        for a, b in zip(left, right, strict=True)
    )


def described(graph: Graph) -> object:
    """All of a graph but names: equal for equal graphs."""
    places: dict[Value, int] = {}

    def told(value: Value) -> object:
        if value.data is not None and value.dtype.is_float:
            return value.shape, value.dtype, np.where(np.isnan(value.data), np.nan, value.data).tobytes()
        if value.data is not None:
            return value.content_key
        return places.setdefault(value, len(places)), value.shape, value.dtype

    def attribute(value: object) -> object:
        if isinstance(value, Graph):
            return described(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return repr(value)

    def operator(op: Op) -> object:
        attrs = {name: attribute(value) for name, value in sorted(op.attrs.items())}
        return op.kind, [told(x) for x in op.inputs], attrs, [told(x) for x in op.results]

    return [told(x) for x in graph.inputs], [operator(op) for op in graph.ops], [told(x) for x in graph.outputs]


def _text(graph: Graph) -> str:
    text = "; ".join(map(repr, graph.ops))
    return text if len(text) < 600 else text[:600] + "..."
