"""Choice of alternatives: estimate each region of a graph with and without a rewrite, and keep the cheapest version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from arm_backend_core import compilation_log
from arm_backend_core.alternatives.cost_model import Cost
from arm_backend_core.alternatives.unconditional import apply_unconditional
from arm_backend_core.errors import compiler_fault
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, extract_subgraph
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.pipeline import run_last_passes
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, apply_once
from arm_backend_core.tosa.passes.rewrite_tracing import is_rewrite_traced, trace_rule

#: Returns the estimated cost of each graph; None for a graph that cannot be estimated.
CostFunction = Callable[[Sequence[Graph]], list[Cost | None]]


class Region(NamedTuple):
    """A part of the graph whose cost is estimated with and without a rewrite.

    Attributes:
        ops: the operators whose cost is estimated together.
        candidates: sets of operators to rewrite; the cheapest set is chosen, or none of them.
    """

    ops: Collection[Op]
    candidates: Sequence[Collection[Op]]


@dataclass(frozen=True)
class Alternative:
    """A bit-exact rewrite that the cost model may choose.

    Attributes:
        name: description of the rewritten operators in the report.
        kinds: operator kinds that ``match_region`` is called for.
        rule: rewrites an operator and returns the new result; None if it does not apply.
        match_region: returns the region around an operator whose cost is estimated; None if the rewrite cannot help.
        objective: the figure to minimize; by default cycles plus bytes of weights.
    """

    name: str
    kinds: tuple[str, ...]
    rule: RewriteRule
    match_region: Callable[[Op, Rewriter], Region | None]
    objective: Callable[[Cost], float] = attrgetter("total")


class Choice(NamedTuple):
    """A chosen alternative.

    Attributes:
        name: the ``Alternative.name``.
        occurrences: number of rewritten operators.
        saved_cycles: cycles that the alternative saves by Vela's estimate; negative if it takes more cycles.
    """

    name: str
    occurrences: int
    saved_cycles: int


def collect_neighbors(op: Op, rewriter: Rewriter, before: Collection[str], after: Collection[str]) -> list[Op]:
    """Collect ``op`` and its transitive producers and readers, up to the first operator of another kind.

    Args:
        op: the operator at which the search starts.
        rewriter: has the readers of each value.
        before: operator kinds of the producers.
        after: operator kinds of the readers.
    """
    producers = [op]
    for step in producers:  # the loop appends to ``producers``
        producers += [source for x in step.inputs if (source := x.producer) is not None and source.kind in before]
    readers = [op]
    for step in readers:
        readers += [reader for reader in rewriter.users(step.output) or () if reader.kind in after]
    return [*producers, *readers]


def choose_alternatives(
    graph: Graph, target: Target, alternatives: Sequence[Alternative], estimate: CostFunction
) -> list[Choice]:
    """Rewrite ``graph`` in place where an alternative is cheaper, in the order of ``alternatives``.

    Returns:
        the chosen alternatives.
    """
    choices = []
    for alternative in alternatives:
        try:
            chosen, saved = _find_cheaper(graph, target, alternative, estimate)
        except Exception as error:  # the rewrites ran on copies, so the graph is intact: skip the alternative
            reason = compiler_fault(
                f"the alternative '{alternative.name}' raised {type(error).__name__}: {error}", error
            ).reason
            compilation_log.current_log().notes.append(reason)
            continue
        if chosen:
            _rewrite_operators(graph, target, alternative, chosen)
            choices.append(Choice(alternative.name, len(chosen), saved))
    return choices


def _rewrite_operators(graph: Graph, target: Target, alternative: Alternative, chosen: Collection[Op]) -> bool:
    """Rewrite the operators ``chosen``; return whether the rule applied to any of them."""

    def rewrite_chosen(op: Op, rewriter: Rewriter) -> Value | None:
        return alternative.rule(op, rewriter) if op in chosen else None

    changed = apply_once(graph, target, {op.kind: [rewrite_chosen] for op in chosen}, no_swaps=True)
    eliminate_common_subexpressions(graph, target)
    return changed


def _find_cheaper(
    graph: Graph, target: Target, alternative: Alternative, estimate: CostFunction
) -> tuple[set[Op], int]:
    """Find the operators whose rewrite makes their region cheaper, and the saved cycles.

    Regions of equal structure are estimated once. Of the unchanged region and its candidates, the one with the least
    ``Alternative.objective`` is chosen.
    """
    users, position = graph.users(), {op: i for i, op in enumerate(graph.ops)}
    equal_regions: dict[Hashable, list[list[Op]]] = {}
    trials: dict[Hashable, list[tuple[Sequence[int], Graph]]] = {}
    for region in _match_regions(graph, target, alternative):
        ops = sorted(set(region.ops), key=position.__getitem__)
        candidates = [[i for i, op in enumerate(ops) if op in rewritten] for rewritten in ((), *region.candidates)]
        key = _structural_key(ops), repr(candidates)
        if equal_regions.setdefault(key, []):
            equal_regions[key].append(ops)
            continue
        equal_regions[key].append(ops)
        trials[key] = []
        for candidate in candidates:
            subgraph = extract_region(graph, ops, users, position.__getitem__)
            if not candidate or _rewrite_operators(subgraph, target, alternative, {subgraph.ops[i] for i in candidate}):
                trials[key].append((candidate, subgraph))
    graphs = [subgraph for trial in trials.values() for _, subgraph in trial if len(trial) > 1]
    for subgraph in graphs:
        apply_unconditional(subgraph, target)
        run_last_passes(subgraph, target)
    costs = dict(zip(graphs, estimate(graphs), strict=True))
    chosen, saved = set[Op](), 0
    for structure, trial in trials.items():
        known = [(cost, candidate) for candidate, subgraph in trial if (cost := costs.get(subgraph)) is not None]
        if len(known) > 1 and not known[0][1]:
            best, rewritten = min(known, key=lambda known_cost: alternative.objective(known_cost[0]))
            chosen.update(ops[i] for ops in equal_regions[structure] for i in rewritten)
            saved += (known[0][0].cycles - best.cycles) * len(equal_regions[structure])
    return chosen, saved


def _structural_key(ops: Sequence[Op]) -> Hashable:
    """Create a key that is equal for regions of equal structure.

    The key omits the values of constants, and the numeric attributes (scales, tables, zero points), which hardly affect
    the cost.
    """
    index = {op.output: i for i, op in enumerate(ops)}
    zero_points = ("input_zp", "output_zp", "weight_zp", "a_zp", "b_zp")
    numeric_attributes = ("multiplier", "shift", "table", "pad_const", *zero_points)
    return tuple(
        (
            *(op.kind, op.output.shape, op.output.dtype),
            *((x.shape, x.dtype, x.data is None, index.get(x)) for x in op.inputs),
            *(repr(attr) for name, attr in sorted(op.attrs.items()) if name not in numeric_attributes),
        )
        for op in ops
    )


def _match_regions(graph: Graph, target: Target, alternative: Alternative) -> Iterator[Region]:
    """Yield the regions that an alternative matches.

    A region is omitted if it would rewrite an operator that an earlier region rewrites, too.
    """
    rewriter, seen, match = Rewriter(graph, target), set[Op](), alternative.match_region
    if is_rewrite_traced():
        match = partial(trace_rule, f"alternative '{alternative.name}'", match)
    for op in graph.ops:
        region = match(op, rewriter) if op.kind in alternative.kinds and op not in seen else None
        rewritten = {other for ops in region.candidates for other in ops} if region is not None else set()
        if region is not None and seen.isdisjoint(rewritten):
            seen |= rewritten
            yield region


def extract_region(
    graph: Graph, ops: Sequence[Op], users: Mapping[Value, Sequence[Op]], position: Callable[[Op], int]
) -> Graph:
    """Copy the operators ``ops`` into a new graph.

    The inputs of the new graph are the operands that are neither constants nor results of ``ops``. Its outputs are the
    results that are outputs of ``graph``, that other operators read, or that no operator reads.
    """
    results = {op.output for op in ops}
    inputs = dict.fromkeys(value for op in ops for value in op.inputs if value.data is None and value not in results)
    returned = results.intersection(graph.outputs)
    outputs = [x for op in ops if (x := op.output) in returned or not set(users.get(x, [None])).issubset(ops)]
    return extract_subgraph([(value, f"x{i}") for i, value in enumerate(inputs)], outputs, position)
