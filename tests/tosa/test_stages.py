"""Stages of the pipeline: the operators and types that a graph may have after each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.passes.pipeline import HARDWARE_PASSES, LAST_PASSES, PASSES, ScheduledPass, run
from arm_backend_core.tosa.passes.stages import BOOLEANS_LOWERED, FINAL, LOWERED, StageChecker
from tests.tosa_graphs import build_graph, make_target

TARGET = Target.from_tosa_spec("TOSA-1.0+INT+int4")
BRANCHES = Target.from_tosa_spec("TOSA-1.0+FP+cf")
X = ((2, 8), DType.INT8)


def _table_of_concat(b: Builder, x: Value) -> Value:
    return b.table(b.concat([x, x], 1), np.arange(-128, 128)[::-1])


def _with_identity(net: Graph, target: Target) -> None:
    x = net.outputs[0]
    net.outputs[0] = Builder(net, target).emit("IDENTITY", (x,), x.dtype)


def _with_wrong_table(net: Graph, target: Target) -> None:
    table = next(op for op in net.ops if op.kind == "TABLE")
    table.attrs = {**table.attrs, "table": table.attrs["table"][:9]}


def _with_loop_marker(net: Graph, target: Target) -> None:
    x = net.outputs[0]
    mark = Op("LOOP_IN", [x], Value(x.shape, x.dtype, "mark"), {"loop": 0, "index": 0})
    mark.output.producer = mark
    net.ops.append(mark)
    net.outputs[0] = mark.output


def _with_int4(net: Graph, target: Target) -> None:
    concat = next(op for op in net.ops if op.kind == "CONCAT")
    concat.inputs[1] = Builder(net, target).const(np.zeros(concat.inputs[1].shape), DType.INT4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_identity, r"after _with_identity: IDENTITY is not allowed at this stage: .* = IDENTITY"),
        (_with_wrong_table, r"after _with_wrong_table: .* = TABLE.*: .*"),
        (_with_loop_marker, r"after _with_loop_marker: .* = LOOP_IN.* needs TOSA"),
        (_with_int4, r"after _with_int4: INT4 is not allowed at this stage: .* = CONCAT"),
    ],
)
def test_the_pass_that_broke_the_graph_is_named(
    change: Callable[[Graph, Target], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipeline, "HARDWARE_PASSES", (ScheduledPass(change, "for the test", BOOLEANS_LOWERED), *HARDWARE_PASSES)
    )
    with pytest.raises(AssertionError, match=message):
        run(build_graph(_table_of_concat, X, target=TARGET), TARGET)


def test_final_graph_is_checked_without_strict_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")
    monkeypatch.setattr(
        pipeline, "LAST_PASSES", (*LAST_PASSES, ScheduledPass(_with_wrong_table, "for the test", FINAL))
    )
    with pytest.raises(AssertionError, match=r"after all passes: .* = TABLE"):
        run(build_graph(_table_of_concat, X, target=TARGET), TARGET)


def test_later_stages_allow_no_more_than_earlier_ones() -> None:
    """Of markers and booleans: what one stage forbids, no later stage allows."""
    steps = [*PASSES, *HARDWARE_PASSES, *LAST_PASSES]
    marks = [step.stage_after.operators & {"MX_CONV2D", "LOOP_IN", "LOOP_OUT"} for step in steps]
    assert all(later <= earlier for earlier, later in pairwise(marks))
    assert marks[-1] == frozenset()
    booleans = [step.stage_after.allows_bool for step in steps]
    assert booleans == sorted(booleans, reverse=True)
    assert steps[-1].stage_after == FINAL


def test_comparisons_are_allowed_until_booleans_are_lowered() -> None:
    u55 = make_target("ethos-u55-128")
    net = build_graph(
        lambda b, x, y: b.compare("GREATER", x, y), ((2, 8), DType.INT32), ((2, 8), DType.INT32), target=u55
    )
    StageChecker(u55).check(net, LOWERED, "lowering")
    with pytest.raises(AssertionError, match=r"after a pass: .* has no GREATER in hardware"):
        StageChecker(u55).check(net, BOOLEANS_LOWERED, "a pass")


def test_changed_operator_is_checked_again() -> None:
    net, checker = build_graph(_table_of_concat, X, target=TARGET), StageChecker(TARGET)
    checker.check(net, BOOLEANS_LOWERED, "one pass")
    _with_wrong_table(net, TARGET)
    with pytest.raises(AssertionError, match=r"after another: .* = TABLE"):
        checker.check(net, BOOLEANS_LOWERED, "another")


# -- nested graphs -------------------------------------------------------------------------------------------


def _conditional() -> Graph:
    """A COND_IF with the branches clamp(x) and x + x."""

    def body(b: Builder, condition: Value, x: Value) -> Value:
        return b.select(condition, b.clamp(x, 0, 3), b.add(x, x))

    net = build_graph(body, ((1, 1), DType.BOOL), ((2, 8), DType.FP32), target=BRANCHES)
    run(net, BRANCHES)
    assert net.ops[-1].kind == "COND_IF"
    return net


def _branches(net: Graph) -> tuple[Graph, Graph]:
    then, other = net.ops[-1].regions
    return then, other


def test_branches_are_legal() -> None:
    StageChecker(BRANCHES).check(_conditional(), FINAL, "all")


def test_operators_of_branches_are_checked() -> None:
    net = _conditional()
    clamp = next(op for op in net.walk() if op.kind == "CLAMP")
    clamp.attrs = {**clamp.attrs, "min_val": 5.0}
    with pytest.raises(AssertionError, match=r"after all: .* = CLAMP"):
        StageChecker(BRANCHES).check(net, FINAL, "all")


def test_results_of_branches_are_distinct() -> None:
    net = _conditional()
    then, _ = _branches(net)
    then.outputs = [then.inputs[0]]
    with pytest.raises(AssertionError, match="an output is not the result"):
        StageChecker(BRANCHES).check(net, FINAL, "all")


def test_branches_are_in_execution_order() -> None:
    net = _conditional()
    _, other = _branches(net)
    (add,) = other.ops
    add.inputs[0] = Value((2, 8), DType.FP32, "nobody's")
    with pytest.raises(AssertionError, match="before its definition"):
        net.verify()


def test_branch_inputs_match_their_operator() -> None:
    net = _conditional()
    then, _ = _branches(net)
    then.inputs[0].shape = (2, 9)
    with pytest.raises(AssertionError, match=r"COND_IF needs values with the number, shapes and types of .*, got "):
        StageChecker(BRANCHES).check(net, FINAL, "all")


def test_condition_of_branches_is_one_boolean() -> None:
    net = _conditional()
    net.ops[-1].inputs[0] = Value((2, 8), DType.BOOL, "several")
    with pytest.raises(AssertionError, match="COND_IF needs a condition of one boolean, got several"):
        StageChecker(BRANCHES).check(net, FINAL, "all")


def test_branches_need_their_extension() -> None:
    without = replace(BRANCHES, extensions=frozenset())
    with pytest.raises(AssertionError, match="COND_IF needs TOSA EXT-CONTROLFLOW"):
        StageChecker(without).check(_conditional(), FINAL, "all")
