"""Which of equal forms parts of a graph get: each part is priced as it is and as it would be, and the cheaper stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arm_backend_core import events
from arm_backend_core.alternatives.always import take_always
from arm_backend_core.alternatives.cost_model import Price
from arm_backend_core.errors import compiler_fault
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, extract_subgraph
from arm_backend_core.tosa.passes import finish
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, apply_once

#: Tells the price of each graph; None where there is none.
Ask = Callable[[Sequence[Graph]], list[Price | None]]


class Region(NamedTuple):
    """What is decided together: the operators that are priced, and the ways to replace some of them."""

    ops: Collection[Op]
    alternatives: Sequence[Collection[Op]]


@dataclass(frozen=True)
class Alternative:
    """Another way to write operators, equal to the bit.

    Attributes:
        name: what was written, for the report.
        kinds: operators that ``match_region`` looks at.
        rule: gives the result of an operator in the other form, or None.
        match_region: what is decided together for an operator; None where there is nothing to ask.
    """

    name: str
    kinds: tuple[str, ...]
    rule: Rule
    match_region: Callable[[Op, Rewriter], Region | None]


class Choice(NamedTuple):
    """How often a form was taken, and the cycles that it saves by Vela's estimate."""

    name: str
    times: int
    cycles: int


def around(op: Op, rewriter: Rewriter, before: Collection[str], behind: Collection[str]) -> list[Op]:
    """An operator, those of the kinds ``before`` that it reads of, and those of ``behind`` that read of it."""
    found = [op]
    for step in found:  # grows
        found += [made for x in step.inputs if (made := x.producer) is not None and made.kind in before]
    readers = [op]
    for step in readers:
        readers += [reader for reader in rewriter.users(step.output) or () if reader.kind in behind]
    return [*found, *readers]


def choose_alternatives(graph: Graph, target: Target, forms: Sequence[Alternative], ask: Ask) -> list[Choice]:
    """Rewrite ``graph`` in place with those of ``forms`` that are cheaper, one form after the other."""
    made = []
    for form in forms:
        try:
            chosen, saved = _cheaper(graph, target, form, ask)
        except Exception as error:  # of copies: the graph is as it was, and does without the form
            reason = compiler_fault(f"the form '{form.name}' raised {type(error).__name__}: {error}", error).reason
            events.current().notes.append(reason)
            continue
        if chosen:
            _rewrite(graph, target, form, chosen)
            made.append(Choice(form.name, len(chosen), saved))
    return made


def _rewrite(graph: Graph, target: Target, form: Alternative, chosen: Collection[Op]) -> bool:
    """Replace these operators by the form; True if there was one that its rule replaces."""

    def rule(op: Op, rewriter: Rewriter) -> Value | None:
        return form.rule(op, rewriter) if op in chosen else None

    changed = apply_once(graph, target, {op.kind: [rule] for op in chosen}, no_swaps=True)
    eliminate_common_subexpressions(graph, target)
    return changed


def _cheaper(graph: Graph, target: Target, form: Alternative, ask: Ask) -> tuple[set[Op], int]:
    """The operators that are cheaper in the form, and the cycles that it saves."""
    users, position = graph.users(), {op: i for i, op in enumerate(graph.ops)}
    alike: dict[Hashable, list[list[Op]]] = {}
    trials: dict[Hashable, list[tuple[Sequence[int], Graph]]] = {}
    for part in _parts(graph, target, form):
        ops = sorted(set(part.ops), key=position.__getitem__)
        ways = [[i for i, op in enumerate(ops) if op in way] for way in ((), *part.alternatives)]
        key = _structure(ops), repr(ways)
        if alike.setdefault(key, []):
            alike[key].append(ops)
            continue
        alike[key].append(ops)
        trials[key] = []
        for way in ways:
            alone = cut_out(graph, ops, users, position.__getitem__)
            if not way or _rewrite(alone, target, form, {alone.ops[i] for i in way}):
                trials[key].append((way, alone))
    graphs = [alone for trial in trials.values() for _, alone in trial if len(trial) > 1]
    for alone in graphs:
        take_always(alone, target)
        finish(alone, target)
    prices = dict(zip(graphs, ask(graphs), strict=True))
    chosen, saved = set[Op](), 0
    for shared, trial in trials.items():
        known = [(price, way) for way, alone in trial if (price := prices.get(alone)) is not None]
        if len(known) > 1 and not known[0][1]:
            best, replaced = min(known, key=lambda one: one[0].total)
            chosen.update(ops[i] for ops in alike[shared] for i in replaced)
            saved += (known[0][0].cycles - best.cycles) * len(alike[shared])
    return chosen, saved


def _structure(ops: Sequence[Op]) -> Hashable:
    """What operators have in common that differ in numbers alone, which hardly matter for what they cost."""
    place = {op.output: i for i, op in enumerate(ops)}
    numbers = ("multiplier", "shift", "table", "input_zp", "output_zp", "weight_zp", "a_zp", "b_zp", "pad_const")
    return tuple(
        (
            *(op.kind, op.output.shape, op.output.dtype),
            *((x.shape, x.dtype, x.data is None, place.get(x)) for x in op.inputs),
            *(repr(attr) for name, attr in sorted(op.attrs.items()) if name not in numbers),
        )
        for op in ops
    )


def _parts(graph: Graph, target: Target, form: Alternative) -> Iterator[Region]:
    """The parts that a form may be for; no operator is in two of them to be replaced."""
    rewriter, seen = Rewriter(graph, target), set[Op]()
    for op in graph.ops:
        found = form.match_region(op, rewriter) if op.kind in form.kinds and op not in seen else None
        replaced = {other for way in found.alternatives for other in way} if found is not None else set()
        if found is not None and seen.isdisjoint(replaced):
            seen |= replaced
            yield found


def cut_out(
    graph: Graph, ops: Sequence[Op], users: Mapping[Value, Sequence[Op]], position: Callable[[Op], int]
) -> Graph:
    """These operators as a graph, with what others make as its inputs and what others read as its outputs."""
    made = {op.output for op in ops}
    given = dict.fromkeys(value for op in ops for value in op.inputs if value.data is None and value not in made)
    returned = made.intersection(graph.outputs)
    kept = [x for op in ops if (x := op.output) in returned or not set(users.get(x, [None])).issubset(ops)]
    return extract_subgraph([(value, f"x{i}") for i, value in enumerate(given)], kept, position)
