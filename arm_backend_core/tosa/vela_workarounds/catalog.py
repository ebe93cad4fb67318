"""Catalog of Vela workarounds: finds patterns that Vela miscompiles and rewrites them (``docs/contributors/vela.md``).

``Hardware.vela_bugs`` names the bugs that affect a family; the names are checked when this module is imported. Every
rewrite keeps the results equal to the bit. The other modules of this package have the workarounds by subject. A rewrite
may create the pattern of another workaround, and several may match one operator. The graph is therefore rewritten until
no predicate matches.
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
    partial_rescales,
    results,
    shapes,
    tables,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround, is_needed

#: Limit of the fixpoint iteration. 2,074 graphs of the operator tests need at most 1 round, 6,000 random pairs of
#: miscompiled patterns at most 3.
_MAX_ROUNDS = 12


def apply_vela_workarounds(graph: Graph, target: Target) -> None:
    """Apply the workarounds for ``target``'s Vela release until no predicate matches.

    Raises:
        AssertionError: matches are left after the last round, because workarounds undo each other, or the target
            refuses an operator of a rewrite.
    """
    for _ in range(_MAX_ROUNDS):
        found = find_vela_bugs(graph, target)
        if not found:
            return
        _rewrite_graph(graph, target, run_last=all(isinstance(x, Workaround) and x.runs_last for x in found))
    assert_no_vela_bugs(graph, target)


def find_vela_bugs(graph: Graph, target: Target) -> dict[AnyWorkaround, list[Any]]:
    """All patterns in ``graph`` that the Vela release of ``target`` miscompiles.

    Returns:
        the matched operators by workaround; for a ``GraphWorkaround``, what its ``find`` returns.
    """
    found: dict[AnyWorkaround, list[Any]] = {}
    by_kind: dict[str, list[Workaround[Any]]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            if sites := workaround.find(graph, target):
                found[workaround] = list(sites)
            continue
        for kind in workaround.kinds:
            by_kind.setdefault(kind, []).append(workaround)
    rewriter = Rewriter(graph, target)
    for op in graph.ops if by_kind else ():
        for workaround in by_kind.get(op.kind, ()):
            if workaround.find(op, rewriter):
                found.setdefault(workaround, []).append(op)
    return found


def assert_no_vela_bugs(graph: Graph, target: Target) -> None:
    """Assert that ``graph`` has no pattern that Vela is known to miscompile.

    Raises:
        AssertionError: lists the workarounds that match, and where.
    """
    found = find_vela_bugs(graph, target)
    remaining = "; ".join(f"{workaround.name}: {site!r}" for workaround, sites in found.items() for site in sites[:3])
    assert not found, f"{target.name}: patterns that Vela miscompiles are left: {remaining}"


def _needed_workarounds(target: Target) -> list[AnyWorkaround]:
    """The workarounds for the bugs of ``target``'s Vela release, by priority."""
    return [workaround for workaround in WORKAROUNDS if is_needed(workaround, target)]


def _rewrite_graph(graph: Graph, target: Target, *, run_last: bool) -> None:
    """Apply graph workarounds, then at each operator the first workaround that matches."""
    rules: dict[str, list[RewriteRule]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            workaround.rewrite(graph, target, workaround.find(graph, target))
        elif workaround.runs_last <= run_last:
            for kind in workaround.kinds:
                rules.setdefault(kind, []).append(partial(_rewrite_operator, workaround))
    apply_once(graph, target, rules)


def _rewrite_operator(workaround: Workaround[Any], op: Op, rewriter: Rewriter) -> Value | None:
    found = workaround.find(op, rewriter)
    if not found:
        return None
    try:
        return workaround.rewrite(op, found, rewriter)
    except Unsupported as refusal:
        raise AssertionError(f"workaround {workaround.name}: {op!r} cannot be rewritten: {refusal}") from refusal


#: All workarounds by priority: where two match one operator, the first is applied first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    *results.WORKAROUNDS,
    convolutions.DILATED,
    memory.SLICED,
    *convolutions.WORKAROUNDS,
    *narrowing.WORKAROUNDS,
    *fused_rescales.WORKAROUNDS,
    *partial_rescales.WORKAROUNDS,
    *tables.FUSED_TABLES,
    *shapes.WORKAROUNDS,
    *memory.WORKAROUNDS,
    *tables.WORKAROUNDS,
)


def check_names(workarounds: Sequence[AnyWorkaround], hardware: Iterable[Hardware]) -> None:
    """Check that workaround names are unique, and that ``hardware`` names all of them and no others.

    Raises:
        ValueError: lists the names that do not fit.
    """
    names = [workaround.name for workaround in workarounds]
    named = {name for one in hardware for name in one.vela_bugs}
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several workarounds have the same name: {', '.join(sorted(duplicates))}")
    if unknown := named - set(names):
        raise ValueError(f"Hardware.vela_bugs names bugs without a workaround: {', '.join(sorted(unknown))}")
    if unnamed := set(names) - named:
        raise ValueError(f"workarounds that no Hardware.vela_bugs names: {', '.join(sorted(unnamed))}")


check_names(WORKAROUNDS, HARDWARE.values())
