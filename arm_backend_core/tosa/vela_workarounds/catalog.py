"""Catalog of Vela workarounds: finds patterns that Vela miscompiles and rewrites them (``docs/contributors/vela.md``).

``Hardware.vela_bugs`` lists the bugs that affect an NPU family. The import of this module checks these names. Every
rewrite is bit-exact. A rewrite may create the pattern of another workaround, and several workarounds may match one
operator. The graph is therefore rewritten until no workaround matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, apply_once
from arm_backend_core.tosa.vela_workarounds import (
    convolutions,
    fused_rescales,
    memory,
    narrowing,
    program_outputs,
    rescale_offsets,
    shapes,
    tables,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround, is_needed

#: Maximum number of rounds of the fixpoint iteration. 2,074 graphs of the operator tests need at most 1 round, and
#: 6,000 random pairs of miscompiled patterns at most 3.
_MAX_ROUNDS = 12


def apply_vela_workarounds(graph: Graph, target: Target) -> None:
    """Apply the workarounds for ``target``'s Vela release until none of them matches.

    Raises:
        AssertionError: a workaround still matches after the last round, because workarounds undo each other; or a
            rewrite needs an operator that the target does not support.
    """
    for _ in range(_MAX_ROUNDS):
        matches = find_vela_bugs(graph, target)
        if not matches:
            return
        _rewrite_graph(graph, target, include_last=all(isinstance(x, Workaround) and x.runs_last for x in matches))
    assert_no_vela_bugs(graph, target)


def find_vela_bugs(graph: Graph, target: Target) -> dict[AnyWorkaround, list[Any]]:
    """Find all patterns in ``graph`` that the Vela release of ``target`` miscompiles.

    Returns:
        {workaround: its matches}: operators for a ``Workaround``, the result of ``find`` for a ``GraphWorkaround``.
    """
    matches: dict[AnyWorkaround, list[Any]] = {}
    workarounds_by_kind: dict[str, list[Workaround[Any]]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            if graph_matches := workaround.find(graph, target):
                matches[workaround] = list(graph_matches)
            continue
        for kind in workaround.kinds:
            workarounds_by_kind.setdefault(kind, []).append(workaround)
    rewriter = Rewriter(graph, target)
    for op in graph.ops if workarounds_by_kind else ():
        for workaround in workarounds_by_kind.get(op.kind, ()):
            if workaround.find(op, rewriter):
                matches.setdefault(workaround, []).append(op)
    return matches


def assert_no_vela_bugs(graph: Graph, target: Target) -> None:
    """Assert that ``graph`` has no pattern that Vela is known to miscompile.

    Raises:
        AssertionError: lists the matching workarounds and the operators that they match.
    """
    matches = find_vela_bugs(graph, target)
    remaining = "; ".join(
        f"{workaround.name}: {match!r}" for workaround, found in matches.items() for match in found[:3]
    )
    assert not matches, f"{target.name}: patterns that Vela miscompiles are left: {remaining}"


def _needed_workarounds(target: Target) -> list[AnyWorkaround]:
    """The workarounds for the bugs of ``target``'s Vela release, in order of priority."""
    return [workaround for workaround in WORKAROUNDS if is_needed(workaround, target)]


def _rewrite_graph(graph: Graph, target: Target, *, include_last: bool) -> None:
    """Apply the graph workarounds, then the first matching workaround of each operator.

    Args:
        include_last: also apply workarounds with ``runs_last``.
    """
    rules: dict[str, list[RewriteRule]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            workaround.rewrite(graph, target, workaround.find(graph, target))
        elif workaround.runs_last <= include_last:
            for kind in workaround.kinds:
                rules.setdefault(kind, []).append(partial(_rewrite_operator, workaround))
    apply_once(graph, target, rules)


def _rewrite_operator(workaround: Workaround[Any], op: Op, rewriter: Rewriter) -> Value | None:
    match = workaround.find(op, rewriter)
    if not match:
        return None
    try:
        return workaround.rewrite(op, match, rewriter)
    except Unsupported as refusal:
        raise AssertionError(f"workaround {workaround.name}: {op!r} cannot be rewritten: {refusal}") from refusal


#: All workarounds in order of priority: if two match one operator, the first one is applied.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    *program_outputs.WORKAROUNDS,
    convolutions.PADDING_ONLY_PHASE_WORKAROUND,
    memory.LOST_SLICE_OFFSET_WORKAROUND,
    *convolutions.WORKAROUNDS,
    *narrowing.WORKAROUNDS,
    *fused_rescales.WORKAROUNDS,
    *rescale_offsets.WORKAROUNDS,
    *tables.FUSED_TABLE_WORKAROUNDS,
    *shapes.WORKAROUNDS,
    *memory.WORKAROUNDS,
    *tables.WORKAROUNDS,
)


def check_names(workarounds: Sequence[AnyWorkaround], hardware: Iterable[Hardware]) -> None:
    """Check that workarounds have different names, and that ``Hardware.vela_bugs`` lists exactly these names.

    Raises:
        ValueError: lists duplicate names, bugs without a workaround, or workarounds that no hardware lists.
    """
    names = [workaround.name for workaround in workarounds]
    bug_names = {name for family in hardware for name in family.vela_bugs}
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several workarounds have the same name: {', '.join(sorted(duplicates))}")
    if unknown := bug_names - set(names):
        raise ValueError(f"Hardware.vela_bugs names bugs without a workaround: {', '.join(sorted(unknown))}")
    if unlisted := set(names) - bug_names:
        raise ValueError(f"workarounds that are missing in every Hardware.vela_bugs: {', '.join(sorted(unlisted))}")


check_names(WORKAROUNDS, HARDWARE.values())
