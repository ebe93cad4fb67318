"""Workarounds for compiler bugs: each is a predicate and a rewrite, and the predicate is the postcondition.

A rewrite is given what its predicate found and has no other condition, so that what one changes and what is checked
behind the pass cannot differ. ``vela`` lists the records and applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.workers.vela import RELEASES, Release

Found = TypeVar("Found")


@dataclass(frozen=True)
class Workaround(Generic[Found]):
    """A form of an operator and its neighbours that the compiler gets wrong.

    Attributes:
        name: as in ``Hardware.vela_bugs`` and ``docs/contributors/vela.md``.
        kinds: operators that ``find`` is asked about.
        find: what the compiler gets wrong at an operator; false where it is right, and false of what ``rewrite`` gives.
            It reads the graph and writes nothing.
        rewrite: gives the value that replaces the operator's result, equal to the bit, of what ``find`` gave.
        runs_last: it is rewritten where nothing but late ones is left, because others may end it on their way.
        releases: of the compiler, that make it.
    """

    name: str
    kinds: tuple[str, ...]
    find: Callable[[Op, Rewriter], Found | None]
    rewrite: Callable[[Op, Found, Rewriter], Value]
    runs_last: bool = False
    releases: tuple[Release, ...] = RELEASES


@dataclass(frozen=True)
class GraphWorkaround(Generic[Found]):
    """The same of a graph as a whole: its results, or operators that are no neighbours.

    Attributes:
        name: as in ``Hardware.vela_bugs`` and ``docs/contributors/vela.md``.
        find: all that the compiler gets wrong; nothing behind ``rewrite``.
        rewrite: changes the graph in place.
        releases: of the compiler, that make it.
    """

    name: str
    find: Callable[[Graph, Target], Sequence[Found]]
    rewrite: Callable[[Graph, Target, Sequence[Found]], None]
    releases: tuple[Release, ...] = RELEASES


AnyWorkaround = Workaround[Any] | GraphWorkaround[Any]


def is_needed(mistake: AnyWorkaround, target: Target) -> bool:
    """Whether the compiler of ``target`` makes it; of a release that is not known, any release's."""
    return mistake.name in target.hardware.vela_bugs and (target.vela is None or target.vela in mistake.releases)
