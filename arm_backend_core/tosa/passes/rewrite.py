"""Peephole rewriting: a sweep applies rewrite rules to each operator; sweeps repeat until no rule applies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, merge_origins
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.passes.rewrite_tracing import is_rewrite_traced, rule_name, trace_rule


class Rewriter:
    """Context of a rewrite rule: the uses of each value, and the builder that emits the replacement.

    Attributes:
        builder: emits the replacement.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self.builder = LegalizingBuilder(graph, target)
        self._users = graph.users()
        self._outputs = set(graph.outputs)

    def users(self, value: Value) -> list[Op] | None:
        """The operators that read ``value`` at the start of the sweep.

        If ``value`` has replaced another value in this sweep, the readers of the replaced value are included.

        Returns:
            None if ``value`` is an output of the graph, if nothing reads it, or if a rule of this sweep emitted it as
            an intermediate value of a replacement.
        """
        return None if value in self._outputs else self._users.get(value)

    def has_one_use(self, value: Value) -> bool:
        """Whether one operator reads ``value``, as one operand only; False if ``users(value)`` is None."""
        return self.only_user(value) is not None

    def only_user(self, value: Value) -> Op | None:
        """The reader of ``value`` if ``has_one_use(value)``, else None."""
        match self.users(value):
            case [reader]:
                return reader
        return None

    def feeds(self, value: Value, kind: str, through: Sequence[str] = ("RESHAPE", "RESCALE")) -> bool:
        """Whether an operator of ``kind`` reads ``value`` directly or through operators of the kinds ``through``."""
        readers = self.users(value) or []
        return any(r.kind == kind or (r.kind in through and self.feeds(r.output, kind, through)) for r in readers)

    def record_replacement(self, old: Value, new: Value) -> None:
        """Record that ``new`` replaces ``old``: the readers of ``old`` now read ``new``."""
        if old in self._outputs:
            self._outputs.add(new)
        self._users[new] = self._users.get(new, []) + self._users.get(old, [])


#: A rewrite rule: returns the value that replaces the operator's result, or None to keep the operator.
RewriteRule = Callable[[Op, Rewriter], Value | None]
#: {operator kind: its rewrite rules, in the order in which they are tried}.
RulesByKind = Mapping[str, Sequence[RewriteRule]]


def producer(value: Value, kind: str) -> Op | None:
    """The producer of ``value`` if it is of this kind, else None."""
    op = value.producer
    return op if op is not None and op.kind == kind else None


def skip_through(value: Value, *kinds: str) -> Value:
    """Trace ``value`` back through first operands while its producer has one of ``kinds``; returns the last value."""
    return trace_back(value, lambda op: op.kind in kinds)[0]


def trace_back(value: Value, can_skip: Callable[[Op], bool]) -> tuple[Value, list[Op]]:
    """Trace ``value`` back through first operands while ``can_skip`` is true of its producer.

    Returns:
        The last value, and the skipped operators in execution order.
    """
    skipped: list[Op] = []
    while (op := value.producer) is not None and can_skip(op):
        skipped.insert(0, op)
        value = op.inputs[0]
    return value, skipped


def has_constant_weights(convolution: Op) -> bool:
    """Whether the weight and the bias of ``convolution`` are constant."""
    return all(operand.data is not None for operand in convolution.inputs[1:])


def apply_once(graph: Graph, target: Target, rules: RulesByKind, *, no_swaps: bool = False) -> bool:
    """Run one sweep: for each operator, in execution order, apply the first rule of ``rules[op.kind]`` that matches.

    A rule may emit operators and then decline. These operators are dead. The sweep removes dead operators before it
    starts, and at its end if a rule applied.

    Args:
        no_swaps: the rules never swap an operator with its neighbour, as f(TRANSPOSE(x)) to TRANSPOSE(f(x)) does. If
            rules may swap operators, origins are propagated differently (``_propagate_origins``).

    Returns:
        Whether any operator was replaced.
    """
    graph.remove_dead()
    rewriter = Rewriter(graph, target)
    old_ops, graph.ops = graph.ops, []
    replacements: dict[Value, Value] = {}
    emitted: dict[Op, list[Op]] = {}
    for op in old_ops:
        op.inputs = [replacements.get(value, value) for value in op.inputs]
        rewriter.builder.origins, first_emitted = op.origins, len(graph.ops)
        result = _apply_first_rule(rules.get(op.kind, ()), op, rewriter)
        if result is None:
            graph.ops.append(op)
        else:
            assert (result.shape, result.dtype) == (op.output.shape, op.output.dtype), f"{op!r}: {result!r}"
            replacements[op.output], emitted[op] = result, graph.ops[first_emitted:]
            rewriter.record_replacement(op.output, result)
    graph.outputs = [replacements.get(value, value) for value in graph.outputs]
    if replacements:
        graph.remove_dead()
        _propagate_origins(emitted, set(graph.ops), no_swaps)
    return bool(replacements)


#: Kinds of data movement that cost nothing when they are folded into arithmetic. The arithmetic does not inherit the
#: origins of such operators.
_FREE_MOVEMENT_KINDS = ("IDENTITY", "RESHAPE", "TRANSPOSE")


def _propagate_origins(emitted: Mapping[Op, Sequence[Op]], live: Collection[Op], no_swaps: bool) -> None:
    """Propagate origins from removed operators to the operators that replace them.

    The builder gives emitted operators the origins of the operator that the rule replaced. The rule may also remove
    producers of this operator. Their origins go to the emitted operators of the same kind. If there are none, they go
    to all emitted operators, or are dropped for ``_FREE_MOVEMENT_KINDS``. If a rule swapped two operators, as
    f(TRANSPOSE(x)) to TRANSPOSE(f(x)), each keeps its own origins only. The origins of removed arithmetic are lost only
    if the rule emitted no operator.

    Args:
        emitted: {replaced operator: the operators that its rule emitted}, in execution order.
        live: the operators that are still in the graph.
        no_swaps: the rules never swap an operator with its neighbour.
    """
    for replaced, ops in emitted.items():
        absorbed: dict[Op, list[Op]] = {}
        for dead in _dead_operators_between({value for op in ops for value in op.inputs}, replaced, live):
            same_kind = [op for op in ops if op.kind == dead.kind]
            for replacement in same_kind or (() if dead.kind in _FREE_MOVEMENT_KINDS else ops):
                absorbed.setdefault(replacement, []).append(dead)
        for replacement, dead_ops in absorbed.items():
            is_swap = not no_swaps and replaced.kind in {op.kind for op in ops}
            is_moved = (
                is_swap and replacement.kind != replaced.kind and replacement.kind in {dead.kind for dead in dead_ops}
            )
            replacement.origins = merge_origins(dead_ops if is_moved else [replacement, *dead_ops])


def _dead_operators_between(read_values: Collection[Value], root: Op, live: Collection[Op]) -> list[Op]:
    """Dead operators on paths from ``read_values`` to the replaced operator ``root``."""
    dead_ops: dict[Op, None] = {}
    pending = list(root.inputs)
    while pending:
        value = pending.pop()
        if value not in read_values and (op := value.producer) is not None and op not in live and op not in dead_ops:
            dead_ops[op] = None
            pending += op.inputs
    reached, count = set(read_values), -1
    while len(reached) > count:
        count = len(reached)
        reached |= {op.output for op in dead_ops if not reached.isdisjoint(op.inputs)}
    return [op for op in dead_ops if op.output in reached]


#: Sweeps allowed beyond the number of operators, for rules that split an operator.
_EXTRA_SWEEPS_FOR_SPLITS = 8


def rewrite_to_fixpoint(graph: Graph, target: Target, rules: RulesByKind) -> None:
    """Repeat ``apply_once`` until no rule applies.

    A rule must remove an operator, or move it past another operator. All rules of a set move operators in the same
    direction. An operator can therefore move at most as often as there are operators, which bounds the number of
    sweeps. A rule that splits an operator (``rewrite_by_space_to_depth_or_im2col`` splits a stride) needs a few more
    sweeps.

    Raises:
        AssertionError: the number of sweeps exceeds the bound, because two rules undo each other.
    """
    sweeps = limit = 0
    while sweeps <= limit:
        if not apply_once(graph, target, rules):
            return
        sweeps, limit = sweeps + 1, max(limit, len(graph.ops) + _EXTRA_SWEEPS_FOR_SPLITS)
    raise AssertionError(f"no fixpoint: the peephole rules for {', '.join(rules)} undo each other")


def _apply_first_rule(rules: Sequence[RewriteRule], op: Op, rewriter: Rewriter) -> Value | None:
    traced = is_rewrite_traced()
    for rule in rules:
        try:
            result = trace_rule(rule_name(rule), rule, op, rewriter) if traced else rule(op, rewriter)
        except Unsupported:
            continue
        if result is not None:
            return result
    return None
