"""Vela workarounds: bugs are found by name, rewritten until none is left, and checked after the passes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.hardware import Hardware
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.tosa.vela_workarounds import catalog
from arm_backend_core.tosa.vela_workarounds.catalog import (
    WORKAROUNDS,
    apply_vela_workarounds,
    assert_no_vela_bugs,
    check_names,
    find_vela_bugs,
)
from arm_backend_core.tosa.vela_workarounds.workaround import Workaround
from arm_backend_core.workers.vela import SUPPORTED_RELEASES, Release
from tests import tosa_graphs
from tests.runtime import vela_bugs
from tests.tosa_graphs import make_target

U55 = make_target("ethos-u55-128")
X = ((2, 3, 4), DType.INT8)


def _multiply_by_1(b: Builder, x: Value) -> Value:
    return b.rescale(b.mul(x, b.const(np.ones((1, 1, 1)), DType.INT8)), DType.INT8, 1.0)


def _emit_again(op: Op, found: bool, rewriter: Rewriter) -> Value:
    return rewriter.builder.emit(op.kind, op.inputs, op.output.dtype, **op.attrs)


def _raise_unsupported(op: Op, found: bool, rewriter: Rewriter) -> Value:
    raise Unsupported("no such operator")


def _always(op: Op, rewriter: Rewriter) -> bool:
    return True


@pytest.mark.parametrize("release", SUPPORTED_RELEASES)
@pytest.mark.parametrize("row", vela_bugs.REPRODUCERS, ids=lambda row: row.name)
def test_miscompiled_graph_is_found_and_rewritten(row: vela_bugs.Reproducer, release: Release) -> None:
    for accelerator in row.accelerators:
        target, graph = make_target(accelerator, release), tosa_graphs.build_graph(row.body, *row.inputs)
        graph.remove_dead()
        found = find_vela_bugs(graph, target)
        assert bool(found) == (accelerator in row.wrong_with(release)), (accelerator, found)
        apply_vela_workarounds(graph, target)
        graph.verify()
        assert_no_vela_bugs(graph, target)


@pytest.mark.parametrize("release", SUPPORTED_RELEASES)
def test_every_bug_has_a_reproducer(release: Release) -> None:
    found: set[str] = set()
    for row in vela_bugs.REPRODUCERS:
        for accelerator in row.wrong_with(release):
            graph = tosa_graphs.build_graph(row.body, *row.inputs)
            graph.remove_dead()
            found |= {bug.name for bug in find_vela_bugs(graph, make_target(accelerator, release))}
    assert found == {bug.name for bug in WORKAROUNDS if release in bug.releases}


def test_unknown_release_of_vela_has_all_bugs() -> None:
    for row in (
        row for row in vela_bugs.REPRODUCERS if row.name in ("batched_activation", "lost_rescale_operand_offset")
    ):
        graph = tosa_graphs.build_graph(row.body, *row.inputs)
        assert {bug.name for bug in find_vela_bugs(graph, replace(U55, vela_release=None))} == {row.name}


def test_remaining_bugs_are_named() -> None:
    row = next(row for row in vela_bugs.REPRODUCERS if row.name == "sliced_and_dilated")
    graph = tosa_graphs.build_graph(row.body, *row.inputs)
    with pytest.raises(
        AssertionError, match=r"left: padding_only_phase: .* = CONV2D.*; lost_slice_offset: .* = CONV2D"
    ):
        assert_no_vela_bugs(graph, U55)


def test_bug_that_remains_after_the_last_passes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without = tuple(step for step in pipeline.LAST_PASSES if step.run is not apply_vela_workarounds)
    monkeypatch.setattr(pipeline, "LAST_PASSES", without)
    row = next(row for row in vela_bugs.REPRODUCERS if row.name == "sliced_and_dilated")
    with pytest.raises(AssertionError, match=r"left: padding_only_phase: .* = CONV2D"):
        pipeline.run(tosa_graphs.build_graph(row.body, *row.inputs, target=U55), U55)


def test_two_bugs_at_one_operator_are_both_rewritten() -> None:
    """One copy, of the padded image, is enough."""
    row = next(row for row in vela_bugs.REPRODUCERS if row.name == "sliced_and_dilated")
    graph = tosa_graphs.build_graph(row.body, *row.inputs)
    apply_vela_workarounds(graph, U55)
    assert [op.kind for op in graph.ops] == ["SLICE", "PAD", "MUL", "RESCALE", "CONV2D", "RESCALE"]


def test_workaround_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "WORKAROUNDS", (Workaround("lost_slice_offset", ("MUL",), _always, _emit_again),))
    with pytest.raises(AssertionError, match=r"left: lost_slice_offset: .* = MUL"):
        apply_vela_workarounds(tosa_graphs.build_graph(_multiply_by_1, X), U55)


def test_workaround_that_the_target_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        catalog, "WORKAROUNDS", (Workaround("lost_slice_offset", ("MUL",), _always, _raise_unsupported),)
    )
    with pytest.raises(AssertionError, match=r"lost_slice_offset: .* = MUL.* cannot be rewritten: no such operator"):
        apply_vela_workarounds(tosa_graphs.build_graph(_multiply_by_1, X), U55)


@pytest.mark.parametrize(
    ("known", "named", "message"),
    [
        ((), ("typo",), "names bugs without a workaround: typo"),
        (("one", "two"), ("one",), "workarounds that are missing in every Hardware.vela_bugs: two"),
        (("one", "one"), ("one",), "several workarounds have the same name: one"),
    ],
)
def test_inconsistent_workaround_names_are_refused(
    known: tuple[str, ...], named: tuple[str, ...], message: str
) -> None:
    bugs = [Workaround(name, ("MUL",), _always, _emit_again) for name in known]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_names(bugs, [Hardware(vela_bugs=named)])


def test_distinct_weights_keep_the_results_with_a_weight_zero_point() -> None:
    """The appended columns multiply pixels by weight - zero point, which must be 0."""

    def body(b: Builder, x: Value) -> tuple[Value, ...]:
        weight = b.const(np.array([3, -2]).reshape(1, 1, 1, 2), DType.INT8)
        biases = [b.const([bias], DType.INT32) for bias in (50, -500)]
        sums = [b.conv2d(x, weight, bias, pad=(0, 0, 0, 0), zps=(4, 7)) for bias in biases]
        return tuple(b.rescale(value, DType.INT8, 0.1) for value in sums)

    graph = tosa_graphs.build_graph(body, ((1, 3, 4, 2), DType.INT8))
    array = np.random.default_rng(0).integers(-128, 128, (1, 3, 4, 2)).astype(np.int8)
    expected = reference_model.run(serialize(graph), [array])
    apply_vela_workarounds(graph, U55)
    assert [op.inputs[1].shape for op in graph.ops if op.kind == "CONV2D"] == [(1, 1, 1, 2), (1, 1, 2, 2)]
    for result, before in zip(reference_model.run(serialize(graph), [array]), expected, strict=True):
        assert np.array_equal(result, before)
