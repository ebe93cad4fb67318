"""The trace of rewrites names the operator, the rule, and the condition by which the rule declined."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.peephole_transpose import cancel_transpose, merge_transpose
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once
from arm_backend_core.tosa.passes.rewrite_tracing import TRACE_VARIABLE, call_and_explain_none

TARGET = Target.from_tosa_spec("TOSA-1.0+INT")


def _graph(*, cancels: bool) -> Graph:
    graph = Graph()
    build = Builder(graph, TARGET)
    x = graph.add_input((1, 2, 3), DType.INT32, "x")
    y = build.transpose(x, (0, 2, 1)) if cancels else build.emit("ABS", (x,), x.dtype)
    graph.outputs = [build.transpose(y, (0, 2, 1))]
    return graph


@pytest.mark.parametrize("cancels", [False, True])
def test_trace_prints_the_condition_of_a_rule_that_declines(
    cancels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "rewrite")
    apply_once(_graph(cancels=cancels), TARGET, {"TRANSPOSE": [cancel_transpose]})
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("rewrite: TRANSPOSE int32[1, ") for line in lines), lines
    assert lines[-1].endswith(": cancel_transpose applies") == cancels, lines
    declined = [
        line for line in lines if "cancel_transpose declines: " in line and "tosa/passes/peephole_transpose.py:" in line
    ]
    assert declined
    assert len(declined) == len(lines) - cancels, lines


def test_without_the_trace_variable_nothing_is_printed_and_no_tracer_runs(capsys: pytest.CaptureFixture[str]) -> None:
    tracers = []

    def rule(op: Op, rewriter: Rewriter) -> Value | None:
        tracers.append(sys.gettrace())
        return None

    before = sys.gettrace()
    apply_once(_graph(cancels=False), TARGET, {"TRANSPOSE": [rule]})
    assert tracers == [before]
    assert capsys.readouterr().err == ""


def test_the_reason_follows_a_helper_that_returned_none() -> None:
    graph = _graph(cancels=False)
    result, reason = call_and_explain_none(merge_transpose, graph.ops[-1], Rewriter(graph, TARGET))
    assert result is None
    assert reason.startswith("cancel_transpose(op, rewriter) (tosa/passes/peephole_transpose.py:"), reason
    assert ", as before is None or " in reason, reason
    bound = partial(merge_transpose, graph.ops[-1])
    assert call_and_explain_none(bound, Rewriter(graph, TARGET)) == (None, reason)
