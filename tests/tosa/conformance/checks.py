"""Checks of the compiler with one test of the conformance generator.

Each failed check is a finding. ``Finding.check`` names the check:

* ``accepts``: the operator's record accepts an operator that TOSA forbids (ERROR_IF, REQUIRE, level) or that the
  profile does not contain.
* ``refuses``: the record refuses an operator that the profile and its extensions support.
* ``unread``: the flatbuffer of a test that expects success cannot be deserialized.
* ``round trip``: after serialization and deserialization, the graph or its results differ.
* ``reference``: the reference model refuses what the record accepts.
* ``evaluation``: the record's evaluation differs from the reference model.
* ``fault``: an unexpected exception.
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
from tests.tosa.conformance import reference_model
from tests.tosa.conformance.generation import VERSIONS, Entry, GeneratedTest

Array = np.ndarray[Any, Any]
#: Limits of executed tests: multiply-accumulates, and elements of the largest tensor, padding included.
MAX_MACS, MAX_ELEMENTS = 5_000_000, 2_000_000


@dataclass(frozen=True)
class Finding:
    """A disagreement between compiler and generator.

    Attributes:
        check: the failed check, see the module's docstring.
        detail: the observed values or message.
    """

    check: str
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Outcome of one test, without NPUs.

    Attributes:
        test: name of the test.
        fails: the ERROR_IF or REQUIRE statement that the test violates; None if the test expects success.
        findings: disagreements.
        executed: whether the reference model ran the original and the serialized flatbuffer.
        evaluated: whether the result was also computed by the record.
    """

    test: str
    fails: str | None
    findings: tuple[Finding, ...] = ()
    executed: bool = False
    evaluated: bool = False


def find_refusal(graph: Graph, profile: str, extensions: Sequence[str], version: str) -> str | None:
    """Return why a profile with these extensions does not support a graph; None if it does.

    An impossible target and a wrong shape of a result are reasons too.
    """
    try:
        target = Target.from_tosa_spec("+".join(("TOSA-1.0", profile, *extensions)))
    except ValueError as error:
        return str(error)
    if version != VERSIONS[0]:
        target = replace(target, version=(1, 1))
    for op in graph.walk():
        if op.regions:
            continue
        try:
            reason = op_refusal(target, op)
        except AssertionError as error:
            reason = str(error)
        if reason is not None:
            return reason
    return None


def check_test(entry: Entry, test: GeneratedTest) -> Verdict:
    """Deserialize, check, serialize, execute and evaluate one test."""
    findings: list[Finding] = []
    executed = evaluated = False
    try:
        graph = deserialize(test.flatbuffer)
    except PayloadError as error:
        if test.fails is None:
            findings.append(Finding("unread", str(error)))
        return Verdict(test.name, test.fails, tuple(findings))
    if test.fails is not None:
        findings += _check_refused(entry, test, graph)
        return Verdict(test.name, test.fails, tuple(findings))
    findings += _check_accepted(entry, test, graph)
    if any(
        finding.check == "refuses" for finding in findings
    ):  # the serializer supports only operators that their records accept
        return Verdict(test.name, test.fails, tuple(findings))
    if any(value.data is not None for part in _nested_graphs(graph) for value in part.outputs):
        findings.append(Finding("round trip", "a constant is returned"))
        return Verdict(test.name, test.fails, tuple(findings))
    reserialized = serialize(graph)
    if canonical_form(deserialize(reserialized)) != canonical_form(graph):
        findings.append(Finding("round trip", "the graph is another one"))
    if is_small(graph, MAX_MACS, MAX_ELEMENTS):
        executed = True
        execution_findings, evaluated = _check_executed(test, graph, reserialized)
        findings += execution_findings
    return Verdict(test.name, test.fails, tuple(findings), executed, evaluated)


def is_small(graph: Graph, work: int, elements: int) -> bool:
    """Whether each operator and each tensor, padding included, is within the limits."""
    return all(op.work <= work and _count_elements(op) <= elements for op in graph.walk())


def _count_elements(op: Op) -> int:
    padded = (
        prod(axis.input_size + axis.pad_before + axis.pad_after for axis in window_axes(op)) if "pad" in op.attrs else 0
    )
    return max(padded, *(value.size for value in (*op.inputs, op.output)))


def _nested_graphs(graph: Graph) -> list[Graph]:
    return [graph, *(inner for op in graph.walk() for inner in op.regions)]


def _check_refused(entry: Entry, test: GeneratedTest, graph: Graph) -> Iterator[Finding]:
    for profile in test.profiles:
        if find_refusal(graph, profile, test.extensions, entry.version) is None:
            yield Finding("accepts", f"{test.fails} with {profile}: {_describe_graph(graph)}")


def _check_accepted(entry: Entry, test: GeneratedTest, graph: Graph) -> Iterator[Finding]:
    """Check that the graph is accepted with the named profiles and extensions, and refused without any of them."""
    for profile in test.profiles:
        reason = find_refusal(graph, profile, test.extensions, entry.version)
        if reason is not None:
            yield Finding("refuses", f"{profile} with {', '.join(test.extensions) or 'no extension'}: {reason}")
    control = any(op.regions for op in graph.ops)
    for profile in PROFILES:
        fewer = [[x for x in test.extensions if x != missing] for missing in test.extensions if not control]
        for extensions in fewer if profile in test.profiles else [list(test.extensions)]:
            if find_refusal(graph, profile, extensions, entry.version) is None and not control:
                had = ", ".join(extensions) or "no extension"
                yield Finding(
                    "accepts",
                    f"{profile} with {had}, needs {test.profiles} {test.extensions}: {_describe_graph(graph)}",
                )


def _check_executed(test: GeneratedTest, graph: Graph, reserialized: bytes) -> tuple[list[Finding], bool]:
    try:
        expected = reference_model.run(test.flatbuffer, graph, test.inputs)
    except ArmBackendError as error:
        return [Finding("reference", str(error))], False
    results = reference_model.run(reserialized, deserialize(reserialized), test.inputs)
    types = [value.dtype for value in graph.outputs]
    ours, theirs = (
        [reference_model.to_constant_array(x, t) for x, t in zip(side, types, strict=True)]
        for side in (results, expected)
    )
    if not _equal(ours, theirs):
        return [Finding("round trip", "the result is another one")], False
    evaluated = evaluate_by_record(graph, test.inputs)
    if evaluated is None:
        return [], False
    difference = describe_difference(evaluated, theirs[0])
    return [Finding("evaluation", f"{difference}: {_describe_graph(graph)}")] if difference else [], True


def describe_difference(ours: Array, theirs: Array) -> str:
    """Describe how many elements differ and the first difference; empty if the arrays are equal."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype}{ours.shape} for {theirs.dtype}{theirs.shape}"
    equal = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    wrong = np.flatnonzero(~equal.ravel())
    first = f", first {ours.ravel()[wrong[0]]!r} for {theirs.ravel()[wrong[0]]!r}" if wrong.size else ""
    return f"{wrong.size} of {ours.size}{first}" if wrong.size else ""


def evaluate_by_record(graph: Graph, inputs: Sequence[Array]) -> Array | None:
    """Evaluate a graph of one operator by its record; None if the record cannot evaluate it."""
    if len(graph.ops) != 1 or graph.ops[0].regions or len(graph.outputs) != 1:
        return None
    (op,) = graph.ops
    arrays_by_input = dict(zip(graph.inputs, inputs, strict=True))
    arrays = [
        reference_model.to_constant_array(arrays_by_input[x], x.dtype) if x.data is None else x.data for x in op.inputs
    ]
    return evaluate(op, arrays)


def _equal(left: Sequence[Array], right: Sequence[Array]) -> bool:
    """Whether arrays are bit-equal, except for NaN: TOSA has a single NaN, so the serializer writes one."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=True))
        for a, b in zip(left, right, strict=True)
    )


def canonical_form(graph: Graph) -> object:
    """Return a canonical form of a graph without names: equal for equal graphs."""
    indices: dict[Value, int] = {}

    def value_key(value: Value) -> object:
        if value.data is not None and value.dtype.is_float:
            return value.shape, value.dtype, np.where(np.isnan(value.data), np.nan, value.data).tobytes()
        if value.data is not None:
            return value.content_key
        return indices.setdefault(value, len(indices)), value.shape, value.dtype

    def attribute_key(value: object) -> object:
        if isinstance(value, Graph):
            return canonical_form(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return repr(value)

    def operator_key(op: Op) -> object:
        attrs = {name: attribute_key(value) for name, value in sorted(op.attrs.items())}
        return op.kind, [value_key(x) for x in op.inputs], attrs, [value_key(x) for x in op.results]

    return (
        [value_key(x) for x in graph.inputs],
        [operator_key(op) for op in graph.ops],
        [value_key(x) for x in graph.outputs],
    )


def _describe_graph(graph: Graph) -> str:
    text = "; ".join(map(repr, graph.ops))
    return text if len(text) < 600 else text[:600] + "..."
