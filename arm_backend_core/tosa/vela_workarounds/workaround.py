"""Vela workarounds as data: a predicate that matches a miscompiled pattern, and a bit-exact rewrite that avoids it.

The predicate is also the postcondition: it must match nothing after the rewrite. The rewrite receives the result of the
predicate and tests no other condition. The check after the pass therefore reports exactly the operators that the pass
would rewrite. ``catalog`` lists the workarounds and applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.workers.vela import SUPPORTED_RELEASES, Release

Match = TypeVar("Match")


@dataclass(frozen=True)
class Workaround(Generic[Match]):
    """A pattern of an operator and its neighbours that Vela miscompiles, and its rewrite.

    Attributes:
        name: the name in ``Hardware.vela_bugs`` and ``docs/contributors/vela.md``.
        kinds: the operator kinds that ``find`` is called for.
        find: returns a description of the match, or a false value if Vela compiles the operator correctly. It must not
            match the result of ``rewrite``, and it must not change the graph.
        rewrite: emits the bit-exact replacement of the operator's result. It receives the result of ``find``.
        runs_last: whether to apply the workaround only if no other one matches, because other rewrites may remove the
            match.
        releases: the releases of Vela that have the bug.
    """

    name: str
    kinds: tuple[str, ...]
    find: Callable[[Op, Rewriter], Match | None]
    rewrite: Callable[[Op, Match, Rewriter], Value]
    runs_last: bool = False
    releases: tuple[Release, ...] = SUPPORTED_RELEASES


@dataclass(frozen=True)
class GraphWorkaround(Generic[Match]):
    """A pattern that Vela miscompiles, and its rewrite, for patterns that ``Workaround`` cannot describe.

    Such a pattern consists of graph outputs, or of operators that are not neighbours.

    Attributes:
        name: the name in ``Hardware.vela_bugs`` and ``docs/contributors/vela.md``.
        find: returns all matches in the graph. After ``rewrite``, it must return none.
        rewrite: changes the graph in place. It receives the result of ``find``.
        releases: the releases of Vela that have the bug.
    """

    name: str
    find: Callable[[Graph, Target], Sequence[Match]]
    rewrite: Callable[[Graph, Target, Sequence[Match]], None]
    releases: tuple[Release, ...] = SUPPORTED_RELEASES


AnyWorkaround = Workaround[Any] | GraphWorkaround[Any]


def is_needed(workaround: AnyWorkaround, target: Target) -> bool:
    """Whether ``target``'s NPU family and Vela release have the bug. An unknown release is assumed to have all bugs."""
    return workaround.name in target.hardware.vela_bugs and target.vela_release in (None, *workaround.releases)
