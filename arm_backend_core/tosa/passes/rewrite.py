"""Peephole rewriting: one sweep over the graph offers each operator to its rules; sweeps repeat to a fixpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, merge_origins
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.trace import is_rewrite_traced, rule_name, trace_rule


class Rewriter:
    """What a rule may ask about the graph, and the builder that it emits operators with."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.build = LegalizingBuilder(graph, target)
        self._users = graph.users()
        self._outputs = set(graph.outputs)

    def users(self, value: Value) -> list[Op] | None:
        """The readers of ``value`` when the sweep began; None if ``value`` is an output of the graph or new."""
        return None if value in self._outputs else self._users.get(value)

    def has_one_use(self, value: Value) -> bool:
        """Whether exactly one operator reads ``value``; False if ``users`` returns None."""
        return self.only_user(value) is not None

    def only_user(self, value: Value) -> Op | None:
        """The single reader of ``value``; None if it has several or none, or if ``users`` returns None."""
        match self.users(value):
            case [reader]:
                return reader
        return None

    def feeds(self, value: Value, kind: str, through: Sequence[str] = ("RESHAPE", "RESCALE")) -> bool:
        """Whether an operator of ``kind`` reads the value, also past operators of the kinds ``through``."""
        readers = self.users(value) or []
        return any(r.kind == kind or (r.kind in through and self.feeds(r.output, kind, through)) for r in readers)

    def record_replacement(self, old: Value, new: Value) -> None:
        """Record that readers of ``old`` read ``new`` from now on."""
        if old in self._outputs:
            self._outputs.add(new)
        self._users[new] = self._users.get(new, []) + self._users.get(old, [])


#: A peephole rule: returns the replacement of the operator's result, or None to keep the operator.
Rule = Callable[[Op, Rewriter], Value | None]
Rules = Mapping[str, Sequence[Rule]]


def producer(value: Value, kind: str) -> Op | None:
    """The producer of ``value`` if it is of this kind, else None."""
    op = value.producer
    return op if op is not None and op.kind == kind else None


def skip_through(value: Value, *kinds: str) -> Value:
    """Follow first operands back from ``value``, past these kinds; returns the value where the walk ends."""
    return trace_back(value, lambda op: op.kind in kinds)[0]


def trace_back(value: Value, is_passed: Callable[[Op], bool]) -> tuple[Value, list[Op]]:
    """Follow first operands back from ``value``, past operators for which ``is_passed`` is true.

    Returns:
        the value where the walk ends, and the passed operators in execution order.
    """
    passed: list[Op] = []
    while (op := value.producer) is not None and is_passed(op):
        passed.insert(0, op)
        value = op.inputs[0]
    return value, passed


def has_constant_weights(convolution: Op) -> bool:
    """Whether weight and bias are constant."""
    return all(operand.data is not None for operand in convolution.inputs[1:])


def apply_once(graph: Graph, target: Target, rules: Rules, *, no_swaps: bool = False) -> bool:
    """Offer every operator, in execution order, to ``rules[kind]``.

    A rule may emit operators and then return None, or the target may refuse one of them. These operators are dead.
    Dead operators are removed before the sweep, and after it if a rule applied.

    Args:
        no_swaps: the rules never exchange an operator with its neighbour (f(TRANSPOSE(x)) to TRANSPOSE(f(x))). It
            decides how origins propagate.

    Returns:
        whether anything was replaced.
    """
    graph.remove_dead()
    rewriter = Rewriter(graph, target)
    old, graph.ops = graph.ops, []
    replaced: dict[Value, Value] = {}
    emitted: dict[Op, list[Op]] = {}
    for op in old:
        op.inputs = [replaced.get(value, value) for value in op.inputs]
        rewriter.build.origins, mark = op.origins, len(graph.ops)
        result = _apply_first_rule(rules.get(op.kind, ()), op, rewriter)
        if result is None:
            graph.ops.append(op)
        else:
            assert (result.shape, result.dtype) == (op.output.shape, op.output.dtype), f"{op!r}: {result!r}"
            replaced[op.output], emitted[op] = result, graph.ops[mark:]
            rewriter.record_replacement(op.output, result)
    graph.outputs = [replaced.get(value, value) for value in graph.outputs]
    if replaced:
        graph.remove_dead()
        _propagate_origins(emitted, set(graph.ops), no_swaps)
    return bool(replaced)


#: Data movement that costs nothing once it is folded into arithmetic, which then need not inherit its origins.
_FREE_MOVEMENT = ("IDENTITY", "RESHAPE", "TRANSPOSE")


def _propagate_origins(emitted: Mapping[Op, Sequence[Op]], live: Collection[Op], no_swaps: bool) -> None:
    """Propagate origins from removed operators to their replacement: to operators of the same kind, or else to all.

    An emitted operator has the origins of the operator that its rule replaced. If a rule exchanged two operators, as
    f(TRANSPOSE(x)) to TRANSPOSE(f(x)), each keeps its own origins only. No arithmetic loses its origins.

    Args:
        emitted: the operators that rules emitted, by the operator that they replaced, in execution order.
        live: the operators that are still in the graph.
        no_swaps: as in ``apply_once``.
    """
    for replaced, ops in emitted.items():
        absorbed: dict[Op, list[Op]] = {}
        for dead in _dead_operators_between({value for op in ops for value in op.inputs}, replaced, live):
            same_kind = [op for op in ops if op.kind == dead.kind]
            for replacement in same_kind or (() if dead.kind in _FREE_MOVEMENT else ops):
                absorbed.setdefault(replacement, []).append(dead)
        for replacement, dead_ops in absorbed.items():
            is_swap = not no_swaps and replaced.kind in {op.kind for op in ops}
            is_moved = (
                is_swap and replacement.kind != replaced.kind and replacement.kind in {dead.kind for dead in dead_ops}
            )
            replacement.origins = merge_origins(dead_ops if is_moved else [replacement, *dead_ops])


def _dead_operators_between(read_values: Collection[Value], root: Op, live: Collection[Op]) -> list[Op]:
    """Dead operators on paths from ``read_values`` to the operator ``root`` that was replaced."""
    found: dict[Op, None] = {}
    pending = list(root.inputs)
    while pending:
        value = pending.pop()
        if value not in read_values and (op := value.producer) is not None and op not in live and op not in found:
            found[op] = None
            pending += op.inputs
    reached, count = set(read_values), -1
    while len(reached) > count:
        count = len(reached)
        reached |= {op.output for op in found if not reached.isdisjoint(op.inputs)}
    return [op for op in found if op.output in reached]


#: Added to the bound on the number of sweeps, which is the number of operators, for rules that split an operator.
_SPLIT_SWEEPS = 8


def rewrite_to_fixpoint(graph: Graph, target: Target, rules: Rules) -> None:
    """Repeat ``apply_once`` until no rule applies.

    A rule must remove an operator, or move one past another in the direction that all rules share. Each operator can
    move at most as often as there are operators, which bounds the number of sweeps; a rule that splits an operator
    (``rewrite_strided_convolution``: one stride into a few) adds a few more.

    Raises:
        AssertionError: no fixpoint within the bound: two rules undo each other.
    """
    sweeps = limit = 0
    while sweeps <= limit:
        if not apply_once(graph, target, rules):
            return
        sweeps, limit = sweeps + 1, max(limit, len(graph.ops) + _SPLIT_SWEEPS)
    raise AssertionError(f"no fixpoint: the peephole rules for {', '.join(rules)} undo each other")


def _apply_first_rule(rules: Sequence[Rule], op: Op, rewriter: Rewriter) -> Value | None:
    traced = is_rewrite_traced()
    for rule in rules:
        try:
            result = trace_rule(rule_name(rule), rule, op, rewriter) if traced else rule(op, rewriter)
        except Unsupported:
            continue
        if result is not None:
            return result
    return None
